"""How a rank and a server agree on what carries rows between them, in their hello and welcome.

A rank that can use NIXL says so in its hello. The server tries it, reading a few bytes of the rank, and says in its
welcome which transport it took and why.
"""

from dataclasses import asdict
from typing import Any

from hf_distca.pool.messages.fields import Fields
from hf_distca.pool.transport.contract import Memory, Transport
from hf_distca.pool.transport.nixl.arena import Arena
from hf_distca.pool.transport.nixl.ends import Introduction, NixlRankEnd, NixlServerEnd, read_process
from hf_distca.pool.transport.nixl.process import Process
from hf_distca.pool.transport.tcp import HostMemory, TcpTransport
from hf_distca.pool.wire.channel import Channel
from hf_distca.pool.wire.errors import LinkLost, MismatchError, ProtocolError

_AGENT, _TAKEN, _WHY, _PROCESS = "nixl", "transport", "why", "process"


def offer(memory: Memory) -> dict[str, Any]:
    """What a rank adds to its hello."""
    if not isinstance(memory, Arena):
        return {}
    return {_AGENT: Introduction.of(memory).header()}


def accept(channel: Channel, memory: Memory, hello: dict[str, Any]) -> tuple[Transport, dict[str, Any]]:
    """The server's end, and what its welcome says of it.

    Args:
        channel: the connection to the rank.
        memory: the server's.
        hello: header of the rank's hello.

    Raises:
        ProtocolError: the hello is not sane.
        MismatchError: NIXL was asked for at this end and cannot be used.
    """
    try:
        if not isinstance(memory, Arena):
            raise LinkLost(f"at the server: {_why_not(memory)}")
        if _AGENT not in hello:
            raise LinkLost("the rank does without NIXL")
        end = NixlServerEnd(channel, memory, Introduction.read(hello[_AGENT]))
    except ProtocolError:
        raise
    except LinkLost as error:
        if isinstance(memory, Arena) and memory.required:
            raise MismatchError(
                f"the server serves over NIXL only: {error}; serve with --transport auto, or set "
                "attention_server_transport='nixl'"
            ) from error
        return TcpTransport(channel), {_TAKEN: "tcp", _WHY: str(error)[:1000]}
    return end, {_TAKEN: "nixl", _WHY: "both ends have it", _PROCESS: asdict(Process.own())}


def taken(channel: Channel, memory: Memory, welcome: dict[str, Any]) -> tuple[Transport, str]:
    """The rank's end that fits a server's welcome, and which it is and why, for messages.

    Raises:
        ProtocolError: the welcome is not sane.
        MismatchError: NIXL was asked for at this end and the server does not take it.
    """
    if not isinstance(memory, Arena):
        return TcpTransport(channel), f"TCP ({_why_not(memory)})"
    fields = Fields("a welcome", welcome)
    why = fields.text(_WHY, 1000)
    if fields.one_of(_TAKEN, ("tcp", "nixl")) == "tcp":
        if memory.required:
            raise MismatchError(
                f"the server does without NIXL, which was asked for: {why}; serve with --transport nixl, or set "
                "attention_server_transport='auto'"
            )
        return TcpTransport(channel), f"TCP ({why})"
    return NixlRankEnd(channel, memory, read_process(welcome.get(_PROCESS))), f"NIXL ({why})"


def _why_not(memory: Memory) -> str:
    return memory.why if isinstance(memory, HostMemory) else "its memory is not registered with NIXL"

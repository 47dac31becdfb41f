"""Which servers there are: a directory at rank 0, and the servers' membership in it."""

import enum
import ipaddress
import itertools
import logging
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from hf_distca.pool.messages.hello import DirectoryWelcome, Refusal, ServerHello
from hf_distca.pool.messages.kinds import DIRECTORY_SERVICE, Kind
from hf_distca.pool.wire.channel import Channel
from hf_distca.pool.wire.errors import AuthenticationError, LinkLost, ProtocolError
from hf_distca.pool.wire.handshake import connect
from hf_distca.pool.wire.listener import Listener, Peer

logger = logging.getLogger(__name__)

ALIVE_S = 2.0
"""A member says so often that it is alive."""

_ANSWER_S = 10.0
_RETRY_S = 0.5


@dataclass(frozen=True)
class ServerInfo:
    """A server that has joined.

    Attributes:
        id: number of its membership, never used again: a server that comes back has a new one.
        host: where it listens for ranks.
        port: its TCP port.
        device: what it computes on, for messages and logs.
        pairs_per_second: its speed, measured when it started (see `hf_distca.kernels.speed`).
    """

    id: int
    host: str
    port: int
    device: str
    pairs_per_second: float


class Directory:
    """The list of live servers, which join and leave by themselves.

    Args:
        host: address of the interface to listen on.
        port: TCP port; 0 for any that is free.
        token: the run's token.
        silence_s: a member that says nothing for so long is dropped.
        ended: called when training is over, for those that servers' connections do not reach.

    Attributes:
        host: where it listens.
        port: where it listens.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        silence_s: float = 20.0,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self._silence_s = silence_s
        self._tell_ended = ended
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._members: dict[int, tuple[ServerInfo, Channel]] = {}
        self._ended = False
        self._listener = Listener(host, port, token, DIRECTORY_SERVICE, Kind, self._serve)
        self.host, self.port = self._listener.host, self._listener.port

    def members(self) -> tuple[ServerInfo, ...]:
        """The servers that are there now, oldest member first."""
        with self._lock:
            return tuple(info for info, _ in self._members.values())

    def drop(self, member: int, refusal: str = "") -> None:
        """Drop a server that ranks cannot use.

        Args:
            member: its id; nothing happens if it is gone already.
            refusal: why it need not try again, which it is told; without one it may join again, as a new member.
        """
        with self._lock:
            _, channel = self._members.pop(member, (None, None))
            if channel is not None:
                if refusal:
                    with suppress(LinkLost):  # it has left by itself
                        channel.send(Kind.REFUSED, Refusal(refusal).header())
                channel.shut_down()

    def end(self) -> None:
        """Tell all servers, and those that still come, that training is over."""
        with self._lock:
            self._ended = True
            for info, channel in self._members.values():
                try:
                    channel.send(Kind.END, {})
                except LinkLost as error:
                    logger.warning("server %s:%d was not told that training ended: %s", info.host, info.port, error)
        if self._tell_ended is not None:
            self._tell_ended()

    def close(self) -> None:
        """Listen no more; servers that were not told of an end try to join again."""
        self._listener.close()

    def _serve(self, peer: Peer) -> None:
        """Keep one member."""
        channel = peer.channel
        info = server_info(ServerHello.read(peer.hello.header), next(self._ids), channel.peer_host)
        channel.set_timeout(self._silence_s)
        with self._lock:
            channel.send(Kind.WELCOME, DirectoryWelcome(info.id).header())
            if self._ended:
                channel.send(Kind.END, {})
            self._members[info.id] = (info, channel)
        logger.info("server %d joined: %s:%d on %s", info.id, info.host, info.port, info.device)
        try:
            while True:
                frame = channel.receive()
                if frame.kind is not Kind.ALIVE or frame.payload:
                    got = f"{frame.kind.name} with {frame.payload} bytes"
                    raise ProtocolError(f"a member sends ALIVE without a payload and nothing else, got {got}")
        finally:
            with self._lock:
                self._members.pop(info.id, None)
            logger.info("server %d left: %s:%d", info.id, info.host, info.port)


class State(enum.Enum):
    """What became of a membership."""

    JOINED = "joined"
    ENDED = "ended"  # training is over
    LOST = "lost"  # the directory is gone, or has dropped this server
    REFUSED = "refused"  # ranks cannot use this server, now or later


class Membership:
    """A server's connection to the directory. Used by one thread.

    Args:
        channel: the connection, after the welcome.
        member: the id that the directory gave.

    Attributes:
        id: the id that the directory gave.
        refusal: why ranks cannot use this server, where that is so.
    """

    def __init__(self, channel: Channel, member: int) -> None:
        self.id = member
        self.refusal = ""
        self._channel = channel
        self._state = State.JOINED
        self._said_alive = time.monotonic()

    @classmethod
    def join(
        cls,
        host: str,
        port: int,
        token: bytes,
        hello: ServerHello,
        wait_s: float,
        give_up: Callable[[], bool] = lambda: False,
    ) -> "Membership":
        """Join the directory, which may not be there yet.

        Args:
            host: where the directory listens.
            port: its TCP port.
            token: the run's token.
            hello: what to say of this server.
            wait_s: how long to try.
            give_up: asked between tries.

        Raises:
            AuthenticationError: the directory has another token.
            ProtocolError: it refuses this server, or is no directory.
            LinkLost: it was not reached in time.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return cls._try(host, port, token, hello)
            except (AuthenticationError, ProtocolError):
                raise  # another try would end alike
            except LinkLost as error:
                if time.monotonic() + _RETRY_S > deadline or give_up():
                    raise LinkLost(f"not joined within {wait_s:g} s; the last try: {error}") from error
            time.sleep(_RETRY_S)

    @classmethod
    def _try(cls, host: str, port: int, token: bytes, hello: ServerHello) -> "Membership":
        channel = Channel(connect(host, port, token, DIRECTORY_SERVICE, _ANSWER_S), Kind)
        try:
            channel.set_timeout(_ANSWER_S)
            channel.send(Kind.HELLO, hello.header())
            frame = channel.receive()
            if frame.kind is Kind.REFUSED:
                raise ProtocolError(f"the directory does not take this server: {Refusal.read(frame.header).reason}")
            if frame.kind is not Kind.WELCOME:
                raise ProtocolError(f"the directory answers {frame.kind.name}, expected WELCOME")
            welcome = DirectoryWelcome.read(frame.header)
        except LinkLost as error:
            channel.close()
            raise type(error)(f"{host}:{port}: {error}") from error
        return cls(channel, welcome.server)

    def poll(self, timeout_s: float) -> State:
        """Wait for news for so long at most, saying now and then that this server is alive."""
        if self._state is not State.JOINED:
            return self._state
        try:
            if time.monotonic() - self._said_alive > ALIVE_S:
                self._said_alive = time.monotonic()
                self._channel.send(Kind.ALIVE, {})
            if select.select([self._channel], [], [], timeout_s)[0]:
                frame = self._channel.receive()
                if frame.kind is Kind.REFUSED:
                    self.refusal = Refusal.read(frame.header).reason
                    self._state = State.REFUSED
                else:
                    self._state = State.ENDED if frame.kind is Kind.END else State.LOST
        except LinkLost as error:
            logger.warning("the directory is gone: %s", error)
            self._state = State.LOST
        return self._state

    def close(self) -> None:
        """Leave."""
        self._channel.close()


def server_info(hello: ServerHello, server: int, came_from: str) -> ServerInfo:
    """A server that joins, as ranks are told of it.

    Args:
        hello: what it says of itself.
        server: id of its membership.
        came_from: address from which it connects.

    Raises:
        ProtocolError: ranks could not reach it.
    """
    if _is_loopback(hello.host) and not _is_loopback(came_from):
        raise ProtocolError(
            f"the server listens on {hello.host}, where ranks on other hosts do not reach it; let it listen on "
            f"an address of its network, such as {came_from}"
        )
    return ServerInfo(server, hello.host or came_from, hello.port, hello.device, hello.pairs_per_second)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name

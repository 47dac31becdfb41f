"""Which servers there are: a directory at rank 0, and the servers' membership in it."""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from hf_distca.pool.messages import Alive, End, Message, ServerHello, ServerWelcome
from hf_distca.pool.wire import (
    DIRECTORY,
    Channel,
    LinkLost,
    Listener,
    MismatchError,
    ProtocolError,
    connect,
    is_loopback,
)

logger = logging.getLogger(__name__)

ALIVE_S = 2.0
"""Seconds between two messages of a member that it is alive."""
ANSWER_S = 10.0
"""Most seconds for an answer, or a message that has begun."""

_RETRY_S = 0.5
"""Seconds between two tries to join."""


class Directory:
    """The list of live servers, which join and leave by themselves.

    A member silent for `silence_s` is dropped. When training is over, `ended` is called: it informs
    those processes of a launch whose server is not connected.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        silence_s: float = 20.0,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._silence_s = silence_s
        self._report_end = ended
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._members: dict[int, tuple[ServerHello, Channel]] = {}
        self._ended = False
        self._listener = Listener(host, port, token, DIRECTORY, self._serve)
        self.host = self._listener.host
        self.port = self._listener.port

    def members(self) -> dict[int, ServerHello]:
        """Return the present servers by id, oldest member first.

        A server that comes back has a new id.
        """
        with self._lock:
            return {member: hello for member, (hello, _) in self._members.items()}

    def drop(self, member: int, refusal: str = "") -> None:
        """Drop a server that ranks cannot use, if it is still there.

        Without a refusal it may join again.
        """
        with self._lock:
            if member not in self._members:
                return
            _, channel = self._members.pop(member)
            if refusal:
                with suppress(LinkLost):  # the server has left by itself
                    channel.refuse(refusal, ANSWER_S)
            channel.shut_down()

    def end(self) -> None:
        """Report the end of training to all servers, and to servers that join later."""
        with self._lock:
            self._ended = True
            for hello, channel in self._members.values():
                try:
                    channel.send(End(), timeout_s=ANSWER_S)
                except LinkLost as error:
                    logger.warning(
                        "cannot report the end to server %s:%d: %s", hello.host, hello.port, error
                    )
        self._report_end()

    def close(self) -> None:
        """Stop listening; servers that got no End try to join again."""
        self._listener.close()

    def _serve(self, channel: Channel, hello: Message) -> None:
        """Welcome a server, and list it as a member until its connection ends."""
        hello = reachable(hello, channel.peer_host)
        member = next(self._ids)
        with self._lock:
            channel.send(ServerWelcome(member), timeout_s=ANSWER_S)
            if self._ended:
                channel.send(End(), timeout_s=ANSWER_S)
            self._members[member] = (hello, channel)
        logger.info("server %d joined: %s:%d on %s", member, hello.host, hello.port, hello.device)
        try:
            message, _ = channel.receive(self._silence_s)
            while isinstance(message, Alive):
                message, _ = channel.receive(self._silence_s)
            raise ProtocolError(f"a member sends nothing but Alive, got {type(message).__name__}")
        finally:
            with self._lock:
                self._members.pop(member, None)
            logger.info("server %d left: %s:%d", member, hello.host, hello.port)


def reachable(hello: Message, sender: str) -> ServerHello:
    """Return the hello of a server with the host that ranks connect to.

    Args:
        sender: address from which the hello came.

    Raises:
        MismatchError: ranks cannot connect to the server.
    """
    if not isinstance(hello, ServerHello):
        raise ProtocolError(f"a server begins with its hello, got {type(hello).__name__}")
    if is_loopback(hello.host) and not is_loopback(sender):
        raise MismatchError(
            f"the server listens on {hello.host}, which ranks on other hosts cannot reach; let it "
            f"listen on an address of its network, such as {sender}"
        )
    return replace(hello, host=hello.host or sender)


def join(
    host: str,
    port: int,
    token: bytes,
    hello: ServerHello,
    wait_s: float,
    give_up: Callable[[], bool],
) -> tuple[Channel, int]:
    """Join the directory; return the connection to it and the id of the membership.

    The directory may not be there yet.

    LinkLost: no directory has answered for `wait_s`, or until `give_up`. ProtocolError: the
    directory has another token, refuses this server, or is no directory.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            channel, welcome = connect(host, port, token, DIRECTORY, hello, ServerWelcome, ANSWER_S)
            return channel, welcome.server
        except ProtocolError:
            raise  # another try would end alike
        except LinkLost as error:
            if time.monotonic() + _RETRY_S > deadline or give_up():
                raise LinkLost(
                    f"no training run answered within {wait_s:g} s; the last error: {error}"
                ) from error
        time.sleep(_RETRY_S)

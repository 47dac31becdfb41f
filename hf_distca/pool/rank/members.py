"""The servers that take part: a rank's link to each, and what all ranks agree on where servers join and are lost."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from hf_distca.dispatch.groups import Groups
from hf_distca.pool.directory import Directory, ServerInfo
from hf_distca.pool.listener import Outbox
from hf_distca.pool.memory import Memory
from hf_distca.pool.messages import Call, Message, RankHello, RankWelcome, Refused, Reply
from hf_distca.pool.transport import chosen, offer
from hf_distca.pool.wire import Buffer, LinkLost, MismatchError, ProtocolError, connect

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
"""For connecting to a server that has joined, at most."""

SERVICE = "attention server"
"""Name of what listens at the other end, for the handshake."""


class PendingReply:
    """A reply on its way into tensors.

    `departed` is when the call was ready to be sent, `arrived` when the reply was complete, by `time.perf_counter`.
    """

    def __init__(self, link: "ServerLink", rows: Sequence[Tensor]) -> None:
        self.rows = rows
        self.departed = self.arrived = 0.0
        self._link = link
        self._done = threading.Event()
        self._reply: Reply | None = None

    def wait(self, timeout_s: float) -> Reply:
        """Wait for the reply so long at most, and fail the link if it does not come.

        Raises:
            LinkLost: the link has failed. What the tensors hold is undefined, and nobody writes to them any more.
        """
        if not self._done.wait(timeout_s):
            self._link.fail(f"no reply within {timeout_s:g} s")
        if self._reply is None:
            self._link.close()  # returns when no thread touches the tensors any more
        if self._reply is None:
            raise LinkLost(self._link.lost)
        return self._reply

    def settle(self, reply: Reply | None) -> None:
        """Note that the reply is complete, or (None) will not come."""
        if reply is not None:
            self._reply = reply
            self.arrived = time.perf_counter()
        self._done.set()


class ServerLink:
    """Calls to one server and their replies; nothing but `PendingReply.wait` blocks the caller.

    A link that failed once stays failed; a server that comes back gets a new one.

    Args:
        host: where the server listens.
        port: where the server listens.
        token: the run's token.
        hello: of this rank.
        connect_s: for connecting, and again for the server's welcome; LinkLost, or MismatchError where it refuses.
        rows_s: rows on their way there or back may stand still for so long.
        memory: where the rows of all calls lie.
    """

    def __init__(
        self, host: str, port: int, token: bytes, hello: RankHello, connect_s: float, rows_s: float, memory: Memory
    ) -> None:
        self._name = f"{host}:{port}"
        self._rows_s = rows_s
        self._lock, self._closing = threading.Lock(), threading.Lock()
        self._pending: dict[int, PendingReply] = {}
        self._lost: str | None = None
        self._channel = connect(host, port, token, SERVICE, connect_s)
        self.within_host = self._channel.within_host
        try:
            welcome = self._channel.ask(hello, RankWelcome, connect_s)
            self._transport, self.carried_by = chosen(self._channel, memory, welcome)
        except LinkLost as error:
            self._channel.close()
            raise type(error)(f"server {self._name}: {error}") from error
        self._outbox = Outbox(self._channel)
        self._receiver = threading.Thread(target=self._receive, name=f"receive {self._name}", daemon=True)
        self._receiver.start()

    @property
    def lost(self) -> str:
        """Why the link failed; empty while it works."""
        return "" if self._lost is None else f"server {self._name}: {self._lost}"

    def send(self, message: Message, payload: Sequence[Buffer] = ()) -> None:
        """Queue a message without a reply; its payload must not change before a later call's reply is here."""
        with self._lock:
            self._check()
            self._outbox.put(partial(self._channel.send, message, payload, self._rows_s))

    def call(
        self,
        call: Call,
        rows: Sequence[Tensor],
        results: Sequence[Tensor],
        ready: Callable[[], None] | None = None,
    ) -> PendingReply:
        """Queue a call, or raise LinkLost where the link has failed.

        Args:
            call: what the server is to compute.
            rows: as `call.request()` says, [N, …] each; they must not change before the reply is here.
            results: as `call.reply()` says; the reply's rows are received into them.
            ready: returns when the rows are in their place; called by the thread that sends.
        """
        reply = PendingReply(self, results)

        def send() -> None:
            if ready is not None:
                ready()
            reply.departed = time.perf_counter()
            self._transport.send(call, rows, self._rows_s, results)

        with self._lock:
            self._check()
            self._pending[call.call_id] = reply
            self._outbox.put(send)
        return reply

    def fail(self, reason: str) -> None:
        """End the link because of something seen elsewhere; what is pending raises LinkLost with the reason."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
            pending, self._pending = list(self._pending.values()), {}
        self._channel.shut_down()
        for reply in pending:
            reply.settle(None)

    def close(self) -> None:
        """End the link and wait until its threads are done with all tensors."""
        self.fail("closed by this rank")
        with self._closing:
            self._outbox.finish(0)
            self._receiver.join()
            self._transport.close()
            self._channel.close()

    def _check(self) -> None:
        if self._lost is not None:
            raise LinkLost(self.lost)

    def _receive(self) -> None:
        try:
            while True:
                frame = self._channel.receive()
                reply = frame.message
                if isinstance(reply, Refused):
                    raise LinkLost(f"the server ended the connection: {reply.reason}")
                with self._lock:
                    pending = self._pending.get(reply.call_id) if isinstance(reply, Reply) else None
                if pending is None or not isinstance(reply, Reply):
                    raise ProtocolError(f"received a {type(reply).__name__} that answers no call")
                self._transport.receive(frame, pending.rows, self._rows_s)
                with self._lock:
                    self._pending.pop(reply.call_id, None)
                pending.settle(reply)
                del pending  # its tensors belong to the caller again
        except LinkLost as error:
            self.fail(str(error))


@dataclass(frozen=True)
class News:
    """Members of the directory, by rank 0 alone, and servers whose link to this rank has failed."""

    listed: tuple[ServerInfo, ...]
    lost: tuple[int, ...]


class Members:
    """The servers that take part, with this rank's link to each.

    A server that does not answer for `timeout_s` is lost. Only rank 0 has the directory.
    """

    def __init__(
        self, groups: Groups, memory: Memory, token: bytes, directory: Directory | None, timeout_s: float
    ) -> None:
        self.memory = memory
        self.timeout_s = timeout_s
        self._groups = groups
        self._token = token
        self._directory = directory
        self._links: dict[int, ServerLink] = {}
        self._infos: dict[int, ServerInfo] = {}
        self._beside: dict[int, int | None] = {}

    @property
    def ids(self) -> tuple[int, ...]:
        """Of the servers that take part."""
        return tuple(sorted(self._links))

    def link(self, server: int) -> ServerLink | None:
        """Return the link to a server; None where it takes no part any more."""
        return self._links.get(server)

    def rank_beside(self, server: int) -> int | None:
        """Return the first rank on the host of a server that takes part or did; None where there is no rank."""
        return self._beside[server]

    def name(self, server: int) -> str:
        """Name a server that takes part or did, for messages."""
        info = self._infos[server]
        return f"{server} ({info.host}:{info.port}, {info.device})"

    def tell(self, message: str, level: int = logging.INFO) -> None:
        """Log on rank 0."""
        if self._groups.rank == 0:
            logger.log(level, message)

    # Between steps

    def news(self) -> News:
        """Return what other ranks are to know before `update`."""
        listed = self._directory.members() if self._directory is not None else ()
        return News(listed, tuple(server for server, link in self._links.items() if link.lost))

    def update(self, news: Sequence[News]) -> list[ServerInfo]:
        """Go on without those that left, and return those that take part from now on. A collective.

        Args:
            news: of every rank.
        """
        gone = {server for rank in news for server in rank.lost}
        present = {info.id: info for info in news[0].listed if info.id not in gone}  # it may come back as a new member
        self._lose(gone, "between steps; no call was running")
        self._lose(set(self._links) - set(present), "it left the directory")
        joined = [info for server, info in sorted(present.items()) if server not in self._links]
        return self._connect(joined) if joined else []

    def _connect(self, joined: Sequence[ServerInfo]) -> list[ServerInfo]:
        """Connect to servers; those to which every rank has a link now."""
        links: dict[int, ServerLink] = {}
        failures: dict[int, tuple[str, bool]] = {}
        hello = RankHello(self._groups.rank, self._groups.ranks, offer(self.memory))
        connect_s = min(CONNECT_S, self.timeout_s)
        for info in joined:
            try:
                links[info.id] = ServerLink(
                    info.host, info.port, self._token, hello, connect_s, self.timeout_s, self.memory
                )
            except LinkLost as error:
                failures[info.id] = str(error), isinstance(error, MismatchError)
        told = self._groups.all_gather((failures, {server for server, link in links.items() if link.within_host}))
        connected = []
        for info in joined:
            reasons = [failures[info.id] for failures, _ in told if info.id in failures]
            if not reasons:
                self._links[info.id] = links[info.id]
                self._infos[info.id] = info
                self._beside[info.id] = next((rank for rank, (_, here) in enumerate(told) if info.id in here), None)
                connected.append(info)
                continue
            if info.id in links:
                links[info.id].close()
            reason = reasons[0][0]
            self.tell(f"attention server {info.host}:{info.port} cannot take part: {reason}", logging.WARNING)
            if self._directory is not None:
                self._directory.drop(info.id, reason if any(final for _, final in reasons) else "")
        return connected

    # In a step

    def without_lost(self, servers: Sequence[int]) -> frozenset[int]:
        """Agree on the servers that some rank has lost, and go on without them. A collective where any takes part.

        Args:
            servers: ids of those that had something to do; the same on every rank.

        Returns:
            Those of them that take no part any more.
        """
        here = [server for server in servers if server in self._links]
        if here:  # the same on every rank
            failed = self._groups.any_of([bool(self._links[server].lost) for server in here])
            self._lose(
                {server for server, lost in zip(here, failed, strict=True) if lost},
                "its tasks of this micro-batch are computed by the ranks",
            )
        return frozenset(server for server in servers if server not in self._links)

    def _lose(self, servers: set[int], what: str) -> None:
        """Go on without servers, the same on every rank; `what` becomes of their tasks, for the warning."""
        for server in sorted(servers & set(self._links)):
            link = self._links.pop(server)
            reason = link.lost or "another rank lost it"
            link.close()
            if self._directory is not None:
                self._directory.drop(server)
            left = f"{len(self._links)} servers left" if self._links else "no server left, so ranks compute all tasks"
            self.tell(f"lost attention server {self.name(server)} ({reason}): {what}; {left}", logging.WARNING)

    def close(self) -> None:
        """Let go of all servers, and tell them that training is over."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._directory is not None:
            self._directory.end()
            self._directory.close()

"""A rank's link to one server: calls, and replies that arrive into tensors.

Shape suffixes: N rows; what follows a row's N is free.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from hf_distca.pool.listener import Outbox
from hf_distca.pool.memory import Memory
from hf_distca.pool.messages import Call, Message, RankHello, RankWelcome, Refused, Reply
from hf_distca.pool.transport import rank_end
from hf_distca.pool.wire import SERVER, Buffer, LinkLost, ProtocolError, connect


class Answer(NamedTuple):
    """A reply, when its call was ready to be sent, and when it was complete, both by `time.perf_counter`."""

    reply: Reply
    departed: float
    arrived: float


@dataclass
class _Pending:
    """A call whose reply has not arrived."""

    rows: Sequence[Tensor]
    answer: Future[Answer] = field(default_factory=Future)
    departed: float = 0.0


class ServerLink:
    """Calls to one server and their replies; nothing but `wait` blocks the caller.

    A link that failed once stays failed; a server that comes back gets a new one.

    Args:
        connect_s: for connecting, and again for the server's welcome; LinkLost, or MismatchError where it refuses.
        rows_s: travelling rows may stand still for so long.
        memory: where the rows of all calls lie.
    """

    def __init__(
        self, host: str, port: int, token: bytes, hello: RankHello, connect_s: float, rows_s: float, memory: Memory
    ) -> None:
        self._name = f"{host}:{port}"
        self._rows_s = rows_s
        self._lock, self._closing = threading.Lock(), threading.Lock()
        self._pending: dict[int, _Pending] = {}  # by id of the call
        self._lost: str | None = None
        self._channel = connect(host, port, token, SERVER, connect_s)
        self.within_host = self._channel.within_host
        try:
            welcome = self._channel.ask(hello, RankWelcome, connect_s)
        except LinkLost as error:
            self._channel.close()
            raise type(error)(f"server {self._name}: {error}") from error
        self.carried_by = f"{welcome.transport} ({welcome.why})"
        self._transport = rank_end(self._channel, memory, welcome)
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
        ready: Callable[[], None] = lambda: None,
    ) -> Future[Answer]:
        """Queue a call, or raise LinkLost where the link has failed; `wait` waits for the answer.

        Args:
            rows: those of `call.request()`, [N, …] each; they must not change before the reply is here.
            results: those of `call.reply()`; the reply's rows are received into them.
            ready: returns when the rows are in their place; called by the thread that sends.
        """
        pending = _Pending(results)

        def send() -> None:
            ready()
            pending.departed = time.perf_counter()
            self._transport.send(call, rows, self._rows_s, results)

        with self._lock:
            self._check()
            self._pending[call.call_id] = pending
            self._outbox.put(send)
        return pending.answer

    def wait(self, answer: Future[Answer], timeout_s: float) -> Answer:
        """Wait for an answer so long at most, and fail the link if it does not come.

        Raises:
            LinkLost: the link has failed. What the tensors hold is undefined, and nobody writes to them any more.
        """
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            self.fail(f"no reply within {timeout_s:g} s")
        except LinkLost:
            pass
        self.close()  # returns when no thread touches the tensors any more
        if answer.done():
            return answer.result()
        raise LinkLost(self.lost)

    def fail(self, reason: str) -> None:
        """End the link because of something seen elsewhere; whoever waits gets LinkLost with the reason."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
            pending, self._pending = self._pending, {}
        self._channel.shut_down()
        for each in pending.values():
            each.answer.set_exception(LinkLost(self.lost))

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
                reply, size = self._channel.receive()
                if isinstance(reply, Refused):
                    raise LinkLost(f"the server ended the connection: {reply.reason}")
                pending = self._pending.get(reply.call_id) if isinstance(reply, Reply) else None
                if pending is None or not isinstance(reply, Reply):
                    raise ProtocolError(f"received a {type(reply).__name__} that answers no call")
                self._transport.receive(reply, size, pending.rows, self._rows_s)
                with self._lock:
                    still_awaited = self._pending.pop(reply.call_id, None) is not None
                if still_awaited:
                    pending.answer.set_result(Answer(reply, pending.departed, time.perf_counter()))
                del pending  # its tensors belong to the caller again
        except LinkLost as error:
            self.fail(str(error))

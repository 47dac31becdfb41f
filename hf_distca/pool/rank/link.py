"""A rank's link to one server: calls, and replies that arrive into tensors."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from torch import Tensor

from hf_distca.dispatch.threads import join
from hf_distca.pool.messages import Call, Message, RankHello, RankWelcome, Refused, Reply
from hf_distca.pool.transport import Memory, Rows, rank_end
from hf_distca.pool.wire import SERVER, Buffer, LinkLost, Outbox, ProtocolError, connect


class Answer(Future[Reply]):
    """The reply to a call, whose rows are then in `results`."""

    def __init__(self, results: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.results = results
        # When the call was ready to be sent, and the reply complete, by `time.perf_counter`.
        self.departed = self.arrived = 0.0


class ServerLink:
    """Calls to one server and their replies; nothing but `wait` blocks the caller.

    A link that failed once stays failed, for the reason `lost`; a server that comes back gets a new
    link. Travelling rows may stand still for `rows_s`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        hello: RankHello,
        connect_s: float,
        rows_s: float,
        memory: Memory,
    ) -> None:
        self.name = f"{host}:{port}"
        self._rows_s = rows_s
        self._lock = threading.Lock()  # for `lost` and the pending answers
        self._closing = threading.Lock()
        self._pending: dict[int, Answer] = {}  # by id of the call
        self.lost = ""
        self._channel, welcome = connect(host, port, token, SERVER, hello, RankWelcome, connect_s)
        self.within_host = self._channel.within_host
        self.carried_by = f"{welcome.transport} ({welcome.why})"
        self._transport = rank_end(self._channel, memory, welcome)
        self._outbox = Outbox(self._channel)
        self._receiver = threading.Thread(
            target=self._receive, name=f"receive {self.name}", daemon=True
        )
        self._receiver.start()

    def send(self, message: Message, payload: Sequence[Buffer] = ()) -> None:
        """Queue a message without a reply.

        Its payload must not change before a later call's reply is here.
        """
        self._put(partial(self._channel.send, message, payload, self._rows_s))

    def call(
        self, call: Call, rows: Rows, results: Mapping[str, Tensor], ready: Callable[[], None]
    ) -> Answer:
        """Queue a call, or raise LinkLost where the link has failed; `wait` waits for the answer.

        Args:
            rows: of `call.request()`; they must not change before the reply is here.
            results: of `call.reply()` by name, to receive into.
            ready: returns when the rows are in their place; called by the thread that sends.
        """
        answer = Answer(results)

        def send() -> None:
            ready()
            answer.departed = time.perf_counter()
            self._transport.send(call, rows, self._rows_s, list(results.values()))

        self._put(send, {call.call_id: answer})
        return answer

    def wait(self, answer: Answer, timeout_s: float) -> Reply:
        """Wait for an answer, and fail the link if none comes in time.

        LinkLost: the link has failed. What the results hold is undefined, and nobody writes to them
        any more.
        """
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            self.fail(f"no reply within {timeout_s:g} s")
        except LinkLost:
            pass
        self.close()  # returns when no thread touches the results any more
        return answer.result()

    def fail(self, reason: str) -> None:
        """End the link; whoever waits gets LinkLost with the reason."""
        with self._lock:
            if self.lost:
                return
            self.lost = reason
            pending = self._pending
            self._pending = {}
        self._channel.shut_down()
        for answer in pending.values():
            answer.set_exception(LinkLost(self.lost))

    def close(self) -> None:
        """End the link and wait until its threads are done with all tensors."""
        self.fail("closed by this rank")
        with self._closing:
            self._outbox.finish(0)
            join(self._receiver)
            self._transport.close()
            self._channel.close()

    def _put(self, send: Callable[[], None], pending: Mapping[int, Answer] | None = None) -> None:
        with self._lock:
            if self.lost:
                raise LinkLost(self.lost)
            self._pending.update(pending or {})
            self._outbox.put(send)

    def _receive(self) -> None:
        try:
            while True:
                reply, size = self._channel.receive()
                if isinstance(reply, Refused):
                    raise LinkLost(f"the server ended the connection: {reply.reason}")
                if not isinstance(reply, Reply):
                    raise _unexpected(reply)
                answer = self._pending.get(reply.call_id)  # one look: `fail` may take all answers
                if answer is None:
                    raise _unexpected(reply)
                self._transport.receive(reply, size, list(answer.results.values()), self._rows_s)
                answer.arrived = time.perf_counter()
                with self._lock:
                    is_awaited = self._pending.pop(reply.call_id, None) is not None
                if is_awaited:
                    answer.set_result(reply)
                del answer  # its tensors belong to the caller again
        except LinkLost as error:
            self.fail(str(error))


def _unexpected(message: Message) -> ProtocolError:
    return ProtocolError(f"received a {type(message).__name__} that answers no call")

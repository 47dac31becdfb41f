"""A queue of messages with a thread that sends them, so that nobody waits for a slow connection."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hf_distca.pool.wire.channel import Buffer, Channel
from hf_distca.pool.wire.errors import LinkLost

_Message = tuple[int, dict[str, Any], Sequence[Buffer], int, Callable[[], None] | None, Callable[[], None] | None]


class Outbox:
    """Sends messages over a channel, in order. It alone sends on that channel.

    After a failed send it only empties its queue: the channel's receiver notices the loss and knows better why.

    Args:
        channel: where to.
        name: of the thread.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        self._channel = channel
        self._messages: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(
        self,
        kind: int,
        header: dict[str, Any],
        buffers: Sequence[Buffer] = (),
        sequence: int = 0,
        *,
        ready: Callable[[], None] | None = None,
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a message. Its buffers must not change before it is sent, once they are ready.

        Args:
            kind: as in `Channel.send`.
            header: as in `Channel.send`.
            buffers: as in `Channel.send`.
            sequence: as in `Channel.send`.
            ready: called by the thread before, returns when the buffers hold what is to be sent.
            sent: called by the thread afterwards, also if sending failed.
        """
        self._messages.put((kind, header, buffers, sequence, ready, sent))

    def finish(self, timeout_s: float) -> None:
        """Send what is queued, for so long at most; then end the connection and the thread."""
        self._messages.put(None)
        self._thread.join(timeout_s)
        self._channel.shut_down()
        self._thread.join()

    def _run(self) -> None:
        lost = False
        while (message := self._messages.get()) is not None:
            kind, header, buffers, sequence, ready, sent = message
            try:
                if ready is not None:
                    ready()
                if not lost:
                    self._channel.send(kind, header, buffers, sequence)
            except LinkLost:
                lost = True
            if sent is not None:
                sent()
            del message, buffers, ready, sent  # nothing is kept while the queue is empty

"""A queue of messages with a thread that sends them, so that nobody waits for a slow connection."""

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from hf_distca.pool.wire.channel import Channel
from hf_distca.pool.wire.errors import LinkLost


class _Message(NamedTuple):
    send: Callable[[], None]
    ready: Callable[[], None] | None
    sent: Callable[[], None] | None


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
        send: Callable[[], None],
        *,
        ready: Callable[[], None] | None = None,
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a message. What it holds must not change before it is sent, once it is ready.

        Args:
            send: sends it on the channel.
            ready: called by the thread before, returns when the message's payload is what is to be sent.
            sent: called by the thread afterwards, also if sending failed.
        """
        self._messages.put(_Message(send, ready, sent))

    def finish(self, timeout_s: float) -> None:
        """Send what is queued, for so long at most; then end the connection and the thread."""
        self._messages.put(None)
        self._thread.join(timeout_s)
        self._channel.shut_down()
        self._thread.join()

    def _run(self) -> None:
        lost = False
        while (message := self._messages.get()) is not None:
            try:
                if message.ready is not None:
                    message.ready()
                if not lost:
                    message.send()
            except LinkLost:
                lost = True
            if message.sent is not None:
                message.sent()
            del message  # nothing is kept while the queue is empty

"""An exchange that hides nothing, to compare others with."""

from collections.abc import Callable
from functools import partial
from typing import Any

from hf_distca import Dispatcher
from hf_distca.dispatch.exchange import Exchange, ExchangeBuffer
from hf_distca.dispatch.recorder import Recorder

TRANSFERS = ("send", "forward", "return_forwarded", "return_received")
"""Methods of a buffer that start a transfer."""


class WaitingExchange(Exchange):
    """Waits for every exchange where it is started.

    Args:
        dispatcher: whose exchanges; the waits are reported to its recorder.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher.groups)
        self._recorder = dispatcher.recorder

    def buffer(self, *args: Any, **kwargs: Any) -> "WaitingBuffer":
        """A buffer whose transfers are waited for where they are started."""
        return WaitingBuffer(super().buffer(*args, **kwargs), self._recorder)


class WaitingBuffer:
    """A buffer whose rows have arrived when a transfer has been started.

    Args:
        buffer: of an Exchange.
        recorder: told of the wait.
    """

    def __init__(self, buffer: ExchangeBuffer, recorder: Recorder) -> None:
        self._buffer, self._recorder = buffer, recorder

    def __getattr__(self, name: str) -> Any:
        """What the buffer has; starts of transfers wait."""
        found = getattr(self._buffer, name)
        return partial(self._waited_for, found) if name in TRANSFERS else found

    def _waited_for(self, start: Callable[..., ExchangeBuffer], *args: Any) -> ExchangeBuffer:
        started = start(*args)
        with self._recorder.span("wait", "at once"):
            started.wait()
        return started

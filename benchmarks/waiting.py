"""An exchange that hides nothing, to compare others with."""

from typing import Any

from hf_distca import Dispatcher
from hf_distca.dispatch.exchange import Exchange, Message, PendingRows
from hf_distca.dispatch.recorder import Recorder


class WaitingExchange(Exchange):
    """Waits for every exchange where it is started.

    Args:
        dispatcher: whose exchanges; the waits are reported to its recorder.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher.groups)
        self._recorder = dispatcher.recorder

    def open(self, *args: Any, **kwargs: Any) -> "WaitingMessage":
        """A message that is waited for when it is sent; all are sent so, those that `start` fills too."""
        return WaitingMessage(super().open(*args, **kwargs), self._recorder)


class WaitingMessage:
    """A message whose rows have arrived when `send` or `pass_on` returns.

    Args:
        message: of an Exchange.
        recorder: told of the wait.
    """

    def __init__(self, message: Message, recorder: Recorder) -> None:
        self._message, self._recorder = message, recorder

    def __getattr__(self, name: str) -> Any:
        """Where rows lie, as the message has it."""
        return getattr(self._message, name)

    def send(self) -> PendingRows:
        """Send it and wait."""
        return self._waited_for(self._message.send())

    def pass_on(self) -> PendingRows:
        """Pass it on and wait."""
        return self._waited_for(self._message.pass_on())

    def _waited_for(self, pending: PendingRows) -> PendingRows:
        with self._recorder.span("wait", "at once"):
            pending.wait()
        return pending

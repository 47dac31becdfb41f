"""What carries the rows of a call between a rank and a server, and what it must do.

Words and rows go apart: a message's header is a word on the connection between the two (`hf_distca.pool.wire`), and
the rows that belong to it are carried by a transport, which may use that connection or put into the header what the
other end needs to fetch them.

Shape suffixes: N rows; what follows a row's N is free.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from hf_distca.pool.messages.tensor_spec import TensorSpec
from hf_distca.pool.wire.channel import Frame


class Memory(Protocol):
    """Where rows lie that a transport sends and receives; one for a process and its device, for all its links."""

    def empty(self, spec: TensorSpec, rows: int) -> Tensor:
        """[rows, *spec.shape] with undefined contents, contiguous, to receive into; so are its slices of rows."""

    def stage(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Put rows where they can be sent from.

        Args:
            tensors: [N, …] each, on the device; may be dropped afterwards.

        Returns:
            staged: the rows, contiguous; themselves where they can be sent as they are.
            ready: returns when the rows are in their place; may be called by another thread.
        """


class Transport(Protocol):
    """One end of what carries rows between a rank and a server. One thread may send while another receives.

    Every error but a wrong use leaves it unusable. Rows lie in a `Memory` of the same make. The rank's end makes calls
    and the server's end answers them.
    """

    def send(
        self,
        kind: int,
        header: dict[str, Any],
        rows: Sequence[Tensor],
        sequence: int,
        timeout_s: float,
        answer: Sequence[Tensor] = (),
    ) -> None:
        """Send a message with the rows that belong to it.

        Returns when the rows may change again; those of a message with an answer must not before that is received.

        Args:
            kind: what the message is.
            header: its JSON object.
            rows: [N, …] each, contiguous; no rows are nothing to send.
            sequence: number that a reply repeats.
            timeout_s: it may stand still for so long.
            answer: [N, …] each, contiguous: what the rows of the message with the same sequence that comes back are
                received into.

        Raises:
            LinkLost: the other end is gone, or stood still.
        """

    def size(self, message: Frame) -> int:
        """Bytes of the rows that belong to a message that has come."""

    def receive(self, message: Frame, rows: Sequence[Tensor], timeout_s: float) -> None:
        """Receive the rows that belong to the last message that has come, before the next one is received.

        Args:
            message: its head.
            rows: [N, …] each, contiguous, of exactly `size` bytes together. After an error their contents are
                undefined, and nobody writes to them any more.
            timeout_s: it may stand still for so long.

        Raises:
            ProtocolError: the message has another number of bytes; nothing was written.
            LinkLost: the other end is gone, or stood still.
        """

    def close(self) -> None:
        """Let go of the other end; nobody uses this one any more, and its connection is down."""

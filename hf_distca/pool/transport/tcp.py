"""Rows over TCP, on the connection of the messages that they belong to: from and into memory on the host.

Shape suffixes: N rows; what follows a row's N is free.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_distca.pool.messages.tensor_spec import TensorSpec
from hf_distca.pool.transport.gpu import SideCopies
from hf_distca.pool.wire.channel import Buffer, Channel, Frame
from hf_distca.pool.wire.errors import ProtocolError


class HostMemory:
    """Memory on the host; pinned where rows come from a GPU and go there. See `Memory`.

    Args:
        device: where rows are computed with.
        why: rows travel over TCP, for messages.

    Attributes:
        why: rows travel over TCP, for messages.
    """

    def __init__(self, device: torch.device, why: str = "TCP was asked for") -> None:
        self.why = why
        self._copies = SideCopies(device) if device.type == "cuda" else None

    def empty(self, spec: TensorSpec, rows: int) -> Tensor:
        """See `Memory.empty`."""
        dtype, pinned = getattr(torch, spec.dtype), self._copies is not None
        return torch.empty((rows, *spec.shape), dtype=dtype, pin_memory=pinned)

    def stage(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """See `Memory.stage`: dense tensors on the host stay as they are, of others copies are made."""
        given = [x_N.detach().contiguous() for x_N in tensors]
        if self._copies is None:
            return given, _ready
        staged = [torch.empty(x_N.shape, dtype=x_N.dtype, pin_memory=True) for x_N in given]
        return staged, self._copies.start(zip(staged, given, strict=True))


def _ready() -> None:
    """Rows on the host are there already."""


class TcpTransport:
    """Rows that follow their message on its connection. See `Transport`.

    Args:
        channel: the connection; whoever else sends on it does so between two calls of `send`.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(
        self,
        kind: int,
        header: dict[str, Any],
        rows: Sequence[Tensor],
        sequence: int,
        timeout_s: float,
        answer: Sequence[Tensor] = (),
    ) -> None:
        """See `Transport.send`."""
        self._channel.send(kind, header, _buffers(rows), sequence, timeout_s=timeout_s)

    def size(self, message: Frame) -> int:
        """See `Transport.size`."""
        return message.payload

    def receive(self, message: Frame, rows: Sequence[Tensor], timeout_s: float) -> None:
        """See `Transport.receive`."""
        expected = sum(x_N.nbytes for x_N in rows)
        if message.payload != expected:
            raise ProtocolError(f"the rows of a {message.kind.name} have {message.payload} bytes, expected {expected}")
        self._channel.receive_into(_buffers(rows), timeout_s=timeout_s)

    def close(self) -> None:
        """See `Transport.close`."""


def _buffers(rows: Sequence[Tensor]) -> list[Buffer]:
    """The memory of contiguous tensors on the host, those without rows left out; NumPy itself has no bfloat16."""
    return [x_N.view(-1).view(torch.uint8).numpy().data for x_N in rows if x_N.numel()]

"""Streams whose copies run as late as events allow, and notice memory that was freed before."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hf_distca.dispatch.host_copies import BLOCK_BYTES

POISON = 255
"""Byte of memory that a copy has not filled yet; floating-point numbers of it are NaN."""


class LateStreams:
    """Stand-in for `torch.cuda` as a module of streams.

    A copy runs when the stream of computation waits for an event that comes after it. An error says
    that the device's memory of a copy was freed before.

    Args:
        block_bytes: bytes of each block of host memory, by which it is told from the device's.

    Attributes:
        log: what was asked of both streams, in order.
        moved: bytes of all copies to the host and to the device.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.Stream = lambda: self
        self.log: list[str] = []
        self.moved = {"host": 0, "device": 0}
        self._block_bytes = block_bytes
        # Host memory [B], the device's storage and first byte there, and where the copy goes.
        self._pending: deque[tuple[Tensor, StorageWeakRef, int, str]] = deque()
        self._before_events: list[int] = []  # copies that begin before each event
        self._begun = 0

    def current_stream(self) -> "LateStreams":
        """The stream of computation: itself."""
        return self

    def wait_stream(self, _stream: Any) -> None:
        self.log.append("copies wait")

    def record_event(self) -> int:
        self._before_events.append(self._begun)
        event = len(self._before_events) - 1
        self.log.append(f"copied {event}")
        return event

    def wait_event(self, event: int) -> None:
        self.log.append(f"wait for {event}")
        while self._begun - len(self._pending) < self._before_events[event]:
            self._run_next()

    @contextmanager
    def stream(self, _stream: Any) -> Iterator[None]:
        with _Recording(self):
            yield

    def begin(self, target_B: Tensor, source_B: Tensor) -> None:
        """Note a copy, without keeping the device's memory."""
        leaves = target_B.untyped_storage().nbytes() == self._block_bytes
        where = "host" if leaves else "device"
        host_B, device_B = (target_B, source_B) if leaves else (source_B, target_B)
        if not leaves:
            target_B.fill_(POISON)
        storage = StorageWeakRef(device_B.untyped_storage())
        self.log.append(f"to {where}")
        self.moved[where] += target_B.numel()
        self._pending.append((host_B, storage, device_B.storage_offset(), where))
        self._begun += 1

    def _run_next(self) -> None:
        host_B, reference, first, where = self._pending.popleft()
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        assert storage is not None, "memory of a copy was freed before the copy was done"
        device_B = torch.empty(0, dtype=torch.uint8).set_(storage, first, host_B.shape)
        target_B, source_B = (host_B, device_B) if where == "host" else (device_B, host_B)
        target_B.copy_(source_B)


class _Recording(TorchDispatchMode):
    """Mode that notes copies instead of running them."""

    def __init__(self, streams: LateStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self._streams.begin(args[0], args[1])
        return args[0]

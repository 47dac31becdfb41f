"""Registered memory that is used again and again: registering costs too much for every call.

Memory comes in few large slabs, each registered once and kept until the process ends. A block of a slab is free again
when the last tensor that shares it is dropped; on a GPU, when what was asked of it until then is done.

Shape suffixes: N rows; what follows a row's N is free.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_distca.pool.messages.tensor_spec import TensorSpec
from hf_distca.pool.transport.gpu import SideCopies
from hf_distca.pool.transport.nixl.agent import HOST, NixlAgent, Piece, Space
from hf_distca.pool.transport.nixl.process import Process
from hf_distca.pool.wire.errors import LinkLost

SLAB_BYTES = 64 << 20
"""Of the first slab; every further one is as large as all before it, so that there are few."""

PROBE_BYTES = 16

_ALIGNMENT = 4096


class _Block(NamedTuple):
    slab: int
    start: int
    stop: int


class _Loan:
    """A block as a tensor can be made of it that holds on to this object.

    Args:
        address: of the block.
        size: bytes.
        space: which memory it is in.
    """

    def __init__(self, address: int, size: int, space: Space) -> None:
        described = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        setattr(self, "__array_interface__" if space == HOST else "__cuda_array_interface__", described)


class Arena:
    """Registered memory: of the GPU that computes, where NIXL can reach it, else of the host. See `Memory`.

    Args:
        agent: with which it is registered.
        device: where rows are computed with.
        copies: made by the device; None where that is the host.
        required: whether rows may travel in no other way.

    Attributes:
        agent: with which it is registered.
        required: whether rows may travel in no other way.
        space: which memory it is.
        probe: a few bytes that a peer may read, to try whether it can.

    Raises:
        LinkLost: NIXL can register no memory.
    """

    def __init__(self, agent: NixlAgent, device: torch.device, copies: SideCopies | None, *, required: bool) -> None:
        self.agent = agent
        self.required = required
        self._copies = copies
        self._lock = threading.Lock()
        self._slabs: list[Tensor] = []
        self._free: list[_Block] = []  # in order, neighbours merged
        self._returned: deque[_Block] = deque()  # by finalizers, which must not lock
        self._cooling: deque[tuple[Callable[[], bool], list[_Block]]] = deque()
        self._kept: list[tuple[Process | None, Sequence[Tensor]]] = []
        self._serves_gpu = device.type == "cuda"
        self._device, self.space = torch.device("cpu"), HOST
        if self._serves_gpu:
            with suppress(LinkLost):  # UCX without CUDA
                self._device, self.space = device, Space("VRAM", device.index or 0)
                self._grow(SLAB_BYTES)
        if not self._slabs:
            self._device, self.space = torch.device("cpu"), HOST
            self._grow(SLAB_BYTES)
        self.probe = self._tensor((PROBE_BYTES,), torch.uint8)

    @property
    def slabs(self) -> int:
        """Registered so far; more of them are new to peers."""
        return len(self._slabs)

    def empty(self, spec: TensorSpec, rows: int) -> Tensor:
        """See `Memory.empty`."""
        return self._tensor((rows, *spec.shape), getattr(torch, spec.dtype))

    def stage(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """See `Memory.stage`: rows that are not in registered memory are copied there, on the host by `ready`."""
        given = [x_N.detach() for x_N in tensors]
        staged = [x_N if self.holds(x_N) else self._tensor(tuple(x_N.shape), x_N.dtype) for x_N in given]
        copies = [(to_N, x_N) for to_N, x_N in zip(staged, given, strict=True) if to_N is not x_N]
        if self._copies is not None:
            return staged, self._copies.start(copies)

        def ready() -> None:
            while copies:
                to_N, x_N = copies.pop()
                to_N.copy_(x_N)

        return staged, ready

    def holds(self, rows_N: Tensor) -> bool:
        """Whether rows lie in registered memory, contiguous."""
        if rows_N.device != self._slabs[0].device or not rows_N.is_contiguous():
            return False
        begin, end = rows_N.data_ptr(), rows_N.data_ptr() + rows_N.nbytes
        return any(slab.data_ptr() <= begin and end <= slab.data_ptr() + slab.nbytes for slab in tuple(self._slabs))

    def keep(self, rows: Sequence[Tensor], peer: Process | None) -> None:
        """Let nobody use rows again that a failed transfer may still write or read.

        Args:
            rows: of it.
            peer: that had a part in it: when it has ended they are free again. None: they are kept for good.
        """
        with self._lock:
            self._kept.append((peer, tuple(rows)))

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype, device=self._device)
        with self._lock:
            block = self._take(-(-size // _ALIGNMENT) * _ALIGNMENT)
        loan = _Loan(self._slabs[block.slab].data_ptr() + block.start, size, self.space)
        weakref.finalize(loan, self._returned.append, block).atexit = False
        on_host = self.space == HOST
        raw = torch.from_numpy(np.asarray(loan)) if on_host else torch.as_tensor(loan, device=self._device)
        return raw.view(dtype).view(shape)

    def _take(self, size: int) -> _Block:
        """A free block, from the slabs there are if possible."""
        self._kept = [kept for kept in self._kept if kept[0] is None or not kept[0].has_ended()]
        self._merge()
        fitting = next((place for place, free in enumerate(self._free) if free.stop - free.start >= size), None)
        if fitting is None:
            self._grow(max(size, sum(slab.nbytes for slab in self._slabs)))
            fitting = len(self._free) - 1
        slab, start, stop = self._free.pop(fitting)
        if start + size < stop:
            self._free.insert(fitting, _Block(slab, start + size, stop))
        return _Block(slab, start, start + size)

    def _merge(self) -> None:
        """Take back what was returned, once no GPU reads it any more: peers do not wait for its streams."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        if returned:
            self._cooling.append((_at_once if self._copies is None else self._copies.fence(), returned))
        while self._cooling and self._cooling[0][0]():
            self._free += self._cooling.popleft()[1]
        merged: list[_Block] = []
        for block in sorted(self._free):
            if merged and (merged[-1].slab, merged[-1].stop) == (block.slab, block.start):
                merged[-1] = merged[-1]._replace(stop=block.stop)
            else:
                merged.append(block)
        self._free = merged

    def _grow(self, size: int) -> None:
        pinned = self._serves_gpu and self.space == HOST
        slab = torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=pinned)
        self.agent.register(Piece(slab.data_ptr(), size), self.space)
        self._slabs.append(slab)
        self._free.append(_Block(len(self._slabs) - 1, 0, size))


def _at_once() -> bool:
    """What the host has dropped nobody reads."""
    return True

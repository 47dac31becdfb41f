"""Memory that rows are sent from and received into: plain memory of the host for TCP, registered memory for NIXL.

Shape suffixes: N rows; what follows a row's N is free.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_distca.pool.messages import TensorSpec
from hf_distca.pool.nixl import HOST, NixlAgent, Space, has_rdma, is_installed
from hf_distca.pool.wire import LinkLost

SLAB_BYTES = 64 << 20
"""Bytes of the first slab; every further one is as large as all before it, so that there are few."""

PROBE_BYTES = 16

_ALIGNMENT = 4096


class Choice(StrEnum):
    """Setting that chooses the transport of rows."""

    AUTO = "auto"
    TCP = "tcp"
    NIXL = "nixl"


class SideCopies:
    """Copies from and into a GPU's memory on a side stream, beside what the GPU computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Copy rows, (to, from) [N, …] each, as they are when the current stream has come here.

        The rows may be dropped at once. Returns a callable for any thread that waits for the copies.
        """
        self._follow()
        with torch.cuda.stream(self._stream):
            for to_N, x_N in copies:
                to_N.copy_(x_N, non_blocking=True)
                x_N.record_stream(self._stream)
        wait: Callable[[], None] = self._stream.record_event().synchronize
        return wait

    def fence(self) -> Callable[[], bool]:
        """Return a callable that polls whether the GPU has done all work queued here and on the current stream."""
        self._follow()
        is_done: Callable[[], bool] = self._stream.record_event().query
        return is_done

    def _follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))


class Memory:
    """Memory of one process's rows, for all its links: of the host, pinned where `device` is a GPU, for rows over TCP.

    `why` is the reason for TCP.
    """

    def __init__(self, device: torch.device, why: str = "TCP was asked for") -> None:
        self.why = why
        self.copies = SideCopies(device) if device.type == "cuda" else None

    def empty(self, spec: TensorSpec, rows: int) -> Tensor:
        """Return [rows, *spec.shape] with undefined contents, contiguous, to receive into."""
        return self._tensor((rows, *spec.shape), getattr(torch, spec.dtype))

    def stage(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Put rows, [N, …] each on the device, where they can be sent from; they may be dropped afterwards.

        Returns the rows there, contiguous, and a function that waits until they are there, for any thread.
        """
        if self.copies is None:
            return [x_N.detach().contiguous() for x_N in tensors], lambda: None
        staged = [self._tensor(tuple(x_N.shape), x_N.dtype) for x_N in tensors]
        return staged, self.copies.start(zip(staged, (x_N.detach() for x_N in tensors), strict=True))

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self.copies is not None)


class _Block(NamedTuple):
    slab: int
    start: int
    stop: int


class _Loan:
    """A block of which a tensor can be made; the tensor keeps this object alive."""

    def __init__(self, address: int, size: int, space: Space) -> None:
        described = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        setattr(self, "__array_interface__" if space == HOST else "__cuda_array_interface__", described)


class Arena(Memory):
    """Memory registered with NIXL: of the GPU that computes, where NIXL can reach it, else of the host.

    Registering costs too much for every call. Memory comes in few large slabs, each registered once and kept until the
    process ends. A block of a slab is free again when the last tensor that shares it is dropped; on a GPU, when the
    work queued until then is done.

    LinkLost: `agent` can register no memory. `required`: rows may travel only over NIXL. `metadata` is what a peer
    needs to reach all memory registered so far.
    """

    def __init__(self, agent: NixlAgent, device: torch.device, *, required: bool) -> None:
        super().__init__(device)
        self.agent, self.required = agent, required
        self.metadata = ""
        self._lock = threading.Lock()
        self._slabs: list[Tensor] = []
        self._free: list[_Block] = []  # in order, neighbours merged
        self._returned: deque[_Block] = deque()  # by finalizers, which must not lock
        self._cooling: deque[tuple[Callable[[], bool], list[_Block]]] = deque()
        self._kept: list[Sequence[Tensor]] = []
        if device.type == "cuda":
            self._device, self.space = device, Space("VRAM", device.index or 0)
            with suppress(LinkLost):  # UCX without CUDA
                self._grow(SLAB_BYTES)
        if not self._slabs:
            self._device, self.space = torch.device("cpu"), HOST
            self._grow(SLAB_BYTES)
        self.probe = self._tensor((PROBE_BYTES,), torch.uint8)

    def stage(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """See `Memory.stage`: rows are copied to registered memory, on the host by `ready`."""
        if self.copies is not None:
            return super().stage(tensors)
        copies = [(self._tensor(tuple(x_N.shape), x_N.dtype), x_N.detach()) for x_N in tensors]

        def ready() -> None:
            while copies:
                to_N, x_N = copies.pop()
                to_N.copy_(x_N)

        return [to_N for to_N, _ in copies], ready

    def keep(self, rows: Sequence[Tensor]) -> None:
        """Keep rows out of use for good: a peer may still write or read them after a transfer has failed."""
        self._kept.append(tuple(rows))

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
        """Return a free block, from an existing slab if possible."""
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
        """Take back returned blocks, once no GPU reads them any more: peers do not wait for its streams."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        if returned:
            # Nobody reads what the host has dropped.
            self._cooling.append(((lambda: True) if self.copies is None else self.copies.fence(), returned))
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
        pinned = self.copies is not None and self.space == HOST
        slab = torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=pinned)
        self.agent.register((slab.data_ptr(), size), self.space)
        self._slabs.append(slab)
        self._free.append(_Block(len(self._slabs) - 1, 0, size))
        self.metadata = self.agent.metadata()


def make_memory(choice: Choice, device: torch.device, address: str) -> Memory:
    """Make the memory of this process's rows: an `Arena` for NIXL, or `Memory` for TCP, with the reason.

    AUTO takes NIXL where that needs no open port of UCX: with RDMA devices. Else UCX may listen on the interface of
    `address`. ValueError: NIXL was asked for and cannot be used.
    """
    if choice is Choice.TCP:
        return Memory(device)
    if choice is Choice.AUTO and not (is_installed() and has_rdma()):
        return Memory(device, "the host has no RDMA device" if is_installed() else "NIXL is not installed")
    try:
        return Arena(NixlAgent(address), device, required=choice is Choice.NIXL)
    except (ImportError, ValueError, LinkLost) as error:
        if choice is Choice.AUTO:
            return Memory(device, str(error))
        raise ValueError(f"attention_server_transport='nixl' cannot be used: {error}") from error

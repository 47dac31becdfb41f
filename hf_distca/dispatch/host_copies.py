"""Activation checkpoints of layers in host memory, copied while other layers compute.

A layer's activation checkpoint is the tensors that are kept for the layer's recomputation. They
leave the device while the next layer runs forward, and return while the next layer runs backward.
At any time the activation checkpoints of at most two layers are on the device: one that a layer
uses, and one that is copied.

    forward   layer 0 │ layer 1     │ layer 2     │ …     backward   … │ layer 1     │ layer 0
    copies            │ 0 to host   │ 1 to host   │                    │ 0 to device │

All copies run on one stream. The streams wait for each other, and the host waits for neither:

1. A copy begins after all work that the stream of computation has at that moment.
2. The device's memory of a checkpoint is freed after the stream of computation waits for the copy.
3. A layer's backward begins after the stream of computation waits for the checkpoint's return.
4. Host memory needs no waits: the stream of copies fills and reads it in order.

On a CPU, "device" and "host" are the same memory, and copies are done when they begin.

Shape suffix: B bytes.
"""

import logging
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

logger = logging.getLogger(__name__)

BUFFERS = 2
"""Activation checkpoints of layers that the device holds while other layers are on the host."""
CHUNK_BYTES = 8 * 2**20
"""Bytes of a copy: large enough for the full speed of a link, and small beside a layer's rows."""
BLOCK_BYTES = 256 * 2**20
"""Bytes of host memory that are reserved at once. torch rounds pinned memory to powers of two."""

FULL = (
    "activation checkpoints fill the %.1f GB of host memory that this rank counted for them, so "
    "further ones stay on the device: several micro-batches run forward before their backward, or "
    "layers keep more than hidden states and results of core attention"
)
"""Warning of a host memory that is full."""


class HostMemory:
    """Host memory for activation checkpoints, which all micro-batches use again.

    It exceeds its limit by a part of a block at most. torch's own allocator of pinned memory has no
    limit, and keeps a freed block until the device has run the block's copies.

    Args:
        limit: bytes.
        pinned: whether a device copies from and to the memory by itself.
    """

    def __init__(
        self,
        limit: int,
        *,
        pinned: bool,
        chunk_bytes: int = CHUNK_BYTES,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.limit = limit
        self.reserved = 0
        self.chunk_bytes = chunk_bytes
        self._block_bytes, self._pinned = block_bytes, pinned
        self._free: list[Tensor] = []
        self._warned = False

    def take(self, size: int) -> list[Tensor] | None:
        """Return chunks [B] for so many bytes; None if the limit leaves too few."""
        chunks = -(-size // self.chunk_bytes)
        while len(self._free) < chunks:
            if self.reserved >= self.limit:
                return None
            block_B = torch.empty(self._block_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            self._free += block_B.split(self.chunk_bytes)
            self.reserved += self._block_bytes
        taken = self._free[-chunks:]
        del self._free[-chunks:]
        return taken

    def give(self, chunks: list[Tensor]) -> None:
        """Take chunks back, even if their copies have not run yet."""
        self._free += chunks

    def warn(self) -> None:
        """Warn once that the memory is full."""
        if not self._warned:
            self._warned = True
            logger.warning(FULL, self.limit / 1e9)


class Copies:
    """Copies on a stream of their own.

    Args:
        backend: module of the device's streams; None for torch's.
    """

    def __init__(self, device: torch.device, backend: Any = None) -> None:
        self._backend = torch.get_device_module(device) if backend is None else backend
        self._stream = self._backend.Stream(*([device] if device.type == "cuda" else []))

    def begin(self, targets_and_sources: Iterable[tuple[Tensor, Tensor]]) -> Any:
        """Copy after all work so far of the current stream; return the event of the copies' end."""
        self._stream.wait_stream(self._backend.current_stream())
        with self._backend.stream(self._stream), torch.no_grad():
            for target, source in targets_and_sources:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Let the current stream wait for an event."""
        self._backend.current_stream().wait_event(event)


@dataclass(eq=False)
class KeptTensor:
    """Tensor of an activation checkpoint: on the device, on the host, or on both.

    Attributes:
        tensor: the tensor on the device; None while it is on the host alone.
        chunks: its bytes on the host.
    """

    tensor: Tensor | None
    chunks: list[Tensor]
    host: HostMemory
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __del__(self) -> None:
        self.host.give(self.chunks)

    def parts(self, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each chunk, and the part of a dense tensor whose bytes it has."""
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        parts_B = flat.view(torch.uint8).split(self.host.chunk_bytes)
        return [
            (chunk_B[: len(part_B)], part_B)
            for chunk_B, part_B in zip(self.chunks, parts_B, strict=True)
        ]


class ActivationOffload:
    """Host memory and copies for the activation checkpoints of a model's first layers.

    Args:
        layers: number of layers whose activation checkpoints go to the host.
        backend: module of the device's streams; None for torch's.
    """

    def __init__(
        self, device: torch.device, layers: int, host: HostMemory, backend: Any = None
    ) -> None:
        self.device, self.layers, self.host = device, layers, host
        self.copies = Copies(device, backend)
        self._leaving: deque[LayerCheckpoint] = deque()
        # Ends of copies to the device that no stream waits for yet, and the copied tensors.
        self._arriving: list[tuple[Any, list[Tensor]]] = []

    def make_room(self, checkpoint: "LayerCheckpoint") -> None:
        """Let the checkpoint of an earlier layer leave the device before another layer runs."""
        self.arrive()  # what an earlier forward copied back and never used
        if len(self._leaving) == BUFFERS:
            self._leaving.popleft().leave()
        self._leaving.append(checkpoint)

    def stay(self) -> None:
        """Let the last checkpoints stay on the device: the backward begins."""
        while self._leaving:
            self._leaving.popleft().stay()

    def fetch(self, kept: list[KeptTensor]) -> None:
        """Begin to copy tensors to the device."""
        copies: list[tuple[Tensor, Tensor]] = []
        tensors: list[Tensor] = []
        for kept_tensor in kept:
            tensor = torch.empty_strided(
                kept_tensor.shape, kept_tensor.stride, dtype=kept_tensor.dtype, device=self.device
            )
            kept_tensor.tensor = tensor
            tensors.append(tensor)
            copies += [(part_B, chunk_B) for chunk_B, part_B in kept_tensor.parts(tensor)]
        self._arriving.append((self.copies.begin(copies), tensors))

    def arrive(self) -> None:
        """Let the current stream wait for all copies to the device."""
        for event, _ in self._arriving:
            self.copies.wait(event)
        self._arriving.clear()


class LayerCheckpoint:
    """Activation checkpoint of one layer, in one forward.

    Args:
        leaves: whether it goes to the host.
        before: activation checkpoint of the layer before.
        storages: storages of earlier layers' tensors.
    """

    def __init__(
        self,
        offload: ActivationOffload,
        leaves: bool,
        before: "LayerCheckpoint | None",
        storages: set[StorageWeakRef],
    ) -> None:
        self._offload, self._leaves, self._before = offload, leaves, before
        self._storages, self._own_storages = storages, set[StorageWeakRef]()
        # All tensors, which autograd owns; those that may not be freed yet, with copies' sources.
        self._kept: list[weakref.ref[KeptTensor]] = []
        self._leaving: list[tuple[KeptTensor, Tensor]] = []
        self._copied: Any = None  # event

    def pack(self, tensor: Tensor) -> Any:
        """Begin to copy a tensor to the host; return what autograd keeps in place of it."""
        if not self._leaves or not self._moves(tensor):
            return tensor
        # 1. The bytes of the copy are in the tensor's order of memory, without gaps.
        stride = torch.empty_like(tensor, device="meta").stride()
        source = tensor.detach() if tensor.stride() == stride else tensor.detach().clone()
        # 2. Find host memory.
        host = self._offload.host
        chunks = host.take(source.nbytes)
        if chunks is None:
            host.warn()
            return tensor
        # 3. Copy.
        kept = KeptTensor(tensor, chunks, host, tensor.shape, stride, tensor.dtype)
        self._copied = self._offload.copies.begin(kept.parts(source))
        self._kept.append(weakref.ref(kept))
        self._leaving.append((kept, source))
        return kept

    def unpack(self, packed: Any) -> Tensor:
        """Return a tensor on the device, while the checkpoint of the layer before returns."""
        offload = self._offload
        offload.stay()
        self.fetch()
        offload.arrive()
        if self._before is not None:
            self._before.fetch()
            self._before = None
        if isinstance(packed, KeptTensor):
            assert packed.tensor is not None
            return packed.tensor
        tensor: Tensor = packed
        return tensor

    def fetch(self) -> None:
        """Begin to copy the tensors that are on the host alone to the device."""
        alive = [reference() for reference in self._kept]
        missing = [kept for kept in alive if kept is not None and kept.tensor is None]
        if missing:
            self._offload.fetch(missing)

    def leave(self) -> None:
        """Free the device's memory once it is copied."""
        kept_tensors = [kept for kept, _ in self._leaving]
        self.stay()
        for kept in kept_tensors:
            kept.tensor = None

    def stay(self) -> None:
        """Let autograd free the device's memory: the current stream waits for the copies."""
        if self._leaving:
            self._offload.copies.wait(self._copied)
        self._leaving.clear()

    def _moves(self, tensor: Tensor) -> bool:
        """Return whether a tensor is worth a copy.

        Tensors that several layers share, such as rotary factors, stay on the device once.
        """
        if (
            tensor.device.type != self._offload.device.type
            or tensor.numel() == 0
            or is_traceable_wrapper_subclass(tensor)
        ):
            return False
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage in self._storages and storage not in self._own_storages:
            return False
        self._storages.add(storage)
        self._own_storages.add(storage)
        return True


@dataclass
class OffloadedForward:
    """Activation checkpoints of the layers of one forward, in their order."""

    offload: ActivationOffload
    begun: int = 0
    last: LayerCheckpoint | None = None
    storages: set[StorageWeakRef] = field(default_factory=set)

    def begin(self) -> LayerCheckpoint:
        """Return the checkpoint of the layer that runs next."""
        leaves = self.begun < self.offload.layers
        self.last = LayerCheckpoint(self.offload, leaves, self.last, self.storages)
        self.begun += 1
        self.offload.make_room(self.last)
        return self.last

    def start_again(self) -> None:
        """Begin another forward of the same micro-batch."""
        self.begun, self.last, self.storages = 0, None, set()

"""Bytes of live tensors while code runs, by purpose, at the peak."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Kept = Literal["weights", "gradients", "exchange buffers", "plan"]
Made = Literal["activations", "cast weights", "kept O", "loss", "backward", "host", "encoder"]
Part = Kept | Made
"""Purpose of a tensor.

- cast weights: autocast's copies.
- plan: row numbers of a bound plan.
- exchange buffers: memory that exists throughout a step, whenever its tensors are made.
- backward: temporary tensors of the backward, recomputed activations included.
- encoder: what an encoder of images takes beside the text model.
- host: offloaded tensors, which take no device memory.
"""

OFFLOADED: tuple[Part, ...] = ("activations", "kept O")
"""Parts that activation checkpoints keep, which may be on the host."""
BESIDE_THE_PEAK: tuple[Part, ...] = ("host", "exchange buffers")
"""Parts that do not decide when the peak is.

The device does not hold them, or always holds them.
"""


class LiveMemory(TorchDispatchMode):
    """Mode that tracks the memory of every tensor that an operator makes.

    It tracks the memory until the tensor is freed.

    Tensors that share memory, such as views, count once. Fake tensors give the counts of a real run
    without its memory or computation. Temporary memory inside a single operator is not seen.

    Args:
        repetitions: how often a deeper model has the tensors again that are made while `repeats` is
            set. The peak is the deeper model's.
        offloaded: how many times the host holds what repeated tensors of activation checkpoints
            take, where activation checkpoints are offloaded.
    """

    def __init__(self, repetitions: float = 0, offloaded: float = 0) -> None:
        super().__init__()
        self.repetitions = repetitions
        self.part: Part = "activations"  # of the tensors that are made from now on
        self.repeats = False  # whether tensors made from now on are repeated
        self.layers_ended = False  # whether repeated tensors that are alive are kept
        self._peaks = _Peak(), _Peak(offloaded)
        self._alive: dict[int, tuple[weakref.ref[Any], int, Part, bool]] = {}
        self._bytes: Counter[Part] = Counter()
        self._repeated: Counter[Part] = Counter()

    @property
    def alive(self) -> Counter[Part]:
        """Bytes by part of the tensors that are alive."""
        return self._bytes.copy()

    @property
    def peak(self) -> Counter[Part]:
        """Bytes by part at the moment of the largest total."""
        return self._peaks[0].parts

    @property
    def offloaded_peak(self) -> Counter[Part]:
        """Bytes by part at that moment, where activation checkpoints of layers are offloaded."""
        return self._peaks[1].parts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # asked of fake tensors for most operators
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        part = self.part
        if func._schema.name == "aten::_to_copy":
            known = self._alive.get(id(args[0].untyped_storage()))
            part = "cast weights" if known is not None and known[2] == "weights" else part
        for x in tree_iter(result):
            if isinstance(x, Tensor):
                self._note(x, part)
        return result

    @contextmanager
    def making(self, part: Part) -> Iterator[None]:
        """Count tensors made inside the context as this part."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def belong(self, tensors: Iterable[Tensor], part: Part) -> None:
        """Count existing tensors as this part."""
        for x in tensors:
            self._free(id(x.untyped_storage()))
            self._note(x, part)

    def begin(self) -> None:
        """Reset the peak to what is alive."""
        for peak in self._peaks:
            peak.most = -1.0
        self._note_peak()

    def _note(self, x: Tensor, part: Part) -> None:
        # Torch keeps the Python object of a storage for as long as the storage lives.
        storage = x.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return
        repeats = self.repeats and part not in get_args(Kept)
        self._alive[key] = weakref.ref(storage, lambda _: self._free(key)), size, part, repeats
        self._add(size, part, repeats=repeats)
        self._note_peak()

    def _free(self, key: int) -> None:
        if key in self._alive:
            _, size, part, repeats = self._alive.pop(key)
            self._add(-size, part, repeats=repeats)

    def _add(self, size: int, part: Part, *, repeats: bool) -> None:
        self._bytes[part] += size
        if repeats:
            self._repeated[part] += size

    def _note_peak(self) -> None:
        """Note the bytes that are live now as the peak, if they are more than before."""
        total: float = _bytes_of_peak(self._bytes)
        # Before the layers end, some of the repeated tensors are temporary.
        repeated = self._repeated if self.layers_ended else Counter[Part]()
        total += self.repetitions * _bytes_of_peak(repeated)
        checkpoints = sum(repeated[part] for part in OFFLOADED)
        for peak in self._peaks:
            if total - peak.offloaded * checkpoints > peak.most:
                peak.most = total - peak.offloaded * checkpoints
                peak.parts = self._parts(repeated, peak.offloaded)

    def _parts(self, repeated: Counter[Part], offloaded: float) -> Counter[Part]:
        """Return the bytes by part of this moment."""
        parts = self._bytes.copy()
        for part, size in repeated.items():
            moved = offloaded * size if part in OFFLOADED else 0
            parts[part] += round(self.repetitions * size - moved)
            if moved:
                parts["host"] += round(moved)
        return parts


@dataclass
class _Peak:
    """Moment of the largest total.

    Attributes:
        offloaded: how many times the host holds what repeated tensors of activation checkpoints
            take.
        most: bytes that decide when the peak is, at the peak.
        parts: bytes by part.
    """

    offloaded: float = 0
    most: float = 0
    parts: Counter[Part] = field(default_factory=Counter)


def _bytes_of_peak(sizes: Counter[Part]) -> int:
    """Return the bytes that decide when the peak is."""
    return sizes.total() - sum(sizes[part] for part in BESIDE_THE_PEAK)

"""Bytes of live tensors while code runs, by purpose, at the peak."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

Part = Literal[
    "weights",
    "cast weights",
    "gradients",
    "plan",
    "exchange buffers",
    "activations",
    "kept O",
    "loss",
    "backward",
    "host",
]
"""Purpose of a tensor.

- cast weights: autocast's copies.
- plan: row numbers of a bound plan.
- backward: temporary tensors of the backward, recomputed activations included.
- host: offloaded tensors, which take no device memory.
"""


def fake_tensors() -> FakeTensorMode:
    """Return a mode in which all tensors are fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class LiveMemory(TorchDispatchMode):
    """Mode that tracks the memory of every tensor that an operator makes, until the tensor is freed.

    Tensors that share memory, such as views, count once. Fake tensors give the counts of a real run without its memory
    or computation. Temporary memory inside a single operator is not seen.

    Attributes:
        peak: bytes by part at the moment of the largest total.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak: Counter[Part] = Counter()
        self._part: Part = "activations"
        self._alive: dict[int, tuple[weakref.ref[Any], int, Part]] = {}
        self._bytes: Counter[Part] = Counter()
        self._most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func._schema.name == "aten::_to_copy" and self._part_of(args[0]) == "weights"
        for x in _tensors(result):
            self._note(x, "cast weights" if is_cast else self._part)
        return result

    @contextmanager
    def making(self, part: Part) -> Iterator[None]:
        """Count tensors made inside the context as this part."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    def now_making(self, part: Part) -> None:
        """Count tensors made from now on as this part."""
        self._part = part

    def belong(self, tensors: Iterable[Tensor], part: Part) -> None:
        """Count existing tensors as this part."""
        for x in tensors:
            self._free(id(x.untyped_storage()))
            self._note(x, part)

    def begin(self) -> None:
        """Reset the peak."""
        self._most = 0
        self._look()

    def _part_of(self, x: Tensor) -> Part | None:
        known = self._alive.get(id(x.untyped_storage()))
        return known[2] if known else None

    def _note(self, x: Tensor, part: Part) -> None:
        # Torch keeps the Python object of a storage for as long as the storage lives.
        storage = x.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._free(key)), size, part
        self._bytes[part] += size
        self._look()

    def _free(self, key: int) -> None:
        if key in self._alive:
            _, size, part = self._alive.pop(key)
            self._bytes[part] -= size

    def _look(self) -> None:
        total = self._bytes.total() - self._bytes["host"]
        if total > self._most:
            self._most, self.peak = total, self._bytes.copy()


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors(item)

"""Logits that are not computed before somebody asks for them, and then only as far as they are asked for.

A model's own code scales them, caps them and hands them to `torch.nn.functional.cross_entropy`. What it does to them
value by value is noted; cross entropy is then computed chunk by chunk. Anything else gets the tensor that it expects.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.utils import logging

from hf_distca.patches.chunked_loss import Step
from hf_distca.patches.uncompiled import uncompiled

logger = logging.get_logger(__name__)

REASON = "logits of a planned step are deferred"
"""Why compiled code stops where they come in."""


class Head(Protocol):
    """What deferred logits ask of the output head that they come from. D: hidden size, V: vocabulary."""

    @property
    def vocabulary(self) -> int:
        """V."""

    @property
    def divides(self) -> bool:
        """Whether ranks may now compute different numbers of parts of their logits."""

    def logits(self, hidden: Tensor, steps: Sequence[Step]) -> Tensor:
        """Hidden states [..., D] to logits [..., V]."""

    def cross_entropy(self, hidden: Tensor, target: Tensor, steps: Sequence[Step], ignore_index: int) -> Tensor:
        """Sum of the cross entropies of the logits of hidden states [T, D] and targets [T]."""

    def argmax(self, hidden: Tensor, steps: Sequence[Step]) -> Tensor:
        """Hidden states [..., D] to the indices [...] of the largest logits."""

    def fits(self, rows: int) -> bool:
        """Whether the logits of so many rows are a chunk at most."""


class DeferredLogits:
    """Stands for logits [..., V]: torch's functions and the methods of a tensor can be called on it.

    Args:
        head: computes them.
        hidden: [..., D], what the head gets.
        sample: [0, V] of their dtype.
        steps: done to the head's logits.
    """

    def __init__(self, head: Head, hidden: Tensor, sample: Tensor | None = None, steps: tuple[Step, ...] = ()) -> None:
        self._head, self._hidden, self._steps = head, hidden, steps
        self._sample = _sample(head, hidden) if sample is None else sample
        self._tensor: Tensor | None = None  # once they are computed for good

    @property
    def shape(self) -> torch.Size:
        """[..., V]."""
        return torch.Size((*self._hidden.shape[:-1], self._head.vocabulary))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._hidden.ndim

    @property
    def dtype(self) -> torch.dtype:
        """As a tensor has it."""
        return self._sample.dtype

    @property
    def device(self) -> torch.device:
        """As a tensor has it."""
        return self._sample.device

    def size(self, dim: int | None = None) -> Any:
        """As a tensor has it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As a tensor has it."""
        return self.ndim

    def numel(self) -> int:
        """As a tensor has it."""
        return self.shape.numel()

    def tensor(self, asked_by: str = "tensor") -> Tensor:
        """The logits themselves, [..., V].

        Args:
            asked_by: what needs them, for the log.
        """
        if self._tensor is not None:
            return self._tensor
        if not self._head.fits(self._hidden.shape[:-1].numel()):
            logger.warning_once(
                f"{asked_by!r} reads all logits of a planned step at once, which takes memory for tokens × vocabulary "
                "values. The loss does not need all logits: read some rows at a time, or only the loss"
            )
        tensor = self._head.logits(self._hidden, self._steps)
        if torch.is_grad_enabled():
            self._tensor = tensor
        return tensor

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(Tensor, name)
        if callable(attribute):
            return partial(_call, attribute, self)
        if name.startswith("is_") or name == "layout":
            return getattr(self._sample, name)
        return getattr(self.tensor(name), name)

    @classmethod
    @uncompiled(REASON)
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What torch calls in place of one of its functions that got deferred logits."""
        kwargs = kwargs or {}
        name = function.__name__
        plain = name.strip("_") if name.startswith("__") else name
        first, others = (args[0], args[1:]) if args else (None, ())
        if isinstance(first, cls) and first._tensor is None and plain in _HANDLERS:
            result = _HANDLERS[plain](first, function, others, kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map_only(cls, lambda logits: logits.tensor(plain), (args, kwargs))
        if isinstance(first, cls) and (plain.endswith("_") or plain == "setitem"):
            first._tensor = args[0]  # it changes
        return function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={list(self.shape)}, dtype={self.dtype})"

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tensor("iteration"))


def _call(function: Callable[..., Any], logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """A method of a tensor, called on deferred logits."""
    return DeferredLogits.__torch_function__(function, (), (logits, *args), kwargs)


def _operator(name: str) -> Callable[..., Any]:
    """The operator of this name, of deferred logits."""
    function = getattr(Tensor, name)

    def operator(self: DeferredLogits, *args: Any) -> Any:
        return _call(function, self, *args)

    return operator


# Python looks for operators in the class, and not by __getattr__.
for _name in (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
    *("__pow__", "__neg__", "__abs__", "__matmul__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__getitem__", "__setitem__", "__array__"),
):
    setattr(DeferredLogits, _name, _operator(_name))
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


def _sample(head: Head, hidden: Tensor) -> Tensor:
    """[0, V] of the dtype that a linear layer gives."""
    dtype, device_type = hidden.dtype, hidden.device.type
    if torch.is_autocast_enabled(device_type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    return torch.empty(0, head.vocabulary, dtype=dtype, device=hidden.device)


# What can be done without the logits. Each gets what torch's function got; NotImplemented where it cannot be done so.


def _value_by_value(logits: DeferredLogits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Note a step that changes each value by itself."""
    if any(isinstance(x, Tensor | DeferredLogits) for x in (*args, *kwargs.values())):
        return NotImplemented

    def step(x: Tensor) -> Tensor:
        result: Tensor = function(x, *args, **kwargs)
        return result

    sample = step(logits._sample)
    if sample is logits._sample:
        return logits
    if sample.device != logits.device or not sample.is_floating_point():
        return NotImplemented
    return DeferredLogits(logits._head, logits._hidden, sample, (*logits._steps, step))


def _with_hidden(logits: DeferredLogits, hidden: Tensor) -> DeferredLogits:
    """The logits of other rows, or of rows in another shape."""
    return DeferredLogits(logits._head, hidden, logits._sample, logits._steps)


def _same(logits: DeferredLogits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    return _with_hidden(logits, logits._hidden)


def _reshape(logits: DeferredLogits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Another shape of the same rows."""
    shape = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
    if kwargs or not shape or not all(isinstance(size, int) for size in shape) or shape[-1] != logits._head.vocabulary:
        return NotImplemented
    return _with_hidden(logits, logits._hidden.reshape(*shape[:-1], logits._hidden.shape[-1]))


def _getitem(logits: DeferredLogits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Some of the rows, whole."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if not logits._head.divides or not all(part is ... or isinstance(part, int | slice) for part in index):
        return NotImplemented
    if any(isinstance(part, bool) for part in index):
        return NotImplemented
    dims = len(index) - (... in index)
    reaches_last = dims == logits.ndim or (... in index and index[-1] is not ...)
    if dims > logits.ndim or (reaches_last and index[-1] != slice(None)):
        return NotImplemented
    return _with_hidden(logits, logits._hidden[index])


def _split(logits: DeferredLogits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """All rows, some at a time."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not logits._head.divides or dim in (-1, logits.ndim - 1):
        return NotImplemented
    return tuple(_with_hidden(logits, part) for part in function(logits._hidden, *args, **kwargs))


def _argmax(logits: DeferredLogits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """The most probable words."""
    dim = kwargs.get("dim", args[0] if args else None)
    if dim not in (-1, logits.ndim - 1) or len(args) > 1 or kwargs.keys() - {"dim"}:
        return NotImplemented
    return logits._head.argmax(logits._hidden, logits._steps)


def _cross_entropy(logits: DeferredLogits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Mean or sum over rows with a target each."""
    settings = {"ignore_index": -100, "reduction": "mean", **kwargs}
    reduction, ignore_index = settings.pop("reduction"), settings.pop("ignore_index")
    (target,) = args if len(args) == 1 else (None,)
    others = {
        name for name, value in settings.items() if value is not None and (name, value) != ("label_smoothing", 0)
    }
    if others or target is None or target.dtype != torch.int64 or reduction not in ("sum", "mean"):
        return NotImplemented
    if logits.ndim != 2 or target.shape != logits.shape[:1] or not len(target):
        return NotImplemented
    total = logits._head.cross_entropy(logits._hidden, target, logits._steps, ignore_index)
    if reduction == "sum":
        return total
    count = (target != ignore_index).sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)  # without targets, gradients are 0


_HANDLERS: dict[str, Callable[..., Any]] = {
    "cross_entropy": _cross_entropy,
    "argmax": _argmax,
    "split": _split,
    "getitem": _getitem,
    **dict.fromkeys(("view", "reshape"), _reshape),
    **dict.fromkeys(("contiguous", "clone"), _same),
    **dict.fromkeys(("float", "double", "half", "bfloat16", "to", "tanh", "neg"), _value_by_value),
    **dict.fromkeys(("mul", "multiply", "rmul", "div", "divide", "true_divide", "truediv"), _value_by_value),
    **dict.fromkeys(("add", "radd", "sub"), _value_by_value),
}

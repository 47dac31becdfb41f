"""Loss of a planned step: logits are computed on demand, and cross entropy chunk by chunk.

A model's own code scales and caps logits and passes them to `torch.nn.functional.cross_entropy`. `DeferredLogits`
records element-wise changes, and `ChunkedSum` computes cross entropy over chunks of rows, without a tensor of rows ×
vocabulary. Any other function gets a real tensor.

The result is exact for any head and for element-wise changes of logits (soft caps, scalings, casts).
`torch.nn.functional.linear_cross_entropy` supports only plain linear heads. In bfloat16 it also sums the loss and the
head's gradient in bfloat16, unlike the model's own loss (torch 2.13: 10.19 for 10.43).

Shape suffixes: T rows, C rows of a chunk, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging

from hf_distca.patches.modules import uncompiled

logger = logging.get_logger(__name__)

REASON = "logits of a planned step are deferred"
"""Reason of the break in compiled code."""
Step = Callable[[Tensor], Tensor]
"""Element-wise change of logits: [C, V] to [C, V]."""


def apply_steps(logits: Tensor, steps: Sequence[Step]) -> Tensor:
    """Apply steps to logits, one after another."""
    for step in steps:
        logits = step(logits)
    return logits


def rows_of_chunk(chunk_bytes: int, vocabulary: int) -> int:
    """Return the most rows whose float32 logits take at most `chunk_bytes`; at least one."""
    return max(1, chunk_bytes // (4 * vocabulary))


@dataclass(frozen=True, eq=False)
class ChunkedSum:
    """Sum of the cross entropies of rows, computed chunk by chunk.

    Attributes:
        targets: [T] int64; rows whose target is `ignore_index` do not count.
        steps: changes of the head's logits before the cross entropy.
        rows: most rows of a chunk.
    """

    targets: Tensor
    ignore_index: int
    steps: Sequence[Step]
    rows: int

    def of_linear(self, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        """Return the sum for a linear head.

        The gradients are computed in the forward, and the backward can run once.

        Returns:
            Scalar, in the dtype that `torch.nn.functional.cross_entropy` gives.
        """
        if torch.is_grad_enabled():
            loss: Tensor = _OfLinear.apply(hidden_TD, weight_VD, bias_V, self)
            return loss
        return self.with_gradients(hidden_TD, weight_VD, bias_V, (False, False, False))[0]

    def of_head(self, forward: Callable[[Tensor], Tensor], hidden_TD: Tensor) -> Tensor:
        """Return the sum for any head; the backward recomputes each chunk's logits.

        Args:
            forward: the head's forward: [C, D] to [C, V].

        Returns:
            Scalar, in the dtype that `torch.nn.functional.cross_entropy` gives.
        """

        def of_chunk(hidden_CD: Tensor, target_C: Tensor) -> Tensor:
            logits_CV = apply_steps(forward(hidden_CD), self.steps)
            return functional.cross_entropy(logits_CV, target_C, ignore_index=self.ignore_index, reduction="sum")

        chunks = zip(hidden_TD.split(self.rows), self.targets.split(self.rows), strict=True)
        if torch.is_grad_enabled():
            return torch.stack([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]).sum()
        return torch.stack([of_chunk(*chunk) for chunk in chunks]).sum()

    @torch.no_grad()
    def with_gradients(
        self, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Return the sum for a linear head, and its gradients.

        The head's gradients are added up in at least float32.

        Args:
            needs: whether the gradients of hidden states, weight and bias are needed.
        """
        summed = torch.promote_types(weight_VD.dtype, torch.float32)
        hidden_grad_TD = torch.empty_like(hidden_TD) if needs[0] else None
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=summed) if needs[1] else None
        bias_grad_V = torch.zeros_like(bias_V, dtype=summed) if bias_V is not None and needs[2] else None
        hidden_TD, weight_VD = _as_autocast(hidden_TD), _as_autocast(weight_VD)  # once, not with each chunk
        bias_V = None if bias_V is None else _as_autocast(bias_V)
        losses = []
        for start in range(0, len(hidden_TD), self.rows):
            chunk = slice(start, start + self.rows)
            logits_CV = functional.linear(hidden_TD[chunk], weight_VD, bias_V)
            loss, grad_CV = self._of_logits(logits_CV, self.targets[chunk], any(needs))
            losses.append(loss)
            if hidden_grad_TD is not None:
                hidden_grad_TD[chunk] = grad_CV @ weight_VD
            if weight_grad_VD is not None and grad_CV.dtype == summed:
                weight_grad_VD.addmm_(grad_CV.T, hidden_TD[chunk])
            elif weight_grad_VD is not None:
                weight_grad_VD += grad_CV.T @ hidden_TD[chunk]
            if bias_grad_V is not None:
                bias_grad_V += grad_CV.sum(0, dtype=summed)
            del logits_CV, grad_CV  # free before the next chunk
        return torch.stack(losses).sum(), (hidden_grad_TD, weight_grad_VD, bias_grad_V)

    def _of_logits(self, logits_CV: Tensor, target_C: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
        """Return the sum of a chunk and, if needed, its gradient [C, V] with respect to the head's logits."""
        with torch.set_grad_enabled(gradient):
            changed_CV = apply_steps(logits_CV.requires_grad_(gradient), self.steps)
        grad_CV = functional.log_softmax(changed_CV.detach(), dim=-1)
        loss = functional.nll_loss(grad_CV, target_C, ignore_index=self.ignore_index, reduction="sum")
        if not gradient:
            return loss, grad_CV
        # Overwrite log_softmax by softmax minus one at the target.
        counts_C1 = (target_C != self.ignore_index)[:, None]
        targets_C1 = torch.where(counts_C1, target_C[:, None], 0)
        grad_CV.exp_().scatter_add_(1, targets_C1, -counts_C1.to(grad_CV.dtype)).mul_(counts_C1)
        if changed_CV is not logits_CV:
            (grad_CV,) = torch.autograd.grad(changed_CV, logits_CV, grad_CV.to(changed_CV.dtype))
        return loss, grad_CV.to(logits_CV.dtype)


class _OfLinear(torch.autograd.Function):
    """Autograd function of `ChunkedSum.of_linear`: its backward only scales the forward's gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, chunked_sum: ChunkedSum
    ) -> Tensor:
        loss, ctx.gradients = chunked_sum.with_gradients(hidden_TD, weight_VD, bias_V, ctx.needs_input_grad[:3])
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the backward of a loss computed in chunks ran a second time, but the first backward freed the "
                "gradients; set loss_chunk_bytes=0 to use retain_graph=True"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return (*(None if gradient is None else gradient.mul_(grad) for gradient in gradients), None)


def _as_autocast(x: Tensor) -> Tensor:
    """Return a tensor in the dtype that autocast gives a linear layer."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device_type))
    return x


class _Head(Protocol):
    """What deferred logits call of an output head, see `PlannedHead`."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def divides(self) -> bool: ...
    def fits(self, rows: int) -> bool: ...
    def logits(self, hidden: Tensor, steps: Sequence[Step]) -> Tensor: ...
    def argmax(self, hidden: Tensor, steps: Sequence[Step]) -> Tensor: ...
    def cross_entropy(self, hidden: Tensor, target: Tensor, steps: Sequence[Step], ignore_index: int) -> Tensor: ...


class DeferredLogits:
    """Stand-in for logits [..., V] that supports torch's functions and a tensor's methods.

    Args:
        hidden: [..., D], input of the head.
        sample: [0, V], with the dtype of the logits.
    """

    def __init__(
        self, head: _Head, hidden: Tensor, sample: Tensor | None = None, steps: tuple[Step, ...] = ()
    ) -> None:
        self._head, self._hidden, self._steps = head, hidden, steps
        self._sample = _sample(head, hidden) if sample is None else sample
        self._tensor: Tensor | None = None  # set once the logits are computed with gradients

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
        """Dtype, as of a tensor."""
        return self._sample.dtype

    @property
    def device(self) -> torch.device:
        """Device, as of a tensor."""
        return self._sample.device

    def size(self, dim: int | None = None) -> Any:
        """Return the shape or the size of a dimension, as a tensor does."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def tensor(self, asked_by: str = "tensor") -> Tensor:
        """Return the logits themselves, [..., V]."""
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
        """Handle a torch function that is called with deferred logits."""
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
            first._tensor = args[0]  # the in-place result replaces the deferred logits
        return function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={list(self.shape)}, dtype={self.dtype})"

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tensor("iteration"))


def _call(function: Callable[..., Any], logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """Call a tensor's method on deferred logits."""
    return DeferredLogits.__torch_function__(function, (), (logits, *args), kwargs)


def _operator(name: str) -> Callable[..., Any]:
    """Return the tensor operator of this name for deferred logits."""
    function = getattr(Tensor, name)

    def operator(self: DeferredLogits, *args: Any) -> Any:
        return _call(function, self, *args)

    return operator


# Python looks up operators in the class, not through __getattr__.
for _name in (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
    *("__pow__", "__neg__", "__abs__", "__matmul__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__getitem__", "__setitem__", "__array__"),
):
    setattr(DeferredLogits, _name, _operator(_name))


def _sample(head: _Head, hidden: Tensor) -> Tensor:
    """Return [0, V] in the dtype that a linear layer gives."""
    dtype, device_type = hidden.dtype, hidden.device.type
    if torch.is_autocast_enabled(device_type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    return torch.empty(0, head.vocabulary, dtype=dtype, device=hidden.device)


# Handlers that need no logits. Each gets the torch function's arguments and returns NotImplemented if it needs logits.


def _value_by_value(logits: DeferredLogits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Record an element-wise change."""
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
    """Return the logits of other hidden states, such as a selection or another shape."""
    return DeferredLogits(logits._head, hidden, logits._sample, logits._steps)


def _same(logits: DeferredLogits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    return _with_hidden(logits, logits._hidden)


def _reshape(logits: DeferredLogits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Reshape rows without changing the last dimension."""
    shape = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
    if kwargs or not shape or not all(isinstance(size, int) for size in shape) or shape[-1] != logits._head.vocabulary:
        return NotImplemented
    return _with_hidden(logits, logits._hidden.reshape(*shape[:-1], logits._hidden.shape[-1]))


def _getitem(logits: DeferredLogits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Select whole rows."""
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
    """Split rows into parts."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not logits._head.divides or dim in (-1, logits.ndim - 1):
        return NotImplemented
    return tuple(_with_hidden(logits, part) for part in function(logits._hidden, *args, **kwargs))


def _argmax(logits: DeferredLogits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return the most probable tokens."""
    dim = kwargs.get("dim", args[0] if args else None)
    if dim not in (-1, logits.ndim - 1) or len(args) > 1 or kwargs.keys() - {"dim"}:
        return NotImplemented
    return logits._head.argmax(logits._hidden, logits._steps)


def _cross_entropy(logits: DeferredLogits, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return the mean or sum of cross entropies over rows, given one target per row."""
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

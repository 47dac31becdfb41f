"""Output head in a planned step: logits are computed on demand, and chunk by chunk for the loss.

A model's own code scales and caps logits and passes them to `torch.nn.functional.cross_entropy`.
`DeferredLogits` records element-wise changes, and cross entropy is computed over chunks of rows
(`hf_distca.patches.loss`). Any other function gets a real tensor.

`plan_head` gives the head a subclass of its own class. It gives the model a subclass whose forward
lets the head defer its logits in a planned step with labels. Logits are computed inside a call of
the head: only there are ZeRO-3's weights gathered and PEFT adapters active.

Shapes: T rows of this rank, D hidden dimension, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, partialmethod, wraps
from types import EllipsisType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_distca.checks.step_rules import PlannedStep
from hf_distca.dispatch.bound import BoundPlan, Ran
from hf_distca.models.decoder import base_model
from hf_distca.models.tensor_parallel import MESH, is_shared_out
from hf_distca.patches.layers import HOOKS
from hf_distca.patches.loss import (
    Forward,
    Step,
    apply_steps,
    as_autocast,
    chosen_chunk_bytes,
    chunk_starts,
    loss_of_head,
    loss_of_linear,
)
from hf_distca.patches.modules import subclass, uncompiled
from hf_distca.plan import PLAN_KEY
from hf_distca.units import AUTO

logger = logging.get_logger(__name__)

REASON = "logits of a planned step are deferred"
"""Reason of the break in compiled code."""
WRAPPERS = ("torch.distributed.", "deepspeed.", "hf_distca.")
"""Modules whose hooks on a head only gather and free weights, whether for a loss or for logits."""
SHAPE_ATTRIBUTES = ("shape", "size", "ndim", "dim", "numel", "dtype", "device", "layout")
"""Attributes of a tensor that do not depend on its values."""
VALUE_BY_VALUE = {
    *("float", "double", "half", "bfloat16", "to", "tanh", "neg", "add", "radd", "sub"),
    *("mul", "multiply", "rmul", "div", "divide", "true_divide", "truediv"),
}
"""Functions that change each value alone, if their other arguments are no tensors."""
FLOAT32_BYTES = 4


def plan_head(
    model: PreTrainedModel, chunk_bytes: int | Literal["auto"], memory: int | None = None
) -> None:
    """Let a model compute the loss of planned steps without all logits, in place.

    Call it before `Accelerator.prepare`. Outside a planned step, and in one without labels, the
    model is unchanged.

    Args:
        chunk_bytes: most bytes of a chunk's logits in float32; 0 for all logits at once.
        memory: bytes of the GPU, by which "auto" is chosen; None for a CPU.
    """
    base: Any = base_model(model)
    head = base.get_output_embeddings()
    if head is None or (chunk_bytes == 0 and not isinstance(head, PlannedHead)):
        return
    if not isinstance(getattr(head, "out_features", None), int) or isinstance(head, nn.Embedding):
        logger.warning_once(
            f"the loss of {type(base).__name__} is computed from all logits at once, which takes "
            f"more memory, because its head is {type(head).__name__}, not a linear layer"
        )
        return
    if not isinstance(head, PlannedHead):
        is_shared = any(map(is_shared_out, head.parameters()))
        if is_shared:  # tensor parallelism has replaced the class's forward
            head.forward_in_shares = vars(head).pop("forward")
        is_plain = type(head).forward is nn.Linear.forward and not is_shared
        head.__class__ = subclass(type(head), PlannedHead, is_plain=is_plain)
        base.__class__ = subclass(type(base), forward=_deferring(type(base).forward))
        if "forward" in vars(base):  # such as Liger's, which uses the head in evaluation only
            base.forward = _deferring(base.forward, base)
    if chunk_bytes == AUTO:
        chunk_bytes = chosen_chunk_bytes(memory, head.out_features)
    head.chunk_bytes = chunk_bytes


def adapted_heads(model: nn.Module) -> list[type[nn.Module]]:
    """Return the classes of planned heads with several modules.

    A chunk runs through all of them.
    """
    heads = [module for module in model.modules() if isinstance(module, PlannedHead)]
    return list({type(head) for head in heads if list(head.children())})


def _deferring(forward: Callable[..., Any], model: Any = None) -> Callable[..., Any]:
    """Return a model's forward that lets its head defer logits in a planned step with labels.

    Args:
        model: the model that `forward` is bound to; None if the model is its first argument.
    """

    @wraps(forward)
    def deferring(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(kwargs.get(PLAN_KEY), BoundPlan) or kwargs.get("labels") is None:
            return forward(*args, **kwargs)
        head = (args[0] if model is None else model).get_output_embeddings()
        if not isinstance(head, PlannedHead) or not head.can_defer():
            return forward(*args, **kwargs)
        head.defers = True
        head.ran = kwargs[PLAN_KEY].ran
        try:
            return forward(*args, **kwargs)
        finally:
            head.defers = False
            head.ran = None

    return deferring


class PlannedHead(nn.Module):
    """Base that precedes an output head's own class."""

    chunk_bytes = 0  # most bytes of a chunk's logits in float32; 0 for all logits at once
    defers = False  # whether calls return deferred logits
    ran: Ran | None = None  # notes of the planned step whose forward runs
    chunk_starts = staticmethod(chunk_starts)
    is_plain: bool  # whether the head is just a linear layer
    # With tensor parallelism, the forward in which each rank computes a share of the vocabulary.
    forward_in_shares: Forward | None = None
    out_features: int
    weight: Tensor
    bias: Tensor | None

    @uncompiled(REASON)
    def can_defer(self) -> bool:
        """Return whether the loss can be computed over chunks; if not, log the reason once."""
        if self.chunk_bytes == 0:
            return False
        reason = self._reason_for_all_logits()
        if reason is not None:
            logger.warning_once(f"the loss is computed from all logits at once: {reason}")
        return reason is None

    def _reason_for_all_logits(self) -> str | None:
        """Return why the loss needs all logits at once; None if it can be computed over chunks."""
        reason = None
        if "forward" in vars(self):
            reason = f"the forward of the head ({type(self).__name__}) has been replaced"
        for name, module in self.named_modules(prefix="head"):
            for hook in _hooks(module):
                if not str(getattr(hook, "__module__", None)).startswith(WRAPPERS):
                    reason = (
                        f"{name} has a hook of its own, {hook!r}, which needs to see all of them"
                    )
            if module is not self and self._gathers_apart(module):
                reason = (
                    f"{name} gathers its weights apart from the rest of the head, for each chunk "
                    "anew"
                )
        return reason

    def _gathers_apart(self, module: nn.Module) -> bool:
        """Return whether FSDP2 or ZeRO-3 gathers the weights of an inner module in its own call."""
        if isinstance(module, FSDPModule):
            return True
        # ZeRO-3 gathers the weights of a leaf at once, and other weights when their module is
        # called.
        is_leaf = getattr(self, "_z3_leaf", False)
        return not is_leaf and any(hasattr(weight, "ds_id") for weight in module.parameters())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the head's logits, or deferred logits."""
        if self.defers and len(args) == 1 and not kwargs:
            return DeferredLogits(self, args[0])
        return super().__call__(*args, **kwargs)

    def forward(
        self, hidden: Tensor, *args: Any, task: Callable[..., Tensor] | None = None, **kwargs: Any
    ) -> Any:
        """Run the head's own forward, or a task.

        Args:
            hidden: [..., D].
            task: a function of the head's own forward and the hidden states.
        """
        forward: Forward = self.forward_in_shares or super().forward
        if task is None:
            return forward(hidden, *args, **kwargs)
        return self._carry_out(task, forward, hidden)

    @uncompiled(REASON)
    def _carry_out(self, task: Callable[..., Tensor], forward: Forward, hidden: Tensor) -> Tensor:
        return task(forward, hidden)

    @property
    def divides(self) -> bool:
        """Whether each rank may compute its rows in a number of parts of its own.

        If every part gathers weights from all ranks, ranks need equally many parts.
        """
        is_divided = any(
            isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in self.parameters()
        )
        return self.defers or not is_divided

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk: as many as have `chunk_bytes` of float32 logits, and at least one."""
        return max(1, self.chunk_bytes // (FLOAT32_BYTES * self.out_features))

    def logits(self, hidden: Tensor, steps: Sequence[Step]) -> Tensor:
        """Return all logits [..., V] of hidden states [..., D]."""
        return self._call(hidden, lambda forward, states: apply_steps(forward(states), steps))

    def argmax(self, hidden: Tensor, steps: Sequence[Step]) -> Tensor:
        """Return the indices [...] of the largest logits of hidden states [..., D]."""

        def task(forward: Forward, states: Tensor) -> Tensor:
            chunks = states.reshape(-1, states.shape[-1]).split(self.chunk_rows)
            return torch.cat([apply_steps(forward(chunk), steps).argmax(-1) for chunk in chunks])

        with torch.no_grad():
            return self._call(hidden, task).view(hidden.shape[:-1])

    def cross_entropy(
        self, hidden: Tensor, target: Tensor, steps: Sequence[Step], ignore_index: int
    ) -> Tensor:
        """Return the sum of cross entropies for hidden states [T, D] and targets [T]."""
        watch = None if self.ran is None or torch.is_grad_enabled() else self.ran.watch
        arguments = target, ignore_index, steps, self.chunk_rows, watch

        def task(forward: Forward, states: Tensor) -> Tensor:
            if self.is_plain:
                others = *arguments, self.chunk_starts
                return loss_of_linear(states, self.weight, self.bias, *others)
            return loss_of_head(forward, states, *arguments)

        return self._call(hidden, task)

    def _call(self, hidden: Tensor, task: Callable[[Forward, Tensor], Tensor]) -> Tensor:
        """Run a task in a call of the head, with whole weights."""
        result: Tensor
        # FSDP2 must gather sharded parameters before use; tensor parallelism computes with shares.
        shards = {
            name: weight
            for name, weight in self.named_parameters()
            if isinstance(weight, DTensor) and weight.device_mesh.mesh_dim_names != (MESH,)
        }
        if not shards or isinstance(self, FSDPModule):  # FSDP2 gathers them itself
            result = super().__call__(hidden, task=task)
            return result
        if torch.is_grad_enabled() or self.forward_in_shares is not None:
            raise PlannedStep.LATE_LOGITS.error_here()
        whole_weights = {name: shard.full_tensor() for name, shard in shards.items()}
        result = torch.func.functional_call(self, whole_weights, (hidden,), {"task": task})
        return result


def _hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that run when a module is called."""
    hooks: list[Callable[..., Any]] = []
    for kind in HOOKS:
        hooks += getattr(module, kind).values()
    return hooks


class DeferredLogits:
    """Stand-in for logits [..., V] that supports torch's functions and a tensor's methods.

    Args:
        hidden: [..., D], input of the head.
        steps: changes of the head's logits.
        sample: [1], any value in the dtype of the changed logits.
    """

    def __init__(
        self,
        head: PlannedHead,
        hidden: Tensor,
        steps: tuple[Step, ...] = (),
        sample: Tensor | None = None,
    ) -> None:
        self._head = head
        self._hidden = hidden
        self._steps = steps
        self._sample = as_autocast(hidden.new_empty(1)) if sample is None else sample
        self._tensor: Tensor | None = None  # set once the logits are computed with gradients

    def tensor(self, reader: str = "tensor") -> Tensor:
        """Return the logits themselves, [..., V]."""
        if self._tensor is not None:
            return self._tensor
        if self._hidden.shape[:-1].numel() > self._head.chunk_rows:
            logger.warning_once(
                f"{reader!r} reads all logits of a planned step at once, which takes memory for "
                "tokens × vocabulary values. The loss does not need all logits: read some rows "
                "at a time, or only the loss"
            )
        tensor = self._head.logits(self._hidden, self._steps)
        if torch.is_grad_enabled():
            self._tensor = tensor
        return tensor

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(Tensor, name)
        if name in SHAPE_ATTRIBUTES or (name.startswith("is_") and not callable(attribute)):
            # An expanded tensor has the shape of the logits and takes no memory.
            shape = (*self._hidden.shape[:-1], self._head.out_features)
            return getattr(self._sample.expand(shape), name)
        if callable(attribute):
            return partial(self.call, attribute)
        return getattr(self.tensor(name), name)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a tensor's method on these logits."""
        return self.__torch_function__(function, (), (self, *args), kwargs)

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={list(self.shape)}, dtype={self.dtype})"

    def __len__(self) -> int:
        return len(self._hidden)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tensor("iteration"))

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
        # The name of an operator such as __add__ is that of its function.
        name = function.__name__
        if name.startswith("__"):
            name = name.strip("_")
        logits = args[0] if args and isinstance(args[0], cls) else None
        if logits is not None and logits._tensor is None:
            result = logits._without_logits(name, function, args[1:], kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map_only(cls, lambda deferred: deferred.tensor(name), (args, kwargs))
        if logits is not None and (name.endswith("_") or name == "setitem"):
            logits._tensor = args[0]  # the in-place result replaces the deferred logits
        return function(*args, **kwargs)

    def _without_logits(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return the result of a function that does not need all logits.

        NotImplemented for any other function.

        Args:
            name: name of the function.
            args: its positional arguments after the logits.
        """
        if name in VALUE_BY_VALUE:
            return self._changed_value_by_value(function, args, kwargs)
        if name in ("clone", "contiguous"):
            return self._same_steps(self._hidden)
        if name in ("view", "reshape") and not kwargs:
            return self._reshaped(args)
        if name == "getitem":
            return self._rows_at(args[0])
        if name == "split":
            return self._split(function, args, kwargs)
        if name == "argmax":
            return self._argmax(args, kwargs)
        if name == "cross_entropy" and len(args) == 1:
            return self._cross_entropy(*args, **kwargs)
        return NotImplemented

    def _same_steps(self, hidden: Tensor) -> "DeferredLogits":
        """Return the logits of other hidden states, with the same changes."""
        return DeferredLogits(self._head, hidden, self._steps, self._sample)

    def _changed_value_by_value(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return logits with one more change, unless it depends on another tensor."""
        if any(isinstance(value, Tensor | DeferredLogits) for value in (*args, *kwargs.values())):
            return NotImplemented

        def step(logits: Tensor) -> Any:
            return function(logits, *args, **kwargs)

        sample = step(self._sample)
        if sample is self._sample:  # such as float() of values that are float already
            return self
        if sample.device == self._sample.device and sample.is_floating_point():
            return DeferredLogits(self._head, self._hidden, (*self._steps, step), sample)
        return NotImplemented

    def _reshaped(self, args: tuple[Any, ...]) -> Any:
        """Return logits in another shape, unless the new shape divides the vocabulary."""
        shape = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
        are_sizes = shape and all(isinstance(size, int) for size in shape)
        if not are_sizes or shape[-1] != self._head.out_features:
            return NotImplemented
        return self._same_steps(self._hidden.reshape(*shape[:-1], self._hidden.shape[-1]))

    def _rows_at(self, key: Any) -> Any:
        """Return the logits of some rows, unless the key also selects in the vocabulary.

        Args:
            key: what stands between the brackets.
        """
        index = key if isinstance(key, tuple) else (key,)
        if not all(type(part) in (int, slice, EllipsisType) for part in index):
            return NotImplemented
        has_ellipsis = ... in index
        indexed_dims = len(index) - has_ellipsis
        ends_with_ellipsis = index[-1:] == (...,)
        reaches_vocabulary = indexed_dims == self.ndim or (has_ellipsis and not ends_with_ellipsis)
        takes_vocabulary_whole = not reaches_vocabulary or index[-1] == slice(None)
        if not self._head.divides or indexed_dims > self.ndim or not takes_vocabulary_whole:
            return NotImplemented
        return self._same_steps(self._hidden[index])

    def _split(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return logits in parts, unless the vocabulary is divided."""
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if not self._head.divides or dim in (-1, self.ndim - 1):
            return NotImplemented
        return tuple(self._same_steps(part) for part in function(self._hidden, *args, **kwargs))

    def _argmax(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the indices of the largest logits, if the function asks for them in each row."""
        dim = kwargs.get("dim", args[0] if args else None)
        has_other_arguments = len(args) > 1 or kwargs.keys() - {"dim"}
        if dim not in (-1, self.ndim - 1) or has_other_arguments:
            return NotImplemented
        return self._head.argmax(self._hidden, self._steps)

    def _cross_entropy(
        self, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean", **options: Any
    ) -> Any:
        """Return the mean or sum of cross entropies over rows, given one target per row."""
        is_plain = all(
            value is None or (name, value) == ("label_smoothing", 0)
            for name, value in options.items()
        )
        if not is_plain or target.dtype != torch.int64 or reduction not in ("sum", "mean"):
            return NotImplemented
        if self.ndim != 2 or target.shape != self.shape[:1] or not len(target):
            return NotImplemented
        total = self._head.cross_entropy(self._hidden, target, self._steps, ignore_index)
        if reduction == "sum":
            return total
        count = (target != ignore_index).sum()
        # Without targets the mean is NaN, and its gradients are 0.
        return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


OPERATORS = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"),
    *("__truediv__", "__rtruediv__", "__pow__", "__neg__", "__abs__", "__matmul__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__getitem__", "__setitem__", "__array__"),
)
"""Operators of a tensor, which Python looks up in the class and not through `__getattr__`."""
for _name in OPERATORS:
    setattr(DeferredLogits, _name, partialmethod(DeferredLogits.call, getattr(Tensor, _name)))

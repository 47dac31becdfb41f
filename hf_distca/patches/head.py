"""Output head in a planned step: logits are computed on demand, and chunk by chunk for the loss.

`plan_head` gives the head a subclass of its own class. It gives the model a subclass whose forward lets the head defer
its logits in a planned step with labels. Logits are computed inside a call of the head: only there are ZeRO-3's
weights gathered and PEFT adapters active.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.models.decoder import base_model
from hf_distca.models.tensor_parallel import MESH, is_shared_out
from hf_distca.patches.layers import HOOKS
from hf_distca.patches.loss import REASON, ChunkedSum, DeferredLogits, Step, apply_steps, rows_of_chunk
from hf_distca.patches.modules import subclass, uncompiled
from hf_distca.plan import PLAN_KEY

logger = logging.get_logger(__name__)

WRAPPERS = ("torch.distributed.", "deepspeed.", "hf_distca.")
"""Modules whose hooks on a head only gather and free weights, whether for a loss or for logits."""

Forward = Callable[[Tensor], Tensor]


def plan_head(model: PreTrainedModel, chunk_bytes: int) -> None:
    """Let a model compute the loss of planned steps without all logits, in place; call it before `prepare`.

    Outside a planned step, and in one without labels, the model is unchanged.

    Args:
        model: a transformers model, or a PEFT model around one.
        chunk_bytes: most bytes of a chunk's logits in float32; 0 for all logits at once.
    """
    base: Any = base_model(model)
    head = base.get_output_embeddings()
    if chunk_bytes == 0 and not isinstance(head, PlannedHead):
        return
    if not isinstance(getattr(head, "out_features", None), int) or isinstance(head, nn.Embedding):
        logger.warning_once(
            f"the loss of {type(base).__name__} is computed from all logits at once, which takes more memory, because "
            f"its head is {type(head).__name__}, not a linear layer"
        )
        return
    if not isinstance(head, PlannedHead):
        if any(map(is_shared_out, head.parameters())):  # tensor parallelism has replaced the class's forward
            head.forward_in_shares = vars(head).pop("forward")
        is_plain = type(head).forward is nn.Linear.forward and "forward_in_shares" not in vars(head)
        head.__class__ = subclass(type(head), PlannedHead, is_plain=is_plain)
        base.__class__ = subclass(type(base), forward=_deferring(type(base).forward))
        if "forward" in vars(base):  # such as Liger's, which uses the head in evaluation only
            base.forward = _deferring(base.forward, base)
    head.chunk_bytes = chunk_bytes


def adapted_heads(model: nn.Module) -> list[type[nn.Module]]:
    """Return the classes of planned heads with several modules; a chunk runs through all of them."""
    return list({type(head) for head in model.modules() if isinstance(head, PlannedHead) and list(head.children())})


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
        with head.deferred():
            return forward(*args, **kwargs)

    return deferring


class PlannedHead(nn.Module):
    """Base that precedes an output head's own class.

    Attributes:
        chunk_bytes: most bytes of a chunk's logits in float32; 0 for all logits at once.
        is_plain: whether the head is just a linear layer.
        forward_in_shares: with tensor parallelism, the forward in which each rank computes a share of the vocabulary.
    """

    chunk_bytes = 0
    is_plain: bool
    forward_in_shares: Forward | None = None
    out_features: int
    weight: Tensor
    bias: Tensor | None
    _defers = False

    @uncompiled(REASON)
    def can_defer(self) -> bool:
        """Return whether the loss can be computed over chunks; if not, log the reason once."""
        if self.chunk_bytes == 0:
            return False
        reason = self._obstacle()
        if reason is not None:
            logger.warning_once(f"the loss is computed from all logits at once: {reason}")
        return reason is None

    def _obstacle(self) -> str | None:
        if "forward" in vars(self):
            return f"the forward of the head ({type(self).__name__}) has been replaced"
        for name, module in self.named_modules(prefix="head"):
            for kind in HOOKS:
                for hook in getattr(module, kind).values():
                    if not str(getattr(hook, "__module__", None)).startswith(WRAPPERS):
                        return f"{name} has a hook of its own, {hook!r}, which needs to see all of them"
            if module is not self and (isinstance(module, FSDPModule) or _is_gathered_apart(self, module)):
                return f"{name} gathers its weights apart from the rest of the head, for each chunk anew"
        return None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Make calls of the head return deferred logits inside the context."""
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the head's logits, or deferred logits inside `deferred`."""
        if self._defers and len(args) == 1 and not kwargs:
            return DeferredLogits(self, args[0])
        return super().__call__(*args, **kwargs)

    def forward(self, hidden: Tensor, *args: Any, task: Callable[..., Tensor] | None = None, **kwargs: Any) -> Any:
        """Run the head's own forward, or a task: a function of that forward and the hidden states."""
        forward: Forward = self.forward_in_shares or super().forward
        return forward(hidden, *args, **kwargs) if task is None else self._carry_out(task, forward, hidden)

    @uncompiled(REASON)
    def _carry_out(self, task: Callable[..., Tensor], forward: Forward, hidden: Tensor) -> Tensor:
        return task(forward, hidden)

    @property
    def vocabulary(self) -> int:
        """Number of logits of a row."""
        return self.out_features

    @property
    def divides(self) -> bool:
        """Whether ranks may compute different numbers of parts; not if each part gathers weights."""
        return self._defers or not any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in self.parameters())

    def fits(self, rows: int) -> bool:
        """Return whether the logits of `rows` rows fit in one chunk."""
        return rows <= self._rows()

    def logits(self, hidden: Tensor, steps: Sequence[Step]) -> Tensor:
        """Return all logits [..., V] of hidden states [..., D]."""
        return self._call(hidden, lambda forward, x: apply_steps(forward(x), steps))

    def argmax(self, hidden: Tensor, steps: Sequence[Step]) -> Tensor:
        """Return the indices [...] of the largest logits of hidden states [..., D]."""

        def task(forward: Forward, x: Tensor) -> Tensor:
            chunks = x.reshape(-1, x.shape[-1]).split(self._rows())
            return torch.cat([apply_steps(forward(chunk), steps).argmax(-1) for chunk in chunks])

        with torch.no_grad():
            return self._call(hidden, task).view(hidden.shape[:-1])

    def cross_entropy(self, hidden: Tensor, target: Tensor, steps: Sequence[Step], ignore_index: int) -> Tensor:
        """Return the sum of cross entropies for hidden states [T, D] and targets [T]."""
        chunked_sum = ChunkedSum(target, ignore_index, steps, self._rows())

        def task(forward: Forward, x: Tensor) -> Tensor:
            return (
                chunked_sum.of_linear(x, self.weight, self.bias) if self.is_plain else chunked_sum.of_head(forward, x)
            )

        return self._call(hidden, task)

    def _rows(self) -> int:
        return rows_of_chunk(self.chunk_bytes, self.vocabulary)

    def _call(self, hidden: Tensor, task: Callable[[Forward, Tensor], Tensor]) -> Tensor:
        """Run a task in a call of the head, with whole weights."""
        call = partial(super().__call__, hidden, task=task)
        in_shards = {name: p for name, p in self.named_parameters() if _is_in_shards(p)}
        if not in_shards or isinstance(self, FSDPModule):  # FSDP2 gathers them itself
            result: Tensor = call()
            return result
        if torch.is_grad_enabled() or self.forward_in_shares is not None:
            raise ValueError(
                "logits of a planned step are read after the model's forward, when FSDP2 has sharded the head's "
                "weights again, so they would get no gradient; read them under torch.no_grad(), or set "
                "loss_chunk_bytes=0"
            )
        whole = {name: p.full_tensor() for name, p in in_shards.items()}
        result = torch.func.functional_call(self, whole, (hidden,), {"task": task})
        return result


def _is_in_shards(parameter: Tensor) -> TypeGuard[DTensor]:
    """Return whether FSDP2 must gather a parameter before use; tensor parallelism computes with shares."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names != (MESH,)


def _is_gathered_apart(head: nn.Module, module: nn.Module) -> bool:
    """Return whether ZeRO-3 gathers the weights of a module inside a head at each call of that module."""
    return not getattr(head, "_z3_leaf", False) and any(hasattr(p, "ds_id") for p in module.parameters())

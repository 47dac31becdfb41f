"""MLPs and norms of decoder layers over chunks of rows: few intermediate rows exist at once.

An MLP or a norm computes each row independently, so that chunks give the same rows. Each chunk is
checkpointed: otherwise autograd would keep all chunks' intermediate rows. For MLPs this is
*TiledMLP* of "Arctic Long Sequence Training" (arXiv 2506.13996).

A chunk of an MLP inside a checkpointed layer would run forward three times: at first, when the
layer is recomputed, and when the chunk is. The layer's recomputation ends with the last tensor that
the layer's backward needs. An MLP's rows are therefore saved before all chunks run, and the chunks
save nothing that the layer's checkpoint sees. Where nothing after the MLP needs its result, the
recomputation ends before the MLP, and a chunk runs twice, as rows of a whole MLP do.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hf_distca.checks.model_rules import Models
from hf_distca.models.decoder import decoder_layers
from hf_distca.patches.modules import subclass

logger = logging.getLogger(__name__)

RunChunks = Callable[[Sequence[Tensor], Callable[[int], Tensor]], list[Tensor]]
"""Function that returns the results of chunks; it gets them, and what computes one by its index."""
NORMS = ("RMSNorm", "LayerNorm", "L2Norm")
"""Ends of the names of classes that normalise each row alone."""


def chunk_layers(model: nn.Module, rows: int) -> None:
    """Make the MLPs and norms of a model's decoder layers compute `rows` rows at a time, in place.

    Call it before `prepare`.

    MLPs that cannot be divided, such as blocks of experts, are unchanged and logged.

    Raises:
        ValueError: no decoder layer has an MLP that can be divided.
    """
    subclasses: dict[type[nn.Module], type[nn.Module]] = {}

    def divide(module: nn.Module, base: type[nn.Module]) -> None:
        cls = type(module)
        if not issubclass(cls, base):
            module.__class__ = subclasses.setdefault(cls, subclass(cls, base))
        vars(module)["chunk_rows"] = rows

    left: dict[str, None] = {}
    divided = 0
    layers = decoder_layers(model)
    children = chain.from_iterable(layer.children() for layer in layers)
    for module in children:
        cls = type(module)
        if not cls.__name__.endswith(("MLP", "MoE", "MoeBlock", "FeedForward")):
            continue
        # The rows of an expert depend on all rows, and the model's loss collects the router's
        # scores.
        if any("Expert" in type(inner).__name__ for inner in module.modules()):
            left[f"{cls.__name__} routes rows to experts"] = None
        elif "forward" in vars(module):
            left[f"{cls.__name__} has another forward, such as Liger's"] = None
        else:
            divide(module, _ChunkedMLP)
            divided += 1
    reasons = "; ".join(left) or "they have no module whose class name ends in MLP"
    if not divided:
        raise Models.NO_MLPS.error(rows=rows, model=type(model).__name__, reasons=reasons)
    if left:
        logger.warning("mlp_chunk_rows does not apply to some MLPs: %s", reasons)
    modules = chain.from_iterable(layer.modules() for layer in layers)
    for module in modules:
        if type(module).__name__.endswith(NORMS) and "forward" not in vars(module):
            divide(module, _ChunkedNorm)


def results_of_chunks(chunks: Sequence[Tensor], compute: Callable[[int], Tensor]) -> list[Tensor]:
    """Return the results of chunks; `compute` takes the index of a chunk."""
    return [compute(index) for index in range(len(chunks))]


class Chunked(nn.Module):
    """Base of modules that compute chunks of rows."""

    chunk_rows: int  # most rows of a chunk
    run_chunks: RunChunks = staticmethod(results_of_chunks)


class _ChunkedMLP(Chunked):
    """Base that precedes an MLP's own class."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        compute: Callable[..., Tensor] = super().forward
        if x.shape[-2] <= self.chunk_rows:
            return compute(x, *args, **kwargs)

        def compute_chunk(chunk: Tensor) -> Tensor:
            return compute(chunk, *args, **kwargs)

        if torch.is_grad_enabled() and x.requires_grad:
            return _saved_before_chunks(compute_chunk, x, self)
        return _in_chunks(compute_chunk, x, self, -2)


class _ChunkedNorm(Chunked):
    """Base that precedes a norm's own class."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        compute: Callable[..., Tensor] = super().forward
        # Q and K have heads beside rows, before or after them.
        dim = max(range(x.ndim - 1), key=lambda index: x.shape[index])
        others = args or kwargs  # such as a gate, whose rows would have to be divided too
        if others or x.shape[dim] <= self.chunk_rows:
            return compute(x, *args, **kwargs)
        return _in_chunks(compute, x, self, dim)


def _in_chunks(compute: Callable[[Tensor], Tensor], x: Tensor, module: Chunked, dim: int) -> Tensor:
    """Compute chunks of rows of a module, each checkpointed if gradients are on."""
    if torch.is_grad_enabled():
        compute = partial(checkpoint, compute, use_reentrant=False)
    chunks = torch.split(x, module.chunk_rows, dim)
    return torch.cat(module.run_chunks(chunks, lambda index: compute(chunks[index])), dim)


def _saved_before_chunks(compute: Callable[[Tensor], Tensor], x: Tensor, module: Chunked) -> Tensor:
    """Compute checkpointed chunks of rows of a module; save the rows once, before all chunks."""
    kept = _KeptRows(module.chunk_rows)
    keep: Any = _Keep.apply
    unpack: Any = _Unpack.apply
    x = keep(kept, x)
    kept.chunks = torch.split(x, module.chunk_rows, -2)

    def compute_chunk(index: int) -> Tensor:
        return compute(kept.chunks[index])

    # Checkpoints of some versions of torch save an empty tensor, for which a checkpoint around them
    # would wait.
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        computed = module.run_chunks(
            kept.chunks, partial(checkpoint, compute_chunk, use_reentrant=False)
        )
    kept.chunks = ()
    result: Tensor = unpack(kept, torch.cat(computed, -2))
    return result


class _KeptRows:
    """Rows of an MLP, as chunks while the MLP runs forward or backward.

    Attributes:
        rows: most rows of a chunk.
        node: autograd node that keeps all rows for the backward.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.chunks: tuple[Tensor, ...] = ()
        self.node: Any = None

    def unpack(self) -> None:
        """Take the chunks from the node."""
        (x,) = self.node.saved_tensors
        self.chunks = tuple(
            chunk.detach().requires_grad_() for chunk in torch.split(x, self.rows, -2)
        )


class _Keep(torch.autograd.Function):
    """Node that keeps an MLP's rows."""

    @staticmethod
    def forward(ctx: Any, kept: _KeptRows, x: Tensor) -> Tensor:
        kept.node = ctx
        # A cycle of references would keep the graph of a recomputed layer, until Python collects
        # garbage.
        ctx.kept = weakref.ref(kept)
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        kept = ctx.kept()
        if kept is not None:  # all chunks have run, but nodes live until the whole backward ends
            kept.chunks = ()
        return None, grad


class _Unpack(torch.autograd.Function):
    """Node whose backward takes the rows from where they are kept, before chunks need them."""

    @staticmethod
    def forward(ctx: Any, kept: _KeptRows, result: Tensor) -> Tensor:
        ctx.kept = kept
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        ctx.kept.unpack()
        return None, grad

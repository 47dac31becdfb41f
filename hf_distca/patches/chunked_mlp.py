"""Decoder MLPs over chunks of rows: what lies between their projections is there for one chunk at a time.

An MLP computes each row by itself, so that chunks give the same rows. Each chunk is checkpointed: its backward
computes it again, else all chunks' intermediate rows would be kept as before. As in "Arctic Long Sequence Training"
(arXiv 2506.13996), *TiledMLP*.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_distca.patches.layers import decoder_layers

logger = logging.getLogger(__name__)

EXPERTS = "Expert"
"""In the name of a class that a block has inside: it sends rows to experts. How many rows an expert has depends on all
rows, and what the router says of them is collected for the model's loss."""


def chunk_mlps(model: nn.Module, rows: int) -> None:
    """Let a model's decoder MLPs compute so many rows at a time. Do it before `prepare`.

    Blocks of experts are left as they are, which is logged.

    Args:
        model: the model; its MLPs are changed in place.
        rows: of a chunk.

    Raises:
        ValueError: no decoder layer has an MLP that can be divided.
    """
    subclasses: dict[type[nn.Module], type[nn.Module]] = {}
    left: dict[str, None] = {}
    chunked = 0
    for layer in decoder_layers(model):
        for module in layer.children():
            if not type(module).__name__.endswith(("MLP", "MoE", "MoeBlock", "FeedForward")):
                continue
            if _why_not(module):
                left[f"{type(module).__name__} {_why_not(module)}"] = None
                continue
            cls = type(module)
            if not issubclass(cls, _ChunkedMLP):
                # Others find modules by the name of their class.
                module.__class__ = subclasses.setdefault(cls, type(cls.__name__, (_ChunkedMLP, cls), {}))
            vars(module)["chunk_rows"] = rows
            chunked += 1
    reasons = "; ".join(left) or "they have no module whose class name ends in MLP"
    if not chunked:
        raise ValueError(
            f"mlp_chunk_rows={rows} has no effect on the decoder layers of {type(model).__name__}: {reasons}; set "
            "mlp_chunk_rows=0"
        )
    if left:
        logger.warning("mlp_chunk_rows does not apply to some MLPs: %s", reasons)


def _why_not(module: nn.Module) -> str:
    """Why a module of a decoder layer cannot be divided by rows; "" where it can."""
    if any(EXPERTS in type(inner).__name__ for inner in module.modules()):
        return "routes rows to experts"
    if "forward" in vars(module):
        return "has another forward, such as Liger's"
    return ""


class _ChunkedMLP(nn.Module):
    """Comes before an MLP's own class."""

    chunk_rows: int

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        compute: Callable[..., Tensor] = super().forward
        if x.shape[-2] <= self.chunk_rows:
            return compute(x, *args, **kwargs)
        chunks = torch.split(x, self.chunk_rows, -2)
        if not torch.is_grad_enabled():
            return torch.cat([compute(chunk, *args, **kwargs) for chunk in chunks], -2)
        return torch.cat([checkpoint(compute, chunk, *args, use_reentrant=False, **kwargs) for chunk in chunks], -2)

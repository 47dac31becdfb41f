"""Decoder MLPs over chunks of rows, so that intermediate rows exist for one chunk at a time.

An MLP computes each row independently, so that chunks give the same rows. Each chunk is
checkpointed: otherwise autograd would keep all chunks' intermediate rows. This is *TiledMLP* of
"Arctic Long Sequence Training" (arXiv 2506.13996).
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_distca.models.decoder import decoder_layers
from hf_distca.patches.modules import subclass
from hf_distca.refusal import RefusedError

logger = logging.getLogger(__name__)


def chunk_mlps(model: nn.Module, rows: int) -> None:
    """Make a model's decoder MLPs compute `rows` rows at a time, in place.

    Call it before `prepare`.

    MLPs that cannot be divided, such as blocks of experts, are unchanged and logged.

    Raises:
        ValueError: no decoder layer has an MLP that can be divided.
    """
    subclasses: dict[type[nn.Module], type[nn.Module]] = {}
    left: dict[str, None] = {}
    chunked = 0
    for module in (child for layer in decoder_layers(model) for child in layer.children()):
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
            if not issubclass(cls, _ChunkedMLP):
                module.__class__ = subclasses.setdefault(cls, subclass(cls, _ChunkedMLP))
            vars(module)["chunk_rows"] = rows
            chunked += 1
    reasons = "; ".join(left) or "they have no module whose class name ends in MLP"
    if not chunked:
        raise RefusedError(
            f"mlp_chunk_rows={rows} has no effect on the decoder layers of {type(model).__name__}: "
            f"{reasons}; set mlp_chunk_rows=0"
        )
    if left:
        logger.warning("mlp_chunk_rows does not apply to some MLPs: %s", reasons)


class _ChunkedMLP(nn.Module):
    """Base that precedes an MLP's own class."""

    chunk_rows: int

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        compute: Callable[..., Tensor] = super().forward
        if x.shape[-2] <= self.chunk_rows:
            return compute(x, *args, **kwargs)
        if torch.is_grad_enabled():
            compute = partial(checkpoint, compute, use_reentrant=False)
        return torch.cat(
            [compute(chunk, *args, **kwargs) for chunk in torch.split(x, self.chunk_rows, -2)], -2
        )

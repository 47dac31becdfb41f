"""Packed rows of tasks as FlashAttention's varlen kernels want them, and back.

Shape suffixes: H heads, P padded head dim.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from .alignment import ALIGNMENT
from .shapes import TaskShapes


def empty_gradients(q_QHP: Tensor, k_KGP: Tensor, v_KGP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Dense tensors for dq, dk and dv, with undefined contents, for a kernel that writes into what it is given."""
    dq_QHP, dk_KGP, dv_KGP = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_QHP, k_KGP, v_KGP))
    return dq_QHP, dk_KGP, dv_KGP


def ready(x: Tensor, head_dim: int) -> Tensor:
    """Padded to a head dim (zeros change no score and add empty columns), dense and aligned; itself where it is so."""
    if x.shape[-1] < head_dim:
        return pad(x, (0, head_dim - x.shape[-1]))
    step = ALIGNMENT // x.element_size()
    aligned = x.stride(-1) == 1 and not any(n % step for n in (x.storage_offset(), *x.stride()[:-1]))
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def some_rows(x: Tensor, rows: slice) -> Tensor:
    """Some rows; x itself where they are all."""
    return x if rows == slice(0, x.shape[0]) else x[rows]


def unpadded(x: Tensor, head_dim: int) -> Tensor:
    """The columns that were there before padding."""
    return x if x.shape[-1] == head_dim else x[..., :head_dim]


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """All parts, contiguous; a single one that is contiguous already is itself the result."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts), dim)


def without_partners(shapes: TaskShapes) -> tuple[list[slice], list[slice]]:
    """Packed query rows of tasks without keys, and packed key/value rows of tasks without rows."""
    return shapes.once(
        "without partners",
        lambda: (
            list(_spans(shapes.q_lens, without=shapes.k_lens)),
            list(_spans(shapes.k_lens, without=shapes.q_lens)),
        ),
    )


def _spans(lens: Sequence[int], without: Sequence[int]) -> Iterator[slice]:
    """The packed positions of each task that has positions here but none on the other side."""
    starts = accumulate(lens, initial=0)
    for start, here, there in zip(starts, lens, without, strict=False):
        if here and not there:
            yield slice(start, start + here)

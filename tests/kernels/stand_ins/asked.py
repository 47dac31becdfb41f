"""What stand-ins have in common: what they are asked for, and the results around the reference."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_distca.kernels import AttentionParams, TaskShapes
from hf_distca.kernels.reference import ReferenceKernel


def signature(arguments: str) -> Callable[..., dict[str, Any]]:
    """Return a function with these arguments, which returns them by name and refuses others."""
    return eval(f"lambda {arguments}: locals()")


def called(
    tensors: tuple[Tensor, ...],
    cumulative: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scale: float,
    causal: bool,
    window: tuple[int | None, int | None],
    softcap: float | None = None,
    one_head_dim: bool = True,
) -> tuple[TaskShapes, AttentionParams]:
    """What a call asks for, after the checks that the kernels make; q, k and v are the first tensors."""
    q, k, v = tensors[:3]
    assert q.shape[2] == k.shape[2] <= 256
    assert v.shape[2] <= 256
    assert q.shape[2] == v.shape[2] or not one_head_dim
    for x in tensors:
        assert x.shape[2] % 8 == 0
        assert x.stride(-1) == 1
        assert not any(stride % 8 for stride in x.stride()[:-1])
        assert x.data_ptr() % 16 == 0
    shapes = TaskShapes.build(*(x.diff().tolist() for x in cumulative), "cpu")
    assert shapes.q_lens
    assert [x[0].item() for x in cumulative] == [0, 0]
    assert (sum(shapes.q_lens), sum(shapes.k_lens)) == (len(q), len(k))
    assert longest[0] >= shapes.max_q > 0
    assert longest[1] >= shapes.max_k > 0
    # With longest[0] == 1 they mean decoding: one row in every task.
    assert longest[0] > 1 or set(shapes.q_lens) == {1}
    left, right = (None if side == -1 else side for side in window)
    assert right == (None if left is None else 0)
    return shapes, AttentionParams(
        scale=scale, window=None if left is None else left + 1, softcap=softcap or None, causal=causal
    )


def forward(q: Tensor, k: Tensor, v: Tensor, shapes: TaskShapes, params: AttentionParams) -> tuple[Tensor, Tensor]:
    """o [Q, H, R] and lse [H, Q]."""
    o, lse = ReferenceKernel().forward(q, k, v, shapes, params)
    o[lse == -torch.inf] = torch.nan
    return o, lse.masked_fill(lse == -torch.inf, torch.inf).T.contiguous()


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    shapes: TaskShapes,
    params: AttentionParams,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.is_contiguous()
    dq, dk, dv = ReferenceKernel().backward(do, q, k, v, o, lse.T, shapes, params)
    for q_rows, k_rows in zip(
        torch.arange(len(q)).split(shapes.q_lens), torch.arange(len(k)).split(shapes.k_lens), strict=True
    ):
        if not len(q_rows) or not len(k_rows):
            dq[q_rows] = dk[k_rows] = dv[k_rows] = torch.nan
    return dq, dk, dv

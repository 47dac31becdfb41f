"""Checks of a kernel call's tensors, the same for every kernel.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, D head dim of queries
and keys, E head dim of values.
"""

from functools import lru_cache

from torch import Tensor

from .shapes import TaskShapes


def check_tensors(q_QHD: Tensor, k_KGD: Tensor, v_KGE: Tensor, shapes: TaskShapes, causal: bool) -> None:
    """Raise ValueError unless the tensors of a kernel call fit one another and the shapes.

    Args:
        q_QHD: packed queries.
        k_KGD: packed keys.
        v_KGE: packed values.
        shapes: lengths of the tasks.
        causal: whether rows are aligned with keys.
    """
    q_rows, k_rows = _totals(shapes.q_lens, shapes.k_lens, causal)
    if q_QHD.dim() != 3 or k_KGD.dim() != 3 or v_KGE.dim() != 3:
        raise ValueError(
            "kernels take q [Q, H, D], k [K, G, D] and v [K, G, E], got "
            f"{list(q_QHD.shape)}, {list(k_KGD.shape)} and {list(v_KGE.shape)}"
        )
    if q_QHD.shape[0] != q_rows or k_KGD.shape[0] != k_rows or v_KGE.shape[0] != k_rows:
        raise ValueError(
            f"the tasks have {q_rows} query rows and {k_rows} key/value rows, but q, k and v have "
            f"{q_QHD.shape[0]}, {k_KGD.shape[0]} and {v_KGE.shape[0]}"
        )
    if q_QHD.shape[2] != k_KGD.shape[2]:
        raise ValueError(f"q and k differ in head dim: {q_QHD.shape[2]} and {k_KGD.shape[2]}")
    if k_KGD.shape[1] != v_KGE.shape[1] or q_QHD.shape[1] % k_KGD.shape[1]:
        raise ValueError(
            "k and v must have as many heads as each other, and q a multiple of that, got "
            f"{k_KGD.shape[1]}, {v_KGE.shape[1]} and {q_QHD.shape[1]}"
        )
    if not q_QHD.dtype == k_KGD.dtype == v_KGE.dtype:
        raise ValueError(
            f"q, k and v must have one dtype, got {q_QHD.dtype}, {k_KGD.dtype} and {v_KGE.dtype}: cast them "
            "to one before the call (autocast does not reach into kernels)"
        )


@lru_cache(maxsize=256)
def _totals(q_lens: tuple[int, ...], k_lens: tuple[int, ...], causal: bool) -> tuple[int, int]:
    """Rows of all tasks; every layer of a micro-batch asks for the same ones."""
    if causal:
        for i, (q_len, k_len) in enumerate(zip(q_lens, k_lens, strict=True)):
            if k_len < q_len:
                raise ValueError(
                    f"task {i} has {q_len} query rows but only {k_len} key/value rows; causal attention is "
                    "aligned at the last row, so a task needs at least as many keys as rows"
                )
    return sum(q_lens), sum(k_lens)

"""Blocks of attention with softcap in plain torch operations, a bounded number of scores at a time.

Softcap is softcap·tanh(score/softcap); its slope is 1 - tanh². Computed in float32 at least.

Shape suffixes: B blocks, R rows of a block, S keys of a block, H query heads, G key/value heads, N = H/G
query heads per key/value head, D head dim of queries and keys, E head dim of values.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

SCORES_AT_ONCE = 1 << 22
"""How many scores are held at a time, of all heads together: 16 MiB in float32."""


def forward(
    q_BRHD: Tensor, k_BSGD: Tensor, v_BSGE: Tensor, causal: bool, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attention of the rows of each block to the keys of the same block.

    Args:
        q_BRHD: queries.
        k_BSGD: keys.
        v_BSGE: values.
        causal: row i sees keys j <= i; otherwise every row sees every key of its block.
        scale: factor on q·k.
        softcap: bound of the scores.

    Returns:
        o_BRHE in the dtype of q, and lse_BRH.
    """
    o_BRHE = q_BRHD.new_empty(*q_BRHD.shape[:3], v_BSGE.shape[3])
    lse_BRH = q_BRHD.new_empty(q_BRHD.shape[:3], dtype=_compute_dtype(q_BRHD))
    for block, rows, keys in _pieces(q_BRHD, k_BSGD, causal):
        k_GSD, v_GSE = _by_head(k_BSGD[block, keys]), _by_head(v_BSGE[block, keys])
        q_GNRD = _by_query_head(q_BRHD[block, rows], k_GSD.shape[0])
        s_GNRS = _capped(q_GNRD, k_GSD, scale, softcap).mul_(softcap)
        if causal:
            s_GNRS.masked_fill_(_hidden(rows, keys), -torch.inf)
        lse_GNR = s_GNRS.logsumexp(dim=-1)
        p_GNRS = s_GNRS.sub_(lse_GNR.unsqueeze(-1)).exp_()
        o_BRHE[block, rows] = _rows_first(p_GNRS @ v_GSE.unsqueeze(1))
        lse_BRH[block, rows] = lse_GNR.flatten(0, 1).T
    return o_BRHE, lse_BRH


def backward(
    do_BRHE: Tensor,
    q_BRHD: Tensor,
    o_BRHE: Tensor,
    lse_BRH: Tensor,
    k_BSGD: Tensor,
    v_BSGE: Tensor,
    causal: bool,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward`, from o and lse of the rows over all their keys, in this block or elsewhere.

    Returns:
        dq_BRHD, dk_BSGD, dv_BSGE, in the dtype they were computed in.
    """
    dtype = _compute_dtype(q_BRHD)
    dq_BRHD = torch.empty_like(q_BRHD, dtype=dtype)
    dk_BSGD = torch.zeros(k_BSGD.shape, dtype=dtype)
    dv_BSGE = torch.zeros(v_BSGE.shape, dtype=dtype)
    for block, rows, keys in _pieces(q_BRHD, k_BSGD, causal):
        k_GSD, v_GSE = _by_head(k_BSGD[block, keys]), _by_head(v_BSGE[block, keys])
        q_GNRD, do_GNRE, o_GNRE = (_by_query_head(x[block, rows], k_GSD.shape[0]) for x in (q_BRHD, do_BRHE, o_BRHE))
        lse_GNR = lse_BRH[block, rows].T.unflatten(0, (k_GSD.shape[0], -1))
        t_GNRS = _capped(q_GNRD, k_GSD, scale, softcap)
        p_GNRS = (t_GNRS * softcap).sub_(lse_GNR.unsqueeze(-1)).exp_()
        if causal:
            p_GNRS.masked_fill_(_hidden(rows, keys), 0.0)
        dv_BSGE[block, keys] += torch.einsum("gnrs,gnre->sge", p_GNRS, do_GNRE)
        delta_GNR = (do_GNRE * o_GNRE).sum(-1)
        ds_GNRS = (do_GNRE @ v_GSE.mT.unsqueeze(1)).sub_(delta_GNR.unsqueeze(-1)).mul_(p_GNRS)
        ds_GNRS.mul_(t_GNRS.square_().neg_().add_(1.0)).mul_(scale)
        dq_BRHD[block, rows] = _rows_first(ds_GNRS @ k_GSD.unsqueeze(1))
        dk_BSGD[block, keys] += torch.einsum("gnrs,gnrd->sgd", ds_GNRS, q_GNRD)
    return dq_BRHD, dk_BSGD, dv_BSGE


def _pieces(q_BRHD: Tensor, k_BSGD: Tensor, causal: bool) -> Iterator[tuple[int, slice, slice]]:
    """Block, rows and keys of pieces of bounded size, in each of which rows meet all their keys."""
    blocks, rows, heads, _ = q_BRHD.shape
    keys = k_BSGD.shape[1]
    at_once = max(SCORES_AT_ONCE // (heads * keys), 1)
    if causal:
        # Small pieces leave little of the square above the diagonal to be computed in vain.
        at_once = min(at_once, 128)
    for block in range(blocks):
        for start in range(0, rows, at_once):
            stop = min(start + at_once, rows)
            yield block, slice(start, stop), slice(0, stop if causal else keys)


def _capped(q_GNRD: Tensor, k_GSD: Tensor, scale: float, softcap: float) -> Tensor:
    """tanh(score / softcap), [G, N, R, S]."""
    return (q_GNRD @ k_GSD.mT.unsqueeze(1)).mul_(scale / softcap).tanh_()


def _hidden(rows: slice, keys: slice) -> Tensor:
    """[R, S], true where a row does not see a key."""
    return torch.arange(keys.start, keys.stop) > torch.arange(rows.start, rows.stop).unsqueeze(1)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _by_head(x_SGD: Tensor) -> Tensor:
    """[G, S, D] in the dtype to compute in."""
    return x_SGD.to(_compute_dtype(x_SGD)).transpose(0, 1)


def _by_query_head(x_RHD: Tensor, kv_heads: int) -> Tensor:
    """[G, N, R, D] in the dtype to compute in."""
    return torch.unflatten(_by_head(x_RHD), 0, (kv_heads, -1))


def _rows_first(x_GNRE: Tensor) -> Tensor:
    """[R, H, E]."""
    return x_GNRE.flatten(0, 1).transpose(0, 1)

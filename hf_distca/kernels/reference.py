"""The readable oracle: one task at a time, every score written out, float64 throughout.

Shape suffixes: Q rows and K keys of one task, H query heads, G key/value heads, D head dim of
queries and keys, E head dim of values.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .contract import AttentionParams, Need, TaskShapes, check_tensors


class ReferenceKernel:
    """Textbook attention on any device, in any dtype, with any option.

    Slow, with all scores of a task at once.
    """

    name = "reference"
    row_overhead = 0
    gather_cost = 0.0

    def check(self, need: Need, device: torch.device) -> None:
        """Accept everything."""

    def forward(
        self,
        q_QHD: Tensor,
        k_KGD: Tensor,
        v_KGE: Tensor,
        shapes: TaskShapes,
        params: AttentionParams,
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        check_tensors(q_QHD, k_KGD, v_KGE, shapes, params.causal)
        outputs, normalizers = [], []
        for q_t, k_t, v_t in _tasks(shapes, [q_QHD], [k_KGD, v_KGE]):
            heads = q_t.shape[1]
            scores_HQK, _ = _scores(q_t, _repeat(k_t, heads), params)
            lse_HQ = scores_HQK.logsumexp(dim=-1)
            p_HQK = torch.exp(scores_HQK - lse_HQ.unsqueeze(-1))
            outputs.append(torch.einsum("hqk,khe->qhe", p_HQK, _repeat(v_t, heads)))
            normalizers.append(lse_HQ.T)
        lse_dtype = torch.float64 if q_QHD.dtype == torch.float64 else torch.float32
        o_QHE = _join(outputs, q_QHD.new_empty(0, q_QHD.shape[1], v_KGE.shape[2]))
        return o_QHE, _join(normalizers, q_QHD.new_empty(0, q_QHD.shape[1], dtype=lse_dtype))

    def backward(
        self,
        do_QHE: Tensor,
        q_QHD: Tensor,
        k_KGD: Tensor,
        v_KGE: Tensor,
        o_QHE: Tensor,
        lse_QH: Tensor,
        shapes: TaskShapes,
        params: AttentionParams,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        check_tensors(q_QHD, k_KGD, v_KGE, shapes, params.causal)
        dqs, dks, dvs = [], [], []
        for do_t, q_t, o_t, lse_t, k_t, v_t in _tasks(
            shapes, [do_QHE, q_QHD, o_QHE, lse_QH], [k_KGD, v_KGE]
        ):
            heads, kv_heads = q_t.shape[1], k_t.shape[1]
            k_KHD, v_KHE = _repeat(k_t, heads), _repeat(v_t, heads)
            scores_HQK, slope_HQK = _scores(q_t, k_KHD, params)
            p_HQK = torch.exp(scores_HQK - lse_t.T.unsqueeze(-1))

            dv_KHE = torch.einsum("hqk,qhe->khe", p_HQK, do_t)
            dp_HQK = torch.einsum("qhe,khe->hqk", do_t, v_KHE)
            delta_HQ = torch.einsum("qhe,qhe->hq", do_t, o_t)
            ds_HQK = p_HQK * (dp_HQK - delta_HQ.unsqueeze(-1)) * slope_HQK * params.scale
            dqs.append(torch.einsum("hqk,khd->qhd", ds_HQK, k_KHD))
            dk_KHD = torch.einsum("hqk,qhd->khd", ds_HQK, q_t)
            # The query heads that share a key/value head add up their gradients.
            dks.append(dk_KHD.unflatten(1, (kv_heads, heads // kv_heads)).sum(2))
            dvs.append(dv_KHE.unflatten(1, (kv_heads, heads // kv_heads)).sum(2))
        return _join(dqs, q_QHD), _join(dks, k_KGD), _join(dvs, v_KGE)


def _tasks(
    shapes: TaskShapes, query_tensors: list[Tensor], key_tensors: list[Tensor]
) -> Iterator[tuple[Tensor, ...]]:
    """Yield each task's rows of packed tensors, in float64."""
    split = [x.double().split(shapes.q_lens) for x in query_tensors] + [
        x.double().split(shapes.k_lens) for x in key_tensors
    ]
    return zip(*split, strict=True)


def _join(tasks: list[Tensor], template: Tensor) -> Tensor:
    """Pack the tensors of all tasks, in the dtype of `template`; no rows without tasks."""
    return torch.cat(tasks).to(template.dtype) if tasks else template.clone()


def _repeat(x_KGD: Tensor, heads: int) -> Tensor:
    """Repeat each key/value head for the query heads that read the head."""
    return x_KGD.repeat_interleave(heads // x_KGD.shape[1], dim=1)


def _scores(q_QHD: Tensor, k_KHD: Tensor, params: AttentionParams) -> tuple[Tensor, Tensor]:
    """Return scores [H, Q, K] and the softcap's slope at each.

    A score is -inf where a row does not see a key.
    """
    scores_HQK = torch.einsum("qhd,khd->hqk", q_QHD, k_KHD) * params.scale
    slope_HQK = torch.ones_like(scores_HQK)
    if params.softcap is not None:
        capped_HQK = torch.tanh(scores_HQK / params.softcap)
        scores_HQK = params.softcap * capped_HQK
        slope_HQK = 1 - capped_HQK**2
    if params.causal:
        rows, keys = q_QHD.shape[0], k_KHD.shape[0]
        row_Q1 = torch.arange(rows, device=q_QHD.device).unsqueeze(1) + keys - rows
        key_K = torch.arange(keys, device=q_QHD.device)
        hidden_QK = key_K > row_Q1
        if params.window is not None:
            hidden_QK |= key_K <= row_Q1 - params.window
        scores_HQK = scores_HQK.masked_fill(hidden_QK, -torch.inf)
    return scores_HQK, slope_HQK

"""The reference itself: against torch's autograd and by hand."""

import math

import pytest
import torch
from torch import Tensor

from hf_distca.kernels import AttentionParams, TaskShapes
from hf_distca.kernels.reference import ReferenceKernel
from tests.kernels.cases import CASES, Case, expected, make_inputs


def explicit_attention(q_QHD: Tensor, k_KGD: Tensor, v_KGE: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """Differentiable attention over all packed rows at once, with one mask that says who sees whom."""
    q_task = torch.repeat_interleave(torch.arange(len(case.q_lens)), torch.tensor(case.q_lens, dtype=torch.long))
    k_task = torch.repeat_interleave(torch.arange(len(case.k_lens)), torch.tensor(case.k_lens, dtype=torch.long))
    # A row's position is that of its own key.
    q_position = torch.cat([torch.arange(k - q, k) for q, k in zip(case.q_lens, case.k_lens, strict=True)])
    k_position = torch.cat([torch.arange(k) for k in case.k_lens])
    visible = q_task[:, None] == k_task
    if case.params.causal:
        visible &= k_position <= q_position[:, None]
    if case.params.window is not None:
        visible &= k_position > q_position[:, None] - case.params.window
    repeats = case.heads // case.kv_heads
    k_KHD, v_KHE = k_KGD.repeat_interleave(repeats, 1), v_KGE.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", q_QHD, k_KHD) * case.params.scale
    if case.params.softcap is not None:
        scores = case.params.softcap * torch.tanh(scores / case.params.softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    seeing = visible.any(1)
    p = torch.where(seeing[:, None], scores, 0.0).softmax(-1) * seeing[:, None]
    lse = torch.where(seeing, torch.where(seeing[:, None], scores, 0.0).logsumexp(-1), -math.inf)
    return torch.einsum("hqk,khe->qhe", p, v_KHE), lse.T


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if sum(case.q_lens)])
def test_matches_autograd_of_an_explicit_masked_softmax(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case, torch.float64)
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    o, lse = explicit_attention(*leaves, case)
    grads = torch.autograd.grad(o, leaves, inputs.do)
    for got, want in zip(expected(case, inputs), (o.detach(), lse.detach(), *grads), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def column(*values: float) -> Tensor:
    """One head of head dim 1."""
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1)


@pytest.mark.parametrize(("window", "expected"), [(None, [2.0, 4.0]), (1, [3.0, 8.0]), (2, [2.0, 5.5])])
def test_equal_scores_average_the_values_seen(window: int | None, expected: list[float]) -> None:
    # Row 0 of the task is row 1 of its document: it sees values 1, 3; then 1, 3, 8. A window counts the row's own key.
    args = column(0, 0), column(5, 6, 7), column(1, 3, 8), TaskShapes.build([2], [3], "cpu")
    o, _ = ReferenceKernel().forward(*args, AttentionParams(1.0, window=window))
    assert o.flatten().tolist() == expected


def test_softmax_weights_by_hand() -> None:
    # Scores 2·ln3·0.5 = ln 3 and 0: weights 3/4 and 1/4.
    shapes = TaskShapes.build([1], [2], "cpu")
    args = column(1), column(2 * math.log(3), 0), column(4, 8), shapes, AttentionParams(0.5)
    o, lse = ReferenceKernel().forward(*args)
    assert o.item() == pytest.approx(5.0, abs=1e-14)
    assert lse.item() == pytest.approx(math.log(4), abs=1e-15)
    # dv = p; ds = p·(v - o) = 3/4·(-1), 1/4·3; dq = 0.5·Σ ds·k, dk = 0.5·ds·q.
    dq, dk, dv = ReferenceKernel().backward(column(1), *args[:3], o, lse, *args[3:])
    assert dv.flatten().tolist() == pytest.approx([0.75, 0.25], abs=1e-14)
    assert dk.flatten().tolist() == pytest.approx([-0.375, 0.375], abs=1e-14)
    assert dq.item() == pytest.approx(-0.75 * math.log(3), abs=1e-14)

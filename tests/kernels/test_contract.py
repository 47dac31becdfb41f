"""Describing a call, what is refused, the reference against torch's autograd, merging, and measured speeds."""

import math

import pytest
import torch
from torch import Tensor

from hf_distca.kernels import KERNEL_NAMES, AttentionParams, Need, TaskShapes, get_kernel, merge_into, speed
from hf_distca.kernels.fused import CHUNK
from hf_distca.kernels.reference import ReferenceKernel
from tests.kernels.cases import CASES, Case, expected, make_inputs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_kernels_by_name() -> None:
    with pytest.raises(ValueError, match="'sdpa'") as error:
        get_kernel("sdpa", CPU)
    assert all(name in str(error.value) for name in KERNEL_NAMES)
    usual = [Need(torch.float32, 64, 64, AttentionParams(1.0))]
    get_kernel("cpu", CPU, usual)
    with pytest.raises(ValueError, match="got cuda; on CUDA use 'torch_varlen'"):
        get_kernel("cpu", CUDA, usual)
    get_kernel("reference", CUDA, [Need(torch.float16, 999, 1, AttentionParams(1.0, softcap=2.0))])


def test_shapes_and_params() -> None:
    shapes = TaskShapes.build([3, 0, 2], torch.tensor([5, 1, 2]), "cpu")
    assert (shapes.q_lens, shapes.k_lens) == ((3, 0, 2), (5, 1, 2))
    assert (shapes.cu_q.tolist(), shapes.cu_k.tolist()) == ([0, 3, 3, 5], [0, 5, 6, 8])
    assert (shapes.cu_q.dtype, shapes.cu_k.dtype) == (torch.int32, torch.int32)
    assert (shapes.max_q, shapes.max_k) == (3, 5)
    empty = TaskShapes.build([], [], "cpu")
    assert (empty.cu_q.tolist(), empty.max_q, empty.max_k) == ([0], 0, 0)
    for q_lens, message in (([1, 2], "got 2 q_lens but 1 k_lens"), ([-1], "0 or more")):
        with pytest.raises(ValueError, match=message):
            TaskShapes.build(q_lens, [3], "cpu")
    for window, softcap, causal, message in (
        (0, None, True, "window must be at least 1"),
        (4, None, False, "a window needs causal=True"),
        (None, 0.0, True, "softcap must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            AttentionParams(1.0, window, softcap, causal)


@pytest.mark.parametrize("kernel_name", ["cpu", "reference", "torch_varlen"])
def test_refused_tensors(kernel_name: str) -> None:
    kernel, params = get_kernel(kernel_name, CPU), AttentionParams(1.0)
    do, q, k, v, shapes = make_inputs(Case((3,), (5,)), torch.float32)
    for bad, message in [
        ((q, k.bfloat16(), v, shapes), "one dtype, got torch.float32, torch.bfloat16"),
        ((q, k, v, TaskShapes.build([3], [6], "cpu")), "3 query rows and 6 key/value rows, but q, k and v have 3, 5"),
        ((q, k[..., :8], v, shapes), "differ in head dim: 32 and 8"),
        ((q[:, :3], k, v, shapes), "q a multiple of it, got 2, 2 and 3"),
        ((q, k, v[:, :1], shapes), "got 2, 1 and 4"),
        ((q.flatten(1), k, v, shapes), r"kernels take q \[Q, H, D\]"),
        ((q, k[:2], v[:2], TaskShapes.build([3], [2], "cpu")), "task 0 has 3 query rows but only 2 key"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernel.forward(*bad, params)
        with pytest.raises(ValueError, match=message):
            kernel.backward(do, *bad[:3], do, torch.zeros(3, 4), bad[3], params)


def explicit_attention(q_QHD: Tensor, k_KGD: Tensor, v_KGE: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """Differentiable attention over all packed rows at once, with one mask that says who sees whom."""
    q_task = torch.repeat_interleave(torch.arange(len(case.q_lens)), torch.tensor(case.q_lens, dtype=torch.long))
    k_task = torch.repeat_interleave(torch.arange(len(case.k_lens)), torch.tensor(case.k_lens, dtype=torch.long))
    # A row's position is that of its own key.
    q_position = torch.cat([torch.arange(k - q, k) for q, k in zip(case.q_lens, case.k_lens, strict=True)])
    k_position = torch.cat([torch.arange(k) for k in case.k_lens])
    visible = q_task[:, None] == k_task
    if case.causal:
        visible &= k_position <= q_position[:, None]
    if case.window is not None:
        visible &= k_position > q_position[:, None] - case.window
    repeats = case.heads[0] // case.heads[1]
    k_KHD, v_KHE = k_KGD.repeat_interleave(repeats, 1), v_KGE.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", q_QHD, k_KHD) * case.scale
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores, seeing = scores.masked_fill(~visible, -math.inf), visible.any(1)
    seen = torch.where(seeing[:, None], scores, 0.0)
    lse = torch.where(seeing, seen.logsumexp(-1), -math.inf)
    return torch.einsum("hqk,khe->qhe", seen.softmax(-1) * seeing[:, None], v_KHE), lse.T


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if sum(case.q_lens) and sum(case.k_lens)])
def test_the_reference_matches_autograd_of_an_explicit_masked_softmax(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case, torch.float64)
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    o, lse = explicit_attention(*leaves, case)
    grads = torch.autograd.grad(o, leaves, inputs.do)
    for got, want in zip(expected(case, inputs), (o.detach(), lse.detach(), *grads), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("window", "values"), [(None, [2.0, 4.0]), (1, [3.0, 8.0]), (2, [2.0, 5.5])])
def test_equal_scores_average_the_values_seen(window: int | None, values: list[float]) -> None:
    # Row 0 of the task is row 1 of its document: it sees values 1, 3; then 1, 3, 8. A window counts the row's own key.
    q, k, v = (torch.tensor(x, dtype=torch.float64).reshape(-1, 1, 1) for x in ([0, 0], [5, 6, 7], [1, 3, 8]))
    o, _ = ReferenceKernel().forward(q, k, v, TaskShapes.build([2], [3], "cpu"), AttentionParams(1.0, window=window))
    assert o.flatten().tolist() == values


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kernel_name", ["cpu", "reference"])
def test_prefix_and_own_part_make_the_whole(kernel_name: str, softcap: float | None) -> None:
    """Two calls over disjoint keys, merged, are one call over all of them."""
    kernel, case = get_kernel(kernel_name, CPU), Case((30,), (50,), scale=0.3, softcap=softcap)
    inputs = make_inputs(case, torch.float64)
    do, q, prefix, own = (
        inputs.do,
        inputs.q,
        *((inputs.k[part], inputs.v[part]) for part in (slice(20), slice(20, 50))),
    )
    own_call = TaskShapes.build([30], [30], CPU), case.params
    prefix_call = TaskShapes.build([30], [20], CPU), AttentionParams(0.3, None, softcap, causal=False)
    o, lse = kernel.forward(q, *own, *own_call)
    merge_into(o, lse, *kernel.forward(q, *prefix, *prefix_call))
    dq, *of_prefix = kernel.backward(do, q, *prefix, o, lse, *prefix_call)
    more_dq, *of_own = kernel.backward(do, q, *own, o, lse, *own_call)
    got = o, lse, dq + more_dq, *(torch.cat(parts) for parts in zip(of_prefix, of_own, strict=True))
    for got_one, want in zip(got, expected(case, inputs), strict=True):
        torch.testing.assert_close(got_one, want, rtol=1e-12, atol=1e-12)


LN2, LN3, LN4, NONE = math.log(2), math.log(3), math.log(4), (0.0, -math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [None, 1, 4, CHUNK])
def test_merge_by_hand(dtype: torch.dtype, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of so many numbers at a time, by index; all rows in order without one."""
    so_far = [(4.0, LN3), (4.0, LN3 + 1e4), NONE, (7.0, 0.5), NONE, (1.0, 0.0)]
    part = [(8.0, 0.0), (8.0, 1e4), (7.0, 0.5), NONE, NONE, (3.0, 0.0)]
    merged = [(5.0, LN4), (5.0, LN4 + 1e4), (7.0, 0.5), (7.0, 0.5), NONE, (2.0, LN2)]
    rows = None
    if chunk is not None:
        monkeypatch.setattr("hf_distca.kernels.fused.CHUNK", chunk)
        rows = torch.tensor([5, 1, 3])
        merged = [merged[row] if row in rows else so_far[row] for row in range(6)]
        part = [part[row] for row in rows]
    o, o_part = (torch.tensor([[[o, 2 * o]] for o, _ in pairs], dtype=dtype) for pairs in (so_far, part))
    lse, lse_part = (torch.tensor([[lse] for _, lse in pairs]) for pairs in (so_far, part))
    merge_into(o, lse, o_part, lse_part, rows)
    assert o.flatten().tolist() == pytest.approx([x for o, _ in merged for x in (o, 2 * o)], rel=1e-3)
    assert lse.flatten().tolist() == pytest.approx([lse for _, lse in merged])


@pytest.mark.parametrize("work", [(64, 8, 2, 64), (256, 16, 4, 16), (8, 1, 1, 4)])
def test_speeds_compare_whatever_was_computed(work: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own, the kernel takes a second for so many multiplications of numbers."""
    now, calls, (tokens, q_heads, kv_heads, dim) = 0.0, [], work

    class Paced:
        def forward(self, q, k, v, shapes, params):
            nonlocal now
            calls.append((tuple(q.shape), tuple(k.shape), shapes.q_lens, params.scale))
            seconds = sum(n * (n + 1) / 2 for n in shapes.q_lens) * q.shape[1] * q.shape[2] / 1e6
            now += 9 * seconds if len(calls) == 1 else seconds  # the first warms up
            return q, q[..., 0]

        def backward(self, do, q, k, v, o, lse, shapes, params):
            return q, k, v

    monkeypatch.setattr(speed.time, "perf_counter", lambda: now)
    monkeypatch.setattr(speed, "USUAL_WORK", work)
    assert speed.measure_speed(Paced(), CPU) == pytest.approx(1e6 / 512)
    assert set(calls) == {((tokens, q_heads, dim), (tokens, kv_heads, dim), (tokens,), dim**-0.5)}
    assert len(calls) >= 4

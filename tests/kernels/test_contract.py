"""What every kernel and its caller agree on.

A call is described, refused, or computed by the reference; results are merged, speeds measured. The
CPU kernel comes last.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hf_distca.kernels import (
    KERNEL_NAMES,
    KERNELS,
    AttentionParams,
    Need,
    TaskShapes,
    cpu,
    get_kernel,
    merge_into,
    speed,
)
from hf_distca.kernels.contract import check_tensors
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.kernels.fused import CHUNK
from hf_distca.kernels.reference import ReferenceKernel
from tests.kernels.cases import CASES, Case, assert_matches_reference, expected, make_inputs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_kernels_by_name() -> None:
    assert ("auto", *KERNELS) == KERNEL_NAMES
    usual = [Need(torch.float32, 64, 64, AttentionParams(1.0))]
    get_kernel("cpu", CPU, usual)
    with pytest.raises(ValueError, match=r"is cuda, but .*; on CUDA use 'torch_varlen'"):
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


@pytest.mark.parametrize("kernel_name", ["cpu", "reference", "torch_varlen"])
def test_refused_tensors(kernel_name: str, subtests: pytest.Subtests) -> None:
    kernel = get_kernel(kernel_name, CPU)
    params = AttentionParams(1.0)
    do, q, k, v, shapes = make_inputs(Case((3,), (5,)), torch.float32)
    for tensors, message in [
        (
            (q, k, v, TaskShapes.build([3], [6], "cpu")),
            r"q \[3, H, D\], k \[6, G, D\] and v \[6, G, E\] for .*; got .*\(5, 2, 32\)",
        ),
        ((q, k[..., :8], v, shapes), r"got \(3, 4, 32\), \(5, 2, 8\)"),
        ((q[:, :3], k, v, shapes), r"H a multiple of G; got \(3, 3, 32\)"),
        ((q, k, v[:, :1], shapes), r"\(5, 2, 32\) and \(5, 1, 32\)"),
        ((q.flatten(1), k, v, shapes), r"got \(3, 128\)"),
        (
            (q, k[:2], v[:2], TaskShapes.build([3], [2], "cpu")),
            "task 0 has 3 query rows but only 2 key",
        ),
    ]:
        *qkv, task_shapes = tensors
        with subtests.test(message):
            with pytest.raises(ValueError, match=message):
                kernel.forward(*qkv, task_shapes, params)
            with pytest.raises(ValueError, match=message):
                kernel.backward(do, *qkv, do, torch.zeros(3, 4), task_shapes, params)
    # Without a causal order rows may be more than keys; the same tasks with one are refused all the
    # same.
    few_keys = (q, k[:2], v[:2])
    shapes = TaskShapes.build([3], [2], "cpu")
    check_tensors(*few_keys, shapes, causal=False)
    with pytest.raises(ValueError, match="task 0 has 3 query rows but only 2 key"):
        kernel.forward(*few_keys, shapes, params)


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if sum(case.q_lens) and sum(case.k_lens)]
)
def test_gradients_of_the_reference_are_those_of_autograd(name: str) -> None:
    """Other kernels compute its forward in other ways."""
    case = CASES[name]
    do, *qkv, shapes = inputs = make_inputs(case, torch.float64)
    leaves = [x.clone().requires_grad_() for x in qkv]
    o, lse = ReferenceKernel().forward(*leaves, shapes, case.params)
    grads = torch.autograd.grad(o, leaves, do)
    for got, want in zip(expected(case, inputs), (o.detach(), lse.detach(), *grads), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("window", "values"), [(None, [2.0, 4.0]), (1, [3.0, 8.0]), (2, [2.0, 5.5])]
)
def test_equal_scores_average_the_values_seen(window: int | None, values: list[float]) -> None:
    # Row 0 of the task is row 1 of its document: it sees values 1, 3; then 1, 3, 8. A window counts
    # the row's own key.
    q, k, v = (
        torch.tensor(x, dtype=torch.float64).reshape(-1, 1, 1)
        for x in ([0, 0], [5, 6, 7], [1, 3, 8])
    )
    o, _ = ReferenceKernel().forward(
        q, k, v, TaskShapes.build([2], [3], "cpu"), AttentionParams(1.0, window=window)
    )
    assert o.flatten().tolist() == values


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kernel_name", ["cpu", "reference"])
def test_prefix_and_own_part_make_the_whole(kernel_name: str, softcap: float | None) -> None:
    """Two calls over disjoint keys, merged, are one call over all of them."""
    kernel, case = get_kernel(kernel_name, CPU), Case((30,), (50,), scale=0.3, softcap=softcap)
    inputs = make_inputs(case, torch.float64)
    do, q, k, v, _ = inputs
    prefix, own = (k[:20], v[:20]), (k[20:], v[20:])
    own_call = TaskShapes.build([30], [30], CPU), case.params
    prefix_call = (
        TaskShapes.build([30], [20], CPU),
        AttentionParams(0.3, None, softcap, causal=False),
    )
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
def test_merge_by_hand(
    dtype: torch.dtype, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    o, o_part = (
        torch.tensor([[[o, 2 * o]] for o, _ in pairs], dtype=dtype) for pairs in (so_far, part)
    )
    lse, lse_part = (torch.tensor([[lse] for _, lse in pairs]) for pairs in (so_far, part))
    merge_into(o, lse, o_part, lse_part, rows)
    assert o.flatten().tolist() == pytest.approx(
        [x for o, _ in merged for x in (o, 2 * o)], rel=1e-3
    )
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


# The CPU kernel.


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name: str, dtype: torch.dtype) -> None:
    assert_matches_reference(CpuKernel(), CASES[name], dtype, seed=int(dtype == torch.float64))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads, causal = draw(st.integers(1, 3)), draw(st.booleans())
    q_lens = draw(st.lists(st.integers(0, 90), max_size=5).map(tuple))
    extra = [draw(st.integers(0, 90)) for _ in q_lens]
    return Case(
        q_lens=q_lens,
        k_lens=tuple(q + e for q, e in zip(q_lens, extra, strict=True)) if causal else tuple(extra),
        heads=(kv_heads * draw(st.integers(1, 3)), kv_heads),
        dims=(draw(st.integers(1, 20)), draw(st.integers(1, 20))),
        scale=draw(st.floats(0.05, 1.0)),
        window=draw(st.none() | st.integers(1, 120)) if causal else None,
        softcap=draw(st.none() | st.floats(0.5, 30.0)),
        causal=causal,
    )


@given(cases(), st.integers(0, 2**16))
@settings(max_examples=60)
def test_matches_reference_for_any_shapes(case: Case, seed: int) -> None:
    assert_matches_reference(CpuKernel(), case, torch.float64, seed)


@pytest.mark.parametrize("name", ["softcap", "softcap_window", "softcap_not_causal"])
def test_softcap_in_pieces(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(cpu, "SCORES_AT_ONCE", 4000)
    assert_matches_reference(CpuKernel(), CASES[name], torch.float32)


def test_memory_is_linear_in_the_rows() -> None:
    # All scores of this task would be 256 MiB; nothing of more than 16 MiB may be allocated.
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, tuple | list) else (out,)
            largest = max(
                [largest, *(x.untyped_storage().nbytes() for x in tensors if torch.is_tensor(x))]
            )
            return out

    for options in ({"window": 300}, {"softcap": 5.0}):
        case = Case((4096,), (8192,), heads=(2, 1), dims=(8, 8), **options)
        do, *qkv, shapes = make_inputs(case, torch.float32)
        with Watch():
            o, lse = CpuKernel().forward(*qkv, shapes, case.params)
            CpuKernel().backward(do, *qkv, o, lse, shapes, case.params)
    assert largest <= 4 * cpu.SCORES_AT_ONCE


@pytest.mark.parametrize(
    ("case", "calls"),
    [
        # Equal documents are one call, and a task with keys before it is two.
        (Case((4, 4, 4, 6), (4, 4, 4, 9)), [(3, 4, 4, False), (1, 4, 6, False), (1, 4, 6, False)]),
        # Only windows that hide keys take blocks.
        (Case((40, 30), (40, 30), window=40), [(1, 4, 40, False), (1, 4, 30, False)]),
        (Case((40, 40, 30), (40, 40, 30), window=39), [(2, 4, 40, True), (1, 4, 30, True)]),
    ],
)
def test_calls_of_the_op(case: Case, calls: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    seen, flash = [], cpu._flash_forward

    def watched(q, *args, attn_mask, **options):
        seen.append((*q.shape[:3], attn_mask is not None))
        return flash(q, *args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(cpu, "_flash_forward", watched)
    assert_matches_reference(CpuKernel(), case, torch.float32)
    assert seen == calls

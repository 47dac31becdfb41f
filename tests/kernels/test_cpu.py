"""The CPU kernel against the float64 reference, forward and backward, and the parts that it cuts tasks into."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.kernels import AttentionParams, TaskShapes, cpu
from hf_distca.kernels.cpu import CpuKernel, Part, plan_parts
from hf_distca.kernels.reference import ReferenceKernel
from tests.kernels.cases import CASES, Case, assert_matches_reference, make_inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name: str, dtype: torch.dtype) -> None:
    assert_matches_reference(CpuKernel(), CASES[name], dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.integers(1, 3))
    causal = draw(st.booleans())
    q_lens = draw(st.lists(st.integers(0, 90), max_size=5).map(tuple))
    extra = [draw(st.integers(0, 90)) for _ in q_lens]
    window = draw(st.none() | st.integers(1, 120)) if causal else None
    return Case(
        q_lens=q_lens,
        k_lens=tuple(q + e for q, e in zip(q_lens, extra, strict=True)) if causal else tuple(extra),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim_qk=draw(st.integers(1, 20)),
        head_dim_v=draw(st.integers(1, 20)),
        params=AttentionParams(
            scale=draw(st.floats(0.05, 1.0)),
            window=window,
            softcap=draw(st.none() | st.floats(0.5, 30.0)),
            causal=causal,
        ),
    )


@given(cases(), st.integers(0, 2**16))
@settings(max_examples=60)
def test_matches_reference_for_any_shapes(case: Case, seed: int) -> None:
    assert_matches_reference(CpuKernel(), case, torch.float64, seed)


def test_softcap_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SCORES_AT_ONCE", 4000)
    for name in ("softcap", "softcap_window", "softcap_not_causal"):
        assert_matches_reference(CpuKernel(), CASES[name], torch.float32)


def test_memory_is_linear_in_the_rows() -> None:
    # All scores of this task would be 256 MiB; nothing of more than 16 MiB may be allocated.
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, tuple | list) else (out,)
            largest = max([largest, *(x.untyped_storage().nbytes() for x in tensors if torch.is_tensor(x))])
            return out

    for params in (AttentionParams(1.0, window=300), AttentionParams(1.0, softcap=5.0)):
        case = Case((4096,), (8192,), heads=2, kv_heads=1, head_dim_qk=8, head_dim_v=8, params=params)
        inputs = make_inputs(case, torch.float32)
        args = inputs.q, inputs.k, inputs.v
        with Watch():
            o, lse = CpuKernel().forward(*args, inputs.shapes, params)
            CpuKernel().backward(inputs.do, *args, o, lse, inputs.shapes, params)
    assert largest <= 4 * cpu.SCORES_AT_ONCE


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_rows_of_any_strides(softcap: float | None) -> None:
    case = Case(params=AttentionParams(0.2, softcap=softcap))
    inputs = make_inputs(case, torch.float64)
    dense = inputs.do, inputs.q, inputs.k, inputs.v
    # Not even the head dim lies dense.
    sparse = tuple(x.transpose(0, 2).contiguous().transpose(0, 2) for x in dense)
    expanded = (dense[0][:, :, :1].expand_as(dense[0]), *dense[1:])
    for do, q, k, v in (sparse, expanded):
        o, lse = CpuKernel().forward(q, k, v, inputs.shapes, case.params)
        got = CpuKernel().backward(do, q, k, v, o, lse, inputs.shapes, case.params)
        given = do, *dense[1:]
        want = ReferenceKernel().backward(*given, o, lse, inputs.shapes, case.params)
        for got_one, want_one in zip(got, want, strict=True):
            torch.testing.assert_close(got_one, want_one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gqa", "window_blocks", "softcap_window"])
def test_same_result_every_time_and_the_same_inputs(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case, torch.float32)
    o, lse = CpuKernel().forward(inputs.q, inputs.k, inputs.v, inputs.shapes, case.params)
    given = inputs.do, inputs.q, inputs.k, inputs.v, o, lse
    before = [x.clone() for x in given]
    first, second = (CpuKernel().backward(*given, inputs.shapes, case.params) for _ in range(2))
    again = CpuKernel().forward(*given[1:4], inputs.shapes, case.params)
    for got, want in zip((*given, *second, *again), (*before, *first, o, lse), strict=True):
        assert torch.equal(got, want)


def test_no_sum_is_written_to_twice_at_once() -> None:
    """Blocks of a window share keys; adding to all blocks in one operation is a race between its threads."""
    case = Case((1400,), (1500,), heads=2, kv_heads=1, head_dim_qk=8, head_dim_v=8, params=AttentionParams(0.2, 600))
    inputs = make_inputs(case, torch.float32)
    added = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal added
            if func is torch.ops.aten.add_.Tensor:
                added += 1
                target = args[0]
                places = torch.arange(target.untyped_storage().nbytes() // target.itemsize)
                written = places.as_strided(target.shape, target.stride(), target.storage_offset())
                assert written.unique().numel() == target.numel()
            return func(*args, **(kwargs or {}))

    args = inputs.q, inputs.k, inputs.v
    o, lse = CpuKernel().forward(*args, inputs.shapes, case.params)
    with Watch():
        CpuKernel().backward(inputs.do, *args, o, lse, inputs.shapes, case.params)
    assert added > 3


# Parts hold each visible pair of row and key exactly once, and nothing else.


def pairs_of(part: Part) -> list[tuple[int, int]]:
    more = part.k_rows - part.q_rows
    sees = {"full": lambda i, j: True, "causal": lambda i, j: j <= i, "window": lambda i, j: i <= j <= i + more}
    return [
        (part.q_first + b * part.q_step + i, part.k_first + b * part.k_step + j)
        for b in range(part.count)
        for i in range(part.q_rows)
        for j in range(part.k_rows)
        if sees[part.mask](i, j)
    ]


def visible_pairs(shapes: TaskShapes, params: AttentionParams) -> list[tuple[int, int]]:
    pairs, q_first, k_first = [], 0, 0
    for q_len, k_len in zip(shapes.q_lens, shapes.k_lens, strict=True):
        for i in range(q_len):
            own = i + k_len - q_len
            first = 0 if params.window is None else max(own - params.window + 1, 0)
            stop = own + 1 if params.causal else k_len
            pairs += [(q_first + i, k_first + j) for j in range(first, stop)]
        q_first, k_first = q_first + q_len, k_first + k_len
    return pairs


@st.composite
def calls(draw: st.DrawFn) -> tuple[TaskShapes, AttentionParams]:
    # Runs of equal tasks become batches.
    runs = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 4)), max_size=4))
    tasks = [(q_len, q_len + before) for q_len, before, repeats in runs for _ in range(repeats)]
    params = AttentionParams(1.0, window=draw(st.none() | st.integers(1, 60)))
    return TaskShapes.build([q for q, _ in tasks], [k for _, k in tasks], "cpu"), params


def assert_exact(shapes: TaskShapes, params: AttentionParams) -> None:
    plan = plan_parts(shapes, params)
    counted = Counter(pair for part in plan.parts for pair in pairs_of(part))
    assert counted == Counter(visible_pairs(shapes, params))
    seen: set[int] = set()
    for part in plan.parts:
        # The kernel stores the results of other parts and adds those of full ones.
        rows = {row for row, _ in pairs_of(part)}
        assert (part.mask != "full") == rows.isdisjoint(seen)
        seen |= rows


@given(calls())
@settings(max_examples=150)
def test_each_visible_pair_once(call: tuple[TaskShapes, AttentionParams]) -> None:
    assert_exact(*call)


def test_each_visible_pair_once_in_several_window_blocks() -> None:
    for window in (64, 65, 100, 200):
        for tasks in ([(260, 300)], [(256, 256 + window - 1)], [(128, 400), (128, 400)]):
            shapes = TaskShapes.build([q for q, _ in tasks], [k for _, k in tasks], "cpu")
            assert_exact(shapes, AttentionParams(1.0, window=window))


def test_a_task_is_a_triangle_and_a_rectangle() -> None:
    plan = plan_parts(TaskShapes.build([3], [5], "cpu"), AttentionParams(1.0))
    where = [(part.q_first, part.q_rows, part.k_first, part.k_rows, part.mask, part.count) for part in plan.parts]
    assert where == [(0, 3, 2, 3, "causal", 1), (0, 3, 0, 2, "full", 1)]
    assert not plan.whole_tasks


def test_equal_documents_are_one_batch() -> None:
    plan = plan_parts(TaskShapes.build([4, 4, 4], [4, 4, 4], "cpu"), AttentionParams(1.0))
    assert plan.parts == (Part(0, 4, 0, 4, "causal", count=3, q_step=4, k_step=4),)
    assert plan.whole_tasks


def test_the_number_of_parts_does_not_grow_with_the_length() -> None:
    params = AttentionParams(1.0, window=128)
    short, long = (plan_parts(TaskShapes.build([n], [n], "cpu"), params).parts for n in (1000, 100_000))
    assert len(short) == len(long) <= 7


def test_work_stays_near_the_visible_pairs_with_a_window() -> None:
    params = AttentionParams(1.0, window=1024)
    parts = plan_parts(TaskShapes.build([65536], [65536], "cpu"), params).parts
    squares = sum(part.count * part.q_rows * part.k_rows for part in parts)
    assert squares <= 1.3 * 65536 * 1024

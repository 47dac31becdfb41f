"""Parts hold each visible pair of row and key exactly once, and nothing else."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.kernels import AttentionParams, TaskShapes
from hf_distca.kernels.cpu import Part, plan_parts


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

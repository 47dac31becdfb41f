import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.dispatch.arena import Arena, rounded_up
from hf_distca.dispatch.rows import FEW_RUNS, RowSum, add_rounds, put, row_index, take

CPU = torch.device("cpu")
SCATTERED = list(range(0, 4 * FEW_RUNS, 2))


def index(rows):
    return row_index(np.array(rows, np.int64), CPU)


def test_kinds_of_index():
    assert index([]) == slice(0, 0)
    assert index([3, 4, 5]) == slice(3, 6)
    assert index([3, 4, 7, 0, 1]) == (slice(3, 5), slice(7, 8), slice(0, 2))
    assert index(SCATTERED).tolist() == SCATTERED


@pytest.mark.parametrize("rows", [[], [2, 3], [5, 6, 0, 3], SCATTERED], ids=["none", "slice", "runs", "scattered"])
def test_take_put_and_add(rows):
    x = torch.arange(40.0).view(40, 1).expand(40, 3)
    taken = take(x, index(rows))
    assert taken[:, 0].tolist() == rows
    written = torch.zeros(40, 3)
    put(written, index(rows), taken + 1)
    assert written[:, 1].tolist() == [row + 1 if row in rows else 0 for row in range(40)]
    total = RowSum((40, 3), x)
    total.add(index(rows), taken)
    total.add(slice(0, 40), x)
    assert total.result()[:, 2].tolist() == [row * (2 if row in rows else 1) for row in range(40)]


def test_rows_named_twice_are_added_in_rounds():
    rows = np.array([0, 1, 2, 1, 2, 2])
    rounds = add_rounds(rows, CPU)
    assert rounds == [(slice(0, 3), slice(0, 3)), (slice(1, 3), slice(3, 5)), (slice(2, 3), slice(5, 6))]
    total = RowSum((4, 1), torch.zeros(4, 1))
    total.add_all(rounds, torch.tensor([[1.0], [2.0], [3.0], [10.0], [20.0], [100.0]]))
    assert total.result().flatten().tolist() == [1.0, 12.0, 123.0, 0.0]


def test_sum_passes_a_single_whole_contribution_through_unless_it_is_borrowed():
    rows = torch.ones(2, 1, dtype=torch.bfloat16)
    total = RowSum((2, 1), rows)
    total.add(slice(0, 2), rows)
    assert total.result() is rows
    total = RowSum((2, 1), rows)
    total.add(slice(0, 2), rows, borrowed=True)
    result = total.result()
    rows.zero_()
    assert result.dtype == torch.bfloat16
    assert result.tolist() == [[1.0], [1.0]]


RUNS = st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12)).map(lambda run: range(run[0], min(sum(run), 12))))


@given(RUNS)
def test_sum_is_that_of_runs_wherever_they_overlap(runs):
    total, expected = RowSum((12, 2), torch.zeros(12, 2)), torch.zeros(12, 2)
    for number, run in enumerate(runs):
        rows = torch.full((len(run), 2), float(2**number))
        expected[list(run)] += rows
        total.add(index(run), rows, borrowed=number % 2 == 1)
    assert total.result().tolist() == expected.tolist()


def test_sum_of_bfloat16_is_kept_in_float32():
    total = RowSum((1, 1), torch.zeros(1, 1, dtype=torch.bfloat16))
    for value in (256.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
        total.add(slice(0, 1), torch.tensor([[value]], dtype=torch.bfloat16))
    assert total.result().item() == 258.0


def test_arena_gives_the_same_memory_again_and_grows_rarely():
    arena = Arena()
    first = arena.take("role", 10, 100, CPU)
    assert first.shape == (10, 100)
    assert arena.take("role", 20, 100, CPU).data_ptr() == first.data_ptr()
    assert arena.take("other", 10, 100, CPU).data_ptr() != first.data_ptr()
    pointers = {arena.take("role", rows, 100, CPU).data_ptr() for rows in range(1000, 1250, 10)}
    assert len(pointers) <= 3
    assert arena.size() <= 2 * rounded_up(125_000)

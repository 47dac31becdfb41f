import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.dispatch.rows import IndexBuffer, RowSum
from hf_distca.kernels.contract import MAX_SOURCES

CPU = torch.device("cpu")


def row_sum(sources, rows, **options):
    by_name = {str(number): np.array(source, np.int64) for number, source in enumerate(sources)}
    return RowSum(by_name, rows, IndexBuffer(CPU), **options)


def column(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).view(-1, 1)


def test_rows_named_twice_and_rows_not_named_at_all():
    total = row_sum([[0, 1, 2, 1, 2, 2]], 4).add_up([column(1, 2, 3, 10, 20, 100)])
    assert total.flatten().tolist() == [1, 12, 123, 0]


def test_further_sources_are_added_to_a_first_one_that_has_every_row():
    first = column(1, 2, 3)
    total = row_sum([[0, 1, 2], [2, 2], []], 3).add_up([first, column(10, 20), column()])
    assert total is first
    assert total.flatten().tolist() == [1, 2, 33]


@pytest.mark.parametrize(
    ("first", "expected"),
    [([0, 2, 1], [1, 13, 2]), ([0, 1], [1, 12, 0]), ([0, 0, 2], [3, 10, 3])],
    ids=["another order", "not all", "one twice"],
)
def test_a_first_source_with_rows_elsewhere_stays_as_it_is(first, expected):
    rows = column(*range(1, len(first) + 1))
    before = rows.tolist()
    total = row_sum([first, [1]], 3).add_up([rows, column(10)])
    assert total.flatten().tolist() == expected
    assert rows.tolist() == before


def test_sum_is_written_where_it_is_wanted():
    message = torch.full((2, 5), 7.0)
    first = column(1, 2)
    total = row_sum([[0, 1], [1]], 2, in_place=False).add_up([first, column(10)], out=message[:, 2:3])
    assert total.flatten().tolist() == [1, 12]
    assert message.tolist() == [[7, 7, 1, 7, 7], [7, 7, 12, 7, 7]]
    assert first.flatten().tolist() == [1, 2]


@pytest.mark.parametrize("first", [[0], []], ids=["onto the first", "anew"])
def test_sum_of_three_in_bfloat16_is_kept_in_float32(first):
    values = [column(value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]  # in bfloat16, 256 + 1 is 256
    empty = torch.empty(0, 1, dtype=torch.bfloat16)
    sources, rows = ([[0], [0], [0]], values) if first else ([[], [0], [0], [0]], [empty, *values])
    assert row_sum(sources, 1).add_up(rows).item() == 258.0


def test_too_many_sources():
    with pytest.raises(ValueError, match="at most 6 sources, got 7"):
        row_sum([[0]] * (MAX_SOURCES + 1), 1)


SOURCES = st.lists(st.lists(st.integers(0, 11), max_size=30), min_size=1, max_size=MAX_SOURCES)


@given(SOURCES, st.booleans())
def test_sum_is_that_of_all_addends(sources, whole_first):
    sources = ([list(range(12)), *sources])[:MAX_SOURCES] if whole_first else sources
    expected, rows = torch.zeros(12, 2), []
    for number, targets in enumerate(sources):
        rows.append(torch.arange(len(targets) * 2.0).view(-1, 2) + 100 * number)
        for target, row in zip(targets, rows[-1].clone(), strict=True):
            expected[target] += row
    assert row_sum(sources, 12).add_up(rows).tolist() == expected.tolist()

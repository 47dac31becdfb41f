"""Index tensors of rows; gather, scatter and sums by them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.dispatch import rows as rows_module
from hf_distca.dispatch.rows import IndexBuffer, RowSum, copy_rows, merge_rows, put, row_index, take
from hf_distca.kernels.contract import MAX_SOURCES
from tests.counting import META, Counting

CPU = torch.device("cpu")


def index(rows):
    return row_index(np.array(rows, np.int64), IndexBuffer(CPU))


@pytest.mark.parametrize("rows", [[], [2, 3], [5, 6, 0, 3]], ids=["none", "slice", "scattered"])
def test_rows_by_index(rows):
    assert isinstance(index(rows), slice) == (rows != [5, 6, 0, 3])
    x = torch.arange(8.0).view(8, 1).expand(8, 3)
    taken = take(x, index(rows))
    assert taken[:, 0].tolist() == rows
    written = torch.zeros(8, 3)
    put(written, index(rows), taken + 1)
    assert written[:, 1].tolist() == [row + 1 if row in rows else 0 for row in range(8)]
    copied = torch.zeros(len(rows), 3)
    copy_rows(copied, x, index(rows))
    assert copied[:, 2].tolist() == rows
    o, lse = torch.ones(8, 1, 2), torch.zeros(8, 1)
    merge_rows(o, lse, index(rows), taken[:, :2].unsqueeze(1), torch.zeros(len(rows), 1))
    assert o[:, 0, 1].tolist() == [(1 + row) / 2 if row in rows else 1 for row in range(8)]
    assert lse.flatten().tolist() == pytest.approx([math.log(2) if row in rows else 0 for row in range(8)])


def test_numbers_come_back_aligned():
    buffer = IndexBuffer(CPU)
    numbers = [np.array([3, 1, 2]), np.array([0, 5], np.int32), np.arange(0), np.arange(4)[::2], np.arange(3)[::-1]]
    placed = [buffer.place(each) for each in numbers]
    buffer.send()
    assert [x.tolist() for x in placed] == [[3, 1, 2], [0, 5], [], [0, 2], [2, 1, 0]]
    assert [x.dtype for x in placed] == [torch.int64, torch.int32, *[torch.int64] * 3]
    assert [x.storage_offset() * x.itemsize for x in placed] == [0, 32, 48, 48, 64]
    assert len({x.untyped_storage().data_ptr() for x in placed}) == 1
    buffer.place(np.array([7]))  # what is placed after sending lies elsewhere
    assert placed[0].tolist() == [3, 1, 2]
    assert [IndexBuffer(device).in_one_go for device in (META, CPU)] == [True, False]


@pytest.mark.parametrize(("chunk", "copies"), [(64, 1), (63, 2), (1, 4)])
def test_one_copy_where_there_is_room(monkeypatch, chunk, copies):
    monkeypatch.setattr(rows_module, "CHUNK_BYTES", chunk)
    buffer = IndexBuffer(META)
    with Counting() as mode:
        placed = [buffer.place(np.arange(2)) for _ in range(4)]
        buffer.send()
        buffer.send()
    assert [x.shape for x in placed] == [(2,)] * 4
    assert [call.name for call in mode.calls if call.what == "copy"] == ["copy_"] * copies


def row_sum(sources, rows, **options):
    by_name = {str(number): np.array(source, np.int64) for number, source in enumerate(sources)}
    return RowSum(by_name, rows, IndexBuffer(CPU), **options)


def column(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).view(-1, 1)


@pytest.mark.parametrize(
    ("first", "expected"),
    [([0, 1, 2], [1, 12, 3]), ([0, 2, 1], [1, 13, 2]), ([0, 1], [1, 12, 0]), ([0, 0, 2], [3, 10, 3])],
    ids=["in order", "another order", "not all", "one twice"],
)
def test_a_first_source_is_added_to_where_it_has_every_row_in_order_and_else_stays(first, expected):
    rows = column(*range(1, len(first) + 1))
    before = rows.tolist()
    total = row_sum([first, [1], []], 3).add_up([rows, column(10), column()])
    assert total.flatten().tolist() == expected
    assert (total is rows) == (first == [0, 1, 2])
    assert total is rows or rows.tolist() == before


def test_sum_is_written_where_it_is_wanted():
    message = torch.full((2, 5), 7.0)
    first = column(1, 2)
    row_sum([[0, 1], [1]], 2, in_place=False).add_up([first, column(10)], out=message[:, 2:3])
    assert message.tolist() == [[7, 7, 1, 7, 7], [7, 7, 12, 7, 7]]
    assert first.flatten().tolist() == [1, 2]


@pytest.mark.parametrize("sources", [[[0], [0], [0]], [[], [0], [0], [0]]], ids=["onto the first", "anew"])
def test_sum_of_three_in_bfloat16_is_kept_in_float32(sources):
    values = [column(value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]  # in bfloat16, 256 + 1 is 256
    empty = [torch.empty(0, 1, dtype=torch.bfloat16)] * (len(sources) - 3)
    assert row_sum(sources, 1).add_up([*empty, *values]).item() == 258.0


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


def test_too_many_sources():
    with pytest.raises(ValueError, match="at most 6 sources, got 7"):
        row_sum([[0]] * (MAX_SOURCES + 1), 1)

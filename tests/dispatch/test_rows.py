import math

import numpy as np
import pytest
import torch

from hf_distca.dispatch.rows import FEW_RUNS, IndexBuffer, copy_rows, merge_rows, put, row_index, take

CPU = torch.device("cpu")
SCATTERED = list(range(0, 4 * FEW_RUNS, 2))


def index(rows):
    return row_index(np.array(rows, np.int64), IndexBuffer(CPU))


def test_kinds_of_index():
    assert index([]) == slice(0, 0)
    assert index([3, 4, 5]) == slice(3, 6)
    assert index([3, 4, 7, 0, 1]) == (slice(3, 5), slice(7, 8), slice(0, 2))
    assert index(SCATTERED).tolist() == SCATTERED


def test_runs_are_one_index_where_each_would_be_a_launch():
    meta = torch.device("meta")
    assert row_index(np.array([3, 4, 5]), IndexBuffer(meta)) == slice(3, 6)
    assert row_index(np.array([3, 4, 7]), IndexBuffer(meta)).shape == (3,)


@pytest.mark.parametrize("rows", [[], [2, 3], [5, 6, 0, 3], SCATTERED], ids=["none", "slice", "runs", "scattered"])
def test_take_put_and_copy(rows):
    x = torch.arange(40.0).view(40, 1).expand(40, 3)
    taken = take(x, index(rows))
    assert taken[:, 0].tolist() == rows
    written = torch.zeros(40, 3)
    put(written, index(rows), taken + 1)
    assert written[:, 1].tolist() == [row + 1 if row in rows else 0 for row in range(40)]
    copied = torch.zeros(len(rows), 3)
    copy_rows(copied, x, index(rows))
    assert copied[:, 2].tolist() == rows


@pytest.mark.parametrize("rows", [[2, 3], [5, 6, 0, 3], SCATTERED], ids=["slice", "runs", "scattered"])
def test_merge(rows):
    o, lse = torch.ones(40, 1, 2), torch.zeros(40, 1)
    part = torch.tensor(rows).view(-1, 1, 1).expand(-1, 1, 2).float()
    merge_rows(o, lse, index(rows), part, torch.zeros(len(rows), 1))
    assert o[:, 0, 1].tolist() == [(1 + row) / 2 if row in rows else 1 for row in range(40)]
    assert lse.flatten().tolist() == pytest.approx([math.log(2) if row in rows else 0 for row in range(40)])

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.plan import TASK
from hf_distca.planner.intervals import (
    Intervals,
    expand,
    grain,
    merge_touching,
    union,
)


def intervals(*rows):
    """Intervals of (document, start, stop)."""
    return Intervals(*np.array(rows, np.int64).reshape(-1, 3).T)


def listed(some):
    return list(zip(some.document.tolist(), some.start.tolist(), some.stop.tolist(), strict=True))


def rows_in(some):
    """[(document, row)] of every row of every interval."""
    return [(document, row) for document, start, stop in listed(some) for row in range(start, stop)]


def test_expand_counts_every_range_up():
    assert expand(np.array([5, 9, 0]), np.array([2, 0, 3])).tolist() == [5, 6, 0, 1, 2]
    assert expand(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


def test_touching_rows_of_one_worker_are_made_one():
    table = np.array([(0, 0, 2, 0), (0, 2, 5, 0), (0, 6, 7, 0), (1, 7, 8, 0), (1, 8, 9, 1)], TASK)
    assert merge_touching(table, "worker").tolist() == [(0, 0, 5, 0), (0, 6, 7, 0), (1, 7, 8, 0), (1, 8, 9, 1)]


def test_a_cut_leaves_the_block_as_far_as_it_must():
    assert grain(128, lambda rows: False) == 128
    assert grain(128, lambda rows: rows > 40) == 32
    assert grain(12, lambda rows: rows > 2) == 2
    assert grain(128, lambda rows: True) == 1


INTERVAL = st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 6)).map(
    lambda drawn: (drawn[0], drawn[1], drawn[1] + drawn[2])
)
"""(document, start, stop), possibly without a row."""


@given(st.lists(st.tuples(st.integers(0, 2), INTERVAL), max_size=8))
def test_unions_are_those_of_sets(drawn):
    owners, rows = union(np.array([owner for owner, _ in drawn], np.int64), intervals(*(rows for _, rows in drawn)))
    found = list(zip(owners.tolist(), listed(rows), strict=True))
    assert found == sorted(found)
    mine = {
        owner: rows_in(intervals(*(rows for other, rows in found if other == owner))) for owner in set(owners.tolist())
    }
    wanted = {}
    for owner, (document, start, stop) in drawn:
        wanted.setdefault(owner, set()).update((document, row) for row in range(start, stop))
    assert mine == {owner: sorted(rows) for owner, rows in wanted.items() if rows}


@given(st.data())
def test_overlaps_are_those_of_sets(data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    ordered = []
    for document, length in enumerate(lengths):
        cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=3)) | {0, length})
        ordered += [(document, start, stop) for start, stop in itertools.pairwise(cuts)]
    drawn = []
    for _ in range(data.draw(st.integers(0, 6))):
        document = data.draw(st.integers(0, len(lengths) - 1))
        start = data.draw(st.integers(0, lengths[document] - 1))
        drawn.append((document, start, data.draw(st.integers(start + 1, lengths[document]))))
    found = intervals(*drawn).overlaps(intervals(*ordered))
    wanted = []
    for first, (document, start, stop) in enumerate(drawn):
        for second, (other, begin, end) in enumerate(ordered):
            low, high = max(start, begin), min(stop, end)
            if document == other and low < high:
                wanted.append((first, second, (document, low, high)))
    assert list(zip(found.first.tolist(), found.second.tolist(), listed(found.rows), strict=True)) == wanted

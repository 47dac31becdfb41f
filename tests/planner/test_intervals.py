import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.plan import TASK
from hf_distca.planner.intervals import ROWS, grain, merge_touching, overlaps, union


def test_touching_rows_of_one_worker_are_made_one():
    table = np.array([(0, 0, 2, 0), (0, 2, 5, 0), (0, 6, 7, 0), (1, 7, 8, 0), (1, 8, 9, 1)], TASK)
    assert merge_touching(table, "worker").tolist() == [(0, 0, 5, 0), (0, 6, 7, 0), (1, 7, 8, 0), (1, 8, 9, 1)]


def test_a_cut_leaves_the_block_as_far_as_it_must():
    assert grain(128, lambda rows: False) == 128
    assert grain(128, lambda rows: rows > 40) == 32
    assert grain(12, lambda rows: rows > 2) == 2
    assert grain(128, lambda rows: True) == 1


# (document, start, stop, worker), possibly without a row.
TASKS = st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 6), st.integers(0, 2)).map(
    lambda drawn: (drawn[0], drawn[1], drawn[1] + drawn[2], drawn[3])
)


@given(st.lists(TASKS, max_size=8))
def test_unions_are_those_of_sets(drawn):
    found = union(np.array(drawn, TASK)).tolist()
    assert found == sorted(found, key=lambda task: (task[3], *task[:2]))
    listed = [(worker, document, row) for document, start, stop, worker in found for row in range(start, stop)]
    wanted = {(worker, document, row) for document, start, stop, worker in drawn for row in range(start, stop)}
    assert listed == sorted(wanted)


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
    found = overlaps(np.array(drawn, ROWS), np.array(ordered, ROWS))
    wanted = [
        (first, second, max(start, begin), min(stop, end))
        for first, (document, start, stop) in enumerate(drawn)
        for second, (other, begin, end) in enumerate(ordered)
        if document == other and max(start, begin) < min(stop, end)
    ]
    assert list(zip(*(each.tolist() for each in found), strict=True)) == wanted

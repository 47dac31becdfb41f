"""What the segments of a path exchange, carried out by hand."""

import itertools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.plan import SEGMENT, Branches, Layout
from hf_distca.plan.cuts import chains, halos
from hf_distca.plan.runs import Run, runs_of
from tests.planner.carried_out import drawn_plans, sent_rows
from tests.planner.plan_checks import rows_of


def cut_where_branches_begin(layout):
    """The layout with a border between segments wherever a branch continues a document."""
    rows = []
    for document, start, stop, rank, offset in layout.segments.tolist():
        borders = {start, stop}
        if layout.branches is not None:
            for begin in layout.branches.starts.tolist():
                if start < begin < stop:
                    borders.add(begin)
        for first, last in itertools.pairwise(sorted(borders)):
            rows.append((document, first, last, rank, offset + first - start))
    return replace(layout, segments=np.array(rows, SEGMENT))


def path_before(layout, document, start):
    """All rows of a path before a row, from the root on."""
    own = int(layout.own_starts[document])
    rows = [(document, row) for row in range(own, start)]
    if own:
        rows = path_before(layout, int(layout.branches.parents[document]), own) + rows
    return rows


PLANS_OF_PATHS = drawn_plans(most_servers=0) | drawn_plans(most_servers=0, with_branches=True)


@given(st.sampled_from([1, 3]), PLANS_OF_PATHS)
def test_every_halo_has_the_rows_of_the_path_before_its_segment(width, plan):
    layout, ranks = plan.layout, plan.layout.ranks
    rows = [rows_of(layout.of_rank(rank)) for rank in range(ranks)]
    tables = [halos(layout, rank, width) for rank in range(ranks)]
    sent = list(sent_rows([table.messages for table in tables]))
    assert {table.messages.crossing for table in tables} == {bool(sent)}
    for rank, table in enumerate(tables):
        extended: list = [None] * table.rows
        for place, row in zip(table.places, rows[rank], strict=True):
            extended[place] = row
        for place, row in zip(table.local_places, table.local_rows, strict=True):
            extended[place] = rows[rank][row]
        arrived = [rows[source][row] for source, target, row in sent if target == rank]
        for place, row in zip(table.received_places, arrived, strict=True):
            extended[place] = row
        expected = []
        for document, start, stop, *_ in layout.of_rank(rank).tolist():
            before = [None] * width + path_before(layout, document, start)
            expected += before[-width:] + [(document, row) for row in range(start, stop)]
        assert extended == expected


class Carried:
    """States of a layout on all ranks, and what each number of a table stands for.

    A segment is known by its document and its first row.
    """

    def __init__(self, layout):
        self.layout = layout
        ranks = range(layout.ranks)
        self.tables = [chains(layout, rank) for rank in ranks]
        self.segments = [layout.of_rank(rank).tolist() for rank in ranks]
        self.names = [[(document, row) for document, row, *_ in held] for held in self.segments]
        self.own_rows = {
            (document, start): [(document, row) for row in range(start, stop)]
            for document, start, stop, *_ in layout.segments.tolist()
        }
        self.linked = [
            [self.names[rank][place] for place in self.tables[rank].linked] for rank in ranks
        ]
        self.earlier = {
            name: earlier
            for table, names in zip(self.tables, self.linked, strict=True)
            for name, earlier in zip(names, table.earlier, strict=True)
        }
        self.incomplete = {name for name, earlier in self.earlier.items() if earlier}
        self.sent = list(sent_rows([table.states for table in self.tables]))
        self.returned = list(sent_rows([table.gradients for table in self.tables]))

    def states_here(self, rank):
        """The segment of each state that a rank numbers."""
        arrived = [
            self.linked[source][item] for source, target, item in self.sent if target == rank
        ]
        return [*self.linked[rank], *arrived]

    def gradients_here(self, rank):
        """The segments of each gradient that a rank numbers."""
        own = [self._own_gradients(source) for source in range(self.layout.ranks)]
        arrived = [own[source][item] for source, target, item in self.returned if target == rank]
        return [*own[rank], *arrived]

    def _own_gradients(self, rank):
        numbers = self.tables[rank].gradient_of
        return [
            {
                name
                for name, other in zip(self.linked[rank], numbers, strict=True)
                if other == number
            }
            for number in range(max(numbers, default=-1) + 1)
        ]

    def state_after(self, rank, place):
        """The rows that the state after a complete segment has seen."""
        before = self.tables[rank].before[place]
        name = self.names[rank][place]
        assert name not in self.incomplete
        return (self.state_after(rank, before) if before >= 0 else []) + self.own_rows[name]

    def state_before(self, rank, place):
        """The rows that the state before a segment has seen."""
        name = self.names[rank][place]
        if name not in self.incomplete:
            return self.state_after(rank, place)[: -len(self.own_rows[name])]
        first, *further = [self.states_here(rank)[number] for number in self.earlier[name]]
        (holder,) = [other for other, names in enumerate(self.names) if first in names]
        state = self.state_after(holder, self.names[holder].index(first))
        return state + [row for other in further for row in self.own_rows[other]]


@given(PLANS_OF_PATHS)
def test_a_state_has_seen_the_path_before_its_segment(plan):
    """A state is the list of rows that it has seen."""
    layout = cut_where_branches_begin(plan.layout)
    carried = Carried(layout)
    assert {table.states.crossing for table in carried.tables} == {bool(carried.sent)}
    assert len(set(carried.sent)) == len(carried.sent)  # a state goes to a rank once
    last_rows = {
        tuple(path_before(layout, document, start)[-1:])
        for document, start, *_ in layout.segments.tolist()
    }
    for rank, table in enumerate(carried.tables):
        for place, (document, start, stop, *_) in enumerate(carried.segments[rank]):
            assert carried.state_before(rank, place) == path_before(layout, document, start)
            assert table.has_later[place] == (((document, stop - 1),) in last_rows)


@given(PLANS_OF_PATHS)
def test_the_gradient_of_a_state_comes_from_all_later_segments(plan):
    """A gradient is a set of segments, each with the segments whose factors changed it."""
    layout = cut_where_branches_begin(plan.layout)
    carried = Carried(layout)
    assert {table.gradients.crossing for table in carried.tables} == {bool(carried.returned)}
    assert len(set(carried.returned)) == len(carried.returned)
    for rank, table in enumerate(carried.tables):
        numbers = carried.gradients_here(rank)
        for name, later in zip(carried.linked[rank], table.later, strict=True):
            after: dict[int, set] = defaultdict(set)
            for place, (number, place_before) in enumerate(later):
                changed = {(c, (min(numbers[number]), *by)) for c, by in after.pop(place, set())}
                assert not changed or len(numbers[number]) == 1
                after[place_before] |= changed | {(c, ()) for c in numbers[number]}
            assert after[-1] == expected_gradient(layout, name, carried.incomplete)
            assert set(after) == {-1}


def expected_gradient(layout, name, incomplete):
    """Of the state after a segment: each later segment that starts from a state of another rank,
    and the segments between.
    """
    by_last_row = {
        (document, stop - 1): (document, start)
        for document, start, stop, *_ in layout.segments.tolist()
    }
    expected = set()
    for later in incomplete:
        between: list = []
        earlier = later
        while earlier in incomplete:
            earlier = by_last_row[path_before(layout, *earlier)[-1]]
            if earlier == name:
                expected.add((later, tuple(between)))
            between = [earlier, *between]
    return expected


def test_a_state_goes_to_a_rank_once_and_last_branches_share_a_gradient():
    """A prefix on rank 0 with three branches on rank 1."""
    table = np.array(
        [(0, 0, 4, 0, 0), *((d, 4, 6, 1, 2 * d - 2) for d in (1, 2, 3))],
        SEGMENT,
    )
    branches = Branches(np.array([-1, 0, 0, 0]), np.array([0, 4, 4, 4]))
    prefix, others = (
        chains(Layout(np.array([4, 6, 6, 6]), table, 2, branches), rank) for rank in (0, 1)
    )
    assert prefix.states.send_counts.tolist() == others.states.recv_counts[::-1].tolist() == [0, 1]
    assert others.gradients.send_counts.tolist() == [1, 0]
    assert others.earlier == ((3,), (3,), (3,))
    assert others.gradient_of == (0, 0, 0)
    assert prefix.later == (((0, -1),),)


def test_what_other_ranks_need_is_computed_first_and_branches_are_packed():
    """Rank 0 has a prefix with two branches, and two documents; rank 1 has a further branch."""
    rows = [(0, 0, 4), (1, 4, 6), (2, 4, 6), (3, 0, 2), (4, 0, 2)]
    offsets = [0, 4, 6, 8, 10]
    held = [(*of_document, 0, at) for of_document, at in zip(rows, offsets, strict=True)]
    table = np.array([*held, (5, 4, 6, 1, 0)], SEGMENT)
    branches = Branches(np.array([-1, 0, 0, -1, -1, 0]), np.array([0, 4, 4, 0, 0, 4]))
    layout = Layout(np.array([4, 6, 6, 2, 2, 6]), table, 2, branches)
    first = chains(layout, 0)
    prefix = Run((0,), None, early=True)

    def rest(*runs: tuple[int, ...]) -> list[Run]:
        return [Run(segments, None, early=False) for segments in runs]

    assert runs_of(first, packs=True, starts=True) == [prefix, *rest((3, 4), (1, 2))]
    assert runs_of(first, packs=True, starts=False) == [prefix, *rest((3, 4), (1,), (2,))]
    assert runs_of(first, packs=False, starts=True) == [prefix, *rest((3,), (4,), (1,), (2,))]
    assert runs_of(chains(layout, 1), packs=True, starts=True) == [Run((0,), 0, early=True)]


def test_a_branch_that_begins_inside_a_segment_is_an_error():
    table = np.array([(0, 0, 4, 0, 0), (1, 3, 6, 0, 4)], SEGMENT)
    layout = Layout(np.array([4, 6]), table, 1, Branches(np.array([-1, 0]), np.array([0, 3])))
    with pytest.raises(ValueError, match="a branch begins inside a segment"):
        chains(layout, 0)

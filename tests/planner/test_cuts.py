"""Tables of what the segments of cut documents exchange."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.planner.cuts import chains, halos
from hf_distca.planner.layout import fixed_layout
from tests.planner.carried_out import drawn_plans


def test_halo_rows_written_out():
    # Ranks hold rows 0 to 4 of document 0; all 5 of document 1 ... the second cut is inside document 1, after row 5.
    layout = fixed_layout([[5, 7, 2]], ranks=3)
    table = halos(layout, rank=2, width=3)
    # Room for three rows, rows 5 and 6 of document 1; room for three rows, both rows of document 2.
    assert (table.rows, table.places.tolist()) == (10, [3, 4, 8, 9])
    assert table.received_places.tolist() == [0, 1, 2]
    assert table.messages.recv_counts.tolist() == [0, 3, 0]
    sender = halos(layout, rank=1, width=3).messages
    assert (sender.send_rows.tolist(), sender.send_counts.tolist()) == ([2, 3, 4], [0, 0, 3])
    assert all(halos(layout, rank, width=3).messages.crossing for rank in range(3))


def test_chains_written_out():
    layout = fixed_layout([[10]], ranks=4)
    tables = [chains(layout, rank) for rank in range(4)]
    # State 0 is the rank's own; those that arrive follow.
    assert [table.earlier for table in tables] == [((),), ((1,),), ((1, 2),), ((1, 2, 3),)]
    assert [table.later for table in tables] == [((1, 2, 3),), ((1, 2),), ((1,),), ((),)]
    assert [table.messages.send_counts.tolist() for table in tables] == [
        [0, 1, 1, 1],
        [0, 0, 1, 1],
        [0, 0, 0, 1],
        [0, 0, 0, 0],
    ]


@given(st.sampled_from([1, 3]), drawn_plans(most_servers=0))
def test_any_layout(width, plan):
    """What ranks send fits what others receive; every halo has the rows before its segment, every chain all states."""
    layout, ranks = plan.layout, plan.layout.ranks
    rows = [
        [(document, row) for document, start, stop, *_ in layout.of_rank(rank).tolist() for row in range(start, stop)]
        for rank in range(ranks)
    ]
    tables = [halos(layout, rank, width) for rank in range(ranks)]
    sent = [_sent(table.messages) for table in tables]
    for rank, table in enumerate(tables):
        extended: list = [None] * table.rows
        for place, row in zip(table.places, rows[rank], strict=True):
            extended[place] = row
        for place, row in zip(table.local_places, table.local_rows, strict=True):
            extended[place] = rows[rank][row]
        arrived = [rows[source][row] for source in range(ranks) for row in sent[source][rank]]
        assert table.messages.recv_counts.tolist() == [len(sent[source][rank]) for source in range(ranks)]
        for place, row in zip(table.received_places, arrived, strict=True):
            extended[place] = row
        expected = []
        for document, start, stop, *_ in layout.of_rank(rank).tolist():
            expected += [(document, row) if row >= 0 else None for row in range(start - width, stop)]
        assert extended == expected

    links = [chains(layout, rank) for rank in range(ranks)]
    sent = [_sent(table.messages) for table in links]
    names = [
        [tuple(segment) for segment in layout.of_rank(rank)[["document", "start"]][table.cut].tolist()]
        for rank, table in enumerate(links)
    ]
    for rank, table in enumerate(links):
        arrived = [names[source][state] for source in range(ranks) for state in sent[source][rank]]
        returned = [
            names[target][links[target].received[i]]
            for target in range(ranks)
            for i in range(len(links[target].received))
            if _source(links[target].messages, i) == rank
        ]
        for segment, earlier, later in zip(names[rank], table.earlier, table.later, strict=True):
            of_document = sorted(name for of_rank in names for name in of_rank if name[0] == segment[0])
            nth = of_document.index(segment)
            assert [[*names[rank], *arrived][state] for state in earlier] == of_document[:nth]
            assert [[*names[rank], *returned][state] for state in later] == of_document[nth + 1 :]


def _sent(messages) -> list[list[int]]:
    """For each rank, the items that go there."""
    return [part.tolist() for part in np.split(messages.send_rows, np.cumsum(messages.send_counts)[:-1])]


def _source(messages, received: int) -> int:
    """The rank from which an item came."""
    return int(np.searchsorted(np.cumsum(messages.recv_counts), received, "right"))

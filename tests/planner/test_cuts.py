"""Tables of what the segments of cut documents exchange."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.planner.cuts import chains, halos
from tests.planner.carried_out import drawn_plans, sent_rows
from tests.planner.plan_checks import rows_of


@given(st.sampled_from([1, 3]), drawn_plans(most_servers=0))
def test_any_layout(width, plan):
    """What ranks send fits what others receive; every halo has the rows before its segment, every chain all states."""
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
            expected += [(document, row) if row >= 0 else None for row in range(start - width, stop)]
        assert extended == expected

    links = [chains(layout, rank) for rank in range(ranks)]
    sent = list(sent_rows([table.messages for table in links]))
    names = [layout.of_rank(rank)[["document", "start"]][table.cut].tolist() for rank, table in enumerate(links)]
    for rank, table in enumerate(links):
        arrived = [names[source][state] for source, target, state in sent if target == rank]
        returned = []
        for target, theirs in enumerate(links):
            source = np.repeat(np.arange(ranks), theirs.messages.recv_counts)
            returned += [names[target][segment] for segment in theirs.received[source == rank]]
        for segment, earlier, later in zip(names[rank], table.earlier, table.later, strict=True):
            of_document = sorted(name for of_rank in names for name in of_rank if name[0] == segment[0])
            nth = of_document.index(segment)
            assert [[*names[rank], *arrived][state] for state in earlier] == of_document[:nth]
            assert [[*names[rank], *returned][state] for state in later] == of_document[nth + 1 :]

import numpy as np

from hf_distca.planner.intervals import Intervals
from hf_distca.planner.routes.moves import Moves
from hf_distca.planner.routes.passed_on import pass_on


def moves_of(*columns):
    """Moves of (document, start, stop, source, target), whose rows lie at 1000 + their number at the source."""
    document, start, stop, source, target = np.array(columns, np.int64).T
    return Moves(Intervals(document, start, stop), source, target, 1000 + start)


def listed(moves):
    rows = moves.rows
    columns = (rows.document, rows.start, rows.stop, moves.source, moves.target, moves.local)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def test_rows_that_one_rank_of_a_node_reads_go_there_directly():
    moves = moves_of((0, 0, 300, 0, 0), (0, 0, 300, 0, 1), (0, 0, 300, 0, 2), (0, 300, 400, 1, 3))
    hops = pass_on(moves, (0, 0, 1, 1), 4)
    assert listed(hops.first) == listed(moves)
    assert listed(hops.second) == []
    hops = pass_on(moves, None, 4)
    assert listed(hops.first) == listed(moves)
    assert listed(hops.second) == []


def test_readers_of_the_same_rows_share_in_passing_them_on():
    hops = pass_on(moves_of((0, 0, 512, 0, 2), (0, 0, 512, 0, 3)), (0, 0, 1, 1), 4)
    assert listed(hops.first) == [(0, 0, 256, 0, 2, 1000), (0, 256, 512, 0, 3, 1256)]
    assert listed(hops.second) == [(0, 0, 256, 2, 3, 1000), (0, 256, 512, 3, 2, 1256)]


def test_rows_are_cut_where_a_reader_begins_or_ends():
    # Rank 4 reads 100 rows more than 3 does, and rank 5 rows 50 to 100: a piece below a block is not divided, and the
    # turns go on from part to part.
    hops = pass_on(moves_of((7, 0, 100, 0, 3), (7, 0, 200, 0, 4), (7, 50, 100, 0, 5)), (0, 0, 0, 1, 1, 1), 6)
    assert listed(hops.first) == [(7, 0, 50, 0, 3, 1000), (7, 50, 100, 0, 4, 1050), (7, 100, 200, 0, 4, 1100)]
    assert listed(hops.second) == [(7, 0, 50, 3, 4, 1000), (7, 50, 100, 4, 3, 1050), (7, 50, 100, 4, 5, 1050)]


def test_every_node_gets_rows_for_itself_and_servers_get_theirs_directly():
    moves = moves_of((0, 0, 8, 0, 1), (0, 0, 8, 0, 2), (0, 0, 8, 0, 3), (0, 0, 8, 0, 4), (0, 0, 8, 0, 5))
    hops = pass_on(moves, (0, 1, 1, 2, 2, 2), 5)
    assert listed(hops.first) == [(0, 0, 8, 0, 1, 1000), (0, 0, 8, 0, 3, 1000), (0, 0, 8, 0, 5, 1000)]
    assert listed(hops.second) == [(0, 0, 8, 1, 2, 1000), (0, 0, 8, 3, 4, 1000)]


def test_a_document_goes_the_same_way_whatever_others_there_are():
    mine = [(3, 0, 600, 0, 2), (3, 0, 300, 0, 3)]
    alone = pass_on(moves_of(*mine), (0, 0, 1, 1), 4)
    others = pass_on(moves_of((1, 0, 40, 1, 2), (1, 0, 900, 1, 3), *mine, (5, 0, 9, 1, 2)), (0, 0, 1, 1), 4)
    for hop in ("first", "second"):
        assert [move for move in listed(getattr(others, hop)) if move[0] == 3] == listed(getattr(alone, hop))

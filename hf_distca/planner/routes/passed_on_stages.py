"""Stages of K/V rows that are forwarded inside nodes.

A row is forwarded in the stage in which it crosses, so ranks of a node that read it compute with it in the same stage.
"""

import numpy as np

from hf_distca.planner.intervals import expand
from hf_distca.planner.routes.passed_on import Hops
from hf_distca.planner.routes.stages import GRAIN
from hf_distca.planner.routes.tables import IntArray

PARTS = 8
"""Number of pieces that a stage should have room for.

Rows are spread over stages in pieces of GRAIN rows, or of fewer if a stage has too little room. Each piece is
forwarded to all its readers.
"""
_GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio's fraction: fractions of its multiples spread evenly between 0 and 1, however many there are."""
_BITS = 62


def hops_by_stage(hops: Hops, stage_rows: int, ranks: int) -> tuple[Hops, ...]:
    """Divide K/V rows into stages.

    Rows on the same path, from one rank to another and on to the same others, are spread evenly over the stages. So
    every rank has about equally much to receive and to compute in each stage.

    Args:
        stage_rows: the most rows of a stage that a rank sends, both hops together, or receives; or the number of ranks
            that a single row is forwarded to, if that is more.
        ranks: number of ranks; later workers are servers, which get all their rows in the first stage.

    Returns:
        The hops of each stage; at least one stage.
    """
    to_ranks = hops.first.target < ranks
    among_ranks, to_servers = hops[to_ranks], hops[~to_ranks]
    readers = int(np.bincount(among_ranks.passes).max(initial=1))
    grain = int(np.clip(stage_rows // (PARTS * readers), 1, GRAIN))
    pieces, spread = _spread(among_ranks, grain)

    most = max(stage_rows, readers)
    count = 1
    while True:
        stage = spread * count // max(int(pieces.first.rows.lengths.sum()), 1)
        busiest = int(pieces.rows_by_stage(stage, count, ranks).max(initial=0))
        if busiest <= most:
            break
        count = max(count + 1, count * busiest // most)

    # A piece may be larger than a stage's share, which leaves some stages empty: drop them.
    numbers, stage = np.unique(stage, return_inverse=True)
    stages = [pieces[stage == number] for number in range(max(len(numbers), 1))]
    stages[0] = Hops(stages[0].first.followed_by(to_servers.first), stages[0].second, stages[0].passes)
    return tuple(stages)


def _spread(hops: Hops, grain: int) -> tuple[Hops, IntArray]:
    """Cut moves into small pieces, and order them so that pieces of the same path lie far apart.

    Returns:
        The pieces of at most `grain` rows, and for each the number of rows before it in that order.
    """
    first = hops.first
    to_others = np.zeros_like(first.source)
    np.bitwise_or.at(to_others, hops.passes, np.int64(1) << (hops.second.target % _BITS))
    way = np.stack([first.source, first.target, to_others])
    order = np.lexsort((first.rows.start, first.rows.document, *way[::-1]))
    lengths = first.rows.lengths[order]
    counts = -(-lengths // grain)
    which, begin = np.repeat(order, counts), grain * expand(np.zeros_like(counts), counts)
    pieces = hops.pieces(which, begin, np.minimum(begin + grain, np.repeat(lengths, counts)))

    way = way[:, which]
    begins = np.append(True, (way[:, 1:] != way[:, :-1]).any(0))[: len(which)]
    number = np.cumsum(begins) - 1
    size = np.bincount(number)[number] if len(number) else number
    nth = np.arange(len(which)) - np.flatnonzero(begins)[number]
    order = np.argsort((nth + number * _GOLDEN % 1) / size, kind="stable")
    rows = pieces.first.rows.lengths[order]
    before = np.empty_like(rows)
    before[order] = np.cumsum(rows) - rows
    return pieces, before

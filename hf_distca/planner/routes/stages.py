"""Division of exchanged K/V rows into stages, so that few rows are in memory at once.

The rows of a stage are sent in one exchange; the next stage travels while they are computed with. Rows of dedicated
servers are not divided: all of them are in the first stage.
"""

from collections.abc import Sequence

import numpy as np

from hf_distca.planner.intervals import Intervals, expand
from hf_distca.planner.routes.moves import Moves
from hf_distca.planner.routes.tables import IntArray

GRAIN = 128
"""Rows of a kernel block, at whose multiples the rows from one rank to another are divided.

If an eighth of their share of a stage is less, they are divided at multiples of that.
"""
_WHOLE = 1 << 40
"""Size of a stage that holds everything."""


def moves_by_stage(moves: Moves, stage_rows: int, ranks: int) -> tuple[Moves, ...]:
    """Divide K/V rows into stages.

    Args:
        stage_rows: the most rows of a stage that a rank sends, or receives.
        ranks: number of ranks; later workers are servers.

    Returns:
        The moves of each stage; at least one stage.
    """
    moves = moves[np.lexsort((moves.rows.start, moves.rows.document, moves.source, moves.target))]
    rows = moves.rows.lengths
    between = np.zeros((int(moves.target.max(initial=ranks - 1)) + 1, ranks), np.int64)
    np.add.at(between, (moves.target, moves.source), rows)
    stages = _rows_by_stage(between[:ranks], stage_rows)
    stages[0] = np.concatenate([stages[0], between[ranks:]])

    # Sorted by target and source, moves and parts of stages are two divisions of the same rows.
    target, source, stage, part_rows = _nonzero(stages)
    order = np.lexsort((stage, source, target))
    stage, part_rows = stage[order], part_rows[order]
    part_stop, stop = np.cumsum(part_rows), np.cumsum(rows)
    start = stop - rows
    low = np.searchsorted(part_stop, start, side="right")
    counts = np.searchsorted(part_stop, stop - 1, side="right") - low + 1
    which, part = np.repeat(np.arange(len(rows)), counts), expand(low, counts)
    first = np.maximum(part_stop[part] - part_rows[part] - start[which], 0)
    pieces = moves.pieces(which, first, np.minimum(part_stop[part], stop[which]) - start[which])
    return tuple(pieces[stage[part] == number] for number in range(len(stages)))


def _rows_by_stage(between: IntArray, stage_rows: int) -> list[IntArray]:
    """Return how many rows go from rank to rank in each stage.

    Every stage has about the same share of the rows from one rank to another. So every rank has about equally much to
    receive and to compute in each stage, and no rank waits for another's computation. If a rank has no room for all
    rows due in a stage, the ranks after it come first, nearest first.

    Args:
        between: [ranks, ranks] rows by receiving rank and holding rank.

    Returns:
        For each stage, rows as in `between`; at least one stage.
    """
    ranks = len(between)
    busiest = max(int(between.sum(end).max()) for end in (0, 1))
    count = max(-(-busiest // stage_rows), 1)  # more stages follow if rows are left over
    grain = np.clip(between // count // 8, 1, GRAIN)
    source = np.arange(ranks)
    left = between.copy()
    stages: list[IntArray] = []
    distances = [d for d in range(ranks) if between[(source + d) % ranks, source].any()]
    while distances or not stages:
        due = left - between + np.minimum(-(-between * (len(stages) + 1) // (count * grain)) * grain, between)
        travels = np.zeros_like(between)
        to_send, to_receive = np.full(ranks, stage_rows), np.full(ranks, stage_rows)
        for distance in distances:
            target = (source + distance) % ranks
            rows = np.minimum(due[target, source], np.minimum(to_send, to_receive[target]))
            travels[target, source] = rows
            to_send -= rows
            to_receive[target] -= rows
        left -= travels
        stages.append(travels)
        distances = [d for d in distances if left[(source + d) % ranks, source].any()]
    return stages


def _nonzero(stages: Sequence[IntArray]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return target, source, stage and rows of everything that travels in some stages."""
    found = [np.nonzero(travels) for travels in stages]
    target, source = (np.concatenate([where[axis] for where in found]) for axis in (0, 1))
    rows = np.concatenate([travels[where] for travels, where in zip(stages, found, strict=True)])
    return target, source, np.repeat(np.arange(len(stages)), [len(where[0]) for where in found]), rows


def pieces_of_windows(
    queries: Moves, received: Intervals, stage_rows: int, window: int, ranks: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut tasks of windowed attention so that each has all its keys in one stage.

    Rows within reach of the windows of two stages travel in both.

    Args:
        queries: [n] query rows of each task, by (worker, document, start).
        received: [n] K/V rows that are sent for each task.
        stage_rows: the most rows of a stage that a rank receives, or two windows if that is more.
        ranks: number of ranks; later workers are servers.

    Returns:
        The task of each piece, its first and last query row counted from the task's first (see `Moves.pieces`), and
        the stage of its keys; 0 if it receives no rows.
    """
    rows, target = queries.rows, queries.target
    # The place of a query is that of its own key among the rows sent to the worker, one task after another.
    before = np.cumsum(received.lengths) - received.lengths
    place = before - before[np.searchsorted(target, target)] + rows.start - received.start
    # The windows of a stage's first queries reach into the previous stage.
    size = np.where((received.lengths > 0) & (target < ranks), max(stage_rows - window + 1, window), _WHOLE)
    first_stage, last_stage = place // size, (place + rows.lengths - 1) // size
    counts = last_stage - first_stage + 1
    which, stage = np.repeat(np.arange(len(place)), counts), expand(first_stage, counts)
    begin = stage * size[which] - place[which]
    return which, np.maximum(begin, 0), np.minimum(begin + size[which], rows.lengths[which]), stage


def stage_intervals(arriving: Sequence[Moves]) -> tuple[IntArray, Intervals]:
    """Return the rows of one worker that arrive stage by stage, joined where they touch within a stage.

    Args:
        arriving: moves of each stage; no row twice.

    Returns:
        The stage of each interval, and the intervals, by (document, start).
    """
    stage = np.repeat(np.arange(len(arriving)), [len(moves.target) for moves in arriving])
    document, start, stop = (
        np.concatenate([getattr(moves.rows, name) for moves in arriving]) for name in ("document", "start", "stop")
    )
    order = np.lexsort((start, document))
    stage, document, start, stop = stage[order], document[order], start[order], stop[order]
    touches = (stage[1:] == stage[:-1]) & (document[1:] == document[:-1]) & (start[1:] == stop[:-1])
    first = np.flatnonzero(np.append(True, ~touches)[: len(stage)])
    last = np.append(first[1:], len(stage))[: len(first)] - 1
    return stage[first], Intervals(document[first], start[first], stop[last])

"""Moves of rows to the workers that compute with them: which rows, over which ranks, in which stage.

Between nodes a byte takes about nine times as long as inside one, and ranks of a node often read
the same rows of a long document. Such rows go to one of these ranks, the gateway, which forwards
them to the others.

K/V rows travel in stages, so that few rows are in memory at once: the next stage travels while one
is computed with. A row is forwarded in the stage in which it crosses. Rows of dedicated servers are
not divided: they are in the first stage. With a window a row may travel in several stages. So
document d of D counts as document s · D + d in stage s.
"""

from collections.abc import Sequence

import numpy as np

from hf_distca.plan import TASK, Plan
from hf_distca.plan.intervals import (
    ROW_LIMIT,
    ROWS,
    IntArray,
    Table,
    by_document,
    cut_at,
    expand,
    joined,
    overlaps,
    row_counts,
    rows_before,
    sortable,
    table_of,
    union,
)

MOVE = np.dtype(
    [(name, np.int64) for name in ("document", "start", "stop", "source", "target", "at", "stage")]
)
"""Rows [start, stop) of a document that go from a rank, possibly to itself, to a worker. `at` is
the number of row `start` among the holder's local rows."""
CUT_TASK = np.dtype([*MOVE.descr, ("keys_start", np.int64), ("keys_stop", np.int64)])
"""Task whose query rows lie in one segment, and the move of these rows to the worker that computes
them.

K/V rows are read from `keys_start` on. Those below `keys_stop` are sent to the worker, others are
read in place. With full attention a local task reads keys of its segment in place. With a window it
reads all keys in place or none.
"""
PIECE = 128
"""Least rows of a piece, a kernel block: rows that several ranks of a node read are divided among
them in pieces."""
PARTS = 8
"""Inverse of the share of a stage by which it may exceed its rows, and below which rows of a path
stay together."""
_WHOLE = 1 << 40
"""Size of a stage that holds everything."""
_GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio's fraction: fractions of its multiples spread evenly between 0 and 1, however
many there are."""


def rows_to_move(plan: Plan) -> tuple[Table, Table, Table]:
    """Return a plan's tasks, of dtype CUT_TASK, by (target, document, start), and moves of K/V rows in two hops.

    The first hop has each row once per worker, or with a window once per worker and stage. In the
    second hop gateways forward rows.
    """
    segments, ranks = by_document(plan.layout.segments), plan.layout.ranks
    tasks, held = _moves(plan.tasks, segments, CUT_TASK)
    _set_keys(tasks, held["start"], plan.window)
    if plan.window is not None and plan.stage_rows is not None:
        which, tasks = _in_stages_of_windows(tasks, plan.stage_rows, plan.window, ranks)
        _set_keys(tasks, held["start"][which], plan.window)
    reading = tasks.compress(tasks["keys_stop"] > tasks["keys_start"])
    keys = table_of(
        TASK, document=reading["document"], start=reading["keys_start"], stop=reading["keys_stop"]
    )
    keys["worker"] = reading["target"] + plan.workers * reading["stage"]
    moves, _ = _moves(union(keys), segments, MOVE)
    moves["stage"], moves["target"] = np.divmod(moves["target"], plan.workers)
    for table in (tasks, moves):
        table["document"] += table["stage"] * len(plan.layout.lengths)
    first, second, via = forward_inside_nodes(moves, plan.nodes or (0,) * plan.workers, ranks)
    if plan.window is None and plan.stage_rows is not None:
        first, second = _in_stages(first, second, via, plan.stage_rows, ranks)
    return tasks, first, second


def rows_by_stage(first: Table, second: Table, ranks: int) -> IntArray:
    """Return [stages, 2, ranks] rows that each rank sends and receives, both hops together.

    Rows that a rank gathers for itself are counted on both sides; rows that servers receive are not
    counted.
    """
    moves = joined(first, second)
    moves = moves.compress(moves["target"] < ranks)
    stages = int(moves["stage"].max(initial=0)) + 1
    numbers = (moves["stage"] * ranks + moves[end] for end in ("source", "target"))
    counted = [
        np.bincount(number, row_counts(moves), stages * ranks).reshape(stages, ranks)
        for number in numbers
    ]
    return np.stack(counted, axis=1).astype(np.int64)


def _moves(rows: Table, segments: Table, dtype: np.dtype[np.void]) -> tuple[Table, Table]:
    """Return moves of rows to their workers, and the segment in which the rows of each move lie."""
    pieces, held = cut_at(rows, segments)
    columns = {name: pieces[name] for name in ("document", "start", "stop")}
    at = held["offset"] + pieces["start"] - held["start"]
    return table_of(dtype, **columns, source=held["rank"], target=pieces["worker"], at=at), held


def _parts(moves: Table, which: IntArray, first: IntArray, last: IntArray) -> Table:
    """Return parts of moves: rows [first, last) of each, counted from the move's first row."""
    parts = moves.take(which)
    parts["stop"] = parts["start"] + last
    parts["start"] += first
    parts["at"] += first
    return parts


def _set_keys(tasks: Table, segment_start: IntArray, window: int | None) -> None:
    """Set which keys of each task are sent; its segment begins at row `segment_start`."""
    here = tasks["source"] == tasks["target"]
    if window is None:
        tasks["keys_stop"] = np.where(here, segment_start, tasks["stop"])
        return
    first = np.maximum(tasks["start"] - window + 1, 0)
    tasks["keys_start"] = first
    tasks["keys_stop"] = np.where(here & (first >= segment_start), first, tasks["stop"])


def _in_stages_of_windows(
    tasks: Table, stage_rows: int, window: int, ranks: int
) -> tuple[IntArray, Table]:
    """Cut tasks of windowed attention so that each has all its keys in one stage, and return the task of each piece.

    Rows within reach of the windows of two stages travel in both. A stage has at most `stage_rows`
    received rows, or two windows if that is more.
    """
    lengths, keys, target = (
        row_counts(tasks),
        tasks["keys_stop"] - tasks["keys_start"],
        tasks["target"],
    )
    # A query has the place of its own key among the rows sent to the worker, one task after
    # another.
    before = np.cumsum(keys) - keys
    place = before - before[np.searchsorted(target, target)] + tasks["start"] - tasks["keys_start"]
    # The windows of a stage's first queries reach into the previous stage.
    size = np.where((keys > 0) & (target < ranks), max(stage_rows - window + 1, window), _WHOLE)
    first_stage = place // size
    counts = (place + lengths - 1) // size - first_stage + 1
    which, stage = np.repeat(np.arange(len(tasks)), counts), expand(first_stage, counts)
    begin = stage * size[which] - place[which]
    pieces = _parts(
        tasks, which, np.maximum(begin, 0), np.minimum(begin + size[which], lengths[which])
    )
    pieces["stage"] = stage
    return which, pieces


def forward_inside_nodes(
    moves: Table, nodes: Sequence[int], ranks: int
) -> tuple[Table, Table, IntArray]:
    """Let rows that several ranks of another node receive cross to that node once.

    Servers get theirs directly.

    Returns:
        Moves of both hops, and for each of the second hop the index of the first hop's move that it
        forwards whole.
    """
    node = np.asarray(nodes)
    crossing = (node[moves["source"]] != node[moves["target"]]) & (moves["target"] < ranks)
    crossed = moves.compress(crossing)
    if not len(crossed):
        return moves, crossed, np.zeros(0, np.int64)

    # 1. Cut the moves into one node wherever any of them begins or ends, so that each part goes
    # whole to its readers.
    into = node[crossed["target"]] * (int(crossed["document"].max()) + 1) + crossed["document"]
    into = np.unique(into, return_inverse=True)[1]  # small enough to be sorted together with rows
    keyed = table_of(ROWS, document=into, start=crossed["start"], stop=crossed["stop"])
    # One number for document, row and whether a move ends or begins there.
    begin, end = (2 * sortable(into, crossed[name]) for name in ("start", "stop"))
    places = np.sort(np.concatenate([begin + 1, end]))
    (document, row), begins = np.divmod(places >> 1, ROW_LIMIT), places & 1
    readers = np.cumsum(2 * begins - 1)[:-1]  # of the rows up to the next place
    kept = (readers > 0) & (row[1:] > row[:-1])
    parts, readers = (
        table_of(ROWS, document=document[:-1], start=row[:-1], stop=row[1:]).compress(kept),
        readers[kept],
    )
    which, part, *_ = overlaps(keyed, parts)
    which = which[np.lexsort((crossed["target"][which], part))]
    first_reader = np.cumsum(readers) - readers

    # 2. Divide each part among its readers. Each piece crosses to one of them, in turn; every part begins with the
    #    next reader.
    lengths = row_counts(parts)
    pieces = np.minimum(readers, np.maximum(lengths // PIECE, 1))
    of_part, nth = np.repeat(np.arange(len(parts)), pieces), expand(np.zeros_like(pieces), pieces)
    share, more = np.divmod(lengths, pieces)
    begin = parts["start"][of_part] + nth * share[of_part] + np.minimum(nth, more[of_part])
    end = begin + share[of_part] + (nth < more[of_part])
    nth_part = np.arange(len(parts)) - np.searchsorted(parts["document"], parts["document"])
    gateway = which[first_reader[of_part] + (nth + nth_part[of_part]) % readers[of_part]]
    hop = _parts(
        crossed, gateway, begin - crossed["start"][gateway], end - crossed["start"][gateway]
    )

    # 3. The first hop goes to the gateways, the second from the gateways to the other readers.
    piece = np.repeat(np.arange(len(of_part)), readers[of_part])
    reader = crossed["target"][which[expand(first_reader[of_part], readers[of_part])]]
    others = reader != hop["target"][piece]
    second = hop.take(piece[others])
    second["source"], second["target"] = hop["target"][piece[others]], reader[others]
    direct = moves.compress(~crossing)
    return joined(direct, hop), second, len(direct) + piece[others]


def _in_stages(
    first: Table, second: Table, via: IntArray, stage_rows: int, ranks: int
) -> tuple[Table, Table]:
    """Divide the K/V rows of full attention into stages.

    `via` is the first hop's move that each second one forwards.

    The rows on one path, from one rank to another and on to the same others, are divided evenly
    over the stages; few rows over few stages. So every rank has about equally much to receive and
    to compute in each stage. A stage exceeds `stage_rows` by an eighth at most, or by a row of each
    path.
    """
    stages = -(-int(rows_by_stage(first, second, ranks).max(initial=0)) // stage_rows)
    if stages <= 1:
        return first, second
    others = np.zeros(len(first), np.int64)  # the set of other ranks, as bits
    np.bitwise_or.at(others, via, np.int64(1) << (second["target"] % 62))
    order = np.lexsort(
        (first["start"], first["document"], others, first["target"], first["source"])
    )
    first, others, via = first.take(order), others[order], np.argsort(order)[via]
    ends = np.stack([first["source"], first["target"], others])
    begins = np.flatnonzero(np.append(True, (ends[:, 1:] != ends[:, :-1]).any(0)))
    path = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(first)))
    lengths, place = row_counts(first), rows_before(first)
    place -= place[begins][path]
    size = np.add.reduceat(lengths, begins)

    # Parts below a kernel block, and fractions of rows, are in other stages on other paths of a
    # rank.
    source, target = ends[:2, begins]
    turn = ((target - source) % ranks + np.arange(len(begins)) * _GOLDEN % 1) / ranks
    on_path = table_of(ROWS, document=path, start=place, stop=place + lengths)
    least = min(max(stage_rows // PARTS, 1), PIECE)  # rows of a part
    while True:
        counts = np.clip(size // least, 1, np.where(target < ranks, stages, 1))
        of_path, nth = (
            np.repeat(np.arange(len(begins)), counts),
            expand(np.zeros_like(counts), counts),
        )
        first_row = (size[of_path] * nth / counts[of_path] + turn[of_path] * (nth > 0)).astype(
            np.int64
        )
        stretches = table_of(
            ROWS, document=of_path, start=first_row, stop=np.append(first_row[1:], 0)
        )
        stretches["stop"][np.cumsum(counts) - 1] = size
        stage_of = ((nth + turn[of_path]) * stages / counts[of_path]).astype(np.int64) * (
            target < ranks
        )[of_path]
        filled = np.flatnonzero(row_counts(stretches))
        which, other, start, stop = overlaps(on_path, stretches.take(filled))
        begin, end = start - place[which], stop - place[which]
        counts = np.bincount(which, minlength=len(first))
        piece = expand((np.cumsum(counts) - counts)[via], counts[via])
        firsts = _parts(first, which, begin, end)
        seconds = _parts(
            second, np.repeat(np.arange(len(via)), counts[via]), begin[piece], end[piece]
        )
        # Stages without rows, where few rows have many readers, are left out.
        firsts["stage"] = np.unique(stage_of[filled[other]], return_inverse=True)[1]
        seconds["stage"] = firsts["stage"][piece]
        if least == 1 or rows_by_stage(firsts, seconds, ranks).max() <= stage_rows * (
            1 + 1 / PARTS
        ):
            return firsts, seconds
        least //= 2

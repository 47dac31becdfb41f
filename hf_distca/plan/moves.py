"""Moves of rows to the workers that compute with them: which rows, between which ranks, and when.

Between nodes a byte takes about nine times as long as inside one, and ranks of a node often read
the same rows of a long document. Such rows go to one of these ranks, the gateway, which forwards
them to the others.

K/V rows travel in stages, so that few rows are in memory at once: the next stage travels while one
is computed with. A row is forwarded in the stage in which it crosses. Rows of remote workers are
not divided: they are in the first stage. With a window a row may travel in several stages. So
document d of D counts as document s · D + d in stage s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_distca.plan import TASK, Branches, Plan
from hf_distca.plan.arrays import BoolArray, FloatArray, IntArray, Table
from hf_distca.plan.cost import pairs
from hf_distca.plan.intervals import (
    ROW_LIMIT,
    ROWS,
    by_document,
    ceil_div,
    cut_at,
    expand,
    joined,
    numbered,
    overlaps,
    row_counts,
    rows_before,
    sortable,
    table_of,
    union,
)
from hf_distca.plan.paths import along_paths

MOVE = np.dtype(
    [
        ("document", np.int64),  # with a stage, see above
        ("start", np.int64),  # first row of the document
        ("stop", np.int64),  # one past the last row
        ("source", np.int64),  # the rank that holds the rows
        ("target", np.int64),  # the worker that computes with them, possibly the source itself
        ("offset", np.int64),  # position of row `start` among the rows of the source
        ("stage", np.int64),
        ("keys_start", np.int64),  # of query rows: the first K/V row that they read
        ("keys_stop", np.int64),  # of query rows: one past the last K/V row that is sent to them
    ]
)
"""Rows [start, stop) of a document that go from a rank to a worker: K/V rows, or queries of a task.

The queries lie in one segment. They read K/V rows from `keys_start` on to their own rows. Those
below `keys_stop` are sent to the worker, the others are read in place. With full attention a local
task reads keys of its segment in place. With a window it reads all keys in place or none.
"""
LEAST_PART = 128
"""Least rows, a kernel block, of the parts into which rows that several ranks of a node read are
divided."""
PARTS = 8
"""Inverse of the share of a stage by which it may exceed its rows, and below which rows of a path
stay together."""
_UNLIMITED = 1 << 40
"""Size of a stage that holds everything."""
_SPREAD = tuple(1.2207440846057596**-power for power in (1, 2, 3))
"""Fractions of sums of their multiples spread evenly between 0 and 1, however many there are: the
additive recurrence R3 of Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences" (2018),
with the root of x⁴ = x + 1."""
_RANKS_AS_BITS = 62
"""Bits of a number that stand for ranks: an int64 has 63, and a node has fewer ranks."""


def held_pairs(queries: Table, window: int | None) -> IntArray:
    """Return the query-key pairs of each move of queries with K/V rows that are read in place.

    The queries end where these K/V rows end.
    """
    held_keys = queries["stop"] - queries["keys_stop"]
    all_pairs = pairs(held_keys - row_counts(queries), held_keys, window)
    return np.where(held_keys > 0, all_pairs, 0)


@dataclass(frozen=True, eq=False)
class Forwards:
    """The second hop: which moves of the first hop gateways forward whole, and to which ranks.

    A long document over many ranks has millions of them, so they are no table of moves.
    """

    move: IntArray  # [forwards] index of the first hop's move, whose target is the gateway
    reader: IntArray  # [forwards] rank that gets the rows

    def of_rank(self, first_hop: Table, rank: int) -> Table:
        """Return the moves from a rank and to a rank, a table of dtype MOVE.

        Their `offset` is the one of the move that is forwarded.
        """
        gateway = first_hop["target"][self.move]
        chosen = np.flatnonzero((gateway == rank) | (self.reader == rank))
        moves = first_hop.take(self.move[chosen])
        moves["source"] = gateway[chosen]
        moves["target"] = self.reader[chosen]
        return moves


def rows_to_move(plan: Plan) -> tuple[Table, Table, Forwards]:
    """Return the moves of a plan's queries, and of its K/V rows in two hops.

    Moves are tables of dtype MOVE. Queries are sorted by (target, document, start), and those that
    stay on their rank are among them. The first hop has each K/V row once per worker, or with a
    window once per worker and stage. In the second hop gateways forward rows.
    """
    # 1. Queries, and the K/V rows that they read. Windows may need rows of several stages.
    segments = by_document(plan.layout.segments)
    ranks = plan.layout.ranks
    queries, segment = _moves_from_segments(plan.tasks, segments)
    _set_keys(queries, segment["start"], plan.window)
    if plan.window is not None and plan.stage_rows is not None:
        task, queries = _in_stages_of_windows(queries, plan.stage_rows, plan.window, ranks)
        _set_keys(queries, segment["start"][task], plan.window)
    # 2. Moves of K/V rows. A document counts anew in each stage, so that its rows may move again.
    keys = _moves_of_keys(queries, segments, plan.workers, plan.layout.branches)
    for moves in (queries, keys):
        moves["document"] += moves["stage"] * len(plan.layout.lengths)
    # 3. Two hops, and stages of full attention: a row has the same stage in both hops.
    first_hop, forwards = forward_inside_nodes(keys, plan.nodes or (0,) * plan.workers, ranks)
    if plan.window is None and plan.stage_rows is not None:
        first_hop, forwards = _in_stages(first_hop, forwards, plan.stage_rows, ranks)
    return queries, first_hop, forwards


def rows_by_stage(first_hop: Table, forwards: Forwards, ranks: int) -> IntArray:
    """Return [stages, 2, ranks] rows that each rank sends and receives, both hops together.

    Rows that a rank gathers for itself are counted on both sides; rows that remote workers receive
    are not counted.
    """
    stages = int(first_hop["stage"].max(initial=0)) + 1
    rows = row_counts(first_hop)
    # A rank in a stage is counted at stage · ranks + rank.
    place = first_hop["stage"] * ranks
    between_ranks = first_hop["target"] < ranks

    def counted(rank_of_moves: IntArray, rows_of_moves: IntArray) -> IntArray:
        places = (place + rank_of_moves)[between_ranks]
        return np.bincount(places, rows_of_moves[between_ranks], stages * ranks).astype(np.int64)

    forwarded = np.bincount(forwards.move, minlength=len(first_hop)) * rows  # by the gateways
    place_of_reader = place[forwards.move] + forwards.reader
    sent = counted(first_hop["source"], rows) + counted(first_hop["target"], forwarded)
    received = counted(first_hop["target"], rows)
    rows_of_readers = np.bincount(place_of_reader, rows[forwards.move], stages * ranks)
    received += rows_of_readers.astype(np.int64)
    return np.stack([sent.reshape(stages, ranks), received.reshape(stages, ranks)], axis=1)


def _moves_from_segments(rows: Table, segments: Table) -> tuple[Table, Table]:
    """Return moves of rows to their workers, and the segment in which the rows of each move lie."""
    parts, segment = cut_at(rows, segments)
    moves = table_of(
        MOVE,
        document=parts["document"],
        start=parts["start"],
        stop=parts["stop"],
        source=segment["rank"],
        target=parts["worker"],
        offset=segment["offset"] + parts["start"] - segment["start"],
    )
    return moves, segment


def _moves_of_keys(
    queries: Table, segments: Table, workers: int, branches: Branches | None
) -> Table:
    """Return moves of all K/V rows that are sent to queries, once per worker and stage."""
    reading = queries.compress(queries["keys_stop"] > queries["keys_start"])
    keys = table_of(
        TASK,
        document=reading["document"],
        start=reading["keys_start"],
        stop=reading["keys_stop"],
        worker=reading["target"] + workers * reading["stage"],  # a worker is another in each stage
    )
    if branches is not None:
        keys, _ = along_paths(keys, branches)
    moves, _ = _moves_from_segments(union(keys), segments)
    moves["stage"], moves["target"] = np.divmod(moves["target"], workers)
    return moves


def _parts_of_moves(moves: Table, index: IntArray, begin: IntArray, end: IntArray) -> Table:
    """Return rows [begin, end) of the moves with these indices, counted from each move's start."""
    parts = moves.take(index)
    parts["stop"] = parts["start"] + end
    parts["start"] += begin
    parts["offset"] += begin
    return parts


def _set_keys(queries: Table, segment_start: IntArray, window: int | None) -> None:
    """Set which keys are sent to queries, whose segments begin at `segment_start`, [moves]."""
    stays = queries["source"] == queries["target"]
    if window is None:
        queries["keys_stop"] = np.where(stays, segment_start, queries["stop"])
        return
    first_key = np.maximum(queries["start"] - window + 1, 0)
    reads_in_place = stays & (first_key >= segment_start)
    queries["keys_start"] = first_key
    queries["keys_stop"] = np.where(reads_in_place, first_key, queries["stop"])


def _in_stages_of_windows(
    tasks: Table, stage_rows: int, window: int, ranks: int
) -> tuple[IntArray, Table]:
    """Cut tasks of windowed attention so that each has all its keys in one stage.

    Rows within reach of the windows of two stages travel in both. A stage has at most `stage_rows`
    received rows, or two windows if that is more.

    Returns:
        [parts] index of the task of each part, and the parts, of dtype MOVE.
    """
    target = tasks["target"]
    lengths = row_counts(tasks)
    keys = tasks["keys_stop"] - tasks["keys_start"]
    # A query has the place of its own key among the rows sent to the worker, task after task.
    keys_before = np.cumsum(keys) - keys
    keys_before -= keys_before[np.searchsorted(target, target)]
    place = keys_before + tasks["start"] - tasks["keys_start"]
    # The windows of a stage's first queries reach into the previous stage.
    divided = (keys > 0) & (target < ranks)
    size = np.where(divided, max(stage_rows - window + 1, window), _UNLIMITED)
    first_stage = place // size
    last_stage = (place + lengths - 1) // size
    counts = last_stage - first_stage + 1
    task = np.repeat(np.arange(len(tasks)), counts)
    stage = expand(first_stage, counts)
    begin = stage * size[task] - place[task]
    end = np.minimum(begin + size[task], lengths[task])
    parts = _parts_of_moves(tasks, task, np.maximum(begin, 0), end)
    parts["stage"] = stage
    return task, parts


def forward_inside_nodes(moves: Table, nodes: Sequence[int], ranks: int) -> tuple[Table, Forwards]:
    """Let rows that several ranks of another node receive cross to that node once.

    Remote workers get theirs directly.
    """
    node = np.asarray(nodes)
    crosses = (node[moves["source"]] != node[moves["target"]]) & (moves["target"] < ranks)
    crossing = moves.compress(crosses)
    if not len(crossing):
        return moves, Forwards(np.zeros(0, np.int64), np.zeros(0, np.int64))
    parts, readers, move = _cut_by_readers(crossing, node)
    part, begin, end, turn = _divide_among_readers(parts, readers)

    # The first hop goes to the gateways.
    first_reader = (np.cumsum(readers) - readers)[part]  # place in `move`, of each share
    gateway = move[first_reader + turn]
    start = crossing["start"][gateway]
    to_gateways = _parts_of_moves(crossing, gateway, begin - start, end - start)

    # The second hop goes from the gateways to all other readers of the shares.
    share = np.repeat(np.arange(len(part)), readers[part])
    reader = crossing["target"][move[expand(first_reader, readers[part])]]
    forwards = reader != to_gateways["target"][share]
    direct = moves.compress(~crosses)
    return joined(direct, to_gateways), Forwards(len(direct) + share[forwards], reader[forwards])


def _cut_by_readers(crossing: Table, node: IntArray) -> tuple[Table, IntArray, IntArray]:
    """Cut moves wherever a move to the same node begins or ends: all readers need a part whole.

    Returns:
        [parts] of dtype ROWS, whose `document` numbers pairs of a document and a target node;
        [parts] number of readers of each part, ranks of the target node; then for each reader, by
        (part, rank), the index of the move by which it would get the part.
    """
    # 1. Number the pairs of a document and a target node. The numbers are small enough to be sorted
    #    together with rows.
    documents = int(crossing["document"].max()) + 1
    pair = node[crossing["target"]] * documents + crossing["document"]
    pair = np.unique(pair, return_inverse=True)[1]
    rows = table_of(ROWS, document=pair, start=crossing["start"], stop=crossing["stop"])

    # 2. Walk over all borders in order. A border is one number: the pair, the row, and in the last
    #    bit whether a move begins or ends there.
    begins = 2 * sortable(pair, crossing["start"]) + 1
    ends = 2 * sortable(pair, crossing["stop"])
    borders = np.sort(np.concatenate([begins, ends]))
    document, row = np.divmod(borders >> 1, ROW_LIMIT)
    change = np.where(borders & 1, 1, -1)
    readers = np.cumsum(change)[:-1]  # of the rows up to the next border
    is_part = (readers > 0) & (row[1:] > row[:-1])
    parts = table_of(ROWS, document=document[:-1], start=row[:-1], stop=row[1:]).compress(is_part)

    # 3. List the readers of each part by rank.
    move, part, *_ = overlaps(rows, parts)
    return parts, readers[is_part], move[np.lexsort((crossing["target"][move], part))]


def _divide_among_readers(
    parts: Table, readers: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Divide each part into shares, one for each reader if the part is long enough.

    Readers take turns as gateways, and every part begins with the next reader.

    Returns:
        For each share: the index of its part, start, stop, and which of the part's readers is the
        gateway.
    """
    lengths = row_counts(parts)
    shares = np.minimum(readers, np.maximum(lengths // LEAST_PART, 1))
    part, nth = numbered(shares)
    size, longer = np.divmod(lengths, shares)  # the first `longer` shares have one more row
    begin = parts["start"][part] + nth * size[part] + np.minimum(nth, longer[part])
    end = begin + size[part] + (nth < longer[part])
    nth_part = np.arange(len(parts)) - np.searchsorted(parts["document"], parts["document"])
    turn = (nth + nth_part[part]) % readers[part]
    return part, begin, end, turn


def _in_stages(
    first_hop: Table, forwards: Forwards, stage_rows: int, ranks: int
) -> tuple[Table, Forwards]:
    """Divide the K/V rows of full attention into stages.

    The rows on one path, from one rank to another and on to the same others, are divided evenly
    over the stages; few rows over few stages. So every rank has about equally much to receive and
    to compute in each stage. A stage exceeds `stage_rows` by an eighth at most, or by a row of each
    path.
    """
    stages = ceil_div(int(rows_by_stage(first_hop, forwards, ranks).max(initial=0)), stage_rows)
    if stages <= 1:
        return first_hop, forwards
    paths = _Paths.build(first_hop, forwards, ranks)
    limit = stage_rows * (1 + 1 / PARTS)
    # Smaller parts spread rows more evenly, but make more moves: try large parts first.
    part_rows = min(max(stage_rows // PARTS, 1), LEAST_PART)
    while True:
        first_hop, forwards = paths.in_stages(stages, part_rows)
        if part_rows == 1 or rows_by_stage(first_hop, forwards, ranks).max() <= limit:
            return first_hop, forwards
        part_rows //= 2


@dataclass(frozen=True, eq=False)
class _Paths:
    """Moves of K/V rows by path: from one rank to another, and on to the same others."""

    first_hop: Table  # [moves] of dtype MOVE, the first hop by (path, document, start)
    forwards: Forwards
    path: IntArray  # [moves] path of each move of the first hop
    place: IntArray  # [moves] rows of the same path before the move
    size: IntArray  # [paths] rows
    ends_at_rank: BoolArray  # [paths] else the path ends at a remote worker
    turn: FloatArray  # [paths] fraction of a part by which a path is behind another one

    @staticmethod
    def build(first_hop: Table, forwards: Forwards, ranks: int) -> "_Paths":
        """Sort the moves of the first hop by path."""
        readers = _sets_of_readers(len(first_hop), forwards)
        keys = (
            first_hop["start"],
            first_hop["document"],
            readers,
            first_hop["target"],
            first_hop["source"],
        )
        order = np.lexsort(keys)
        first_hop = first_hop.take(order)
        readers = readers[order]
        forwards = replace(forwards, move=np.argsort(order)[forwards.move])

        # A path begins where any of its ranks changes.
        ends = np.stack([first_hop["source"], first_hop["target"], readers])
        begins = np.flatnonzero(np.append(True, (ends[:, 1:] != ends[:, :-1]).any(axis=0)))
        paths = np.arange(len(begins))
        path = np.repeat(paths, np.diff(begins, append=len(first_hop)))
        place = rows_before(first_hop)
        place -= place[begins][path]
        size = np.add.reduceat(row_counts(first_hop), begins)

        # Parts below a kernel block, and fractions of rows, are in other stages on other paths of a
        # rank. Turns are far apart for consecutive sources of a target, for consecutive targets of
        # a source, and for the paths between two ranks.
        source, target = ends[:2, begins]
        between = source * (target.max() + 1) + target
        nth = paths - np.searchsorted(between, between)
        source_factor, target_factor, path_factor = _SPREAD
        # A matrix product would not be rounded alike on all hosts.
        turn = (source * source_factor + target * target_factor + nth * path_factor) % 1
        return _Paths(first_hop, forwards, path, place, size, target < ranks, turn)

    def in_stages(self, stages: int, part_rows: int) -> tuple[Table, Forwards]:
        """Return the first hop's moves, cut and with stages, and how they are forwarded.

        A path has a part in each stage, or fewer if parts would have less than `part_rows` rows.
        """
        # 1. Divide the rows of each path into parts of about equal rows.
        parts = np.clip(self.size // part_rows, 1, np.where(self.ends_at_rank, stages, 1))
        path, nth = numbered(parts)
        even_start = self.size[path] * nth / parts[path] + self.turn[path] * (nth > 0)
        first_row = even_start.astype(np.int64)
        stop = np.append(first_row[1:], 0)
        ranges = table_of(ROWS, document=path, start=first_row, stop=stop)
        ranges["stop"][np.cumsum(parts) - 1] = self.size
        stage = ((nth + self.turn[path]) * stages / parts[path]).astype(np.int64)
        stage *= self.ends_at_rank[path]
        has_rows = np.flatnonzero(row_counts(ranges))

        # 2. Cut the first hop's moves at the borders of these parts.
        stop = self.place + row_counts(self.first_hop)
        rows = table_of(ROWS, document=self.path, start=self.place, stop=stop)
        move, holder, start, stop = overlaps(rows, ranges.take(has_rows))
        begin, end = start - self.place[move], stop - self.place[move]
        first_hop = _parts_of_moves(self.first_hop, move, begin, end)
        # Stages without rows, where few rows have many readers, are left out.
        first_hop["stage"] = np.unique(stage[has_rows[holder]], return_inverse=True)[1]

        # 3. All parts of a move are forwarded as the move is.
        parts_of_move = np.bincount(move, minlength=len(self.first_hop))
        first_part = np.cumsum(parts_of_move) - parts_of_move
        counts = parts_of_move[self.forwards.move]
        reader = np.repeat(self.forwards.reader, counts)
        return first_hop, Forwards(expand(first_part[self.forwards.move], counts), reader)


def _sets_of_readers(moves: int, forwards: Forwards) -> IntArray:
    """Return [moves] the set of ranks to which each move is forwarded, as bits of a number.

    In nodes of more than _RANKS_AS_BITS ranks two sets may have one number. Then rows of both are
    divided over the stages together.
    """
    sets = np.zeros(moves, np.int64)
    bit = np.int64(1) << (forwards.reader % _RANKS_AS_BITS)
    np.bitwise_or.at(sets, forwards.move, bit)
    return sets

"""Figures of a plan: balance, bytes, sizes of tasks, and counts for predictions; from segments and tasks alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, ExchangeFigures, Plan
from hf_distca.planner.cost import RowBytes, Workers, pairs
from hf_distca.planner.intervals import ROW_LIMIT, Intervals, by_document, sortable, union
from hf_distca.planner.nodes import NETWORK_BANDWIDTH, NODE_BANDWIDTH
from hf_distca.planner.routes.forwarded import between_borders, forward_inside_nodes
from hf_distca.planner.routes.moves import Moves
from hf_distca.planner.seconds import Tasks

IntArray = NDArray[np.int64]

WITHIN, BETWEEN = 0, 1
"""Indices of links inside a node and between nodes."""


@dataclass(frozen=True)
class PlanMetrics:
    """Figures of one plan.

    Attributes:
        max_over_mean: the last worker's finishing time over the ideal one. With equal workers and no base loads, this
            is largest pairs over mean pairs. 1.0 for a plan without tasks.
        tokens_max_over_mean: largest tokens of a rank over the mean; 1.0 without tokens.
        bytes_total: bytes that cross between workers in one layer's forward: Q rows and K/V rows to the worker, O rows
            back. A K/V row counts once per (document, worker); rows already there are free.
        bytes_bottleneck: the largest number of bytes that a worker sends or receives.
        min_rows: rows of the smallest task; 0 without tasks.
        tasks_cut_below_block: tasks below a block that do not end where their document ends.
    """

    max_over_mean: float
    tokens_max_over_mean: float
    bytes_total: int
    bytes_bottleneck: int
    tasks: int
    min_rows: int
    tasks_below_block: int
    tasks_cut_below_block: int


def loads_of(plan: Plan) -> NDArray[np.int64]:
    """Return [workers] int64: query-key pairs that each worker computes."""
    cost = pairs(plan.tasks["start"], plan.tasks["stop"], plan.window)
    loads = np.zeros(plan.workers, np.int64)
    np.add.at(loads, plan.tasks["worker"], cost)
    return loads


def query_rows_of(plan: Plan) -> NDArray[np.int64]:
    """Return [workers] int64: query rows that each worker computes."""
    rows = np.zeros(plan.workers, np.int64)
    np.add.at(rows, plan.tasks["worker"], plan.tasks["stop"] - plan.tasks["start"])
    return rows


def measure(
    plan: Plan, row_bytes: RowBytes | None = None, *, workers: Workers | None = None, balance_block_size: int = 128
) -> PlanMetrics:
    """Count the balance and the bytes of a plan.

    Args:
        workers: speeds and base loads for max_over_mean; None for equal workers.

    Raises:
        ValueError: `workers` describes another number of workers than the plan has.
    """
    workers = workers or Workers.uniform(plan.workers)
    if len(workers) != plan.workers:
        raise ValueError(f"the plan has {plan.workers} workers, but {len(workers)} are described")
    loads = loads_of(plan)
    ideal = workers.ideal(int(loads.sum()))
    tokens = plan.layout.tokens
    rows = plan.tasks["stop"] - plan.tasks["start"]
    below = rows < balance_block_size
    at_end = plan.tasks["stop"] == plan.layout.lengths[plan.tasks["document"]]
    moved = bytes_moved(plan, row_bytes or RowBytes())
    return PlanMetrics(
        max_over_mean=float(workers.finishing(loads).max() / ideal) if ideal else 1.0,
        tokens_max_over_mean=float(tokens.max() / tokens.mean()) if tokens.any() else 1.0,
        bytes_total=int(moved[0].sum()),
        bytes_bottleneck=int(moved.max()),
        tasks=len(plan.tasks),
        min_rows=int(rows.min()) if len(rows) else 0,
        tasks_below_block=int(below.sum()),
        tasks_cut_below_block=int((below & ~at_end).sum()),
    )


def bytes_moved(plan: Plan, row_bytes: RowBytes) -> IntArray:
    """Return [2, workers] int64: bytes that each worker sends and receives in one layer's forward."""
    moved: IntArray = bytes_by_link(plan, row_bytes, plan.nodes or (0,) * plan.workers).sum(axis=0)
    return moved


def bytes_by_link(plan: Plan, row_bytes: RowBytes, nodes: Sequence[int]) -> IntArray:
    """Return [2, 2, workers] int64: bytes of one layer's forward by link and direction.

    Links are WITHIN and BETWEEN nodes, directions are sent and received. If the plan has nodes itself, forwarded K/V
    rows cross to a node once.

    Args:
        nodes: [workers] node of each worker.
    """
    plan, _ = without_whole(plan)
    return RowsMoved.of(plan, nodes).forward_bytes(row_bytes)


@dataclass(frozen=True, eq=False)
class RowsMoved:
    """Rows that travel in one layer's forward, by link and direction as in `bytes_by_link`: [2, 2, workers].

    Attributes:
        queries: rows of Q; as many rows of O come back.
        keys: rows of K/V, forwarded rows included.
    """

    queries: IntArray
    keys: IntArray

    @property
    def most_keys(self) -> int:
        """K/V rows that the busiest worker sends or receives."""
        return int(self.keys.sum(axis=0).max(initial=0))

    @classmethod
    def of(cls, plan: Plan, nodes: Sequence[int], *, exact: bool = True) -> "RowsMoved":
        """Count the rows of a plan; every K/V row that a worker's tasks read reaches the worker once.

        Args:
            exact: make the hops of forwarded rows to count them. Otherwise take every part of a document to be divided
                evenly among its readers on a node, which is off by a block of rows at most.
        """
        segments = by_document(plan.layout.segments)
        queries, keys = _Links(nodes), _Links(nodes)
        cut = Intervals.of(plan.tasks).overlaps(Intervals.of(segments))
        queries.add_moves(segments["rank"][cut.second], plan.tasks["worker"][cut.first], cut.rows.lengths)
        needed = Intervals(plan.tasks["document"], plan.first_key(), plan.tasks["stop"])
        reader, read = union(plan.tasks["worker"], needed)
        if plan.nodes is not None and exact:
            found = read.overlaps(Intervals.of(segments))
            moves = Moves.from_segments(found.rows, segments[found.second], reader[found.first])
            hops = forward_inside_nodes(moves, plan.nodes, plan.layout.ranks)
            for hop in (hops.first, hops.second):
                keys.add_moves(hop.source, hop.target, hop.rows.lengths)
        else:
            direct = np.ones(len(reader), bool) if plan.nodes is None else reader >= plan.layout.ranks
            keys.add_reads(segments, reader, read, direct)
        return cls(np.rint(queries.rows).astype(np.int64), np.rint(keys.rows).astype(np.int64))

    def forward_bytes(self, row_bytes: RowBytes) -> IntArray:
        """Return [2, 2, workers] bytes of the forward: Q, K and V are sent; as many rows of O come back."""
        moved: IntArray = self.queries * row_bytes.q + self.queries[:, ::-1] * row_bytes.o + self.keys * row_bytes.kv
        return moved

    def backward_bytes(self, row_bytes: RowBytes) -> IntArray:
        """Return [2, 2, workers] bytes of the backward: Q, O, dO, K and V are sent; dQ, dK and dV come back."""
        there = self.queries * (row_bytes.q + 2 * row_bytes.o) + self.keys * row_bytes.kv
        back = self.queries[:, ::-1] * row_bytes.q + self.keys[:, ::-1] * row_bytes.kv
        moved: IntArray = there + back
        return moved


def without_whole(plan: Plan) -> tuple[Plan, NDArray[np.void]]:
    """Separate the documents that one rank holds and computes alone, which are most.

    Returns:
        The plan without these documents, and their tasks.
    """
    tasks, segments, documents = plan.tasks, plan.layout.segments, len(plan.layout.lengths)
    holder = np.full(documents, -1)
    holder[segments["document"]] = segments["rank"]
    cuts = np.bincount(segments["document"], minlength=documents) + np.bincount(tasks["document"], minlength=documents)
    alone = (cuts == 2)[tasks["document"]] & (holder[tasks["document"]] == tasks["worker"])
    whole = np.zeros(documents, bool)
    whole[tasks["document"][alone]] = True
    layout = replace(plan.layout, segments=segments[~whole[segments["document"]]])
    return replace(plan, layout=layout, tasks=tasks[~alone]), tasks[alone]


class _Links:
    """Counts of rows by link and direction, as in `bytes_by_link`.

    Attributes:
        rows: [2, 2, workers].
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        self.node = np.asarray(nodes)
        self.rows = np.zeros((2, 2, len(nodes)))

    def add(self, link: int, direction: int, worker: IntArray, rows: NDArray[Any]) -> None:
        """Add rows that workers send (direction 0) or receive (1)."""
        self.rows[link, direction] += np.bincount(worker, rows, len(self.node))

    def add_moves(self, source: IntArray, target: IntArray, rows: IntArray) -> None:
        """Add rows that go from sources to targets; rows that stay are not counted."""
        away = np.flatnonzero(source != target)
        source, target, rows = source[away], target[away], rows[away]
        within = self.node[source] == self.node[target]
        for link, here in ((WITHIN, within), (BETWEEN, ~within)):
            for direction, worker in enumerate((source, target)):
                self.add(link, direction, worker[here], rows[here])

    def add_reads(
        self, segments: NDArray[np.void], reader: IntArray, read: Intervals, direct: NDArray[np.bool_]
    ) -> None:
        """Add rows that readers read, without a list of all pairs of holders and readers.

        Rows of a segment count once for each reader, and once for each reader on its node and on its rank. Rows of a
        reader count by how many of them its node holds, and the rank itself.

        Args:
            reader: [n] worker that reads each interval.
            read: [n] intervals; those of one reader do not overlap.
            direct: [n] whether the rows come straight from their holders. Otherwise rows of other nodes come to the
                readers of a node once, and each reader gets an even share of them for the others.
        """
        node, held, holder = self.node, Intervals.of(segments), segments["rank"]
        of_node = node[holder], held
        here = _covered(node[reader], read, *of_node)
        self.add(WITHIN, 0, holder, here - _covered(reader, read, holder, held))
        own_node = _covered(*of_node, node[reader], read)
        self.add(WITHIN, 1, reader, own_node - _covered(holder, held, reader, read))
        if direct.any():
            to, rows = reader[direct], read[direct]
            self.add(BETWEEN, 1, to, rows.lengths - own_node[direct])
            anywhere = _covered(np.zeros_like(to), rows, np.zeros_like(holder), held)
            self.add(BETWEEN, 0, holder, anywhere - _covered(node[to], rows, *of_node))
        if direct.all():
            return
        reader, read = reader[~direct], read[~direct]
        at, once = union(node[reader], read)
        anywhere = _covered(np.zeros_like(at), once, np.zeros_like(holder), held)
        self.add(BETWEEN, 0, holder, anywhere - _covered(at, once, *of_node))
        # Parts of a document that the same ranks of a node read.
        key = read.document * (int(node.max()) + 1) + node[reader]
        parts, readers = between_borders(Intervals(key, read.start, read.stop))
        document, at = np.divmod(parts.document, int(node.max()) + 1)
        crossing = parts.lengths - _covered(*of_node, at, Intervals(document, parts.start, parts.stop))
        share = crossing / readers
        low = np.searchsorted(sortable(parts.document, parts.start), sortable(key, read.start))
        high = np.searchsorted(sortable(parts.document, parts.start), sortable(key, read.stop))
        crossed, shared, passed = (
            before[high] - before[low]
            for before in (np.append(0.0, np.cumsum(each)) for each in (crossing, share, share * (readers - 1)))
        )
        self.add(BETWEEN, 1, reader, shared)
        self.add(WITHIN, 1, reader, crossed - shared)
        self.add(WITHIN, 0, reader, passed)


def _covered(owner: IntArray, intervals: Intervals, of: IntArray, rows: Intervals) -> IntArray:
    """Return [m] int64: how often intervals of the same owner and document cover rows, added up over the rows.

    Args:
        owner: [n] owner of each interval.
        of: [m] owner whose intervals are counted.
        rows: [m] rows of a document.
    """
    owners = int(max(owner.max(initial=0), of.max(initial=0))) + 1
    key, asked = intervals.document * owners + owner, rows.document * owners + of
    covered = np.zeros(len(of), np.int64)
    # Rows of [start, stop) below a row x: min(stop, x) - min(start, x).
    for edges, sign in ((intervals.stop, 1), (intervals.start, -1)):
        places = np.sort(sortable(key, edges))
        below = np.append(0, np.cumsum(places % ROW_LIMIT))
        last = np.searchsorted(places, sortable(asked + 1, 0))
        for x, sign_of_x in ((rows.stop, 1), (rows.start, -1)):
            at = np.searchsorted(places, sortable(asked, x))
            covered += sign * sign_of_x * (below[at] + (last - at) * x)
    return covered


def exchange_figures(
    plans: Sequence[Plan],
    row_bytes: RowBytes,
    nodes: Sequence[int],
    node_bandwidth: float = NODE_BANDWIDTH,
    network_bandwidth: float = NETWORK_BANDWIDTH,
) -> ExchangeFigures:
    """Count the bytes of exchanges.

    Args:
        plans: one for each nano-batch, all for one kind of attention.
        nodes: [workers] node of each worker, from 0 on.
        node_bandwidth: GB/s that a worker sends, and receives, inside its node.
        network_bandwidth: GB/s that a worker sends, and receives, between nodes.
    """
    moved = np.sum([bytes_by_link(plan, row_bytes, nodes) for plan in plans], axis=0)
    of_nodes = moved @ np.equal.outer(nodes, np.unique(nodes))
    return ExchangeFigures(
        bytes_total=int(moved[:, 0].sum()),
        bytes_bottleneck=int(moved.sum(axis=0).max()),
        bytes_within_nodes=int(moved[WITHIN, 0].sum()),
        bytes_within_nodes_bottleneck=int(moved[WITHIN].max()),
        bytes_within_nodes_busiest_node=int(of_nodes[WITHIN].max()),
        bytes_between_nodes=int(moved[BETWEEN, 0].sum()),
        bytes_between_nodes_bottleneck=int(moved[BETWEEN].max()),
        bytes_between_nodes_busiest_node=int(of_nodes[BETWEEN].max()),
        link_seconds=link_seconds(moved, node_bandwidth, network_bandwidth),
    )


def link_seconds(
    moved: NDArray[np.int64], node_bandwidth: float = NODE_BANDWIDTH, network_bandwidth: float = NETWORK_BANDWIDTH
) -> float:
    """Return the seconds that the busiest link takes for its bytes.

    Args:
        moved: [2, 2, workers] bytes as in `bytes_by_link`.
        node_bandwidth: GB/s that a worker sends, and receives, inside its node.
        network_bandwidth: GB/s that a worker sends, and receives, between nodes.
    """
    within, between = (int(moved[link].max(initial=0)) for link in (WITHIN, BETWEEN))
    return max(within / node_bandwidth, between / network_bandwidth) / 1e9


@dataclass(frozen=True, eq=False)
class CountedPlan:
    """Counts of a plan that a schedule needs: groups of tasks and rows that travel.

    Attributes:
        local: tasks whose queries and keys are the worker's own.
        remote_kv: tasks of local queries on received keys.
        remote_query: tasks of received queries on all of their keys.
        ranks: number of workers that hold rows; the workers after them are dedicated servers.
        forwards: whether K/V rows are forwarded inside nodes.
        connected: [ranks] the same number for ranks that share documents, directly or over other ranks.
    """

    local: Tasks
    remote_kv: Tasks
    remote_query: Tasks
    among_ranks: RowsMoved
    with_servers: RowsMoved
    row_bytes: RowBytes
    stages: int
    ranks: int
    forwards: bool
    windowed: bool
    connected: IntArray

    @property
    def bytes_moved(self) -> IntArray:
        """[2, workers] bytes that each worker sends and receives in one layer's forward."""
        both = [rows.forward_bytes(self.row_bytes) for rows in (self.among_ranks, self.with_servers)]
        moved: IntArray = np.sum(both, axis=(0, 1))
        return moved

    @property
    def servers(self) -> int:
        """Number of dedicated servers."""
        return len(self.local.rows) - self.ranks


def count_plan(
    plan: Plan, kind: AttentionKind, bytes_per_value: int, nodes: Sequence[int] | None = None, *, exact: bool = True
) -> CountedPlan:
    """Count a plan's tasks and rows.

    If K/V rows travel in stages, every stage is taken to be full; uneven stages may take one more.

    Args:
        nodes: [workers] node of each worker; None for the plan's nodes, or one node for all.
        exact: as in `RowsMoved.of`.
    """
    nodes = nodes or plan.nodes or (0,) * plan.workers
    ranks = plan.layout.ranks
    plan, whole = without_whole(plan)
    segments = by_document(plan.layout.segments)
    found = Intervals.of(plan.tasks).overlaps(Intervals.of(segments))
    worker, start, stop = plan.tasks["worker"][found.first], found.rows.start, found.rows.stop
    first, segment_start = plan.first_key()[found.first], segments["start"][found.second]
    is_local = segments["rank"][found.second] == worker
    every, inside = pairs(start, stop, plan.window), pairs(start - segment_start, stop - segment_start, plan.window)

    def summed(chosen: NDArray[np.bool_], keys: IntArray, amount: IntArray) -> Tasks:
        columns = ((stop - start)[chosen], keys[chosen], amount[chosen])
        return _summed(worker[chosen], columns, plan.workers)

    lengths, amount = whole["stop"] - whole["start"], pairs(whole["start"], whole["stop"], plan.window)
    alone = _summed(whole["worker"], (lengths, lengths, amount), plan.workers)
    local = summed(is_local, stop - np.maximum(first, segment_start), inside)
    # Servers get their rows in exchanges apart.
    at_ranks = plan.tasks["worker"] < ranks
    among_ranks, with_servers = (
        RowsMoved.of(replace(plan, tasks=plan.tasks[at]), nodes, exact=exact) for at in (at_ranks, ~at_ranks)
    )
    return CountedPlan(
        local=local.plus(alone),
        remote_kv=summed(is_local & (first < segment_start), np.maximum(segment_start - first, 0), every - inside),
        remote_query=summed(~is_local, stop - first, every),
        among_ranks=among_ranks,
        with_servers=with_servers,
        row_bytes=RowBytes.of_kind(kind, bytes_per_value),
        stages=1 if plan.stage_rows is None else max(-(-among_ranks.most_keys // plan.stage_rows), 1),
        ranks=ranks,
        forwards=plan.nodes is not None,
        windowed=plan.window is not None,
        connected=_connected(plan),
    )


def _connected(plan: Plan) -> IntArray:
    """Return [ranks] the same number for ranks that share documents, directly or over other ranks."""
    ranks, segments, tasks = (
        plan.layout.ranks,
        plan.layout.segments,
        plan.tasks[plan.tasks["worker"] < plan.layout.ranks],
    )
    document = np.concatenate([segments["document"], tasks["document"]])
    rank = np.concatenate([segments["rank"], tasks["worker"]])
    lowest, before = np.arange(ranks), np.zeros(0, np.int64)
    while not np.array_equal(lowest, before):
        before = lowest.copy()
        of_document = np.full(len(plan.layout.lengths), ranks)
        np.minimum.at(of_document, document, lowest[rank])
        np.minimum.at(lowest, rank, of_document[document])
        lowest = lowest[lowest]
    return lowest


def _summed(worker: IntArray, columns: Sequence[IntArray], workers: int) -> Tasks:
    """Sum rows, keys and pairs of [tasks] by worker."""
    rows, keys, amount = (np.bincount(worker, values, workers).astype(np.float64) for values in columns)
    return Tasks(rows, keys, amount, (rows > 0).astype(np.float64))

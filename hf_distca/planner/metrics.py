"""Figures of a plan: balance, bytes and sizes of tasks, counted from its segments and tasks alone.

Tasks and exchanged rows of a plan in one layer, counted for all workers at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, ExchangeFigures, Plan
from hf_distca.planner.cost import RowBytes, Workers, pairs
from hf_distca.planner.intervals import Intervals, by_document, union
from hf_distca.planner.nodes import NETWORK_BANDWIDTH, NODE_BANDWIDTH
from hf_distca.planner.routes.forwarded import forward_inside_nodes
from hf_distca.planner.routes.moves import Moves
from hf_distca.planner.seconds import Tasks

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


def bytes_moved(plan: Plan, row_bytes: RowBytes) -> NDArray[np.int64]:
    """Return [2, workers] int64: bytes that each worker sends and receives in one layer's forward."""
    moved: NDArray[np.int64] = bytes_by_link(plan, row_bytes, plan.nodes or (0,) * plan.workers).sum(axis=0)
    return moved


def bytes_by_link(plan: Plan, row_bytes: RowBytes, nodes: Sequence[int]) -> NDArray[np.int64]:
    """Return [2, 2, workers] int64: bytes of one layer's forward by link and direction.

    Links are WITHIN and BETWEEN nodes, directions are sent and received. If the plan has nodes itself, forwarded K/V
    rows cross to a node once.

    Args:
        nodes: [workers] node of each worker.
    """
    plan, _ = without_whole(plan)
    return bytes_of_rows(query_rows_by_link(plan, nodes), key_rows_by_link(plan, nodes), row_bytes)


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


def bytes_of_rows(queries: NDArray[np.int64], keys: NDArray[np.int64], row_bytes: RowBytes) -> NDArray[np.int64]:
    """Return [2, 2, workers] int64: bytes in the forward, from counts by `query_rows_by_link` and `key_rows_by_link`.

    As many rows of O go back as rows of Q are sent.
    """
    moved: NDArray[np.int64] = queries * row_bytes.q + queries[:, ::-1] * row_bytes.o + keys * row_bytes.kv
    return moved


def backward_bytes_of_rows(
    queries: NDArray[np.int64], keys: NDArray[np.int64], row_bytes: RowBytes
) -> NDArray[np.int64]:
    """Return [2, 2, workers] int64: bytes in the backward, from the same counts as `bytes_of_rows`.

    Q, O, dO, K and V are sent; dQ, dK and dV come back.
    """
    there = queries * (row_bytes.q + 2 * row_bytes.o) + keys * row_bytes.kv
    back = queries[:, ::-1] * row_bytes.q + keys[:, ::-1] * row_bytes.kv
    moved: NDArray[np.int64] = there + back
    return moved


def query_rows_by_link(plan: Plan, nodes: Sequence[int]) -> NDArray[np.int64]:
    """Return [2, 2, workers] int64: rows of Q sent and received, by link as in `bytes_by_link`."""
    segments = by_document(plan.layout.segments)
    queries = Intervals.of(plan.tasks).overlaps(Intervals.of(segments))
    holder, worker = segments["rank"][queries.second], plan.tasks["worker"][queries.first]
    return _by_link([(holder, worker, queries.rows.lengths)], nodes)


def key_rows_by_link(plan: Plan, nodes: Sequence[int]) -> NDArray[np.int64]:
    """Return [2, 2, workers] int64: rows of K/V sent and received, by link as in `bytes_by_link`.

    Every row that a worker's tasks read reaches the worker once, directly or forwarded.
    """
    segments = by_document(plan.layout.segments)
    needed = Intervals(plan.tasks["document"], plan.first_key(), plan.tasks["stop"])
    reader, read = union(plan.tasks["worker"], needed)
    keys = read.overlaps(Intervals.of(segments))
    moves = Moves.from_segments(keys.rows, segments[keys.second], reader[keys.first])
    hops = forward_inside_nodes(moves, plan.nodes, plan.layout.ranks)
    return _by_link([(hop.source, hop.target, hop.rows.lengths) for hop in (hops.first, hops.second)], nodes)


def _by_link(
    moved: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]], nodes: Sequence[int]
) -> NDArray[np.int64]:
    """Return [2, 2, workers] counts of (source, target, rows); rows that stay are not counted."""
    node, workers = np.asarray(nodes), len(nodes)
    rows = np.zeros(4 * workers)
    for source, target, amount in moved:
        away = np.flatnonzero(source != target)
        source, target, amount = source[away], target[away], amount[away]
        link = np.where(node[source] == node[target], WITHIN, BETWEEN) * 2
        for direction, worker in enumerate((source, target)):
            rows += np.bincount((link + direction) * workers + worker, amount, len(rows))
    return rows.astype(np.int64).reshape(2, 2, workers)


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


IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowsMoved:
    """Rows that travel in one layer's forward.

    Arrays are [2, 2, workers]: by link (within a node, between nodes) and direction (sent, received).

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
    def none(cls, workers: int) -> "RowsMoved":
        """Return the count of a plan in which nothing moves."""
        return cls(np.zeros((2, 2, workers), np.int64), np.zeros((2, 2, workers), np.int64))

    @classmethod
    def of(cls, plan: Plan, nodes: Sequence[int]) -> "RowsMoved":
        """Count the rows of a plan."""
        return cls(query_rows_by_link(plan, nodes), key_rows_by_link(plan, nodes))


@dataclass(frozen=True, eq=False)
class CountedPlan:
    """Counts of a plan that a schedule needs: groups of tasks and rows that travel.

    Attributes:
        local: local tasks, whose queries and keys are the worker's local.
        remote_kv: remote-KV tasks: local queries on received keys.
        remote_query: remote-query tasks: received queries on all of their keys.
        ranks: number of workers that hold rows; the workers after them are dedicated servers.
        forwards: whether K/V rows are forwarded inside nodes.
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

    @property
    def bytes_moved(self) -> IntArray:
        """[2, workers] bytes that each worker sends and receives in one layer's forward."""
        both = (self.among_ranks, self.with_servers)
        moved: IntArray = np.sum(
            [bytes_of_rows(rows.queries, rows.keys, self.row_bytes) for rows in both], axis=(0, 1)
        )
        return moved

    @property
    def servers(self) -> int:
        """Number of dedicated servers."""
        return len(self.local.rows) - self.ranks


def count_plan(
    plan: Plan, kind: AttentionKind, bytes_per_value: int, nodes: Sequence[int] | None = None
) -> CountedPlan:
    """Count a plan's tasks and rows.

    Args:
        nodes: [workers] node of each worker; None for the plan's nodes, or one node for all.
    """
    nodes = nodes or plan.nodes or (0,) * plan.workers
    ranks = plan.layout.ranks
    plan, whole = without_whole(plan)
    local, remote_kv, remote_query = grouped_tasks(plan)
    rows = whole["stop"] - whole["start"]
    alone = _summed(whole["worker"], rows, rows, pairs(whole["start"], whole["stop"], plan.window), plan.workers)
    rows, keys, amount = local.rows + alone.rows, local.keys + alone.keys, local.pairs + alone.pairs
    local = Tasks(rows, keys, amount, (rows > 0).astype(np.float64))
    at_ranks = plan.tasks["worker"] < ranks
    if at_ranks.all():
        among_ranks, with_servers = RowsMoved.of(plan, nodes), RowsMoved.none(plan.workers)
    else:
        among_ranks, with_servers = (
            RowsMoved.of(replace(plan, tasks=plan.tasks[at]), nodes) for at in (at_ranks, ~at_ranks)
        )
    return CountedPlan(
        local,
        remote_kv,
        remote_query,
        among_ranks,
        with_servers,
        RowBytes.of_kind(kind, bytes_per_value),
        stages_of(among_ranks, plan.stage_rows),
        ranks,
        plan.nodes is not None,
        plan.window is not None,
    )


def stages_of(moved: RowsMoved, stage_rows: int | None) -> int:
    """Return the number of stages in which K/V rows travel if every stage is full.

    Uneven stages may take one more.
    """
    return 1 if stage_rows is None else max(-(-moved.most_keys // stage_rows), 1)


def grouped_tasks(plan: Plan) -> tuple[Tasks, Tasks, Tasks]:
    """Return the local, remote-KV and remote-query tasks of each worker, as in `CountedPlan`."""
    segments = by_document(plan.layout.segments)
    pieces = Intervals.of(plan.tasks).overlaps(Intervals.of(segments))
    worker = plan.tasks["worker"][pieces.first]
    held = segments[pieces.second]
    start, stop = pieces.rows.start, pieces.rows.stop
    first = plan.first_key()[pieces.first]
    every = pairs(start, stop, plan.window)
    is_local = held["rank"] == worker
    inside = pairs(start - held["start"], stop - held["start"], plan.window)

    def summed(chosen: NDArray[np.bool_], keys: IntArray, amount: IntArray) -> Tasks:
        return _summed(worker[chosen], (stop - start)[chosen], keys[chosen], amount[chosen], plan.workers)

    begin = np.maximum(first, held["start"])
    local = summed(is_local, stop - begin, inside)
    remote_kv = summed(is_local & (first < held["start"]), np.maximum(held["start"] - first, 0), every - inside)
    return local, remote_kv, summed(~is_local, stop - first, every)


def _summed(worker: IntArray, rows: IntArray, keys: IntArray, amount: IntArray, workers: int) -> Tasks:
    """Sum tasks by worker; arrays are [tasks]."""
    totals = [np.bincount(worker, weights=values, minlength=workers) for values in (rows, keys, amount)]
    summed = [each.astype(np.float64) for each in totals]  # bincount returns integers if there are no tasks
    return Tasks(summed[0], summed[1], summed[2], (summed[0] > 0).astype(np.float64))

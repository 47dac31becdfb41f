"""Balancing over nodes, and then inside each node.

Between nodes a byte takes about nine times as long as inside one. So nodes are balanced first, each as if it were one
worker. Only the differences in their pairs cross the network, and K/V rows cross to a node once.

Then each node's tasks go to its own workers. Rows stay on the rank that holds them if it is on the node; other rows go
to workers with room. Balancing continues inside the node, over its fast links.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import SEGMENT, TASK, Layout
from hf_distca.planner.cost import Workers, pairs, row_reaching
from hf_distca.planner.intervals import Intervals, by_document, merge_touching
from hf_distca.planner.shifted import ShiftedRows, merged


def check_nodes(nodes: Sequence[int], ranks: int, workers: int) -> None:
    """Raise ValueError unless nodes of workers are numbered so that nodes of ranks are the first ones, in order."""
    of_ranks = np.asarray(nodes[:ranks])
    steps = np.diff(of_ranks, prepend=0)
    named = np.unique(np.asarray(nodes))
    in_order = len(of_ranks) and of_ranks[0] == 0 and bool(np.all((steps == 0) | (steps == 1)))
    if len(nodes) != workers or not in_order or not np.array_equal(named, np.arange(len(named))):
        raise ValueError(
            f"nodes must have one number per worker, {workers} in all: 0, 1, 2, … in the order of the {ranks} ranks, "
            f"then the nodes of dedicated servers; got {tuple(nodes)!r:.120}"
        )


def layout_of_nodes(layout: Layout, nodes: Sequence[int]) -> Layout:
    """Return the layout with nodes in place of ranks; touching rows of a node are one segment.

    Args:
        nodes: [workers] node of each worker; ranks are on nodes 0, 1, 2, … in order.
    """
    segments = layout.segments.copy()
    segments["rank"] = np.asarray(nodes)[segments["rank"]]
    order = np.lexsort((segments["start"], segments["document"], segments["rank"]))
    segments = merge_touching(segments[order], "rank")
    rows = segments["stop"] - segments["start"]
    before = np.cumsum(rows) - rows
    segments["offset"] = before - before[np.searchsorted(segments["rank"], segments["rank"])] if len(rows) else before
    return Layout(layout.lengths, segments.astype(SEGMENT), max(nodes[: layout.ranks]) + 1)


def workers_of_nodes(workers: Workers, nodes: Sequence[int]) -> Workers:
    """Return nodes as workers, with the summed speed and the mean base load, weighted by speed, of their workers."""
    count = max(nodes) + 1
    speed = np.bincount(nodes, weights=workers.speed, minlength=count)
    busy = np.bincount(nodes, weights=np.asarray(workers.speed) * np.asarray(workers.base_load), minlength=count)
    return Workers(tuple(speed.tolist()), tuple((busy / speed).tolist()))


def ideals_inside(
    loads: NDArray[np.int64], workers: Workers, nodes: Sequence[int] | NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return [workers] when all workers of the same node would finish together.

    Args:
        loads: [workers] pairs of each worker.
        nodes: [workers] node of each worker.
    """
    if not any(workers.base_load):
        node = np.asarray(nodes)
        even: NDArray[np.float64] = (np.bincount(node, loads) / np.bincount(node, workers.speed))[node]
        return even
    ideal = np.zeros(len(workers))
    for number in range(max(nodes) + 1):
        here = np.flatnonzero(np.asarray(nodes) == number)
        own = Workers(*(tuple(np.asarray(of_all)[here].tolist()) for of_all in (workers.speed, workers.base_load)))
        ideal[here] = own.ideal(int(loads[here].sum()))
    return ideal


def tasks_of_workers(
    tasks: NDArray[np.void],
    rows: ShiftedRows,
    workers: Workers,
    nodes: Sequence[int],
    limit: NDArray[np.float64],
    block: int,
) -> NDArray[np.void]:
    """Give the tasks of each node to workers of that node.

    Args:
        tasks: [tasks] of dtype TASK, whose workers are nodes, in the view of `rows`.
        nodes: [workers] node of each worker.
        limit: [workers] when each worker may finish.
        block: rows of a kernel block.

    Returns:
        Tasks of the same rows, sorted and merged.
    """
    node = np.asarray(nodes)
    segments = by_document(rows.segments)
    found = Intervals.of(tasks).overlaps(Intervals.of(segments))
    home, of_node = segments["rank"][found.second], tasks["worker"][found.first]
    given = np.zeros(len(home), TASK)
    given["document"], given["start"], given["stop"] = found.rows.document, found.rows.start, found.rows.stop
    given["worker"] = home
    visits = node[home] != of_node
    loads = rows.loads(given[~visits], len(workers))
    room = ((limit - np.asarray(workers.base_load)) * np.asarray(workers.speed) - loads).tolist()
    members = [np.flatnonzero(node == number).tolist() for number in range(int(node.max()) + 1)]
    # The largest pieces of documents come first, since they need the most room.
    visitors = given[visits]
    visitors["worker"] = of_node[visits]
    visitors = merged(visitors)
    cost = pairs(visitors["start"], visitors["stop"], rows.pair_window)
    placed = []
    for index in np.argsort(-cost, kind="stable").tolist():
        doc, start, stop, at = visitors[index].tolist()
        while start < stop:
            worker = max(members[at], key=lambda one: (room[one], -one))
            cut = _last_row(start, stop, room[worker], rows.pair_window, block)
            placed.append((doc, start, cut, worker))
            room[worker] -= pairs(start, cut, rows.pair_window)
            start = cut
    return merged(np.concatenate([given[~visits], np.array(placed, TASK)]))


def _last_row(start: int, stop: int, room: float, window: int | None, block: int) -> int:
    """Return where to cut a task so that its beginning fits into `room`: a block's boundary, or the task's end."""
    cut = int(row_reaching(pairs(0, start, window) + max(room, 0.0), window)) // block * block
    return stop if cut < start + block or stop - cut < block else cut

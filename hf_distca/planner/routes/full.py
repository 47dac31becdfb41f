"""K/V rows that tasks of full attention read.

A local task reads its own segment in place, and all rows of the document before the segment, which all its queries
see. A remote-query task reads rows [0, stop) among the rows sent to the worker. Of the rows of a stage a query sees
the rows up to its own: all of them, a part if its own row is among them, or none.
"""

import numpy as np

from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import Intervals, expand
from hf_distca.planner.routes.cut_tasks import CutTasks, KeysRead, Reads
from hf_distca.planner.routes.tables import IntArray


def full_keys(tasks: CutTasks) -> KeysRead:
    """Return the K/V rows that tasks read; query row p reads rows 0 to p."""
    rows, at_home = tasks.queries.rows, tasks.at_home
    stop = np.where(at_home, tasks.segment_start, rows.stop)
    return KeysRead(
        local=at_home,
        local_first=tasks.segment_start,
        brought=stop > 0,
        brought_rows=Intervals(rows.document, np.zeros_like(stop), stop),
    )


def before_queries(task: IntArray, queries: Intervals, keys: Intervals) -> Reads:
    """Return queries with all rows of a stage that come before them in the document.

    Args:
        task: [n] a cut task that reads an interval of a stage, increasing.
        queries: [n] all query rows of the task.
        keys: [n] the interval; intervals of one task are in order.
    """
    start = np.maximum(queries.start, keys.stop)
    seen = start < queries.stop
    task, queries, keys, start = task[seen], queries[seen], keys[seen], start[seen]
    # Queries of a task that see one more interval form a separate read, of that interval and all earlier ones.
    last = np.append((task[1:] != task[:-1]) | (start[1:] != start[:-1]), True)[: len(task)]
    which = np.flatnonzero(last)
    first = np.searchsorted(task, task[which])
    of_same_task = np.append(task[which][1:] == task[which][:-1], False)[: len(which)]
    stop = np.where(of_same_task, np.append(start[which][1:], 0)[: len(which)], queries.stop[which])
    seeing = Intervals(queries.document[which], start[which], stop)
    counts = which - first + 1
    read = keys[expand(first, counts)]
    rows = np.bincount(np.repeat(np.arange(len(counts)), counts), weights=read.lengths, minlength=len(counts))
    return Reads(task[which], seeing, counts, read, seeing.lengths * rows.astype(np.int64))


def up_to_queries(task: IntArray, queries: Intervals, keys: Intervals) -> Reads:
    """Return queries whose own rows are the last of an interval of a stage.

    Args:
        task: [n] a cut task that reads an interval of a stage.
        queries: [n] all query rows of the task.
        keys: [n] the interval.
    """
    start = np.maximum(queries.start, keys.start)
    among = start < keys.stop
    task, keys, start = task[among], keys[among], start[among]
    seeing = Intervals(keys.document, start, keys.stop)
    return Reads(task, seeing, np.ones_like(task), keys, pairs(start - keys.start, keys.lengths))

"""Which K/V rows tasks of full attention read, and from where.

A task at home reads its own segment where it lies, and all rows of the document before the segment, every one of
which all its queries see. A task elsewhere reads rows [0, stop) among those brought there. Of the rows of a stage a
query sees those up to its own: all of them, or, where its own row is among them, a part, or none.
"""

import numpy as np

from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import Intervals, expand
from hf_distca.planner.routes.cut_tasks import CutTasks, KeysRead, Reads
from hf_distca.planner.routes.tables import IntArray


def full_keys(tasks: CutTasks) -> KeysRead:
    """The K/V rows that tasks read, each query row p those of rows 0 to p."""
    rows, at_home = tasks.queries.rows, tasks.at_home
    stop = np.where(at_home, tasks.segment_start, rows.stop)
    return KeysRead(
        local=at_home,
        local_first=tasks.segment_start,
        brought=stop > 0,
        brought_rows=Intervals(rows.document, np.zeros_like(stop), stop),
    )


def before_queries(task: IntArray, queries: Intervals, keys: Intervals) -> Reads:
    """Queries with all rows of a stage that come before them in the document.

    Args:
        task: [n] a cut task that reads an interval of a stage, increasing.
        queries: [n] all its query rows.
        keys: [n] the interval; those of one task in their order.
    """
    start = np.maximum(queries.start, keys.stop)
    seen = start < queries.stop
    task, queries, keys, start = task[seen], queries[seen], keys[seen], start[seen]
    # Those of a task that come after one more interval are a read of their own, of that interval and all before it.
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
    """Queries whose own rows are the last of an interval of a stage.

    Args:
        task: [n] a cut task that reads an interval of a stage.
        queries: [n] all its query rows.
        keys: [n] the interval.
    """
    start = np.maximum(queries.start, keys.start)
    among = start < keys.stop
    task, keys, start = task[among], keys[among], start[among]
    seeing = Intervals(keys.document, start, keys.stop)
    return Reads(task, seeing, np.ones_like(task), keys, pairs(start - keys.start, keys.lengths))

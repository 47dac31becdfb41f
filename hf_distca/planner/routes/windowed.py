"""K/V rows that tasks of sliding-window attention read.

A task reads rows [first, stop), where `first` is the edge of its first query's window. If all these rows are in the
segment of its queries, they are read in place. Otherwise all of them are sent to the worker, in one stage.
"""

import numpy as np

from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import Intervals
from hf_distca.planner.routes.cut_tasks import CutTasks, KeysRead, Reads
from hf_distca.planner.routes.tables import IntArray


def windowed_keys(tasks: CutTasks, window: int) -> KeysRead:
    """Return the K/V rows that tasks read; query row p reads rows max(0, p - window + 1) to p."""
    rows = tasks.queries.rows
    first = np.maximum(rows.start - window + 1, 0)
    inside = tasks.at_home & (first >= tasks.segment_start)
    return KeysRead(
        local=inside,
        local_first=first,
        brought=~inside,
        brought_rows=Intervals(rows.document, first, np.where(inside, first, rows.stop)),
    )


def within_window(task: IntArray, queries: Intervals, keys: Intervals, window: int) -> Reads:
    """Return queries with all rows that their windows reach.

    Args:
        task: [n] cut task of each interval of queries.
        queries: [n] query rows of the task.
        keys: [n] K/V rows that the task reads.
    """
    return Reads(task, queries, np.ones_like(task), keys, pairs(queries.start, queries.stop, window))

"""Which K/V rows tasks of sliding-window attention read, and from where.

A task reads rows [first, stop), first the row that its first query's window reaches. They are either all in the
segment of its queries, which then computes them where they lie, or all are brought to the worker, in one stage.
"""

import numpy as np

from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import Intervals
from hf_distca.planner.routes.cut_tasks import CutTasks, KeysRead, Reads
from hf_distca.planner.routes.tables import IntArray


def windowed_keys(tasks: CutTasks, window: int) -> KeysRead:
    """The K/V rows that tasks read.

    Args:
        tasks: the tasks.
        window: a query row p reads those of rows max(0, p - window + 1) to p.
    """
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
    """Queries with all rows that their windows reach.

    Args:
        task: [n] the cut task of each.
        queries: [n] its query rows.
        keys: [n] the rows that it reads.
        window: see `windowed_keys`.
    """
    return Reads(task, queries, np.ones_like(task), keys, pairs(queries.start, queries.stop, window))

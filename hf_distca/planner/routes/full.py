"""Which K/V rows tasks of full attention read, and from where.

A task at home reads its own segment where it lies, and all rows of the document before the segment, every one of
which all its queries see. A task elsewhere reads rows [0, stop) among those brought there. Of the rows of a stage a
query sees those up to its own: all of them, or, where its own row is among them, a part, or none.
"""

import numpy as np

from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import Intervals
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
    """Queries that see all rows of a stage: those that come after them in the document.

    Args:
        task: [n] the cut task of each.
        queries: [n] all its query rows.
        keys: [n] rows of a stage that it reads.
    """
    start = np.maximum(queries.start, keys.stop)
    later = start < queries.stop
    seeing = Intervals(queries.document, start, queries.stop)
    return Reads(task, seeing, keys, seeing.lengths * keys.lengths)[later]


def up_to_queries(task: IntArray, queries: Intervals, keys: Intervals) -> Reads:
    """Queries whose own rows are the last of the rows of a stage that they read.

    Args:
        task: [n] the cut task of each.
        queries: [n] all its query rows.
        keys: [n] rows of a stage that it reads.
    """
    start = np.maximum(queries.start, keys.start)
    among = start < keys.stop
    seeing = Intervals(queries.document, start, keys.stop)
    return Reads(task, seeing, keys, pairs(start - keys.start, keys.lengths))[among]

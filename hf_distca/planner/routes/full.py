"""Which K/V rows tasks of full attention read, and from where.

A task at home reads its own segment where it lies, and all rows of the document before the segment, every one of
which all its queries see. A task elsewhere reads rows [0, stop) among those brought there.
"""

import numpy as np

from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import Intervals
from hf_distca.planner.routes.cut_tasks import CutTasks, KeysRead


def full_keys(tasks: CutTasks) -> KeysRead:
    """The K/V rows that tasks read, each query row p those of rows 0 to p."""
    rows, at_home = tasks.queries.rows, tasks.at_home
    stop = np.where(at_home, tasks.segment_start, rows.stop)
    return KeysRead(
        local=at_home,
        local_first=tasks.segment_start,
        brought=stop > 0,
        brought_rows=Intervals(rows.document, np.zeros_like(stop), stop),
        brought_pairs=np.where(at_home, rows.lengths * stop, pairs(rows.start, rows.stop)),
    )

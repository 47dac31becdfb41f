"""K/V rows that arrive at workers, stage by stage, and the tasks that read them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Plan
from hf_distca.planner.intervals import Intervals, by_document, union
from hf_distca.planner.routes.cut_tasks import CutTasks, KeysRead, Reads
from hf_distca.planner.routes.full import before_queries, full_keys, up_to_queries
from hf_distca.planner.routes.moves import Moves
from hf_distca.planner.routes.passed_on import Hops, pass_on
from hf_distca.planner.routes.passed_on_stages import hops_by_stage
from hf_distca.planner.routes.stages import moves_by_stage, stage_intervals, tasks_by_stage
from hf_distca.planner.routes.tables import IntArray
from hf_distca.planner.routes.windowed import windowed_keys, within_window


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Tasks of a plan and the K/V rows that are sent to their workers.

    Attributes:
        tasks: [n] the cut tasks; with a window they are also cut so that each has its keys in one stage.
        keys: [n] K/V rows that the tasks read.
        stages: for each stage, hops of the rows to all workers. Each row is sent once per worker; with a window, once
            per worker and stage.
        stage: [n] with a window, the stage of a task's keys.
    """

    window: int | None
    tasks: CutTasks
    keys: KeysRead
    stages: tuple[Hops, ...]
    stage: IntArray

    @classmethod
    def of(cls, plan: Plan, tasks: NDArray[np.void]) -> "Arrivals":
        """Return the arrivals for some tasks of a plan.

        Args:
            tasks: tasks of the plan. All tasks are needed with stages, which depend on all that ranks send and
                receive. They are also needed with nodes, since every rank has to know whether any rank forwards rows.
        """
        ranks = plan.layout.ranks
        segments = by_document(plan.layout.segments)
        cut = CutTasks.of(plan, tasks, segments)
        stage = np.zeros_like(cut.segment_start)
        if plan.window is None:
            keys = full_keys(cut)
            hops = pass_on(_brought(cut, keys, segments), plan.nodes, ranks)
            if plan.stage_rows is None:
                stages: tuple[Hops, ...] = (hops,)
            elif len(hops.second.source):
                stages = hops_by_stage(hops, plan.stage_rows, ranks)
            else:
                stages = tuple(Hops.direct(moves) for moves in moves_by_stage(hops.first, plan.stage_rows, ranks))
            return cls(plan.window, cut, keys, stages, stage)
        keys = windowed_keys(cut, plan.window)
        if plan.stage_rows is not None:
            cut, stage = tasks_by_stage(cut, keys, plan.stage_rows, plan.window, ranks)
            keys = windowed_keys(cut, plan.window)
        of_stages = [stage == number for number in range(stage.max(initial=0) + 1)]
        stages = tuple(pass_on(_brought(cut[these], keys[these], segments), plan.nodes, ranks) for these in of_stages)
        return cls(plan.window, cut, keys, stages, stage)

    def reads(self, which: IntArray, rank: int) -> Iterator[tuple[Reads, Reads]]:
        """Yield, for each stage, the reads up to the queries' own rows, and the reads of all rows before them.

        `which` are indices of tasks of worker `rank`.
        """
        queries, keys = self.tasks.queries.rows[which], self.keys.brought_rows[which]
        if self.window is not None:
            none = which[:0]
            for number in range(len(self.stages)):
                task = np.flatnonzero(self.stage[which] == number)
                yield (
                    within_window(task, queries[task], keys[task], self.window),
                    before_queries(none, queries[none], keys[none]),
                )
            return
        stage, rows = stage_intervals([hops.arriving(rank) for hops in self.stages])
        overlaps = keys.overlaps(rows)
        for number in range(len(self.stages)):
            found = np.flatnonzero(stage[overlaps.second] == number)
            task, read = overlaps.first[found], overlaps.rows[found]
            yield up_to_queries(task, queries[task], read), before_queries(task, queries[task], read)


def _brought(tasks: CutTasks, keys: KeysRead, segments: NDArray[np.void]) -> Moves:
    """Return the K/V rows that each worker's tasks read, each row once per worker."""
    worker, rows = union(tasks.queries.target, keys.brought_rows)
    found = rows.overlaps(Intervals.of(segments))
    return Moves.from_segments(found.rows, segments[found.second], worker[found.first])

"""Tasks shorter than a kernel block: which of them the balance needs, and plans without the others.

A kernel works in blocks of rows, so a shorter task wastes part of one. A short task has a reason where

- its document ends with it;
- it is a whole segment on the rank that holds it: the layout cut it (equal tokens need single rows), and
  computing it elsewhere would cost bytes;
- the balance needs it: neither giving all its rows to the worker of the task before or after it, nor widening
  it to a block with rows of one of them, keeps every worker within its limit.

`without_short` makes such changes one by one until no other short task is left.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import TASK
from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import Span, common, joined


def without_short(
    tasks: NDArray[np.void],
    segments: NDArray[np.void],
    stops: NDArray[np.int64],
    room: Sequence[float],
    window: int | None,
    block: int,
) -> NDArray[np.void]:
    """The tasks, in no order, with every change made that removes a short one and keeps within `room`.

    Args:
        tasks: [tasks] of dtype TASK; none that touch on one worker.
        segments: [segments] of dtype SEGMENT: where the rows are.
        stops: [documents] one past each document's last row.
        room: [workers] pairs that each worker may take on.
        window: width of the sliding window; None for full causal attention.
        block: rows of a kernel block.
    """
    short = (tasks["stop"] - tasks["start"] < block) & (tasks["stop"] != stops[tasks["document"]])
    concerned = np.isin(tasks["document"], tasks["document"][short])
    if not concerned.any():
        return tasks
    left = list(room)
    documents: dict[int, _Document] = {}
    by_document = np.sort(tasks[concerned], order=["document", "start"]).tolist()
    for doc, group in itertools.groupby(by_document, key=lambda task: int(task[0])):
        of_doc = segments[segments["document"] == doc]
        held = [(start, stop, rank) for _, start, stop, rank, _ in of_doc.tolist()]
        documents[doc] = _Document([task[1:] for task in group], held, int(stops[doc]), window, block)
    # A change frees room on one worker, so that another may become possible in any document.
    while any(document.remove_one(left) for document in documents.values()):
        pass
    rows = [(doc, *span) for doc, document in documents.items() for span in document.spans]
    return np.concatenate([tasks[~concerned], np.array(rows, TASK)])


class _Document:
    """The tasks of one document.

    Attributes:
        spans: its tasks by start; they touch, and neighbours have different workers.
        segments: (start, stop, rank) of its rows.
        stop: one past its last row.
    """

    def __init__(self, spans: list[Span], segments: list[Span], stop: int, window: int | None, block: int) -> None:
        self.spans, self.segments, self.stop = spans, segments, stop
        self.window, self.block = window, block

    def remove_one(self, room: list[float]) -> bool:
        """Make the cheapest change that removes the first short task that can go; whether there was one."""
        for index, span in enumerate(self.spans):
            if not self._is_short(span):
                continue
            near = slice(max(index - 1, 0), index + 2)
            old = self.spans[near]
            fitting = []
            for new in self._changes(index):
                added = self._added(old, new)
                fits = all(amount <= 0 or amount <= room[worker] for worker, amount in added.items())
                if fits and self._count_short(new) < self._count_short(old):
                    fitting.append((self._rows_away(new), new, added))
            if fitting:
                _, new, added = min(fitting, key=lambda change: change[0])
                self.spans[near] = new
                for worker, amount in added.items():
                    room[worker] -= amount
                return True
        return False

    def _changes(self, index: int) -> Iterator[list[Span]]:
        """What task `index` and the tasks before and after it may become."""
        start, stop, worker = self.spans[index]
        before = self.spans[max(index - 1, 0) : index]
        after = self.spans[index + 1 : index + 2]
        for first, _, other in before:
            yield joined([(first, stop, other), *after])
            for cut in ((stop - self.block) // self.block * self.block, stop - self.block):
                if cut - first >= self.block:
                    yield [(first, cut, other), (cut, stop, worker), *after]
        for _, last, other in after:
            yield joined([*before, (start, last, other)])
            for cut in (-(-(start + self.block) // self.block) * self.block, start + self.block):
                if last - cut >= self.block:
                    yield [*before, (start, cut, worker), (cut, last, other)]

    def _is_short(self, span: Span) -> bool:
        return span[1] - span[0] < self.block and span[1] != self.stop and span not in self.segments

    def _count_short(self, spans: list[Span]) -> int:
        return sum(self._is_short(span) for span in spans)

    def _added(self, old: list[Span], new: list[Span]) -> dict[int, int]:
        """worker -> pairs that it computes more, or fewer, after a change."""
        added: dict[int, int] = {}
        for sign, spans in ((-1, old), (1, new)):
            for start, stop, worker in spans:
                added[worker] = added.get(worker, 0) + sign * pairs(start, stop, self.window)
        return added

    def _rows_away(self, spans: list[Span]) -> int:
        """Rows of some tasks that their workers do not hold."""
        return sum(
            span[1] - span[0] - sum(common(span, segment) for segment in self.segments if segment[2] == span[2])
            for span in spans
        )

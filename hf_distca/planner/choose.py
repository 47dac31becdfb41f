"""The fastest of several plans for one micro-batch, by predicted seconds.

Every rank chooses alike: what is predicted depends on the lengths and the settings alone. Groups of ranks that
exchange nothing with each other are tried from the smallest on, and each with one nano-batch and with two. A way is
skipped where computing alone takes longer than the best plan so far, and the search ends where exchanges have nothing
left to give.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Choice, MicroBatchPlan, NanoBatch
from hf_distca.planner.build import plan_as_set, summary_of
from hf_distca.planner.counted import count_plan
from hf_distca.planner.groups import Placing, arrange, partitions, place_in_groups
from hf_distca.planner.layout import check_capacity
from hf_distca.planner.nodes import node_sizes, nodes_of
from hf_distca.planner.settings import Choices, PlanSettings
from hf_distca.planner.step import document_seconds, in_stages, predict_step
from hf_distca.planner.tasks import plan_stages

IntArray = NDArray[np.int64]

GOOD_ENOUGH = 0.003
"""Share of a step by which a further way would have to be faster to be tried."""


@dataclass(frozen=True, eq=False)
class _Candidate:
    """One way to carry a micro-batch out.

    Attributes:
        nano_batches: with plans that are not in stages yet.
        choice: what was chosen, and what it takes.
        waited: share of the step in which ranks wait for exchanges, of the rank that waits the longest.
    """

    nano_batches: tuple[NanoBatch, ...]
    choice: Choice
    waited: float


def choose(lengths: IntArray, settings: PlanSettings, choices: Choices) -> MicroBatchPlan:
    """Plan a micro-batch in the way that is predicted to take the least time.

    Args:
        lengths: [documents] tokens of each document.
        settings: see PlanSettings.
        choices: what may be chosen.

    Raises:
        ValueError: see `plan_micro_batch`.
    """
    search = _Search(lengths, settings, choices)
    best = search.run()
    alone = len(best.nano_batches) == 1
    nano_batches = tuple(
        replace(
            nano,
            plans={
                kind: plan_stages(replace(plan, stage_rows=None), kind, settings, alone=alone)
                for kind, plan in nano.plans.items()
            },
        )
        for nano in best.nano_batches
    )
    return MicroBatchPlan(nano_batches, summary_of(lengths, nano_batches, settings), choice=best.choice)


class _Search:
    """Looks for the fastest plan.

    Args:
        lengths: [documents] tokens of each document.
        settings: of plans.
        choices: what may be chosen.
    """

    def __init__(self, lengths: IntArray, settings: PlanSettings, choices: Choices) -> None:
        self._lengths, self._settings, self._choices = lengths, replace(settings, choices=None), choices
        self._nodes = nodes_of(node_sizes(settings.ranks, settings.ranks_per_node))
        self._costs = choices.costs
        self._best: _Candidate | None = None

    def run(self) -> _Candidate:
        """The best candidate."""
        finest, *coarser = self._choices.tolerances
        if not self._choices.groups or self._settings.document_layout != "joint":
            ways = self._as_set(self._choices.tolerances)
        else:
            check_capacity(self._lengths, self._settings.ranks, self._settings.tokens_per_rank)
            ways = self._in_groups(finest, coarser)
        for candidate in ways:
            if self._best is None or candidate.choice.seconds < self._best.choice.seconds:
                self._best = candidate
        assert self._best is not None
        return self._best

    def _as_set(self, tolerances: tuple[float, ...]) -> Iterator[_Candidate]:
        """Plans with the layout of the settings."""
        for tolerance in tolerances:
            for count in self._choices.nano_batches:
                chosen = replace(self._settings, balance_tolerance=tolerance, ping_pong=count == 2)
                plan = plan_as_set(self._lengths, chosen)
                if len(plan.nano_batches) == count or count == 1 or len(self._choices.nano_batches) == 1:
                    yield self._candidate(plan.nano_batches, self._settings.ranks, tolerance)

    def _in_groups(self, finest: float, coarser: list[float]) -> Iterator[_Candidate]:
        """Plans whose documents lie inside groups of ranks."""
        settings = self._settings
        seconds = document_seconds(self._lengths, self._costs)
        ideal = float(seconds.sum()) / settings.ranks
        placings = [
            placing
            for sizes in partitions(node_sizes(settings.ranks, settings.ranks_per_node))
            if (placing := place_in_groups(self._lengths, seconds, sizes, settings.tokens_per_rank))
        ]
        for placing in placings:
            if self._better_than(placing.slowest):
                yield from self._tried(placing, finest)
            if not self._better_than(ideal):
                return
        if self._best is not None and self._best.waited > GOOD_ENOUGH:
            placing = next(each for each in placings if each.sizes[0] == self._best.choice.group)
            for tolerance in coarser:
                yield from self._tried(placing, tolerance)

    def _tried(self, placing: Placing, tolerance: float) -> Iterator[_Candidate]:
        for count in self._choices.nano_batches:
            if count == 2 and max(placing.sizes) == 1 and not placing.left:
                continue  # there is no exchange to hide
            chosen = replace(self._settings, balance_tolerance=tolerance)
            arranged = arrange(self._lengths, placing, chosen, self._costs, count)
            if arranged is None:
                continue
            nano_batches = tuple(
                NanoBatch(
                    documents, layout, {kind: arranged.tasks(layout, kind, chosen) for kind in self._settings.kinds}
                )
                for documents, layout in zip(arranged.documents, arranged.layouts, strict=True)
            )
            yield self._candidate(nano_batches, placing.sizes[0], tolerance)

    def _better_than(self, seconds: float) -> bool:
        """Whether a way that takes so long would be worth a try."""
        return self._best is None or seconds < self._best.choice.seconds * (1 - GOOD_ENOUGH)

    def _candidate(self, nano_batches: tuple[NanoBatch, ...], group: int, tolerance: float) -> _Candidate:
        alone = len(nano_batches) == 1
        counted = [
            {
                kind: in_stages(
                    count_plan(plan, kind, self._settings.bytes_per_value, self._nodes),
                    kind,
                    self._settings,
                    alone=alone,
                )
                for kind, plan in nano.plans.items()
            }
            for nano in nano_batches
        ]
        step = predict_step(counted, [nano.layout.tokens for nano in nano_batches], self._costs)
        choice = Choice(group, len(nano_batches), tolerance, step.seconds)
        return _Candidate(nano_batches, choice, float(step.waited.max()) / step.seconds)

"""The fastest of several plans for one micro-batch, by predicted seconds.

Every rank chooses alike: what is predicted depends on the lengths and the settings alone. Groups of ranks that
exchange nothing with each other are tried from the smallest on, and each with one nano-batch and with two. A way is
skipped where computing alone takes longer than the best plan so far, and the search ends where exchanges have nothing
left to give.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Choice, MicroBatchPlan, NanoBatch
from hf_distca.planner.build import packed_seconds, plan_as_set, plan_placed, summary_of
from hf_distca.planner.counted import count_plan
from hf_distca.planner.groups import Placing, arrange, partitions, place_in_groups
from hf_distca.planner.layout import check_capacity
from hf_distca.planner.nodes import node_sizes, nodes_of
from hf_distca.planner.settings import Choices, PlanSettings
from hf_distca.planner.step import document_seconds, in_stages, predict_step
from hf_distca.planner.tasks import plan_stages

IntArray = NDArray[np.int64]

DOMINANT_SHARE = 0.25
"""Share of a group's work from which on a document is worth dividing evenly over the whole group."""
MOST_EVEN_RANKS = 32
"""Larger groups would exchange so many pieces of a document that planning them takes too long."""
UNBALANCED = 1e9
"""Tolerance of plans that move nothing for balance: rows travel only where documents are cut."""
GOOD_ENOUGH = 0.01
"""Share of a step by which a further way would have to be faster to be tried."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to carry a micro-batch out.

    Attributes:
        placing: the groups.
        evenly: whether long documents are divided evenly.
        nano_batches: with plans that are not in stages yet.
        choice: what was chosen, and what it takes.
        waited: share of the step in which ranks wait for exchanges, of the rank that waits the longest.
    """

    placing: Placing
    evenly: bool
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
    return search.chosen(search.ways())


def choose_placed(placed: Sequence[Sequence[int]], settings: PlanSettings, choices: Choices) -> MicroBatchPlan:
    """Plan documents that already lie on ranks and stay there, in the way that is predicted to take the least time.

    Args:
        placed: lengths of the documents of each rank, in the order of its rows.
        settings: see PlanSettings.
        choices: what may be chosen; documents are not grouped.
    """
    lengths = np.array([length for of_rank in placed for length in of_rank], np.int64)
    search = _Search(lengths, settings, choices)
    return search.chosen(search.as_set(partial(plan_placed, placed)))


def candidates(lengths: IntArray, settings: PlanSettings, choices: Choices) -> Iterator[Candidate]:
    """Every plan that may be chosen, however slow: what the search is compared with.

    Args:
        lengths: [documents] tokens of each document.
        settings: see PlanSettings.
        choices: what may be chosen.
    """
    search = _Search(lengths, settings, choices)
    for placing in search.placings():
        for tolerance in choices.tolerances:
            yield from search.tried(placing, tolerance, choices.nano_batches, (True, False), every=True)


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
        self._seconds = document_seconds(lengths, choices.costs)
        self._best: Candidate | None = None

    def chosen(self, ways: Iterator[Candidate]) -> MicroBatchPlan:
        """The plan of the best of some ways, which look at the best so far."""
        for candidate in ways:
            if self._best is None or candidate.choice.seconds < self._best.choice.seconds:
                self._best = candidate
        best = self._best
        assert best is not None
        alone = len(best.nano_batches) == 1
        nano_batches = tuple(
            replace(
                nano,
                plans={
                    kind: plan_stages(replace(plan, stage_rows=None), kind, self._settings, alone=alone)
                    for kind, plan in nano.plans.items()
                },
            )
            for nano in best.nano_batches
        )
        choice = replace(best.choice, packed_seconds=packed_seconds(self._lengths, self._settings, self._costs))
        return MicroBatchPlan(nano_batches, summary_of(self._lengths, nano_batches, self._settings), choice=choice)

    def ways(self) -> Iterator[Candidate]:
        """Every way that is worth trying."""
        layout, groups = self._settings.document_layout, self._choices.groups
        if layout == "joint" and groups:
            check_capacity(self._lengths, self._settings.ranks, self._settings.tokens_per_rank)
            yield from self._in_groups()
            return
        if layout == "whole" and groups:
            yield from self._whole()
        yield from self.as_set(partial(plan_as_set, self._lengths))

    def _whole(self) -> Iterator[Candidate]:
        """Whole documents, the costliest first, without exchange."""
        sizes = (1,) * self._settings.ranks
        placing = place_in_groups(self._lengths, self._seconds, sizes, self._settings.tokens_per_rank)
        if placing is not None and not placing.left:
            yield from self.tried(placing, self._choices.tolerances[0], self._choices.nano_batches, (False,))

    def as_set(self, plan: Callable[[PlanSettings], MicroBatchPlan]) -> Iterator[Candidate]:
        """Plans with the layout of the settings, from those that move nothing for balance on.

        Args:
            plan: makes a plan with a tolerance and a number of nano-batches.
        """
        every = Placing.of_all(self._seconds, self._settings.ranks)
        finest, *coarser = self._choices.tolerances
        for tolerance in [*([UNBALANCED] if coarser else []), finest, *coarser]:
            best = self._best
            if best is not None and best.choice.seconds * (1 - GOOD_ENOUGH) <= every.slowest:
                return
            if tolerance in coarser and best is not None and best.waited <= GOOD_ENOUGH:
                return
            for count in self._choices.nano_batches:
                chosen = replace(self._settings, balance_tolerance=tolerance, ping_pong=count == 2)
                nano_batches = plan(chosen).nano_batches
                candidate = self._candidate(nano_batches, every, tolerance, evenly=False)
                if len(nano_batches) == count or count == self._choices.nano_batches[0]:
                    yield candidate
                if candidate.waited == 0:  # nothing that a second nano-batch could hide
                    break

    def _in_groups(self) -> Iterator[Candidate]:
        """Plans whose documents lie inside groups of ranks."""
        finest, *coarser = self._choices.tolerances
        ideal = float(self._seconds.sum()) / self._settings.ranks
        placings = self.placings()
        # The smallest groups that compute alike come first, then smaller ones, which exchange less, then larger ones.
        limit = min(placing.slowest for placing in placings) * (1 + GOOD_ENOUGH)
        first = next(index for index, placing in enumerate(placings) if placing.slowest <= limit)
        for placing in [*reversed(placings[: first + 1]), *placings[first + 1 :]]:
            if self._worth(placing, ideal):
                dominated = placing.longest_share(self._seconds) > DOMINANT_SHARE
                yield from self.tried(placing, finest, self._choices.nano_batches, (dominated, False))
        for tolerance in coarser:
            best = self._best
            if best is None or best.waited <= GOOD_ENOUGH:
                return
            yield from self.tried(best.placing, tolerance, (best.choice.nano_batches,), (best.evenly,))
            if self._best is best:
                return

    def placings(self) -> list[Placing]:
        """The documents of groups, for every division into groups that can hold them; the smallest groups first."""
        ranks, tokens = self._settings.ranks, self._settings.tokens_per_rank
        every = partitions(node_sizes(ranks, self._settings.ranks_per_node))
        found = [place_in_groups(self._lengths, self._seconds, sizes, tokens) for sizes in every]
        return [placing for placing in found if placing is not None]

    def _worth(self, placing: Placing, ideal: float) -> bool:
        """Whether a division into groups could be faster than the best plan so far."""
        if self._best is None:
            return True
        enough = self._best.choice.seconds * (1 - GOOD_ENOUGH)
        if enough <= ideal or enough <= placing.slowest:
            return False
        # Larger groups exchange more: they have to compute more evenly.
        before = self._best.placing
        return len(placing.sizes) > len(before.sizes) or placing.slowest < before.slowest * (1 - GOOD_ENOUGH)

    def tried(
        self,
        placing: Placing,
        tolerance: float,
        nano_batches: tuple[int, ...],
        evenly: tuple[bool, ...],
        *,
        every: bool = False,
    ) -> Iterator[Candidate]:
        """Plans on one division into groups, until exchanges cost next to nothing.

        Args:
            placing: the documents of each group.
            tolerance: of balance.
            nano_batches: numbers of them.
            evenly: whether long documents are divided evenly.
            every: do not end where exchanges cost next to nothing.
        """
        chosen = replace(self._settings, balance_tolerance=tolerance)
        exchanges = max(placing.sizes) > 1 or bool(placing.left)
        most = max(placing.sizes)
        for divided in dict.fromkeys(each and 1 < most <= MOST_EVEN_RANKS for each in evenly):
            for count in nano_batches if exchanges else nano_batches[:1]:
                arranged = arrange(self._lengths, placing, chosen, self._costs, count, evenly=divided)
                if arranged is None:
                    continue
                planned = tuple(
                    NanoBatch(documents, layout, {kind: arranged.tasks(layout, kind, chosen) for kind in chosen.kinds})
                    for documents, layout in zip(arranged.documents, arranged.layouts, strict=True)
                )
                candidate = self._candidate(planned, placing, tolerance, evenly=divided)
                yield candidate
                if not every and candidate.choice.seconds * (1 - GOOD_ENOUGH) <= placing.slowest:
                    return

    def _candidate(
        self, nano_batches: tuple[NanoBatch, ...], placing: Placing, tolerance: float, *, evenly: bool
    ) -> Candidate:
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
        attention = tuple(step.attention.tolist())
        choice = Choice(max(placing.sizes), len(nano_batches), tolerance, step.seconds, attention)
        return Candidate(placing, evenly, nano_batches, choice, float(step.waited.max()) / step.seconds)

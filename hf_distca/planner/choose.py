"""PlanChoice of the fastest plan for one micro-batch, by predicted seconds.

Every rank chooses alike, since predictions depend on lengths and settings alone. Groups of ranks that exchange nothing
with each other are searched near the smallest ones that compute about alike. Plans that are quick to make come first.
Nothing is planned if computing alone takes longer than the best plan so far.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, MicroBatchPlan, NanoBatch, PlanChoice
from hf_distca.planner.build import finished, lengths_of, nano_batches_as_set, nano_batches_placed, packed_seconds
from hf_distca.planner.groups import Placing, arrange, partitions, place_in_groups
from hf_distca.planner.layout import check_capacity
from hf_distca.planner.metrics import CountedPlan, count_plan
from hf_distca.planner.nodes import node_sizes, nodes_of
from hf_distca.planner.settings import Choices, PlanSettings
from hf_distca.planner.stages import STAGES_ALONE, usual_stages
from hf_distca.planner.walk import Walked, document_seconds, in_stages, predict_step

IntArray = NDArray[np.int64]

DOMINANT_SHARE = 0.1
"""Share of a group's work from which a document is worth dividing evenly over several nodes."""
MOST_EVEN_RANKS = 32
"""Maximum ranks of a group with evenly divided documents; in larger groups planning their many pieces takes too
long."""
UNBALANCED = 1e9
"""Tolerance of plans that move nothing for balance: rows travel only where documents are cut."""
OTHER_STAGES = (1, STAGES_ALONE // 2, 2 * STAGES_ALONE)
"""Numbers of stages that are tried for one nano-batch, which has no other nano-batch to hide its exchange."""
GOOD_ENOUGH = 0.01
"""Share of a step by which a further candidate has to be faster to be tried."""
SAMPLED_RANKS = 16
"""Number of ranks that are planned while plans in smaller groups are compared."""
LONG_OVER_NODES = 0.25
"""Share of the work of a group of more than two nodes from which a document is always divided evenly."""
HARDLY_WAITING, HARDLY_WAITING_IN_NODES = 0.06, 0.03
"""Shares of a step that ranks wait; the second one is for groups inside nodes.

Up to this share, larger groups are tried only if they compute more evenly.
"""
FEW_RANKS = 32
"""Number of ranks up to which the search tries groups of several nodes as readily as groups inside nodes."""
UNEVEN = 0.05
"""Share by which the slowest group may compute longer than the mean. Up to it, the search stops at the first larger
group that is no faster."""
WAITING, MUCH_WAITING = 0.1, 0.25
"""Shares of a step that ranks wait in two nano-batches, from which a coarser balance may be faster.

The second one is for many ranks, whose plans take long.
"""
HARDLY_HIDDEN = 0.2
"""Share of a step that ranks wait in two nano-batches, from which one nano-batch may be faster."""
NEAR = 0.02
"""Share of a step by which a plan with one nano-batch may be slower than the best and still be tried with two."""


MOST_IN_FULL = 6
"""Maximum number of plans made in full, out of those that looked best with some of their groups."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """Plan that may be chosen for a micro-batch, with its predicted seconds.

    Attributes:
        nano_batches: their plans are not in stages yet.
        counted: for each nano-batch, the counts of its plans.
        waited: share of the step that the longest-waiting rank waits for exchanges.
    """

    placing: Placing
    evenly: bool
    nano_batches: tuple[NanoBatch, ...]
    counted: list[dict[AttentionKind, CountedPlan]]
    choice: PlanChoice
    waited: float


def choose(lengths: IntArray, settings: PlanSettings, choices: Choices) -> MicroBatchPlan:
    """Plan a micro-batch with the least predicted time.

    Raises:
        ValueError: see `plan_micro_batch`.
    """
    search = _Search(lengths, settings, choices)
    return search.chosen(search.candidates())


def choose_placed(placed: Sequence[Sequence[int]], settings: PlanSettings, choices: Choices) -> MicroBatchPlan:
    """Plan documents that stay on the ranks where they lie, with the least predicted time.

    Documents are not grouped, whatever `choices` says.

    Args:
        placed: for each rank, lengths of its documents in the order of its rows.
    """
    search = _Search(lengths_of(placed), settings, choices)
    return search.chosen(search.as_set(partial(nano_batches_placed, placed)))


def _seconds(candidate: Candidate) -> float:
    return candidate.choice.seconds


def candidates(lengths: IntArray, settings: PlanSettings, choices: Choices) -> Iterator[Candidate]:
    """Yield every plan that may be chosen, however slow: the reference for the search."""
    search = _Search(lengths, settings, choices)
    for level in range(len(search.partitions)):
        for tolerance in choices.tolerances:
            for evenly in (True, False):
                for count in choices.nano_batches:
                    candidate = search.planned(level, tolerance, count, evenly=evenly)
                    if candidate is not None:
                        yield candidate


class _Search:
    """Search for the fastest plan.

    Attributes:
        partitions: for each level, [groups] ranks of each group; from single ranks to one group of all.
    """

    def __init__(self, lengths: IntArray, settings: PlanSettings, choices: Choices) -> None:
        costs = choices.costs
        self._lengths, self._choices = lengths, choices
        self._settings = replace(
            settings, choices=None, slowness=costs.slowness, row_work=costs.row_work(settings.dominant_kind)
        )
        self._speeds = 1 / np.array(costs.slowness or (1.0,) * settings.ranks)
        sizes = node_sizes(settings.ranks, settings.ranks_per_node)
        self._nodes, self._ranks_of_node = nodes_of(sizes), max(sizes)
        self._costs = choices.costs
        self._seconds = document_seconds(lengths, choices.costs)
        self._evenly_s = float(self._seconds.sum() / self._speeds.sum())
        self._placings: dict[int, Placing | None] = {}
        self._tried: dict[tuple[int, float, int, bool], Candidate | None] = {}
        self._best: Candidate | None = None
        self._even_limit = MOST_EVEN_RANKS  # ranks of the largest groups with evenly divided documents that may help
        self.partitions = partitions(sizes)

    def chosen(self, candidates: Iterator[Candidate]) -> MicroBatchPlan:
        """Return the plan of the best of some candidates.

        The generator of candidates reads the best one so far.
        """
        for candidate in candidates:
            if self._best is None or candidate.choice.seconds < self._best.choice.seconds:
                self._best = candidate
        best = self._best
        assert best is not None
        choice, stages = best.choice, usual_stages(len(best.nano_batches))
        if len(best.nano_batches) == 1 and (max(best.placing.sizes) > 1 or best.placing.left):
            for count in OTHER_STAGES:
                step = self._walked(best.nano_batches, best.counted, self._settings, count)
                if step.seconds < choice.seconds:
                    choice = replace(choice, seconds=step.seconds, attention=tuple(step.attention.tolist()))
                    stages = count
        choice = replace(choice, packed_seconds=packed_seconds(self._lengths, self._settings, self._costs))
        return finished(self._lengths, best.nano_batches, self._settings, stages, choice)

    def candidates(self) -> Iterator[Candidate]:
        """Yield every candidate that is worth trying."""
        layout, groups = self._settings.document_layout, self._choices.groups
        if layout == "joint" and groups:
            check_capacity(self._lengths, self._settings.ranks, self._settings.tokens_per_rank)
            yield self._grouped()
            return
        if layout == "whole" and groups:
            yield from self._whole()
        yield from self.as_set(partial(nano_batches_as_set, self._lengths))

    def _whole(self) -> Iterator[Candidate]:
        """Yield a plan of whole documents, the costliest placed first, without exchange."""
        placing = self._placing(0)
        if placing is not None and not placing.left:
            finest, fewest = self._choices.tolerances[0], min(self._choices.nano_batches)
            candidate = self.planned(0, finest, fewest, evenly=True)
            if candidate is not None:
                yield candidate

    def as_set(self, plan: Callable[[PlanSettings], tuple[NanoBatch, ...]]) -> Iterator[Candidate]:
        """Yield plans with the layout of the settings, first those that move nothing for balance.

        Args:
            plan: makes nano-batches from settings with a tolerance and a number of nano-batches.
        """
        every = Placing.of_all(self._seconds, self._speeds)
        finest, *coarser = self._choices.tolerances
        for tolerance in [*([UNBALANCED] if coarser else []), finest, *coarser]:
            best = self._best
            if best is not None and best.choice.seconds * (1 - GOOD_ENOUGH) <= every.slowest:
                return
            if tolerance in coarser and best is not None and best.waited <= GOOD_ENOUGH:
                return
            for count in self._choices.nano_batches:
                chosen = replace(self._settings, balance_tolerance=tolerance, ping_pong=count == 2)
                nano_batches = plan(chosen)
                candidate = self._candidate(nano_batches, every, tolerance, self._settings, evenly=False)
                if len(nano_batches) == count or count == self._choices.nano_batches[0]:
                    yield candidate
                if candidate.waited == 0:  # a second nano-batch has nothing to hide
                    break

    def _grouped(self) -> Candidate:
        """Return the best plan in groups, with all groups planned.

        A sample of groups may look faster than all of them are. So plans are made in full as long as one could be the
        best.
        """
        self._in_groups()
        found = sorted((each for each in self._tried.values() if each is not None), key=_seconds)
        best = self._best = None
        for part in found[:MOST_IN_FULL]:
            if best is not None and best.choice.seconds <= part.choice.seconds:
                break
            whole: Candidate | None = part
            if part.nano_batches[0].layout.ranks < self._settings.ranks:
                level, chosen = self.partitions.index(part.placing.sizes), part.choice
                whole = self.planned(level, chosen.tolerance, chosen.nano_batches, evenly=part.evenly)
            best = min((each for each in (best, whole) if each is not None), key=_seconds, default=None)
        return best or min(self.as_set(partial(nano_batches_as_set, self._lengths)), key=_seconds)

    def _in_groups(self) -> None:
        """Try plans whose documents lie inside groups of ranks."""
        finest, *coarser = self._choices.tolerances
        few, *_, many = self._choices.nano_batches * 2
        top, first = len(self.partitions) - 1, self._first()
        inside = max(level for level, sizes in enumerate(self.partitions) if max(sizes) <= self._ranks_of_node)
        many_ranks = self._settings.ranks > FEW_RANKS
        # 1. Long documents divided evenly, or whole ones only. Ranks compute about alike, so one nano-batch suffices.
        #    Of many ranks, groups of several nodes take long to plan: they are tried last, as long as they help.
        level = near = min(first, inside) if many_ranks else first
        if near == first or not self._leaves_documents(near):
            self._evenly(near, finest, few)
        if self._best is None and near == first:
            self._jointly(first, finest)
        while level > 0 and (self._best is not None or not many_ranks) and self._worth(level - 1):
            level -= 1
            self._evenly(level, finest, few)
        for level in range(near + 1, max(first, min(first + 1, inside)) + 1):
            best = self._best
            if not self._worth(level) or (level < first and self._leaves_documents(level)):
                continue
            candidate = self._evenly(level, finest, few)
            if many_ranks and candidate is not None and best is not None and self._best is best:
                self._even_limit = max(self.partitions[level])
                break
        # 2. Few documents cut, with exchanges hidden by two nano-batches; larger groups as long as they help.
        level = first if self._best is None else self._level()
        if self._worth(level):
            self._jointly(level, finest)
        while level < top and self._worth(level + 1):
            level, best = level + 1, self._best
            if many_ranks and inside < level < first:
                continue
            self._jointly(level, finest)
            uneven = best is not None and self._until_done(best.placing.slowest) > self._evenly_s * (1 + UNEVEN)
            if self._best is best and best is not None and not self._leaves_documents(level) and not uneven:
                break
        if self._best is None:
            return
        # 3. Variations of the best plan: two nano-batches, then coarser tolerances.
        even = {key[0]: each.choice.seconds for key, each in self._tried.items() if each is not None and each.evenly}
        for level, seconds in even.items():
            near_best = seconds <= min(even.values()) * (1 + NEAR)
            near_best &= not many_ranks or seconds <= self._best.choice.seconds * (1 + 2 * NEAR)
            if near_best and self._best.waited > HARDLY_WAITING_IN_NODES and self._worth(level):
                self._evenly(level, finest, many)
        for tolerance in coarser:
            best = self._best
            hides = len(best.nano_batches) == 2 and not best.evenly
            hides &= best.waited <= (MUCH_WAITING if many_ranks else WAITING)
            if hides or best.waited <= GOOD_ENOUGH or not self._worth(self._level()):
                return
            self._try(self._level(), tolerance, best.choice.nano_batches, evenly=best.evenly)
            if best.choice.seconds * (1 - GOOD_ENOUGH) <= self._best.choice.seconds:
                return

    def _first(self) -> int:
        """Return the level of the smallest groups that compute about alike."""
        limit = self._evenly_s * (1 + GOOD_ENOUGH)
        low, high = 0, len(self.partitions) - 1
        while low < high:
            level = (low + high) // 2
            low, high = (low, level) if self._slowest(level, limit) <= limit else (level + 1, high)
        return high

    def _slowest(self, level: int, limit: float) -> float:
        """Return the least seconds that the slowest group computes; inf if documents do not fit.

        The seconds are exact up to `limit`.
        """
        least = self._until_done(float(self._seconds.max() / self._speeds.max()) / max(self.partitions[level]))
        if least > limit:
            return least
        placing = self._placing(level)
        return inf if placing is None else self._until_done(placing.slowest)

    def _until_done(self, slowest: float) -> float:
        """Return the seconds until all ranks have computed, from the slowest rank's seconds."""
        return self._costs.until_done(self._evenly_s, slowest)

    def _placing(self, level: int) -> Placing | None:
        """Return the placing of documents in the groups of a level; None if they do not fit."""
        if level not in self._placings:
            sizes = self.partitions[level]
            self._placings[level] = place_in_groups(
                self._lengths, self._seconds, sizes, self._settings.tokens_per_rank, self._speeds
            )
        return self._placings[level]

    def _leaves_documents(self, level: int) -> bool:
        """Return whether some documents fit into no group of a level, and cross nodes."""
        placing = self._placing(level)
        return placing is None or bool(placing.left)

    def _worth(self, level: int) -> bool:
        """Return whether a level could be faster than the best plan so far."""
        if self._best is None:
            return True
        enough = self._best.choice.seconds * (1 - GOOD_ENOUGH)
        inside = max(self.partitions[level]) <= self._ranks_of_node
        if level > self._level() and self._best.waited <= (HARDLY_WAITING_IN_NODES if inside else HARDLY_WAITING):
            # Larger groups exchange more, so they have to compute more evenly.

            enough = self._until_done(self._best.placing.slowest) * (1 - GOOD_ENOUGH)
        return self._slowest(level, enough) < enough

    def _level(self) -> int:
        """Return the level of the best plan so far."""
        assert self._best is not None
        return self.partitions.index(self._best.placing.sizes)

    def _evenly(self, level: int, tolerance: float, count: int) -> Candidate | None:
        """Try to divide long documents evenly, if groups lie inside nodes or a document is worth several nodes."""
        placing = self._placing(level)
        inside = max(self.partitions[level]) <= self._ranks_of_node
        if placing is None or not (inside or placing.longest_share(self._seconds) > DOMINANT_SHARE):
            return None
        return self._try(level, tolerance, count, evenly=True)

    def _jointly(self, level: int, tolerance: float) -> None:
        """Try to cut few documents, in the most nano-batches; in fewer too if the exchange is hardly hidden.

        A document that is long for several nodes is divided evenly instead.
        """
        placing, most = self._placing(level), max(self.partitions[level])
        if (
            placing is not None
            and 2 * self._ranks_of_node < most <= MOST_EVEN_RANKS
            and placing.longest_share(self._seconds) > LONG_OVER_NODES
        ):
            if most <= self._even_limit:
                self._evenly(level, tolerance, min(self._choices.nano_batches))
            return
        for count in reversed(self._choices.nano_batches):
            candidate = self._try(level, tolerance, count, evenly=False)
            if candidate is not None and candidate.waited <= HARDLY_HIDDEN:
                return

    def _try(self, level: int, tolerance: float, count: int, *, evenly: bool) -> Candidate | None:
        """Plan once, and keep the plan if it is the best so far."""
        key = (level, tolerance, count, evenly)
        if key not in self._tried:
            self._tried[key] = candidate = self.planned(level, tolerance, count, evenly=evenly, sampled=True)
            seconds = inf if self._best is None else self._best.choice.seconds
            if candidate is not None and candidate.choice.seconds < seconds:
                self._best = candidate
        return self._tried[key]

    def planned(
        self, level: int, tolerance: float, count: int, *, evenly: bool, sampled: bool = False
    ) -> Candidate | None:
        """Plan a micro-batch in groups.

        Args:
            level: index into the partitions.
            count: number of nano-batches; one where nothing is exchanged.
            sampled: plan only some groups: those with the most work or the longest documents.

        Returns:
            None if no such plan exists, or if it equals another plan.
        """
        placing, most = self._placing(level), max(self.partitions[level])
        if placing is None or (evenly and most > MOST_EVEN_RANKS):
            return None
        if most == 1 and (not evenly or count != min(self._choices.nano_batches)) and not placing.left:
            return None
        chosen, part = replace(self._settings, balance_tolerance=tolerance), placing
        if sampled:
            part, chosen = self._sample(placing, chosen)
        arranged = arrange(self._lengths, part, chosen, self._costs, count, evenly=evenly)
        if arranged is None:
            return None
        nano_batches = tuple(
            NanoBatch(documents, layout, {kind: arranged.tasks(layout, kind, chosen) for kind in chosen.kinds})
            for documents, layout in zip(arranged.documents, arranged.layouts, strict=True)
        )
        return self._candidate(nano_batches, placing, tolerance, chosen, evenly=evenly)

    def _sample(self, placing: Placing, settings: PlanSettings) -> tuple[Placing, PlanSettings]:
        """Return some groups with the settings of their ranks; all groups if there are few."""
        most = max(placing.sizes)
        half = max(SAMPLED_RANKS // most, 2) // 2
        if placing.left or self._costs.slowness or 2 * half >= len(placing.sizes):
            return placing, settings
        longest = np.array([self._seconds[documents].max() for documents in placing.documents])
        kept = np.zeros(len(placing.sizes), bool)
        kept[np.argsort(-placing.seconds, kind="stable")[:half]] = True
        kept[np.argsort(-np.where(kept, 0.0, longest), kind="stable")[:half]] = True
        nodes = np.array(self._nodes)[np.repeat(kept, placing.sizes)]
        groups = np.flatnonzero(kept).tolist()
        part = Placing(
            tuple(placing.sizes[group] for group in groups),
            tuple(placing.documents[group] for group in groups),
            (),
            placing.seconds[kept],
        )
        per_node = tuple(np.unique(nodes, return_counts=True)[1].tolist())
        return part, replace(settings, ranks=len(nodes), ranks_per_node=per_node)

    def _candidate(
        self,
        nano_batches: tuple[NanoBatch, ...],
        placing: Placing,
        tolerance: float,
        settings: PlanSettings,
        *,
        evenly: bool,
    ) -> Candidate:
        counted = self._counted(nano_batches, settings)
        step = self._walked(nano_batches, counted, settings, usual_stages(len(nano_batches)))
        attention = tuple(step.attention.tolist())
        choice = PlanChoice(max(placing.sizes), len(nano_batches), tolerance, step.seconds, attention)
        return Candidate(placing, evenly, nano_batches, counted, choice, float(step.waited.max()) / step.seconds)

    def _counted(
        self, nano_batches: Sequence[NanoBatch], settings: PlanSettings
    ) -> list[dict[AttentionKind, CountedPlan]]:
        """Count the plans of each nano-batch, in one stage."""
        nodes = nodes_of(node_sizes(settings.ranks, settings.ranks_per_node))
        count = partial(count_plan, bytes_per_value=settings.bytes_per_value, nodes=nodes)
        return [{kind: count(plan, kind) for kind, plan in nano.plans.items()} for nano in nano_batches]

    def _walked(
        self,
        nano_batches: Sequence[NanoBatch],
        counted: Sequence[dict[AttentionKind, CountedPlan]],
        settings: PlanSettings,
        stages: int,
    ) -> Walked:
        """Predict a step of counted plans in about `stages` stages."""
        staged = [
            {kind: in_stages(plan, kind, settings, stages=stages) for kind, plan in nano.items()} for nano in counted
        ]
        nodes = nodes_of(node_sizes(settings.ranks, settings.ranks_per_node))
        return predict_step(staged, [nano.layout for nano in nano_batches], self._costs, nodes)

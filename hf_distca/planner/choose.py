"""Choice of the fastest plan for one micro-batch, by predicted seconds.

Every rank chooses alike, since predictions depend on lengths and settings alone. Groups of ranks
that exchange nothing with each other are searched near the smallest ones that compute about alike.
Nothing is planned if computing alone takes longer than the best plan so far.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, MicroBatchPlan, NanoBatch, PlanChoice
from hf_distca.plan.nodes import node_sizes
from hf_distca.plan.stages import STAGES_ALONE, usual_stages
from hf_distca.planner.build import (
    finished,
    lengths_of,
    nano_batches_as_set,
    nano_batches_placed,
    packed_seconds,
)
from hf_distca.planner.groups import (
    LONG_SHARE,
    Placing,
    joined_nodes,
    nano_batches_in_groups,
    partitions,
    place_in_groups,
    place_on_ranks,
)
from hf_distca.planner.layout import check_capacity
from hf_distca.planner.settings import Choices, PlanSettings
from hf_distca.predict.counts import CountedPlan, count_plan
from hf_distca.predict.walk import Walked, document_seconds, in_stages, predict_step

IntArray = NDArray[np.int64]

UNBALANCED = 1e9
"""Tolerance of plans that move nothing for balance: rows travel only where documents are cut."""
OTHER_STAGES = (STAGES_ALONE // 2, 2 * STAGES_ALONE)
"""Further numbers of stages that are tried for the chosen plan; two nano-batches are not tried with
many."""
GOOD_ENOUGH = 0.01
"""Share of a step by which a further candidate has to be faster to be tried."""
DOMINANT_SHARE = 0.06
"""Share of a group's work from which a document is worth dividing evenly over several nodes."""
MOST_MOVES = 4096
"""Maximum moves of K/V rows, from a piece to a rank, of documents divided evenly over several
nodes, over the root of the number of ranks. More moves take too long to plan."""
NEAR = 0.03
"""Share of a step by which a plan with one nano-batch may be slower than the best and still be
tried with two."""
WAITING = 0.06
"""Share of a step that ranks wait, up to which larger groups over nodes are tried only if they
compute more evenly."""
HARDLY_HIDDEN = 0.2
"""Share of a step that ranks wait in two nano-batches, from which one nano-batch may be faster."""
COARSER_FROM, COARSER_FROM_MANY = 0.1, 0.25
"""Shares of a step that few, or many, ranks wait in two nano-batches, from which a coarser balance
may be faster."""

FEW_RANKS = 32
"""Number of ranks up to which plans take little time; for more ranks fewer are tried, on the terms
below."""
QUICK_RANKS = 64
"""Maximum number of planned ranks for which a coarser balance is tried."""
SAMPLED_RANKS = 16
"""Number of ranks that are planned while plans in smaller groups are compared."""
MOST_IN_FULL = 6
"""Maximum number of plans made in full, out of those that looked best with some of their groups."""
ACROSS = 0.1
"""Share of a step that exchanges take at least where few documents are cut, between nodes."""
_seconds = attrgetter("choice.seconds")
"""Predicted seconds of a candidate, by which candidates are compared."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """Plan that may be chosen for a micro-batch, with its predicted seconds."""

    placing: Placing
    evenly: bool
    nano_batches: tuple[NanoBatch, ...]  # their plans are not in stages yet
    counted: list[dict[AttentionKind, CountedPlan]]  # for each nano-batch, the counts of its plans
    stages: int | None  # about how many stages are fastest; None for the usual number
    choice: PlanChoice
    step: Walked
    waited: float  # share of the step that the longest-waiting rank waits for exchanges


def choose(lengths: IntArray, settings: PlanSettings, choices: Choices) -> MicroBatchPlan:
    """Plan a micro-batch with the least predicted time.

    Raises:
        ValueError: see `plan_micro_batch`.
    """
    search = _Search(lengths, settings, choices)
    return search.chosen(search.candidates())


def choose_placed(
    placed: Sequence[Sequence[int]], settings: PlanSettings, choices: Choices
) -> MicroBatchPlan:
    """Plan documents that stay on the ranks where they lie, with the least predicted time.

    Documents are not grouped, whatever `choices` says.

    Args:
        placed: for each rank, lengths of its documents in the order of its rows.
    """
    search = _Search(lengths_of(placed), settings, choices)
    return search.chosen(search.as_set(partial(nano_batches_placed, placed)))


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
        partitions: for each level, [groups] ranks of each group; from single ranks to one group of
            all.
    """

    def __init__(self, lengths: IntArray, settings: PlanSettings, choices: Choices) -> None:
        costs = choices.costs
        self._lengths, self._choices = lengths, choices
        self._settings = replace(
            settings,
            choices=None,
            slowness=costs.slowness,
            row_work=costs.row_work(settings.dominant_kind),
        )
        self._speeds = 1 / np.array(costs.slowness or (1.0,) * settings.ranks)
        sizes = node_sizes(settings.ranks, settings.ranks_per_node)
        self._ranks_of_node = max(sizes)
        self._costs = costs
        self._seconds = document_seconds(lengths, costs)
        self._evenly_s = float(self._seconds.sum() / self._speeds.sum())
        self._placings: dict[int, Placing | None] = {}
        self._tried: dict[tuple[int, float, int, bool], Candidate | None] = {}
        self._best: Candidate | None = None
        self.partitions = partitions(sizes)
        self._inside = max(
            level for level, each in enumerate(self.partitions) if max(each) <= self._ranks_of_node
        )
        if self._first() > self._inside and len(sizes) > 2:
            joined = joined_nodes(
                lengths, self._seconds, sizes, settings.tokens_per_rank, self._speeds
            )
            if joined is not None and joined not in self.partitions:
                level = sum(max(sizes) < max(joined) for sizes in self.partitions)
                self.partitions.insert(level, joined)
                self._placings = {
                    each: placing for each, placing in self._placings.items() if each < level
                }

    def chosen(self, candidates: Iterator[Candidate]) -> MicroBatchPlan:
        """Return the plan of the best of some candidates.

        The generator of candidates reads the best one so far.
        """
        for candidate in candidates:
            if self._best is None or candidate.choice.seconds < self._best.choice.seconds:
                self._best = candidate
        best = self._best
        assert best is not None
        options = OTHER_STAGES[: 3 - best.choice.nano_batches]
        others = self._fastest(best.nano_batches, best.counted, self._settings, options)
        step, stages = min((best.step, best.stages), others, key=lambda each: each[0].seconds)
        packed = packed_seconds(self._lengths, self._settings, self._costs)
        attention = tuple(step.attention.tolist())
        choice = replace(
            best.choice, seconds=step.seconds, attention=attention, packed_seconds=packed
        )
        return finished(
            self._lengths, best.nano_batches, self._settings, stages, choice, best.counted
        )

    def candidates(self) -> Iterator[Candidate]:
        """Yield every candidate that is worth trying."""
        layout, groups = self._settings.document_layout, self._choices.groups
        if layout == "joint" and groups:
            check_capacity(self._lengths, self._settings.ranks, self._settings.tokens_per_rank)
            yield self._grouped()
            yield from self._on_ranks()
            return
        placing = self._placing(0)
        if layout == "whole" and groups and placing is not None and not placing.left:
            # The costliest document is placed first.
            whole = self.planned(
                0, self._choices.tolerances[0], min(self._choices.nano_batches), evenly=True
            )
            if whole is not None:
                yield whole
        yield from self.as_set(partial(nano_batches_as_set, self._lengths))

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
                candidate = self._candidate(
                    nano_batches, every, tolerance, self._settings, evenly=False
                )
                if len(nano_batches) == count or count == self._choices.nano_batches[0]:
                    yield candidate
                if candidate.waited == 0:  # a second nano-batch has nothing to hide
                    break

    def _on_ranks(self) -> Iterator[Candidate]:
        """Yield the plan of whole documents on ranks where equal work does not fit, if it could be faster."""
        placing, best = self._placing(0), self._best
        if placing is None or not placing.left or best is None:
            return
        fitted = place_on_ranks(
            self._lengths,
            self._seconds,
            self._settings.ranks,
            self._settings.tokens_per_rank,
            self._speeds,
        )
        if fitted is None or fitted.slowest > best.choice.seconds * (1 - GOOD_ENOUGH):
            return
        finest, count = self._choices.tolerances[0], min(self._choices.nano_batches)
        nano_batches = nano_batches_in_groups(
            self._lengths, fitted, self._settings, self._costs, count, evenly=True
        )
        if nano_batches is not None:
            yield self._candidate(nano_batches, fitted, finest, self._settings, evenly=True)

    def _grouped(self) -> Candidate:
        """Return the best plan in groups.

        Sampled plans are made in full as long as one could be the best.
        """
        self._in_groups()
        if (
            self._best is not None
            and self._slowest(0, self._best.choice.seconds) <= self._best.choice.seconds
        ):
            self._evenly(
                0, self._choices.tolerances[0], self._choices.nano_batches[0]
            )  # exchanges nothing
        found = sorted((each for each in self._tried.values() if each is not None), key=_seconds)
        best = self._best = None
        for part in found[:MOST_IN_FULL]:
            if best is not None and best.choice.seconds <= part.choice.seconds:
                break
            whole: Candidate | None = part
            if part.nano_batches[0].layout.ranks < self._settings.ranks:
                level, chosen = self.partitions.index(part.placing.sizes), part.choice
                whole = self.planned(
                    level, chosen.tolerance, chosen.nano_batches, evenly=part.evenly
                )
            best = min(
                (each for each in (best, whole) if each is not None), key=_seconds, default=None
            )
        return best or min(self.as_set(partial(nano_batches_as_set, self._lengths)), key=_seconds)

    def _in_groups(self) -> None:
        """Try plans whose documents lie inside groups of ranks."""
        finest, *coarser = self._choices.tolerances
        few, *_, many = self._choices.nano_batches * 2
        top, first, many_ranks = (
            len(self.partitions) - 1,
            self._first(),
            self._settings.ranks > FEW_RANKS,
        )
        # 1. Long documents divided evenly, or whole ones only: in the smallest groups that compute about alike, in
        #    smaller ones, and in larger ones inside nodes.
        failed = 0
        for level in range(first, -1, -1):
            if failed == 2 or not self._worth(level):
                break
            best = self._best
            self._evenly(level, finest, few)
            failed = failed + 1 if self._best is best and best is not None else 0
        for level in range(first + 1, self._inside + 1):
            if self._worth(level):
                self._evenly(level, finest, few)
        # 2. Few documents cut, with exchanges hidden by two nano-batches; other groups as long as
        # they help.
        begin = first if self._best is None else self._level()
        levels = (
            sorted({min(begin, self._inside), self._inside, top})
            if many_ranks
            else range(begin, top + 1)
        )
        failed = 0
        for level in levels:
            across = many_ranks and level > self._inside
            if failed == 2 or not self._worth(level, ACROSS if across else 0.0):
                continue
            if (
                many_ranks
                and not across
                and (placing := self._placing(level)) is not None
                and placing.left
            ):
                continue
            best = self._best
            self._jointly(level, finest)
            failed = failed + 1 if self._best is best and best is not None else 0
        if self._best is None:
            return
        # 3. Variations of the best plan: two nano-batches, then coarser tolerances.
        even = {
            key[0]: each.choice.seconds
            for key, each in self._tried.items()
            if each is not None and each.evenly
        }
        near = [
            level for level, seconds in even.items() if seconds <= min(even.values()) * (1 + NEAR)
        ]
        for level in near:
            cheap = level <= self._inside or not many_ranks
            if max(self.partitions[level]) <= SAMPLED_RANKS:
                cheap |= even[level] <= self._best.choice.seconds * (1 + NEAR)
            if cheap and self._best.waited > GOOD_ENOUGH and self._worth(level):
                self._evenly(level, finest, many)
        for tolerance in coarser[:1] if many_ranks else coarser:
            best = self._best
            hides = len(best.nano_batches) == 2 and not best.evenly
            hides &= best.waited <= (COARSER_FROM_MANY if many_ranks else COARSER_FROM)
            quick = best.nano_batches[0].layout.ranks <= QUICK_RANKS
            if hides or best.waited <= GOOD_ENOUGH or not quick or not self._worth(self._level()):
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
        longest = float(self._seconds.max() / self._speeds.max()) / max(self.partitions[level])
        least = self._costs.until_done(self._evenly_s, longest)
        if least > limit:
            return least
        placing = self._placing(level)
        return inf if placing is None else self._until_placed(placing)

    def _placing(self, level: int) -> Placing | None:
        """Return the placing of documents in the groups of a level; None if they do not fit."""
        if level not in self._placings:
            sizes = self.partitions[level]
            place = partial(
                place_in_groups,
                self._lengths,
                self._seconds,
                sizes,
                self._settings.tokens_per_rank,
                self._speeds,
            )
            placing = place()
            if placing is not None and max(sizes) == 1 and self._costs.ranks_per_core > 1:
                # Idle ranks leave their cores to others, so as many ranks as there are cores should
                # be done last.
                uneven = place(fill_to=placing.slowest)
                if (
                    uneven is not None
                    and not uneven.left
                    and self._until_placed(uneven) < self._until_placed(placing)
                ):
                    placing = uneven
            self._placings[level] = placing
        return self._placings[level]

    def _until_placed(self, placing: Placing) -> float:
        """Return the seconds until the ranks of all groups have computed."""
        return self._costs.until_done(np.repeat(placing.seconds, placing.sizes), placing.slowest)

    def _worth(self, level: int, besides: float = 0.0) -> bool:
        """Return whether a level could be faster than the best plan so far.

        Args:
            besides: share by which steps are longer than computing at least.
        """
        if self._best is None:
            return True
        enough = self._best.choice.seconds * (1 - GOOD_ENOUGH)
        # A placing says nothing about the work of documents that fit in no group.
        is_placed = not self._best.placing.left
        if is_placed and level > max(self._level(), self._inside) and self._best.waited <= WAITING:
            # Larger groups exchange more, so they have to compute more evenly.
            enough = self._until_placed(self._best.placing) * (1 - GOOD_ENOUGH)
        return self._slowest(level, enough) * (1 + besides) < enough

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
        """Try to cut few documents, in the most nano-batches, and in fewer if few ranks hardly hide the exchange."""
        for count in reversed(self._choices.nano_batches):
            candidate = self._try(level, tolerance, count, evenly=False)
            if candidate is not None and (
                candidate.waited <= HARDLY_HIDDEN or self._settings.ranks > FEW_RANKS
            ):
                return

    def _try(self, level: int, tolerance: float, count: int, *, evenly: bool) -> Candidate | None:
        """Plan once, and keep the plan if it is the best so far."""
        key = (level, tolerance, count, evenly)
        if key not in self._tried:
            self._tried[key] = candidate = self.planned(
                level, tolerance, count, evenly=evenly, sampled=True
            )
            self._best = min(
                (one for one in (self._best, candidate) if one is not None),
                key=_seconds,
                default=None,
            )
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
        if placing is None or (
            evenly and self._moves(placing) > MOST_MOVES * self._settings.ranks**0.5
        ):
            return None
        if (
            most == 1
            and (not evenly or count != min(self._choices.nano_batches))
            and not placing.left
        ):
            return None
        chosen, part = replace(self._settings, balance_tolerance=tolerance), placing
        if sampled:
            part, chosen = self._sample(placing, chosen)
        nano_batches = nano_batches_in_groups(
            self._lengths, part, chosen, self._costs, count, evenly=evenly
        )
        if nano_batches is None:
            return None
        return self._candidate(nano_batches, placing, tolerance, chosen, evenly=evenly)

    def _moves(self, placing: Placing) -> int:
        """Return about how many moves of K/V rows there are if groups of several nodes divide documents evenly."""
        groups = zip(
            placing.documents,
            placing.sizes,
            placing.seconds * LONG_SHARE * self._ranks_of_node,
            strict=True,
        )
        return sum(
            2 * size**2 * int((self._seconds[documents] > long).sum())
            for documents, size, long in groups
            if size > self._ranks_of_node
        )

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
        nodes = np.array(settings.node_of_ranks)[np.repeat(kept, placing.sizes)]
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
        nodes = settings.node_of_ranks
        count = partial(count_plan, bytes_per_value=settings.bytes_per_value, nodes=nodes)
        counted = [
            {kind: count(plan, kind) for kind, plan in nano.plans.items()} for nano in nano_batches
        ]
        step, stages = self._fastest(nano_batches, counted, settings, (None, 1))
        choice = PlanChoice(
            max(placing.sizes), len(nano_batches), tolerance, step.seconds, attention=()
        )
        waited = float(step.waited.max()) / step.seconds
        return Candidate(placing, evenly, nano_batches, counted, stages, choice, step, waited)

    def _fastest(
        self,
        nano_batches: Sequence[NanoBatch],
        counted: Sequence[dict[AttentionKind, CountedPlan]],
        settings: PlanSettings,
        options: Sequence[int | None],
    ) -> tuple[Walked, int | None]:
        """Return the fastest of some numbers of stages, with the step that is predicted for it."""
        layouts = [nano.layout for nano in nano_batches]
        nodes = settings.node_of_ranks
        steps: dict[tuple[int, ...], tuple[Walked, int | None]] = {}
        for option in options:
            count, together = option or usual_stages(len(nano_batches)), option is not None
            staged = [
                {
                    kind: in_stages(
                        plan, settings.buffer_rows(kind), stages=count, together=together
                    )
                    for kind, plan in nano.items()
                }
                for nano in counted
            ]
            stages = tuple(plan.stages for nano in staged for plan in nano.values())
            if stages not in steps:
                steps[stages] = predict_step(staged, layouts, self._costs, nodes), option
        return min(steps.values(), key=lambda each: each[0].seconds)

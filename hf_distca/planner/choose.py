"""Search for the fastest plan of one micro-batch, by predicted seconds.

```
 document lengths
    │  1. place   Documents go into groups of ranks: single ranks, pairs, …, nodes, pairs of nodes,
    │             …, all ranks. Groups exchange nothing with each other. Smaller groups exchange
    │             less, larger groups compute more evenly. So a placing is dropped if smaller
    │             groups compute about as evenly.
    │  2. list    A candidate is a placing, a division of documents inside groups, a tolerance and
    │             a number of nano-batches. Its bound is the time that the slowest group computes,
    │             with the kernel calls that it makes in any case: one of a layer, two if documents
    │             are cut. No plan of the candidate is faster.
    │  3. search  Lowest bound first: make the plan, predict its step, keep the fastest. Stop when
    │             the next bound is not below the fastest step so far.
    │  4. finish  The fastest plan gets the number of stages that is predicted to be fastest.
    ▼
  plan
```

A layout that the settings name is not searched for: its candidates differ in tolerance and in the
number of nano-batches. Every rank finds the same plan, since predictions depend on lengths and
settings alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, sqrt
from operator import attrgetter
from typing import Literal

import numpy as np

from hf_distca.plan import AttentionKind, MicroBatchPlan, NanoBatch, PlanChoice
from hf_distca.plan.arrays import FloatArray, IntArray
from hf_distca.plan.nodes import node_sizes
from hf_distca.plan.stages import usual_stages
from hf_distca.planner.build import (
    finished,
    left_in_place,
    lengths_of,
    nano_batches_as_set,
    nano_batches_placed,
    packed_in_order,
)
from hf_distca.planner.division import LONG_SHARE
from hf_distca.planner.layout import check_capacity
from hf_distca.planner.prefix_trees import PrefixTrees, seconds_of
from hf_distca.planner.rank_groups import (
    Placing,
    joined_nodes,
    nano_batches_in_groups,
    partitions,
    place_in_groups,
    place_on_ranks,
)
from hf_distca.planner.settings import UNBALANCED, PlanSettings
from hf_distca.predict.counts import CountedPlan, count_nano_batches
from hf_distca.predict.walk import Walked, in_stages, predict_step

GOOD_ENOUGH = 0.01
"""A plan that saves less than this share of a step is not looked for: predictions are wrong by more
than that."""
FEW_WAITS = 0.1
"""Share of a step up to which waits of two nano-batches are few. Slower links make two of them
worse than one, which may move fewer rows."""
SAVED_BY_ONE = 0.02
"""Share of a step that one nano-batch saves at most where two of them have few waits: kernel calls,
and cuts of documents."""
HARDLY_WAITS = 0.002
"""Share of a step up to which its waits are not worth further stages."""
MOST_MOVES = 4096
"""Most moves of K/V rows, from a segment to a rank, over the root of the number of ranks, for which
documents are divided over all ranks of several nodes. Planning more moves takes longer than all
other plans."""
OTHER_STAGES: Mapping[int, Sequence[int]] = {1: (2, 8), 2: (2,)}
"""By number of nano-batches: numbers of stages that are tried for the fastest plan, besides one and
the usual number. Two nano-batches hide exchanges already, so many stages cost more than they
hide."""

Division = Literal["over all", "over few", "as set"]
"""How long documents of a group are divided: over all of its ranks, or over few, see
`hf_distca.planner.division`; or with the layout that the settings name."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """Plan that may be made, and the least seconds that its step can take.

    Attributes:
        placing: documents of each group of ranks.
        bound: seconds that the slowest group computes, with the kernel calls that it makes in any
            case.
        division: how a group divides its documents over its ranks.
        tolerance: how far a rank's core attention may exceed the mean, as a fraction of the mean.
        nano_batches: number of nano-batches.
    """

    placing: Placing
    bound: float
    division: Division
    tolerance: float
    nano_batches: int


@dataclass(frozen=True, eq=False)
class PlannedCandidate:
    """Plan of a candidate with its predicted step.

    Attributes:
        nano_batches: their plans are not in stages yet.
        counts: for each nano-batch, the counts of its plans by kind of attention.
        stages: approximate number of stages that is fastest; None for the usual number.
        step: the predicted step.
    """

    candidate: Candidate
    nano_batches: tuple[NanoBatch, ...]
    counts: list[dict[AttentionKind, CountedPlan]]
    stages: int | None
    step: Walked

    @property
    def seconds(self) -> float:
        """Predicted seconds of the step."""
        return self.step.seconds


def choose(
    lengths: IntArray, settings: PlanSettings, trees: PrefixTrees | None = None
) -> MicroBatchPlan:
    """Plan a micro-batch with the least predicted time.

    Args:
        trees: prefix trees, each laid out as one document; None without prefix sharing.

    Raises:
        ValueError: see `plan_micro_batch`.
    """
    as_set = partial(nano_batches_as_set, lengths, trees=trees)
    search = _Search(lengths, settings, as_set, trees)
    if settings.document_layout == "auto":
        check_capacity(lengths, settings.ranks, settings.rows_per_rank)
        listed = search.in_groups()
    elif settings.document_layout == "whole":
        listed = [*search.whole_documents(), *search.as_set()]
    else:
        listed = search.as_set()
    fastest = fastest_of(listed, search.planned, search.least_seconds)
    if fastest is None:  # no group can be laid out
        fastest = fastest_of(search.as_set(), search.planned)
    assert fastest is not None
    return search.finished(fastest, packed_in_order(lengths, settings, trees))


def choose_placed(rank_lengths: Sequence[Sequence[int]], settings: PlanSettings) -> MicroBatchPlan:
    """Plan documents that stay on the ranks where they lie, with the least predicted time.

    Args:
        rank_lengths: for each rank, lengths of its documents in the order of its rows.
    """
    fixed_nano_batches = partial(nano_batches_placed, rank_lengths)
    search = _Search(lengths_of(rank_lengths), settings, fixed_nano_batches)
    fastest = fastest_of(search.as_set(), search.planned)
    assert fastest is not None
    return search.finished(fastest, left_in_place(rank_lengths, settings))


def fastest_of(
    listed: Iterable[Candidate],
    plan: Callable[[Candidate], PlannedCandidate | None],
    least_seconds: Callable[[Candidate], float] = attrgetter("bound"),
) -> PlannedCandidate | None:
    """Plan candidates from the lowest bound on, until no further one can be faster.

    Of candidates with equal bounds or seconds, the first is planned first or taken.

    Args:
        plan: makes the plan of a candidate and predicts its step; None if no such plan exists.
        least_seconds: seconds that a candidate takes at least, after what has been planned.

    Returns:
        None if no candidate can be planned.
    """
    fastest: PlannedCandidate | None = None
    for candidate in sorted(listed, key=attrgetter("bound")):
        if fastest is not None and candidate.bound >= fastest.seconds * (1 - GOOD_ENOUGH):
            break
        if fastest is not None and least_seconds(candidate) >= fastest.seconds * (1 - GOOD_ENOUGH):
            continue
        planned = plan(candidate)
        if planned is not None and (fastest is None or planned.seconds < fastest.seconds):
            fastest = planned
    return fastest


def _key(candidate: Candidate) -> tuple[int, Division, float, int]:
    """Return what tells a candidate from the others of a search."""
    placing = id(candidate.placing)
    return placing, candidate.division, candidate.tolerance, candidate.nano_batches


def _computed(step: Walked) -> float:
    """Return the seconds that the slowest rank computes."""
    return float((step.attention + step.other).max())


class _Search:
    """Candidates for one micro-batch, and their plans.

    Args:
        settings: with the costs by which steps are predicted.
        as_set: makes nano-batches with the layout of the settings, from settings with a tolerance
            and with or without two nano-batches.
    """

    def __init__(
        self,
        lengths: IntArray,
        settings: PlanSettings,
        as_set: Callable[[PlanSettings], tuple[NanoBatch, ...]],
        trees: PrefixTrees | None = None,
    ) -> None:
        costs = settings.costs
        assert costs is not None
        self._trees = trees
        self._lengths = lengths
        self._costs = costs
        self._as_set = as_set
        self._settings = settings
        self._node_sizes = node_sizes(settings.ranks, settings.ranks_per_node)
        self._speeds: FloatArray = 1 / np.array(costs.slowness or (1.0,) * settings.ranks)
        self._seconds = seconds_of(lengths, costs, trees)
        # Seconds that every rank computes if all ranks finish together.
        self._even_share = float(self._seconds.sum() / self._speeds.sum())
        self._steps: dict[tuple[int, Division, float, int], Walked] = {}  # that were predicted

    # 1. Placings of documents in groups of ranks.

    def _placings(self) -> Iterator[Placing]:
        """Yield the placings of all documents, in groups of growing size."""
        yield from self._whole_placings()
        sizes_of_groups = partitions(self._node_sizes)
        inside_nodes = [sizes for sizes in sizes_of_groups if max(sizes) <= max(self._node_sizes)]
        yield from self._placed_in(inside_nodes)
        # As few nodes as documents need are joined too.
        sizes_of_groups = sizes_of_groups[len(inside_nodes) :]
        if len(self._node_sizes) > 2:
            joined_sizes = joined_nodes(
                self._lengths,
                self._seconds,
                self._node_sizes,
                self._settings.rows_per_rank,
                self._speeds,
            )
            known = (*inside_nodes, *sizes_of_groups)
            if joined_sizes is not None and joined_sizes not in known:
                sizes_of_groups.append(joined_sizes)
        yield from self._placed_in(sorted(sizes_of_groups, key=max))

    def _placed_in(self, sizes_of_groups: Iterable[tuple[int, ...]]) -> Iterator[Placing]:
        """Yield the placings of documents in groups of several ranks in which they fit."""
        for sizes in sizes_of_groups:
            placing = self._placed(sizes) if max(sizes) > 1 else None
            if placing is not None:
                yield placing

    def _placed(self, sizes: tuple[int, ...], fill_to: float = 0.0) -> Placing | None:
        """Return the placing of documents in groups; None if they do not fit."""
        return place_in_groups(
            self._lengths,
            self._seconds,
            sizes,
            self._settings.rows_per_rank,
            self._speeds,
            fill_to=fill_to,
        )

    def _whole_placings(self) -> list[Placing]:
        """Return the placings of whole documents on single ranks."""
        ranks = self._settings.ranks
        placing = self._placed((1,) * ranks)
        if placing is None:
            return []
        if placing.unplaced:
            # Equal work leaves no room for some documents: equal tokens may.
            even_tokens = place_on_ranks(
                self._lengths,
                self._seconds,
                ranks,
                self._settings.rows_per_rank,
                self._speeds,
            )
            return [placing] if even_tokens is None else [even_tokens, placing]
        if self._costs.ranks_per_core > 1:
            # A rank that has finished leaves its core to the others. So no core is idle if the last
            # ranks, one for each core, finish together.
            filled = self._placed((1,) * ranks, fill_to=placing.slowest)
            if filled is not None and not filled.unplaced:
                return [min(placing, filled, key=self._bound)]
        return [placing]

    def _bound(self, placing: Placing) -> float:
        """Return the least seconds of a step in which the ranks of all groups have computed.

        Of a document that is cut, a rank computes rows in two kernel calls of a layer: those that
        read its own keys, and those that read the keys of other ranks.
        """
        fixed = self._seconds_of_calls(2 if self._may_have_cuts(placing) else 1)
        work = np.repeat(placing.seconds, placing.sizes) + fixed
        # A placing says nothing about the work of documents that fit in no group.
        return max(self._costs.until_done(work, placing.slowest + fixed), self._even_share + fixed)

    def _seconds_of_calls(self, kernel_calls: int) -> float:
        """Return the seconds of a number of kernel calls in each layer on the fastest rank."""
        return self._costs.calls(kernel_calls) * min(self._costs.slowness, default=1.0)

    def _even_placings(self) -> list[Placing]:
        """Return placings that compute more evenly than all placings in smaller groups."""
        even = []
        lowest = inf
        # No larger groups compute more evenly than all ranks together.
        least = self._even_share + self._seconds_of_calls(2)
        for placing in self._placings():
            bound = self._bound(placing)
            if bound >= lowest * (1 - GOOD_ENOUGH):
                continue
            even.append(placing)
            # A bound is no measure for larger groups if it leaves documents out, or if documents
            # have too many moves to be divided over all ranks of their groups.
            if not placing.unplaced and not self._has_too_many_moves(placing):
                lowest = bound
                if least >= lowest * (1 - GOOD_ENOUGH):
                    break
        return even

    # 2. Candidates.

    def in_groups(self) -> list[Candidate]:
        """List candidates whose documents lie inside groups of ranks, small groups first.

        Documents that are divided over all ranks are planned in the fewest nano-batches: all ranks
        exchange alike, and hide the exchange in stages. A coarse tolerance saves rows between
        nodes.
        """
        finest = self._settings.tolerances[0]
        coarsest = self._settings.tolerances[-1]
        fewest, most = min(self._settings.nano_batches), max(self._settings.nano_batches)
        placings = self._even_placings()
        most_even = min(placings, key=self._bound, default=None)
        listed = []
        for placing in placings:
            spans_nodes = max(placing.sizes) > max(self._node_sizes)
            tolerances = (finest, coarsest) if spans_nodes else (finest,)
            options: list[tuple[Division, float, int]] = [
                ("over all", tolerance, fewest) for tolerance in tolerances
            ]
            # With too many moves a plan takes long, so only the most even placing is tried.
            is_tried = placing is most_even or not self._has_too_many_moves(placing)
            if max(placing.sizes) > 1 and is_tried:
                # Two nano-batches come first: they tell how little one of them could gain.
                options.append(("over few", finest, most))
                options += [("over few", tolerance, fewest) for tolerance in tolerances]
            bound = self._bound(placing)
            listed += [
                Candidate(placing, bound, division, tolerance, count)
                for division, tolerance, count in dict.fromkeys(options)
            ]
        return listed

    def whole_documents(self) -> list[Candidate]:
        """List the candidates with whole documents on single ranks."""
        fewest = min(self._settings.nano_batches)
        finest = self._settings.tolerances[0]
        return [
            Candidate(placing, self._bound(placing), "over all", finest, fewest)
            for placing in self._whole_placings()
            if not self._may_have_cuts(placing)
        ]

    def as_set(self) -> list[Candidate]:
        """List candidates with the layout of the settings.

        Candidates that move nothing for balance come first.
        """
        placing = Placing.of_all(self._seconds, self._speeds)
        bound = self._even_share + self._seconds_of_calls(1)
        tolerances = self._settings.tolerances
        # Where only the tolerance of the settings may be chosen, every plan keeps to it.
        if len(tolerances) > 1:
            tolerances = (UNBALANCED, *tolerances)
        return [
            Candidate(placing, bound, "as set", tolerance, count)
            for tolerance in tolerances
            for count in self._settings.nano_batches
        ]

    @staticmethod
    def _may_have_cuts(placing: Placing) -> bool:
        """Return whether documents may be cut: not if each lies whole on a single rank."""
        return max(placing.sizes) > 1 or bool(placing.unplaced)

    # 3. Plans of candidates.

    def planned(self, candidate: Candidate) -> PlannedCandidate | None:
        """Plan a candidate and predict its step; None if no such plan exists."""
        nano_batches = self._nano_batches(candidate)
        if nano_batches is None:
            return None
        planned = PlannedCandidate(candidate, nano_batches, *self._predicted(nano_batches))
        self._steps[_key(candidate)] = planned.step
        return planned

    def least_seconds(self, candidate: Candidate) -> float:
        """Return the seconds that a candidate takes at least, by similar plans that were made.

        Where two nano-batches hardly wait, one of them saves little. A coarser tolerance can save
        waits alone: what it tolerates counts as longer computation.
        """
        finest = self._settings.tolerances[0]
        least = candidate.bound
        two = self._steps.get(_key(replace(candidate, tolerance=finest, nano_batches=2)))
        hides = two is not None and two.seconds <= _computed(two) * (1 + FEW_WAITS)
        if (
            two is not None
            and hides
            and candidate.nano_batches == 1
            and candidate.tolerance == finest
        ):
            least = max(least, two.seconds * (1 - SAVED_BY_ONE))
        if candidate.tolerance > finest:
            finer = self._steps.get(_key(replace(candidate, tolerance=finest))) or two
            if finer is not None:
                longer = (candidate.tolerance - finest) * float(finer.attention.mean())
                least = max(least, _computed(finer) + longer)
        return least

    def _predicted(
        self, nano_batches: Sequence[NanoBatch]
    ) -> tuple[list[dict[AttentionKind, CountedPlan]], int | None, Walked]:
        """Return counts of nano-batches, the faster number of stages, and the predicted step."""
        settings = self._settings
        counts = count_nano_batches(nano_batches, settings.bytes_per_value, settings.node_of_ranks)
        step, stages = self._fastest_stages(nano_batches, counts, (None, 1))
        return counts, stages, step

    def _nano_batches(self, candidate: Candidate) -> tuple[NanoBatch, ...] | None:
        """Lay out and balance the documents of a candidate, in one stage.

        None if they cannot be.
        """
        settings = replace(self._settings, balance_tolerance=candidate.tolerance)
        count = candidate.nano_batches
        if candidate.division == "as set":
            planned = self._as_set(replace(settings, ping_pong=count == 2))
            # Documents that form one nano-batch only are planned by the candidate with one.
            fewest = min(self._settings.nano_batches)
            return planned if len(planned) == count or count == fewest else None
        over_all = candidate.division == "over all"
        if over_all and self._has_too_many_moves(candidate.placing):
            return None
        return nano_batches_in_groups(
            self._lengths,
            candidate.placing,
            settings,
            self._costs,
            count,
            over_all=over_all,
            trees=self._trees,
        )

    def _has_too_many_moves(self, placing: Placing) -> bool:
        """Return whether documents have too many moves to be divided over all ranks of groups."""
        return self._moves(placing) > MOST_MOVES * sqrt(self._settings.ranks)

    def _moves(self, placing: Placing) -> int:
        """Return about how many moves of K/V rows there are between the ranks of several nodes.

        Documents are then divided over all ranks of their groups.
        """
        ranks_of_node = max(self._node_sizes)
        moves = 0
        groups = zip(placing.documents, placing.sizes, placing.seconds, strict=True)
        for documents, size, seconds in groups:
            if size > ranks_of_node:
                long = self._seconds[documents] > LONG_SHARE * ranks_of_node * seconds
                # A long document has two segments on each rank, which all ranks read.
                moves += 2 * size**2 * int(long.sum())
        return moves

    def _fastest_stages(
        self,
        nano_batches: Sequence[NanoBatch],
        counts: Sequence[Mapping[AttentionKind, CountedPlan]],
        options: Iterable[int | None],
    ) -> tuple[Walked, int | None]:
        """Return the fastest of some numbers of stages, with its predicted step.

        More stages save waits alone, so they are not tried where fewer hardly wait.

        Args:
            options: approximate numbers of stages; None for the usual number.
        """
        layouts = [nano.layout for nano in nano_batches]
        usual = usual_stages(len(nano_batches))
        steps: dict[tuple[int, ...], tuple[Walked, int | None]] = {}
        for option in sorted(options, key=lambda option: option or usual):
            staged = []
            for counts_of_kinds in counts:
                staged_of_kinds = {
                    kind: in_stages(
                        plan_counts,
                        self._settings.buffer_rows(kind),
                        stages=option or usual,
                        together=option is not None,
                    )
                    for kind, plan_counts in counts_of_kinds.items()
                }
                staged.append(staged_of_kinds)
            # Small exchanges take fewer stages than asked for: equal steps are predicted once.
            stages = tuple(
                plan_counts.stages
                for counts_of_kinds in staged
                for plan_counts in counts_of_kinds.values()
            )
            if stages not in steps:
                step = predict_step(staged, layouts, self._costs, self._settings.node_of_ranks)
                steps[stages] = step, option
                if step.seconds <= _computed(step) * (1 + HARDLY_WAITS):
                    break
        return min(steps.values(), key=lambda step_and_stages: step_and_stages[0].seconds)

    # 4. The plan that is taken.

    def finished(self, fastest: PlannedCandidate, packed: NanoBatch) -> MicroBatchPlan:
        """Return the plan of a candidate in the number of stages that is fastest.

        Args:
            packed: the same documents, with nothing moved for balance.
        """
        nano_batches = fastest.nano_batches
        options = (fastest.stages, *OTHER_STAGES[len(nano_batches)])
        step, stages = self._fastest_stages(nano_batches, fastest.counts, options)
        _, _, packed_step = self._predicted((packed,))
        choice = PlanChoice(
            group=max(fastest.candidate.placing.sizes),
            nano_batches=len(nano_batches),
            tolerance=fastest.candidate.tolerance,
            seconds=step.seconds,
            attention=tuple(step.attention.tolist()),
            packed_seconds=packed_step.seconds,
        )
        return finished(nano_batches, packed, self._settings, stages, choice, fastest.counts)

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
    │             are cut. Exchanges between nodes add a little. No plan of the candidate is faster.
    │  3. search  Lowest bound first: lay the documents out, which gives a higher bound. If that is
    │             the lowest, make the plan, predict its step, and keep the fastest. If a plan
    │             waits, list the candidates that would wait less. Stop when the next bound is not
    │             below the fastest step so far.
    │  4. finish  The fastest plan gets the number of stages that is predicted to be fastest,
    │             if it waits.
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
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf, sqrt
from typing import Literal, Protocol

import numpy as np

from hf_distca.plan import AttentionKind, MicroBatchPlan, NanoBatch, PlanChoice
from hf_distca.plan.arrays import FloatArray, IntArray
from hf_distca.plan.intervals import local_tasks
from hf_distca.plan.nodes import node_sizes
from hf_distca.plan.stages import usual_stages
from hf_distca.planner.build import (
    LaidOut,
    balanced,
    finished,
    lay_out_as_set,
    lay_out_placed,
    left_in_place,
    lengths_of,
    packed_in_order,
)
from hf_distca.planner.division import LONG_SHARE
from hf_distca.planner.layout import check_capacity
from hf_distca.planner.layout_bounds import work_of
from hf_distca.planner.prefix_trees import PrefixTrees, seconds_of
from hf_distca.planner.rank_groups import (
    ALIKE,
    Placing,
    balance_in_groups,
    joined_nodes,
    lay_out_in_groups,
    partitions,
    place_in_groups,
    place_on_ranks,
    slack_of_groups,
)
from hf_distca.planner.settings import UNBALANCED, PlanSettings
from hf_distca.predict.counts import CountedPlan, count_nano_batches
from hf_distca.predict.walk import Walked, in_stages, predict_step

GOOD_ENOUGH = 0.004
"""A plan that saves less than this share of a step is not looked for, nor are further stages for
waits of up to this share."""
TOO_UNEVEN = 2.0
"""Seconds of the ranks with the costliest document, over those of ranks that finish together, from
which on documents are not placed so. Over links of 1 GB/s, plans of up to 1.6 were the fastest."""
FEW_WAITS = 0.02
"""Share of a step up to which waits are few. A coarser tolerance, which saves waits alone, is not
tried then."""
NEAR_BOUND = 0.036
"""Share by which a step may exceed its bound where documents are divided over all ranks of several
nodes. Up to it, division over few ranks was faster by less than a hundredth."""
HIDDEN = 0.1
"""Share of a step up to which two nano-batches hide exchanges between nodes. Up to it, one
nano-batch over few ranks was never faster."""
MANY_RANKS = 128
"""Ranks beyond which planning takes long: smaller groups and one nano-batch are then preferred."""
EVEN_ENOUGH = 0.02
"""Share by which a placing of many ranks may be less even than the most even one."""
MOST_MOVES = 4096
"""Most moves of K/V rows, from a segment to a rank, over the root of the number of ranks, for which
documents are divided over all ranks of several nodes. Planning more moves takes longer than all
other plans."""
OTHER_STAGES: Mapping[int, Sequence[int]] = {1: (2, 8), 2: (2,)}
"""By number of nano-batches: numbers of stages that are tried for the fastest plan, besides one and
the usual number. Two nano-batches hide exchanges already, so many stages cost more than they
hide."""

CountsOfKinds = Mapping[AttentionKind, CountedPlan]
"""Counts of the plans of a nano-batch."""
Division = Literal["over all", "over few", "as set"]
"""How long documents of a group are divided: over all of its ranks, or over few, see
`hf_distca.planner.division`; or with the layout that the settings name."""
ACROSS_NODES: Mapping[Division, float] = {"over all": 0.007, "over few": 0.012, "as set": 0.0}
"""Least share by which a step exceeds the bound of its layout, by the division of documents, where
groups have several nodes and nodes have several ranks. In 2,000 plans for models from 1B to 70B,
with windows and without, over links of 50 and 6 GB/s, no step exceeded its bound by less."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """Plan that may be made, and the least seconds that its step can take.

    Attributes:
        placing: documents of each group of ranks.
        bound: seconds that the slowest group computes, with the kernel calls that it makes in any
            case, and with what exchanges between nodes add at least.
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

    @property
    def is_balanced_by_moves(self) -> bool:
        """Whether a rank computes rows that it does not hold."""
        return any(
            len(plan.tasks) > len(local_tasks(plan.layout.segments))
            for nano_batch in self.nano_batches
            for plan in nano_batch.plans.values()
        )


def choose(
    lengths: IntArray, settings: PlanSettings, trees: PrefixTrees | None = None
) -> MicroBatchPlan:
    """Plan a micro-batch with the least predicted time.

    Args:
        trees: prefix trees, each laid out as one document; None without prefix sharing.

    Raises:
        ValueError: see `plan_micro_batch`.
    """
    as_set = partial(lay_out_as_set, lengths, trees=trees)
    search = _Search(lengths, settings, as_set, trees)
    if settings.document_layout == "auto":
        check_capacity(lengths, settings.ranks, settings.rows_per_rank)
        listed = search.in_groups()
    elif settings.document_layout == "whole":
        listed = [*search.whole_documents(), *search.as_set()]
    else:
        listed = search.as_set()
    fastest = fastest_of(listed, search)
    if fastest is None:  # no group can be laid out
        fastest = fastest_of(search.as_set(), search)
    assert fastest is not None
    return search.finished(fastest, packed_in_order(lengths, settings, trees))


def choose_placed(rank_lengths: Sequence[Sequence[int]], settings: PlanSettings) -> MicroBatchPlan:
    """Plan documents that stay on the ranks where they lie, with the least predicted time.

    Args:
        rank_lengths: for each rank, lengths of its documents in the order of its rows.
    """
    search = _Search(lengths_of(rank_lengths), settings, partial(lay_out_placed, rank_lengths))
    fastest = fastest_of(search.as_set(), search)
    assert fastest is not None
    return search.finished(fastest, left_in_place(rank_lengths, settings))


class Planner(Protocol):
    """What `fastest_of` asks of a search."""

    def least_seconds(self, candidate: Candidate) -> float:
        """Return the seconds of any plan of a candidate's layout; infinite without a layout."""
        ...

    def planned(self, candidate: Candidate) -> PlannedCandidate | None:
        """Plan a candidate and predict its step; None if no such plan exists."""
        ...

    def over_few(self, candidate: Candidate, bound: float, seconds: float) -> list[Candidate]:
        """List the candidate over few ranks that may be faster than one that takes so long."""
        ...

    def waiting_less(self, planned: PlannedCandidate) -> list[Candidate]:
        """List the candidates that may wait less than a plan."""
        ...


def fastest_of(listed: Iterable[Candidate], planner: Planner) -> PlannedCandidate | None:
    """Plan candidates from the lowest bound on, until no further one can be faster.

    A candidate's documents are laid out when its bound is the lowest one. The layout gives a higher
    bound, and the candidate is planned when that is the lowest. Of candidates with equal bounds or
    seconds, the first is planned first or taken.

    Returns:
        None if no candidate can be planned.
    """
    fastest: PlannedCandidate | None = None
    limit = inf
    numbers = count()
    waiting = [(each.bound, next(numbers), False, each) for each in listed]
    heapify(waiting)
    while waiting:
        bound, number, is_laid_out, candidate = heappop(waiting)
        if bound >= limit:
            break
        seconds = inf
        if not is_laid_out:
            seconds = max(bound, planner.least_seconds(candidate))
            heappush(waiting, (seconds, number, True, candidate))
        elif (planned := planner.planned(candidate)) is not None:
            seconds = planned.seconds
            if fastest is None or seconds < fastest.seconds:
                fastest = planned
                limit = seconds * (1 - GOOD_ENOUGH)
            # They have about the same layout.
            for each in planner.waiting_less(planned):
                heappush(waiting, (bound, next(numbers), False, each))
        for each in planner.over_few(candidate, bound, seconds):
            heappush(waiting, (each.bound, next(numbers), False, each))
    return fastest


def _layout_key(candidate: Candidate) -> tuple[int, Division, int]:
    """Return what tells the layout of a candidate from the others of a search."""
    return id(candidate.placing), candidate.division, candidate.nano_batches


class _Search:
    """Candidates for one micro-batch, and their plans.

    Args:
        settings: with the costs by which steps are predicted.
        as_set: lays documents out as the settings name it, from settings with or without two
            nano-batches.
    """

    def __init__(
        self,
        lengths: IntArray,
        settings: PlanSettings,
        as_set: Callable[[PlanSettings], list[LaidOut]],
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
        self._layouts: dict[tuple[int, Division, int], list[LaidOut] | None] = {}
        self._has_many_ranks = settings.ranks > MANY_RANKS
        self._smallest_even: Placing | None = None
        # What tells candidates that followed from others.
        self._followed: set[tuple[int, Division, int, float]] = set()

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
        costliest = float(self._seconds.max() / self._speeds.max())
        for sizes in sizes_of_groups:
            # Alone, the costliest document keeps the ranks of the largest group busy for so long.
            if max(sizes) == 1 or costliest > TOO_UNEVEN * self._even_share * max(sizes):
                continue
            placing = self._placed(sizes)
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
            if bound >= lowest * (1 - ALIKE):
                continue
            even.append(placing)
            # A bound is no measure for larger groups if it leaves documents out, or if documents
            # have too many moves to be divided over all ranks of their groups.
            if not placing.unplaced and not self._has_too_many_moves(placing):
                lowest = bound
                if least >= lowest * (1 - ALIKE):
                    break
        return even

    # 2. Candidates.

    def in_groups(self) -> list[Candidate]:
        """List candidates whose documents lie inside groups of ranks, small groups first.

        Documents that are divided over all ranks are planned in the fewest nano-batches: all ranks
        exchange alike, and hide the exchange in stages.
        """
        finest = self._settings.tolerances[0]
        fewest = min(self._settings.nano_batches)
        placings = self._even_placings()
        # Among many ranks, the smallest groups that are about as even as the most even ones.
        enough = min(map(self._bound, placings), default=0.0)
        enough *= 1 + EVEN_ENOUGH * self._has_many_ranks
        even = [placing for placing in placings if self._bound(placing) <= enough]
        self._smallest_even = min(even, key=lambda placing: max(placing.sizes), default=None)
        listed = []
        for placing in placings:
            bound = self._with_exchanges(self._bound(placing), placing, "over all")
            listed.append(Candidate(placing, bound, "over all", finest, fewest))
            if max(placing.sizes) > 1 and not self._spans_nodes(placing):
                listed.append(Candidate(placing, bound, "over few", finest, fewest))
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
        return PlannedCandidate(candidate, nano_batches, *self._predicted(nano_batches))

    def least_seconds(self, candidate: Candidate) -> float:
        """Return the seconds of any plan of a candidate's layout; infinite without a layout."""
        seconds = self.bound_of_layout(candidate)
        return self._with_exchanges(seconds, candidate.placing, candidate.division)

    def bound_of_layout(self, candidate: Candidate) -> float:
        """Return the seconds that ranks compute in any plan of a layout; infinite without one."""
        laid_out = self._laid_out(candidate)
        if laid_out is None:
            return inf
        layouts = [layout for _, layout in laid_out]
        nodes = self._settings.node_of_ranks
        work = work_of(layouts, self._costs, nodes, self._settings.bytes_per_value)
        return work.least_seconds(candidate.placing.sizes, self._slack(candidate), self._costs)

    def _with_exchanges(self, seconds: float, placing: Placing, division: Division) -> float:
        """Add what exchanges between nodes add at least to the seconds of a step."""
        if max(self._node_sizes) == 1 or not self._spans_nodes(placing):
            return seconds
        return seconds * (1 + ACROSS_NODES[division])

    def over_few(self, candidate: Candidate, bound: float, seconds: float) -> list[Candidate]:
        """List the candidate over few ranks that may be faster than one that takes so long.

        That is, where documents are divided over all ranks of several nodes.

        Args:
            bound: of the candidate, before these seconds were known.
        """
        placing = candidate.placing
        if candidate.division != "over all" or not self._spans_nodes(placing):
            return []
        # With too many moves a plan takes long, so only one placing is tried.
        has_too_many_moves = self._has_too_many_moves(placing)
        is_tried = placing is self._smallest_even or not has_too_many_moves
        is_near = max(self._node_sizes) > 1 and seconds <= bound * (1 + NEAR_BOUND)
        if is_near or not is_tried:
            return []
        # One nano-batch is planned faster, and hides exchanges in stages.
        first = min if has_too_many_moves and self._has_many_ranks else max
        nano_batches = first(self._settings.nano_batches)
        return self._new(replace(candidate, division="over few", nano_batches=nano_batches))

    def waiting_less(self, planned: PlannedCandidate) -> list[Candidate]:
        """List the candidates that may wait less than a plan.

        Over few ranks of several nodes two nano-batches hide exchanges, and one moves fewer rows.
        Over few ranks of a node one nano-batch makes fewer kernel calls, and two hide exchanges.
        """
        candidate = planned.candidate
        self._new(candidate)
        finest, coarsest = self._settings.tolerances[0], self._settings.tolerances[-1]
        fewest, most = min(self._settings.nano_batches), max(self._settings.nano_batches)
        spans_nodes = self._spans_nodes(candidate.placing)
        tolerance, nano_batches = candidate.tolerance, candidate.nano_batches
        if candidate.division == "over all" and spans_nodes:
            if planned.step.waits > FEW_WAITS and planned.is_balanced_by_moves:
                tolerance = coarsest
        elif candidate.division == "over few":
            if not spans_nodes:
                nano_batches = most
            elif planned.step.waits > HIDDEN:
                if nano_batches < most and tolerance == finest:
                    nano_batches = most
                else:
                    tolerance, nano_batches = coarsest, fewest
        return self._new(replace(candidate, tolerance=tolerance, nano_batches=nano_batches))

    def _new(self, candidate: Candidate) -> list[Candidate]:
        """List a candidate that follows from others, unless it was listed before."""
        key = *_layout_key(candidate), candidate.tolerance
        if key in self._followed:
            return []
        self._followed.add(key)
        return [candidate]

    def _spans_nodes(self, placing: Placing) -> bool:
        """Return whether a group has ranks of several nodes."""
        return max(placing.sizes) > max(self._node_sizes)

    def _slack(self, candidate: Candidate) -> FloatArray:
        """Return [groups] how far above its group's mean a rank of a candidate may be."""
        if candidate.division == "as set":
            return np.array([candidate.tolerance])
        return slack_of_groups(self._lengths, candidate.placing, candidate.tolerance, self._costs)

    def _predicted(
        self, nano_batches: Sequence[NanoBatch]
    ) -> tuple[list[dict[AttentionKind, CountedPlan]], int | None, Walked]:
        """Return counts of nano-batches, the faster number of stages, and the predicted step."""
        settings = self._settings
        counts = count_nano_batches(nano_batches, settings.bytes_per_value, settings.node_of_ranks)
        step, stages = self._fastest_stages(nano_batches, counts, (None, 1))
        if len(nano_batches) == 1 and step.waits > HIDDEN:
            more, many = self._fastest_stages(nano_batches, counts, OTHER_STAGES[1][-1:])
            if more.seconds < step.seconds:
                return counts, many, more
        return counts, stages, step

    def _laid_out(self, candidate: Candidate) -> list[LaidOut] | None:
        """Lay out the documents of a candidate; None if they cannot be."""
        key = _layout_key(candidate)
        if key not in self._layouts:
            self._layouts[key] = self._new_layouts(candidate)
        return self._layouts[key]

    def _new_layouts(self, candidate: Candidate) -> list[LaidOut] | None:
        """Lay out the documents of a candidate; None if they cannot be."""
        count = candidate.nano_batches
        if candidate.division == "as set":
            laid_out = self._as_set(replace(self._settings, ping_pong=count == 2))
            # Documents that form one nano-batch only are planned by the candidate with one.
            fewest = min(self._settings.nano_batches)
            return laid_out if len(laid_out) == count or count == fewest else None
        over_all = candidate.division == "over all"
        if over_all and self._has_too_many_moves(candidate.placing):
            return None
        return lay_out_in_groups(
            self._lengths,
            self._seconds,
            candidate.placing,
            self._settings,
            count,
            over_all=over_all,
            trees=self._trees,
        )

    def _nano_batches(self, candidate: Candidate) -> tuple[NanoBatch, ...] | None:
        """Lay out and balance the documents of a candidate, in one stage.

        None if they cannot be laid out.
        """
        laid_out = self._laid_out(candidate)
        if laid_out is None:
            return None
        settings = replace(self._settings, balance_tolerance=candidate.tolerance)
        if candidate.division == "as set":
            return balanced(laid_out, settings)
        slack = self._slack(candidate)
        return tuple(
            balance_in_groups(nano_batch, candidate.placing, settings, slack)
            for nano_batch in laid_out
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
        counts: Sequence[CountsOfKinds],
        options: Iterable[int | None],
    ) -> tuple[Walked, int | None]:
        """Return the fastest of some numbers of stages, with its predicted step.

        More stages save waits alone, so they are not tried where fewer hardly wait.

        Args:
            options: approximate numbers of stages; None for the usual number.
        """
        # Small exchanges take fewer stages than asked for: equal numbers are predicted once.
        counts_of_stages: dict[tuple[int, ...], tuple[list[CountsOfKinds], int | None]] = {}
        for option in options:
            staged = [
                self._staged(counts_of_kinds, option, len(counts)) for counts_of_kinds in counts
            ]
            stages = tuple(of_kind.stages for of_kinds in staged for of_kind in of_kinds.values())
            counts_of_stages.setdefault(stages, (staged, option))
        layouts = [nano.layout for nano in nano_batches]
        steps = []
        for stages in sorted(counts_of_stages):
            staged, option = counts_of_stages[stages]
            step = predict_step(staged, layouts, self._costs, self._settings.node_of_ranks)
            steps.append((step, option))
            if step.waits <= GOOD_ENOUGH:
                break
        return min(steps, key=lambda step_and_option: step_and_option[0].seconds)

    def _staged(
        self, counts: CountsOfKinds, option: int | None, nano_batches: int
    ) -> CountsOfKinds:
        """Return the counts of the plans of a nano-batch in an approximate number of stages.

        Args:
            option: as in `_fastest_stages`.
        """
        return {
            kind: in_stages(
                plan_counts,
                self._settings.buffer_rows(kind),
                stages=option or usual_stages(nano_batches),
                together=option is not None,
            )
            for kind, plan_counts in counts.items()
        }

    # 4. The plan that is taken.

    def finished(self, fastest: PlannedCandidate, packed: NanoBatch) -> MicroBatchPlan:
        """Return the plan of a candidate in the number of stages that is fastest.

        Args:
            packed: the same documents, with nothing moved for balance.
        """
        nano_batches = fastest.nano_batches
        step, stages = fastest.step, fastest.stages
        if step.waits > GOOD_ENOUGH:
            options = OTHER_STAGES[len(nano_batches)]
            other_step, other_stages = self._fastest_stages(nano_batches, fastest.counts, options)
            if other_step.seconds < step.seconds:
                step, stages = other_step, other_stages
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

"""Prediction of layers that mix rows in order, and of the exchanges of cut documents.

Arrays are [ranks] seconds unless they say otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Direction, Layout
from hf_distca.plan.arrays import FloatArray, IntArray
from hf_distca.plan.cuts import complete_segments, linked_pairs, predecessors, sent_once
from hf_distca.plan.intervals import row_counts
from hf_distca.predict.seconds import Links, MixingCosts


@dataclass(frozen=True, eq=False)
class CountedCuts:
    """Counts of a nano-batch on which the seconds of mixing layers depend, [ranks] each."""

    rows: IntArray
    cut: IntArray  # rows of segments that send or need states
    continued: IntArray  # rows of segments that start from a state of another rank
    segments: IntArray  # segments of cut documents and of prefix trees
    uncut_documents: IntArray
    # [2, ranks] within and between nodes: the larger number of halos that a rank sends and
    # receives.
    halos: IntArray
    states: IntArray  # [2, ranks] the same for pairs of A and B

    @property
    def runs(self) -> IntArray:
        """[ranks] runs of a recurrence's kernel on packed documents.

        All uncut documents of a rank share one run.
        """
        return self.segments + (self.uncut_documents > 0)

    def bytes_moved(self, halo: float, state: float) -> float:
        """Return the bytes of halos and states that the busiest rank exchanges in a forward.

        Args:
            halo: bytes of a halo.
            state: bytes of a pair of A and B.
        """
        return float((halo * self.halos + state * self.states).sum(axis=0).max())


def count_cuts(layout: Layout, nodes: Sequence[int]) -> CountedCuts:
    """Count the segments of a layout, and the messages between them.

    Args:
        nodes: [workers] node of each worker, ranks first.
    """
    ranks = layout.ranks
    rank = layout.segments["rank"]
    rows = row_counts(layout.segments)
    before = predecessors(layout)
    is_complete = complete_segments(layout, before)
    earlier, later = linked_pairs(before, is_complete)
    follows = np.flatnonzero(before >= 0)
    is_linked = np.zeros(len(rank), np.bool_)
    is_linked[earlier] = is_linked[later] = True
    is_whole = before < 0
    is_whole[before[follows]] = False

    def sums(values: IntArray | NDArray[np.bool_]) -> IntArray:
        """Return [ranks] the sum of a value of each segment."""
        return np.bincount(rank, values, ranks).astype(np.int64)

    holder, target = sent_once(earlier, rank[later], layout)
    node_of_workers = np.asarray(nodes)
    return CountedCuts(
        rows=layout.tokens,
        cut=sums(rows * is_linked),
        continued=sums(rows * ~is_complete),
        segments=sums(~is_whole),
        uncut_documents=sums(is_whole),
        halos=_messages(rank[before[follows]], rank[follows], ranks, node_of_workers),
        states=_messages(rank[holder], target, ranks, node_of_workers),
    )


def _messages(source: IntArray, target: IntArray, ranks: int, nodes: IntArray) -> IntArray:
    """Return [2, ranks] by link: the larger number of messages that each rank sends and receives.

    Args:
        source: [messages] sending rank.
        target: [messages] receiving rank; a message to the same rank does not travel.
        nodes: [workers] node of each worker.
    """
    travels = source != target
    # Messages inside a node are counted at [0, ranks), those between nodes at [ranks, 2 · ranks).
    link = np.where(nodes[source] == nodes[target], 0, ranks)[travels]
    sent = np.bincount(link + source[travels], minlength=2 * ranks)
    received = np.bincount(link + target[travels], minlength=2 * ranks)
    return np.maximum(sent, received).reshape(2, ranks)


@dataclass(frozen=True, eq=False)
class _Computation:
    """Seconds of the parts of a nano-batch's mixing layer, in the order of the forward."""

    before_mixing: FloatArray  # all rows before the convolution
    cut: FloatArray  # convolution and recurrence of cut documents
    uncut: FloatArray  # convolution and recurrence of documents that are not cut
    after_mixing: FloatArray  # all rows after the recurrence


@dataclass(frozen=True, eq=False)
class _Act:
    """Part of a nano-batch's mixing layer from one exchange to the next.

    Uncut documents wait for nothing, so they are computed where ranks would wait for states.
    """

    nano_batch: int
    seconds: FloatArray  # of the computation that needs the nano-batch's last exchange
    waits: bool  # whether there is such an exchange
    sent: FloatArray | None  # [2, ranks] bytes that are sent afterwards, by link
    uncut_before: FloatArray | float = 0.0  # of uncut documents before the wait
    uncut_after: FloatArray | float = 0.0  # of uncut documents after the sending


class MixingLayers:
    """Mixing layers between two layers with attention, in one direction on all ranks.

    Args:
        nano_batches: one or two, in the order of their rows.
        costs: of a layer's forward.
        layers: number of mixing layers for each layer with attention.
        launches: seconds of a layer's forward per nano-batch, whatever its size.
        factor: [ranks] time of computation in this direction on each rank, as a multiple of its
            costs.

    Attributes:
        computed: seconds of computation.
        waited: seconds of waits for exchanges in the last `walk`.
    """

    def __init__(
        self,
        nano_batches: Sequence[CountedCuts],
        costs: MixingCosts,
        layers: float,
        launches: float,
        links: Links,
        direction: Direction,
        factor: FloatArray,
    ) -> None:
        self._layers = layers
        self._links = links
        self._exchanges = any(counts.states.any() for counts in nano_batches)
        self.computed: FloatArray = np.zeros_like(factor)
        self.waited: FloatArray = np.zeros_like(factor)

        # Without cuts one call has the rows of all nano-batches, and is launched once.
        launch = launches if self._exchanges else launches / len(nano_batches)
        acts: list[list[_Act]] = []
        for index, counts in enumerate(nano_batches):
            computation = _computation(counts, costs, launch, factor)
            self.computed += layers * (
                computation.before_mixing
                + computation.cut
                + computation.uncut
                + computation.after_mixing
            )
            acts.append(_acts(index, counts, costs, computation, direction))
        # Nano-batches take turns; the second one begins the backward.
        if direction == "backward":
            acts.reverse()
        self._acts = [act for turn in zip(*acts, strict=True) for act in turn]

    def walk(self, clock: FloatArray) -> FloatArray:
        """Return the time after the layers on each rank, from the time before them."""
        if not self._exchanges:
            return clock + self.computed
        start = clock
        waited = np.zeros_like(clock)
        links_free = np.zeros((2, len(clock)))
        arrivals: dict[int, FloatArray] = {}  # of the last exchange of each nano-batch
        for act in self._acts:
            clock = clock + act.uncut_before
            if act.waits:
                arrival = arrivals[act.nano_batch]
                waited += np.maximum(arrival - clock, 0.0)
                clock = np.maximum(clock, arrival)
            clock = clock + act.seconds
            if act.sent is not None:
                arrivals[act.nano_batch] = self._send(clock, act.sent, links_free)
            clock = clock + act.uncut_after
        # One layer is walked; all layers take as long.
        self.waited = self._layers * waited
        end: FloatArray = start + self._layers * (clock - start)
        return end

    def _send(self, clock: FloatArray, sent: FloatArray, links_free: FloatArray) -> FloatArray:
        """Return when the rows of an exchange arrive on each rank.

        Args:
            clock: when each rank reaches the exchange.
            sent: [2, ranks] bytes by link.
            links_free: [2, ranks] when each rank's links are free; changed in place.
        """
        started = clock + self._links.start
        # Rows arrive once every sender has reached the exchange.
        all_started = float(started[sent.any(axis=0)].max(initial=0.0))
        arrival = started
        for link, cost in enumerate((self._links.within, self._links.between)):
            uses_link = sent[link] > 0
            link_free = np.maximum(links_free[link], all_started) + cost.seconds(sent[link])
            np.copyto(links_free[link], link_free, where=uses_link)
            arrival = np.where(uses_link, np.maximum(arrival, link_free), arrival)
        return arrival


def _computation(
    counts: CountedCuts, costs: MixingCosts, launch: float, factor: FloatArray
) -> _Computation:
    """Return the seconds of a nano-batch's computation in one layer.

    Args:
        launch: seconds of the layer's forward for this nano-batch, whatever its size.
        factor: as in `MixingLayers`.
    """
    cut = costs.mix * counts.cut + costs.continued * counts.continued + costs.run * counts.segments
    # The uncut documents of a rank share one run of the recurrence's kernel.
    uncut = costs.mix * (counts.rows - counts.cut) + costs.run * (counts.uncut_documents > 0)
    return _Computation(
        before_mixing=factor * (costs.before_mixing * counts.rows + launch),
        cut=factor * cut,
        uncut=factor * uncut,
        after_mixing=factor * (costs.after_mixing * counts.rows),
    )


def _acts(
    index: int,
    counts: CountedCuts,
    costs: MixingCosts,
    computation: _Computation,
    direction: Direction,
) -> list[_Act]:
    """Return the three acts of a nano-batch: up to the halos, up to the states, and the rest.

    The uncut documents of both nano-batches are computed between the sending of the first states
    and the first wait for states.
    """
    halos: FloatArray = np.multiply(costs.halo, counts.halos)
    states: FloatArray = np.multiply(costs.state, counts.states)
    # Uncut documents of the first nano-batch and of the second; the other number is 0.
    uncut_first: FloatArray | float = computation.uncut if index == 0 else 0.0
    uncut_second: FloatArray | float = 0.0 if index == 0 else computation.uncut
    if direction == "forward":
        return [
            _Act(index, computation.before_mixing, False, halos),
            _Act(index, computation.cut, True, states, uncut_after=uncut_second),
            _Act(index, computation.after_mixing, True, None, uncut_before=uncut_first),
        ]
    return [
        _Act(index, computation.after_mixing, False, states, uncut_after=uncut_first),
        _Act(index, computation.cut, True, halos, uncut_before=uncut_second),
        _Act(index, computation.before_mixing, True, None),
    ]

"""Prediction of layers that mix rows in order: their computation, and the exchanges of cut documents.

Arrays are [ranks] seconds unless they say otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Direction, Layout
from hf_distca.plan.cuts import chained
from hf_distca.plan.intervals import FloatArray, IntArray, row_counts
from hf_distca.predict.seconds import Links, MixingCosts


@dataclass(frozen=True, eq=False)
class CountedCuts:
    """Counts of a nano-batch on which the seconds of mixing layers depend, [ranks] each."""

    rows: IntArray
    cut: IntArray  # rows of cut documents
    continued: IntArray  # rows of segments with earlier segments
    segments: IntArray  # segments of cut documents
    whole: IntArray  # documents that are not cut
    # [2, ranks] within and between nodes: the larger number of halos that a rank sends and
    # receives.
    halos: IntArray
    states: IntArray  # [2, ranks] the same for pairs of A and B

    @property
    def runs(self) -> IntArray:
        """[ranks] runs of a recurrence's kernel that takes packed documents: whole documents share one."""
        return self.segments + (self.whole > 0)

    def bytes_moved(self, halo: float, state: float) -> float:
        """Return the busiest rank's bytes in a layer's forward, for the bytes of a halo and of a pair of A and B."""
        return float((halo * self.halos + state * self.states).sum(axis=0).max())


def count_cuts(layout: Layout, nodes: Sequence[int]) -> CountedCuts:
    """Count the segments of a layout and the messages between them, from [workers] nodes, ranks first."""
    ranks = layout.ranks
    order, nth, earlier, later = chained(layout.segments)
    segments = layout.segments.take(order)
    rank, rows = segments["rank"], row_counts(segments)
    is_cut = rows < layout.lengths[segments["document"]]

    def messages(source: IntArray, target: IntArray) -> IntArray:
        away, node = source != target, np.asarray(nodes)
        link = np.where(node[source] == node[target], 0, ranks)[away]
        of_ends = [np.bincount(link + ends[away], minlength=2 * ranks) for ends in (source, target)]
        return np.maximum(*of_ends).reshape(2, ranks)

    continued = np.flatnonzero(nth > 0)
    cut, follow, segments_cut, whole = (
        np.bincount(rank, values, ranks).astype(np.int64)
        for values in (rows * is_cut, rows * (nth > 0), is_cut, ~is_cut)
    )
    halos, states = (
        messages(rank[continued - 1], rank[continued]),
        messages(rank[earlier], rank[later]),
    )
    return CountedCuts(layout.tokens, cut, follow, segments_cut, whole, halos, states)


_Act = tuple[int, FloatArray | float, bool, FloatArray, NDArray[Any] | None, FloatArray | float]
"""Nano-batch, seconds, whether to wait for an exchange, seconds, [2, ranks] bytes to send by link,
seconds."""


class MixingLayers:
    """Mixing layers between two layers with attention, in one direction on all ranks.

    Args:
        costs: of a layer's forward.
        layers: number of mixing layers for each layer with attention.
        launches: seconds of a layer's forward per nano-batch, whatever its size.
        factor: [ranks] time of computation in this direction on each rank, as a multiple of its
            costs.
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
        self._layers, self._links = layers, links
        self._exchanges = any(nano.states.any() for nano in nano_batches)
        launch = (
            launches if self._exchanges else launches / len(nano_batches)
        )  # without cuts one call has all rows
        self.computed: FloatArray = np.zeros_like(factor)
        self.waited: FloatArray = np.zeros_like(factor)  # for exchanges in `walk`
        # A nano-batch has three acts. The whole documents of both nano-batches lie between the
        # sending of states and the wait for them.
        every: list[list[_Act]] = []
        for index, nano in enumerate(nano_batches):
            first, last = costs.before * nano.rows + launch, costs.after * nano.rows
            cut = (
                costs.mix * nano.cut + costs.continued * nano.continued + costs.run * nano.segments
            )
            whole = costs.mix * (nano.rows - nano.cut) + costs.run * (nano.whole > 0)
            first, cut, whole, last = (factor * seconds for seconds in (first, cut, whole, last))
            self.computed += layers * (first + cut + whole + last)
            halos, states = costs.halo * nano.halos, costs.state * nano.states
            own, other = (whole, 0.0) if index == 0 else (0.0, whole)
            if direction == "forward":
                acts = [
                    (0, False, first, halos, 0),
                    (0, True, cut, states, other),
                    (own, True, last, None, 0),
                ]
            else:
                acts = [
                    (0, False, last, states, own),
                    (other, True, cut, halos, 0),
                    (0, True, first, None, 0),
                ]
            every.append([(index, *act) for act in acts])
        in_order = every if direction == "forward" else reversed(every)
        self._acts = [act for acts_of_all in zip(*in_order, strict=True) for act in acts_of_all]

    def walk(self, clock: FloatArray) -> FloatArray:
        """Return the time after the layers on each rank, from the time before them."""
        if not self._exchanges:
            return clock + self.computed
        begun, waited, free = clock, np.zeros_like(clock), np.zeros((2, len(clock)))
        arrives: dict[int, FloatArray] = {}
        for nano, early, waits, seconds, size, late in self._acts:
            clock = clock + early
            if waits:
                waited += np.maximum(arrives[nano] - clock, 0.0)
                clock = np.maximum(clock, arrives[nano])
            clock = clock + seconds
            if (
                size is not None
            ):  # every rank starts to send; rows arrive once every sender has reached this point
                start = clock + self._links.start
                ready = float(start[size.any(axis=0)].max(initial=0.0))
                arrives[nano] = start
                for link, cost in enumerate((self._links.within, self._links.between)):
                    used = size[link] > 0
                    done = np.maximum(free[link], ready) + cost.seconds(size[link])
                    np.copyto(free[link], done, where=used)
                    arrives[nano] = np.where(used, np.maximum(arrives[nano], done), arrives[nano])
            clock = clock + late
        self.waited = self._layers * waited
        ended: FloatArray = begun + self._layers * (clock - begun)
        return ended

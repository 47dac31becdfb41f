"""Corrections of measured costs, from the seconds of training steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.arrays import FloatArray
from hf_distca.predict.seconds import StepCosts
from hf_distca.predict.walk import predict_plan

TOLERATED_ERROR = 0.1
"""Relative error up to which costs stay unchanged, so that plans stay the same from run to run."""
SHORTEST = 1e-9
"""Least expected seconds, to avoid a division by zero."""


@dataclass(frozen=True)
class Corrections:
    """Ratios of observed to measured costs."""

    attention: float = 1.0
    other: float = 1.0  # of all computation besides kernel calls
    # [ranks] time of each rank over the mean; empty if all ranks are alike.
    slowness: tuple[float, ...] = ()

    def applied(self, costs: StepCosts) -> StepCosts:
        """Return the corrected costs."""
        kinds = (
            replace(
                kind,
                forward=kind.forward.scaled(self.attention),
                backward=kind.backward.scaled(self.attention),
            )
            for kind in costs.kinds
        )
        return replace(
            costs,
            kinds=tuple(kinds),
            before_attention=costs.before_attention * self.other,
            after_attention=costs.after_attention * self.other,
            head=costs.head * self.other,
            launches=costs.launches * self.other,
            slowness=self.slowness,
            mixing=costs.mixing and costs.mixing.scaled(self.other),
        )

    def after(
        self,
        costs: StepCosts,
        expected: FloatArray,
        observed: FloatArray,
    ) -> "Corrections":
        """Return corrections for observed steps, or these corrections if they are about right.

        Args:
            costs: as measured, without corrections.
            expected: [steps, 2, ranks] seconds that each rank expects by these costs, see
                `expected_seconds`.
            observed: [steps, 2, ranks] seconds in kernel calls of a step, and between core
                attentions of its first forward.
        """
        # 1. Ratios of observed to expected seconds, [steps, 2, ranks]. With one layer there is no
        #    time between core attentions: kernel calls count for both.
        if costs.depth == 1:
            observed = observed[:, [0, 0]]
        ratios = observed / np.maximum(expected, SHORTEST)

        # 2. The median of the steps counts.
        attention, other = np.median(ratios.mean(axis=2), axis=0).tolist()
        slowness = _slowness(ratios)

        # 3. Small errors of these corrections change nothing.
        known_slowness = np.array(self.slowness or (1.0,) * len(slowness))
        errors = [attention / self.attention, other / self.other, *(slowness / known_slowness)]
        if all(abs(error - 1) <= TOLERATED_ERROR for error in errors):
            return self
        all_alike = bool(np.all(slowness == 1))
        return Corrections(attention, other, () if all_alike else tuple(slowness.tolist()))


def expected_seconds(
    plans: Sequence[MicroBatchPlan],
    rank: int,
    costs: StepCosts,
    nodes: Sequence[int],
    bytes_per_value: int,
) -> tuple[float, float]:
    """Return the seconds of a rank in kernel calls of a step, and between its core attentions.

    Args:
        plans: of the micro-batches of the step, which are those of the rank's pods.
        nodes: [ranks] node of each rank.
        bytes_per_value: size of a value in the dtype of core attention.
    """
    kernel = 0.0
    for plan in plans:
        walked = predict_plan(plan, costs, nodes, bytes_per_value)
        kernel += float(walked.attention[rank - plan.first_rank])
    if costs.depth == 1:
        return kernel, kernel
    return kernel, _seconds_between(plans[0], rank, costs)


def _seconds_between(plan: MicroBatchPlan, rank: int, costs: StepCosts) -> float:
    """Return the expected seconds between the core attentions of a micro-batch's forward."""
    # Where nothing moves, a layer runs once on the rows of both nano-batches.
    runs = 1 if plan.summary.exchange.bytes_total == 0 else len(plan.nano_batches)
    layer_seconds = int(plan.tokens[rank - plan.first_rank]) * costs.between
    return (costs.depth - 1) * (layer_seconds + runs * costs.launches)


def _slowness(ratios: FloatArray) -> FloatArray:
    """Return [ranks] how slow each rank is, over the mean; 1 for all if the error is small.

    A rank counts as slow if all its work is slow in all steps; the smallest ratio counts. It counts
    as fast if all its work is fast in all steps.

    Args:
        ratios: [steps, 2, ranks] observed over expected seconds.
    """
    relative = (ratios / ratios.mean(axis=2, keepdims=True)).reshape(-1, ratios.shape[2])
    slowness: FloatArray = np.clip(1.0, relative.min(axis=0), relative.max(axis=0))
    if np.abs(slowness - 1).max() <= TOLERATED_ERROR:
        return np.ones(len(slowness))
    return slowness

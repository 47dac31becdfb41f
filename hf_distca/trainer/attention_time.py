"""Predict core attention of the busiest rank from the plans, to be logged beside what it took."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hf_distca.patches.model import layers_by_kind
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.metrics import loads_of

FloatArray = NDArray[np.float64]


class AttentionTime:
    """Predicts from the plans of micro-batches that have run.

    Plans that were chosen by costs carry a prediction. Of other plans the kernels are known only by what they were
    seen to take: all ranks together took so long for all pairs, and the busiest rank should take its share of that.
    Where it takes longer, it is slower than the others, or its tasks are of worse shapes.

    Args:
        model: as it will be trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = layers_by_kind(model)

    def predicted(self, plans: Sequence[MicroBatchPlan], seen: Sequence[float]) -> float:
        """Seconds of the rank with the most to compute in all of these micro-batches.

        Args:
            plans: of the micro-batches.
            seen: [ranks] seconds that the kernels of each rank were seen to take for them.
        """
        choices = [plan.choice for plan in plans if plan.choice is not None]
        if len(choices) == len(plans):
            return float(np.sum([choice.attention for choice in choices], axis=0).max())
        # Workers beyond the ranks are servers, which come and go.
        pairs = np.sum([self._pairs(plan)[: len(seen)] for plan in plans], axis=0)
        return float(sum(seen) * pairs.max() / max(pairs.sum(), 1.0))

    def _pairs(self, plan: MicroBatchPlan) -> FloatArray:
        """[workers] query-key pairs of all layers, by the width of their heads."""
        every: list[FloatArray] = [
            loads_of(of_kind).astype(np.float64) * (self._layers[kind] * kind.q_heads * (kind.dim_qk + kind.dim_v))
            for nano in plan.nano_batches
            for kind, of_kind in nano.plans.items()
        ]
        summed: FloatArray = np.sum(every, axis=0)
        return summed

"""Predict the core attention time of the busiest rank from the plans, to log beside the measured time."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hf_distca.models.kinds import layers_by_kind
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.metrics import loads_of

FloatArray = NDArray[np.float64]


class AttentionTime:
    """Predict the attention time of micro-batches that have run.

    Plans that were chosen by costs carry a prediction. For other plans, the measured time of all ranks is divided by
    query-key pairs, and the busiest rank is expected to take its share. If that rank takes longer, it is slower than
    the others, or the shapes of its tasks are worse.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = layers_by_kind(model)

    def predicted(self, plans: Sequence[MicroBatchPlan], seen: Sequence[float]) -> float:
        """Return the predicted seconds of the busiest rank in all of these micro-batches.

        Args:
            seen: [ranks] seconds measured in the kernels of each rank for these micro-batches.
        """
        choices = [plan.choice for plan in plans if plan.choice is not None]
        if len(choices) == len(plans):
            return float(np.sum([choice.attention for choice in choices], axis=0).max())
        # Workers beyond the ranks are servers, whose number changes.
        pairs = np.sum([self._pairs(plan)[: len(seen)] for plan in plans], axis=0)
        return float(sum(seen) * pairs.max() / max(pairs.sum(), 1.0))

    def _pairs(self, plan: MicroBatchPlan) -> FloatArray:
        """[workers] query-key pairs of all layers, weighted by the width of the heads."""
        every: list[FloatArray] = [
            loads_of(of_kind).astype(np.float64) * (self._layers[kind] * kind.q_heads * (kind.dim_qk + kind.dim_v))
            for nano in plan.nano_batches
            for kind, of_kind in nano.plans.items()
        ]
        summed: FloatArray = np.sum(every, axis=0)
        return summed

"""Floating point operations that a model needs for a micro-batch, without recomputation."""

import numpy as np
from torch import nn

from hf_distca.models.decoder import base_model
from hf_distca.models.kinds import layers_by_kind
from hf_distca.models.shape import count_of, weights_met
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.cost import pairs


class ModelFlops:
    """Count floating point operations as model FLOPs utilization (MFU) defines them.

    Each active parameter of a token takes two operations forward and four backward; two backward if it is frozen. Core
    attention counts likewise, by query-key pairs that are not masked.

    Args:
        shared_by: number of processes that share each layer's heads, by tensor parallelism.
    """

    def __init__(self, model: nn.Module, shared_by: int) -> None:
        base = base_model(model)
        self._layers = layers_by_kind(model)
        self._shared_by = shared_by
        met = weights_met(base)
        head = getattr(base.get_output_embeddings(), "weight", None)
        if head is not None:
            met[head] = float(count_of(head))
        self.of_token = sum(count * (6.0 if weight.requires_grad else 4.0) for weight, count in met.items())

    def of(self, plan: MicroBatchPlan) -> float:
        """Return the operations of a micro-batch on all ranks, forward and backward."""
        total = self.of_token * float(plan.tokens.sum())
        for nano in plan.nano_batches:
            for kind, of_kind in nano.plans.items():
                count = float(np.sum(pairs(0, of_kind.layout.lengths, of_kind.window)))
                of_pair = 6.0 * kind.q_heads * (kind.dim_qk + kind.dim_v) * self._shared_by
                total += self._layers[kind] * of_pair * count
        return total

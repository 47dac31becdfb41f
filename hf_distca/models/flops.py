"""FLOPs of a model for a micro-batch, as model FLOPs utilization defines them."""

from collections.abc import Callable

import numpy as np
from torch import nn

from hf_distca.models.decoder import base_model
from hf_distca.models.kinds import layers_by_kind
from hf_distca.models.shape import count_of, weights_met
from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.cost import pairs

FORWARD_AND_BACKWARD = 6.0
"""FLOPs of a trained weight for a token: a multiplication and an addition in the forward, and twice
as many in the backward."""
FORWARD_AND_INPUT_GRADIENT = 4.0
"""The same for a frozen weight, which has no gradient of its own."""


def flops_counter(model: nn.Module, processes_per_rank: int) -> Callable[[MicroBatchPlan], float]:
    """Return a function that counts the FLOPs of a micro-batch on all ranks, as MFU defines them.

    Weights count if they are active for a token. Core attention counts by query-key pairs that are
    not masked.

    Args:
        processes_per_rank: processes that share each layer's heads.
    """
    base = base_model(model)
    layers = layers_by_kind(model)
    active_numbers = weights_met(base)
    head = getattr(base.get_output_embeddings(), "weight", None)
    if head is not None:
        active_numbers[head] = float(count_of(head))
    flops_per_token = 0.0
    for weight, count in active_numbers.items():
        is_trained = weight.requires_grad
        flops_per_token += count * (
            FORWARD_AND_BACKWARD if is_trained else FORWARD_AND_INPUT_GRADIENT
        )

    def count_flops(plan: MicroBatchPlan) -> float:
        total = flops_per_token * float(plan.tokens.sum())
        for nano_batch in plan.nano_batches:
            for kind, kind_plan in nano_batch.plans.items():
                width = kind.q_heads * (kind.dim_qk + kind.dim_v) * processes_per_rank
                layout = kind_plan.layout
                pair_count = float(
                    np.sum(pairs(layout.own_starts, layout.lengths, kind_plan.window))
                )
                total += layers[kind] * FORWARD_AND_BACKWARD * width * pair_count
        return total

    return count_flops

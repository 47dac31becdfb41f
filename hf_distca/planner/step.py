"""Prediction of a micro-batch: every layer's schedule walked forward and backward, and everything else added."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, MicroBatchPlan
from hf_distca.planner.cost import pairs
from hf_distca.planner.counted import CountedPlan, count_plan
from hf_distca.planner.nodes import node_sizes, nodes_of
from hf_distca.planner.seconds import FloatArray, StepCosts
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.stages import stage_rows
from hf_distca.planner.walk import LayerCosts, Walked, walk_layer

IntArray = NDArray[np.int64]


def predict_step(
    nano_batches: Sequence[Mapping[AttentionKind, CountedPlan]], tokens: Sequence[IntArray], costs: StepCosts
) -> Walked:
    """Predict the seconds of a micro-batch.

    Args:
        nano_batches: for each nano-batch, its counted plans by kind of attention.
        tokens: for each nano-batch, [ranks] rows that each rank holds.
    """
    slowness: FloatArray = np.array(costs.slowness or (1.0,) * len(tokens[0]))
    rows: list[FloatArray] = [each * slowness for each in tokens]
    launches = slowness * (costs.launches / 2)
    head: FloatArray = np.multiply(costs.head, np.sum(rows, axis=0))
    before, after = ([seconds * each + launches for each in rows] for seconds in (costs.before, costs.after))
    attention: FloatArray = np.zeros_like(head)
    other = head.copy()
    waited: FloatArray = np.zeros_like(head)
    seconds = 0.0
    for of_kind in costs.kinds:
        counted = [nano[of_kind.kind] for nano in nano_batches]
        layer = LayerCosts(
            of_kind.forward, of_kind.backward, before, after, costs.backward_factor, costs.exchange, slowness
        )
        for direction in ("forward", "backward"):
            walked = walk_layer(counted, layer, direction)
            attention += of_kind.layers * walked.attention
            other += of_kind.layers * walked.other
            waited += of_kind.layers * walked.waited
            seconds += of_kind.layers * walked.seconds
    total = costs.until_done(attention + other, seconds + float(head.max()))
    return Walked(total, attention, other, waited)


def predict_plan(plan: MicroBatchPlan, settings: PlanSettings, costs: StepCosts) -> Walked:
    """Predict the seconds of a planned micro-batch."""
    nodes = nodes_of(node_sizes(settings.ranks, settings.ranks_per_node))
    counted = [
        {kind: count_plan(of_kind, kind, settings.bytes_per_value, nodes) for kind, of_kind in nano.plans.items()}
        for nano in plan.nano_batches
    ]
    return predict_step(counted, [nano.layout.tokens for nano in plan.nano_batches], costs)


def document_seconds(lengths: IntArray, costs: StepCosts) -> FloatArray:
    """Return [documents] seconds of computing each document, forward and backward, without calls of the kernel."""
    total = costs.token * lengths.astype(np.float64)
    for of_kind in costs.kinds:
        kind = of_kind.kind
        each = pairs(0, lengths, kind.window)
        if kind.chunk is not None:
            chunks, rest = np.divmod(lengths, kind.chunk)
            each = chunks * pairs(0, kind.chunk, kind.window) + pairs(0, rest, kind.window)
        for cost in (of_kind.forward, of_kind.backward):
            total += of_kind.layers * (cost.pair * each + (cost.row + cost.key) * lengths)
    return total


def in_stages(counted: CountedPlan, kind: AttentionKind, settings: PlanSettings, *, stages: int) -> CountedPlan:
    """Return the counts of a plan without stages, with as many stages as it will have."""
    most = counted.among_ranks.most_keys
    rows = stage_rows(most, settings.buffer_rows(kind), stages=stages, in_hops=counted.passes_on)
    return counted if rows is None else replace(counted, stages=-(-most // rows))

"""torch.compile of a model or of parts of it: same loss and gradients, broken by core attention and
logits alone.
"""

from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters

from hf_distca.models.checkpointing import enable_checkpointing
from hf_distca.patches.head import plan_head
from hf_distca.patches.layers import plan_layers
from hf_distca.planner.micro_batch import plan_micro_batch
from tests.models_and_batches import (
    CHUNK_BYTES,
    assert_same_step,
    dispatcher_of_all_ranks,
    planned_step,
    random_documents,
    reference_step,
    small_model,
)

BATCHES = [[40, 7, 33], [24, 30, 25], [50, 41], [12, 13]]
CORE_ATTENTION = "core attention follows a plan"
TURNS = "two nano-batches take turns"
LOGITS = "logits of a planned step are deferred"


def _steps(
    parts: str, ping_pong: bool, checkpointing: bool
) -> tuple[list, list[Counter], list[int]]:
    """Of each batch: loss and gradients, why and how often tracing has stopped so far, and how many
    graphs exist.

    Parts are compiled as users do; "eager" runs the traced graphs as they are.
    """
    dispatcher = dispatcher_of_all_ranks(ping_pong=ping_pong)
    model = small_model().train()
    plan_head(model, CHUNK_BYTES)
    if ping_pong:
        plan_layers(model)
    if checkpointing:
        enable_checkpointing(model, {"use_reentrant": False})
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="eager") if parts == "model" else model
    for layer in model.model.layers:
        inner = [layer.mlp, layer.input_layernorm]
        modules = {"layers": [layer], "inner modules": inner, "attention": [layer.self_attn]}
        for module in modules.get(parts, []):
            module.compile(backend="eager")
    steps = []
    breaks = []
    graphs = []
    for lengths in BATCHES:
        model.zero_grad()
        bound = dispatcher.bind(plan_micro_batch(lengths, dispatcher.settings))
        steps.append(planned_step(compiled, bound, random_documents(lengths)))
        breaks.append(Counter())
        for why, count in counters["graph_break"].items():
            breaks[-1][
                next((known for known in (CORE_ATTENTION, TURNS, LOGITS) if known in why), why)
            ] += count
        graphs.append(counters["stats"]["unique_graphs"])
    return steps, breaks, graphs


@pytest.mark.parametrize(
    ("parts", "ping_pong", "checkpointing", "broken_by"),
    [
        ("layers", False, False, {CORE_ATTENTION}),
        ("attention", True, False, {CORE_ATTENTION}),
        ("model", True, False, {TURNS, LOGITS}),
        ("inner modules", True, True, set()),
    ],
)
def test_core_attention_alone_stays_uncompiled(
    rank_pools, parts, ping_pong, checkpointing, broken_by
):
    ((steps, breaks, graphs),) = rank_pools[1].run(_steps, parts, ping_pong, checkpointing)
    for lengths, got in zip(BATCHES, steps, strict=True):
        assert_same_step(got, reference_step(small_model(), random_documents(lengths)))
    assert set(breaks[-1]) == broken_by
    # What is traced for one length, and then for any, serves every plan that follows.
    assert graphs[0] > 0
    assert breaks[2] == breaks[-1]
    assert graphs[2] == graphs[-1]

"""Decoder MLPs over chunks of rows: the same results, and less memory."""

import logging

import pytest
from transformers import PreTrainedModel

from hf_distca.memory.micro_batch import Use, count_micro_batch
from hf_distca.models.checkpointing import enable_checkpointing
from hf_distca.models.fake import model_after
from hf_distca.patches.chunked_mlp import chunk_mlps
from hf_distca.patches.layers import plan_layers
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from tests.models_and_batches import (
    Step,
    assert_same_step,
    dispatcher_of_all_ranks,
    planned_step,
    random_documents,
    reference_step,
    relative_error,
    small_kinds,
    small_model,
    with_lora,
)

LENGTHS = [120, 7, 1, 33, 64]
ROWS = 10
"""Of a chunk: no rank's rows are a multiple of it."""


def _model(model_type: str, rows: int, checkpointing: bool | None) -> PreTrainedModel:
    model = small_model("llama" if model_type == "lora" else model_type, "eager").double().train()
    if model_type == "lora":
        model = with_lora(model)
    if rows:
        chunk_mlps(model, rows)
    if checkpointing is not None:
        enable_checkpointing(model, {"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    return model


CASES = [
    ("llama", None),
    ("gemma2", False),
    ("qwen3", None),
    ("phi3", True),
    ("lora", False),
    ("lora", True),
]


@pytest.mark.parametrize(("model_type", "checkpointing"), CASES)
def test_same_loss_and_gradients(model_type, checkpointing):
    steps = [
        reference_step(_model(model_type, rows, checkpointing), random_documents([47]))
        for rows in (0, ROWS)
    ]
    (loss, grads), (got_loss, got) = steps
    assert got_loss == pytest.approx(loss, rel=1e-12)
    assert got.keys() == grads.keys()
    assert max(relative_error(got[name], grads[name]) for name in grads) < 1e-12


def _planned(checkpointing: bool | None) -> Step:
    dispatcher = dispatcher_of_all_ranks(ping_pong=True)
    model = small_model().train()
    plan_layers(model)
    chunk_mlps(model, ROWS)
    if checkpointing is not None:
        enable_checkpointing(model, {"use_reentrant": checkpointing})
    bound = dispatcher.bind(plan_micro_batch(LENGTHS, dispatcher.settings))
    return planned_step(model, bound, random_documents(LENGTHS))


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_planned_steps(rank_pools, checkpointing):
    expected = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    for got in rank_pools[2].run(_planned, checkpointing):
        assert_same_step(got, expected)


def test_activations_do_not_grow_with_the_width_of_the_mlp():
    taken = {}
    for width in (640, 1280):
        for rows in (0, 64):
            model = small_model(intermediate_size=width).train()
            if rows:
                chunk_mlps(model, rows)
            settings = PlanSettings(1, 1024, small_kinds())
            plan = plan_micro_batch([1024], settings)
            taken[width, rows] = count_micro_batch(model_after(model), plan, 0, Use("cpu"))[
                "activations"
            ]
    # Tensors [1024, width] of float32: four a layer, of which the last layer's backward has used
    # one at the peak.
    assert taken[1280, 0] - taken[640, 0] == 7 * 1024 * 640 * 4
    assert taken[1280, 64] == taken[640, 64]


def test_an_mlp_with_another_forward_is_left_alone(caplog):
    model = small_model()
    model.model.layers[1].mlp.forward = lambda x: x  # as Liger puts it there
    chunk_mlps(model, ROWS)
    assert [hasattr(layer.mlp, "chunk_rows") for layer in model.model.layers] == [True, False]
    assert "LlamaMLP has another forward, such as Liger's" in caplog.text


def test_experts_are_left_alone(caplog):
    config = {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
    }
    model = small_model("qwen3_moe", **config)
    with caplog.at_level(logging.WARNING):
        chunk_mlps(model, ROWS)
    assert [hasattr(layer.mlp, "chunk_rows") for layer in model.model.layers] == [True, False]
    assert "Qwen3MoeSparseMoeBlock routes rows to experts" in caplog.text
    with pytest.raises(
        ValueError, match=r"mlp_chunk_rows=10 has no effect on .* routes rows to experts"
    ):
        chunk_mlps(small_model("gpt_oss", num_local_experts=2, num_experts_per_tok=1), ROWS)

"""Decoder MLPs over chunks of rows: the same results, and less memory."""

import gc
import logging

import pytest
import torch
from transformers import PreTrainedModel

from hf_distca.memory.counted_step import count_peaks
from hf_distca.models.checkpointing import enable_checkpointing
from hf_distca.models.fake import model_after
from hf_distca.patches.chunked_mlp import chunk_layers
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
    small_run,
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
        chunk_layers(model, rows)
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
    # Gemma 2 adds up the gradients of a norm's weights in float32.
    for name, grad in grads.items():
        is_rounded = model_type == "gemma2" and "norm" in name
        assert relative_error(got[name], grad) < (1e-6 if is_rounded else 1e-12), name


def _planned(checkpointing: bool | None) -> Step:
    dispatcher = dispatcher_of_all_ranks(ping_pong=True)
    model = small_model().train()
    plan_layers(model)
    chunk_layers(model, ROWS)
    if checkpointing is not None:
        enable_checkpointing(model, {"use_reentrant": checkpointing})
    bound = dispatcher.bind(plan_micro_batch(LENGTHS, dispatcher.settings))
    return planned_step(model, bound, random_documents(LENGTHS))


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_planned_steps(rank_pools, checkpointing):
    expected = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    for got in rank_pools[2].run(_planned, checkpointing):
        assert_same_step(got, expected)


@pytest.mark.parametrize(
    ("model_type", "checkpointing", "runs"),
    [("llama", False, 2), ("llama", True, 3), ("llama", None, 2), ("gemma2", False, 3)],
)
def test_a_chunk_runs_forward_no_more_often_than_needed(model_type, checkpointing, runs):
    """The last norm of a layer of Gemma 2 needs the result of its MLP."""
    model = _model(model_type, ROWS, checkpointing)
    seen = []
    model.model.layers[0].mlp.act_fn.register_forward_hook(
        lambda _module, args, _output: seen.append(args[0].shape[-2])
    )
    reference_step(model, random_documents([47]))
    assert sorted(seen) == sorted(runs * [10, 10, 10, 10, 7])


def test_rows_of_chunks_are_those_of_all_rows():
    x = torch.randn(1, 47, 32)
    model = small_model("qwen3").eval()
    layer = model.model.layers[0]
    heads = torch.randn(1, 47, 4, 8)
    with torch.no_grad():
        norms = [
            lambda: layer.input_layernorm(x),
            lambda: layer.post_attention_layernorm(x),
            lambda: layer.self_attn.q_norm(heads),
            lambda: layer.self_attn.k_norm(heads.transpose(1, 2)).transpose(1, 2),
        ]
        expected = [norm() for norm in norms]
        chunk_layers(model, ROWS)
        for norm, result in zip(norms, expected, strict=True):
            assert torch.equal(norm(), result)


class WithResidualLayerNorm(torch.nn.Module):
    """A norm of rows to which other rows are added before, as fla's norms do it."""

    def forward(self, x, residual=0):
        return x + residual


def test_norms_of_rows_and_other_rows_compute_all_rows_at_once():
    model = small_model()
    norm = model.model.layers[0].input_layernorm = WithResidualLayerNorm()
    chunk_layers(model, 2)
    x = torch.arange(6.0).view(1, 3, 2)
    assert norm(x).tolist() == x.tolist()
    assert norm(x, x).tolist() == norm(x, residual=x).tolist() == (2 * x).tolist()


def test_activations_do_not_grow_with_the_width_of_the_mlp():
    taken = {}
    for width in (640, 1280):
        for rows in (0, 64):
            model = small_model(intermediate_size=width).train()
            if rows:
                chunk_layers(model, rows)
            settings = PlanSettings(1, 1024, small_kinds())
            plan = plan_micro_batch([1024], settings)
            taken[width, rows] = count_peaks(
                model_after(model), plan, 0, small_run(kernel="cpu")
            ).on_device["activations"]
    # Tensors [1024, width] of float32: four a layer, of which the last layer's backward has used
    # one at the peak.
    assert taken[1280, 0] - taken[640, 0] == 7 * 1024 * 640 * 4
    assert taken[1280, 64] == taken[640, 64]


@pytest.fixture
def without_collections():
    """Python collects no cycles of references, which would keep memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize(("chunk_rows", "bytes_of_row"), [(0, 2536), (64, 1192)])
def test_the_backward_of_a_checkpointed_layer(chunk_rows, bytes_of_row):
    """Of Qwen3 in bfloat16, whose MLP is three times as wide as the hidden state of 32 numbers."""
    taken = []
    for rows in (1024, 2048):
        model = small_model("qwen3", intermediate_size=96).bfloat16().train()
        model.model.norm = torch.nn.Identity()  # whose backward would take more
        if chunk_rows:
            chunk_layers(model, chunk_rows)
        plan = plan_micro_batch([rows], PlanSettings(1, rows, small_kinds()))
        run = small_run(checkpointing={})
        taken.append(sum(count_peaks(model_after(model), plan, 0, run).on_device.values()))
    assert (taken[1] - taken[0]) / 1024 == bytes_of_row


def test_an_mlp_with_another_forward_is_left_alone(caplog):
    model = small_model()
    model.model.layers[1].mlp.forward = lambda x: x  # as Liger puts it there
    chunk_layers(model, ROWS)
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
        chunk_layers(model, ROWS)
    assert [hasattr(layer.mlp, "chunk_rows") for layer in model.model.layers] == [True, False]
    assert "Qwen3MoeSparseMoeBlock routes rows to experts" in caplog.text
    with pytest.raises(
        ValueError, match=r"mlp_chunk_rows=10 has no effect on .* routes rows to experts"
    ):
        chunk_layers(small_model("gpt_oss", num_local_experts=2, num_experts_per_tok=1), ROWS)

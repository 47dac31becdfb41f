"""Sizes of tables of small models of transformers, also with adapters and after a resize."""

from types import SimpleNamespace

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_distca.batches.limits import Limits
from hf_distca.models.tables import model_limits, trained_positions
from tests.models_and_batches import small_model
from tests.survey.tiny import tiny_config


@pytest.mark.parametrize(
    ("model_type", "positions", "trained"),
    [
        *((table, 256, None) for table in ("gpt2", "opt", "bert", "ctrl")),
        *((rotary, None, 256) for rotary in ("llama", "gemma3")),
    ],
)
def test_positions_are_those_that_the_model_has(model_type, positions, trained):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        tiny_config(model_type), attn_implementation="eager"
    ).eval()
    assert model_limits(model) == Limits(64, 64, positions, trained)
    last = positions or 1000
    ids = torch.full((1, 2), 5)
    model(input_ids=ids, position_ids=torch.tensor([[0, last - 1]]))
    if positions is not None:
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            model(input_ids=ids, position_ids=torch.tensor([[0, last]]))


def test_positions_that_a_rotary_embedding_is_made_for():
    def trained(**rope):
        return trained_positions(
            small_model(max_position_embeddings=100, rope_parameters=rope).config
        )

    base = {"rope_theta": 1e4}
    assert trained(**base, rope_type="default") == 100
    assert trained(**base, rope_type="linear", factor=4.0) == 400
    extended = {"factor": 4.0, "original_max_position_embeddings": 100}
    assert trained(**base, rope_type="yarn", **extended) == 400
    assert trained(**base, rope_type="dynamic", factor=2.0) is None
    layers = {
        "full_attention": {**base, "rope_type": "yarn", **extended},
        "sliding_attention": base,
    }
    assert (
        trained_positions(SimpleNamespace(max_position_embeddings=100, rope_parameters=layers))
        == 400
    )
    assert trained_positions(SimpleNamespace(max_position_embeddings=100)) is None


def test_towers_have_positions_of_their_own():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("phi4_multimodal"))
    names = [name for name, _ in model.named_modules()]
    assert any(
        name.endswith("image_embed.img_processor.embeddings.position_embedding") for name in names
    )
    assert model_limits(model).positions is None


@pytest.mark.parametrize(
    "modules",
    [
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
    ],
    ids=["saved", "adapted"],
)
def test_resized_and_adapted_tables(modules):
    model = small_model()
    assert model_limits(model) == Limits(64, 64, None, 2048)
    model.resize_token_embeddings(70)
    config = peft.LoraConfig(**{"target_modules": ["q_proj"], **modules})
    assert model_limits(peft.get_peft_model(model, config)) == Limits(70, 70, None, 2048)

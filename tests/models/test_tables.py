"""Sizes of tables of small models of transformers, also with adapters and after a resize."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_distca.collator.limits import Limits
from hf_distca.models.tables import model_limits
from tests.models_and_batches import small_model
from tests.survey.tiny import tiny_config


@pytest.mark.parametrize(
    ("model_type", "positions"),
    [("gpt2", 256), ("opt", 256), ("bert", 256), ("ctrl", 256), ("llama", None), ("gemma3", None)],
)
def test_positions_are_those_that_the_model_has(model_type, positions):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), attn_implementation="eager").eval()
    assert model_limits(model) == Limits(64, 64, positions)
    last = positions or 1000
    ids = torch.full((1, 2), 5)
    model(input_ids=ids, position_ids=torch.tensor([[0, last - 1]]))
    if positions is not None:
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            model(input_ids=ids, position_ids=torch.tensor([[0, last]]))


def test_towers_have_positions_of_their_own():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("phi4_multimodal"))
    names = [name for name, _ in model.named_modules()]
    assert any(name.endswith("image_embed.img_processor.embeddings.position_embedding") for name in names)
    assert model_limits(model).positions is None


def test_resized_and_adapted_tables():
    model = small_model()
    assert model_limits(model) == Limits(64, 64, None)
    model.resize_token_embeddings(70)
    for modules in ({"modules_to_save": ["embed_tokens", "lm_head"]}, {"target_modules": ["embed_tokens", "lm_head"]}):
        adapted = peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": ["q_proj"], **modules}))
        assert model_limits(adapted) == Limits(70, 70, None)
        model = adapted.unload()

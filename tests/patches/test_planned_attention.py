"""What the attention function refuses in a planned step, asked directly as a model's layer would."""

import pytest
import torch
from torch import nn
from transformers.masking_utils import create_causal_mask

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.patches.attention import DeferredMask, distca_attention, distca_mask
from hf_distca.planner.settings import PlanSettings
from tests.models_and_batches import small_kinds, small_model


class LlamaAttention(nn.Module):
    """Has what the attention function looks at."""

    layer_idx = 3


@pytest.fixture
def plan():
    dispatcher = Dispatcher(PlanSettings(ranks=1, tokens_per_rank=64, kinds=small_kinds()), torch.device("cpu"))
    return dispatcher.bind(dispatcher.plan_lengths([[5, 7]])[0])


def attend(plan, mask=None, batch=1, **kwargs):
    query, key = torch.randn(batch, 4, 12, 8), torch.randn(batch, 2, 12, 8)
    return distca_attention(LlamaAttention(), query, key, key, mask, distca_plan=plan, **kwargs)


def deferred(local_size=None, added_by_model=False) -> DeferredMask:
    return DeferredMask(local_size, added_by_model, make=lambda: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 0.1}, r"LlamaAttention \(layer 3\) uses attention dropout 0.1"),
        ({"batch": 2}, r"got a batch of 2 rows, but a planned step needs batch size 1"),
        ({"mask": torch.ones(1, 1, 12, 12)}, r"got an attention_mask of shape \[1, 1, 12, 12\]"),
        ({"mask": deferred(added_by_model=True)}, "adds a custom mask to the causal mask"),
        ({"mask": deferred(local_size=4)}, "masks by a local size of 4, but has sliding_window=None"),
        ({"mask": deferred(local_size=4), "sliding_window": 5}, "local size of 4, but has sliding_window=5"),
        ({"is_causal": False}, "is not causal"),
        ({"position_bias": torch.zeros(1)}, "passes position_bias"),
        ({"cache": object()}, "passes cache"),
    ],
)
def test_what_a_plan_cannot_express(plan, arguments, message):
    with pytest.raises(ValueError, match=message):
        attend(plan, **arguments)
    assert plan.ran.attentions == 0
    output, weights = attend(plan, deferred())
    assert (output.shape, weights, plan.ran.attentions) == ((1, 12, 4, 8), None, 1)


def test_a_module_that_is_not_causal(plan, monkeypatch):
    monkeypatch.setattr(LlamaAttention, "is_causal", False, raising=False)
    with pytest.raises(ValueError, match="is not causal"):
        attend(plan)
    attend(plan, is_causal=True)  # what the call says goes before what the module says


def test_masks_know_what_the_model_put_in():
    assert distca_mask(1, 5, 5, local_size=3).local_size == 3
    assert distca_mask(1, 5, 5).local_size is None
    # A model that lets tokens of one image see each other, say, through transformers' masks.
    inputs = {"inputs_embeds": torch.zeros(1, 12, 32), "attention_mask": None, "past_key_values": None}
    config = small_model().config
    mask = create_causal_mask(config, **inputs, or_mask_function=lambda batch, head, q, k: k < 3)
    assert mask.added_by_model
    assert not create_causal_mask(config, **inputs).added_by_model

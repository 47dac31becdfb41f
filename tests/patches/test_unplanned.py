"""Outside a planned step attn_implementation="distca" gives what "sdpa" gives."""

import pytest
import torch
from transformers import DynamicCache

from hf_distca.patches.attention import DeferredMask, distca_mask
from tests.models_and_batches import small_model

SINKS = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}


GEMMA = {
    "sliding_window": 4,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 2,
}


def pair(model_type="llama", other="sdpa", **config):
    return small_model(model_type, **config).eval(), small_model(model_type, other, **config).eval()


@pytest.mark.parametrize(
    ("model_type", "other", "config"),
    [
        ("llama", "sdpa", {}),
        ("mistral", "sdpa", {"sliding_window": 4}),
        ("gemma2", "eager", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
        ("gpt_oss", "eager", SINKS),
        ("doge", "sdpa", {"keep_window_size": 6}),
        ("gemma4_text", "sdpa", GEMMA),
    ],
    ids=["llama", "window", "softcap", "sinks", "mask", "shared"],
)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_batches(model_type, other, config, padding):
    model, reference = pair(model_type, other, **config)
    tokens = torch.arange(3, 27).view(2, 12)
    mask = torch.ones_like(tokens)
    if padding == "left":
        mask[0, :5] = 0
    if padding == "right":
        mask[1, 8:] = 0
    inputs = {"input_ids": tokens} if padding == "none" else {"input_ids": tokens, "attention_mask": mask}
    with torch.no_grad():
        got, expected = model(**inputs).logits, reference(**inputs).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("model_type", "config"), [("llama", {}), ("doge", {}), ("gemma4_text", GEMMA)])
def test_generate(model_type, config):
    model, reference = pair(model_type, use_cache=True, **config)
    row, rows = torch.arange(3, 9)[None], torch.arange(3, 15).view(2, 6)
    mask = torch.ones_like(rows)
    mask[0, :3] = 0
    given = [(row, {}), (row, {"cache_implementation": "static"})]
    for tokens, options in [*given, (rows, {"attention_mask": mask})] if model_type == "llama" else given:
        options = {"max_new_tokens": 5, "do_sample": False, **options}
        assert torch.equal(model.generate(tokens, **options), reference.generate(tokens, **options))


def test_prefill_in_two_parts():
    model, reference = pair(use_cache=True)
    tokens = torch.arange(3, 13)[None]
    logits = []
    for each in (model, reference):
        cache = DynamicCache(config=each.config)
        with torch.no_grad():
            each(tokens[:, :4], past_key_values=cache)
            logits.append(each(tokens[:, 4:], past_key_values=cache).logits)
    torch.testing.assert_close(logits[0], logits[1])


def test_packed_row_without_plan():
    model, reference = pair()
    inputs = {"input_ids": torch.arange(3, 13)[None], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 0]])}
    torch.testing.assert_close(model(**inputs).logits, reference(**inputs).logits)
    whole = model(input_ids=inputs["input_ids"]).logits
    assert not torch.allclose(whole, model(**inputs).logits)  # the documents did not see one another


def test_training_gradients():
    model, reference = pair()
    tokens = torch.arange(3, 27).view(2, 12)
    for each in (model, reference):
        each(input_ids=tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad)


def test_logits_of_the_last_rows():
    tokens, models = torch.arange(3, 15)[None], pair("gemma4_text", **GEMMA)
    for kept in (0, 1, 5):
        with torch.no_grad():
            got, expected = (each(tokens, logits_to_keep=kept).logits for each in models)
        torch.testing.assert_close(got, expected)


def test_mask_is_made_only_where_it_is_needed():
    assert isinstance(distca_mask(1, 5, 5), DeferredMask)
    assert not isinstance(distca_mask(2, 5, 5), DeferredMask)
    assert not isinstance(distca_mask(1, 5, 9, q_offset=4), DeferredMask)
    assert not isinstance(distca_mask(1, 5, 5, q_offset=4), DeferredMask)
    padding = torch.tensor([[False, True, True]])
    assert distca_mask(1, 3, 3, attention_mask=padding).tolist() == [
        [[[False, False, False], [False, True, False], [False, True, True]]]
    ]

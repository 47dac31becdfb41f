"""The kinds of attention that a model tells of, and those that its layers turn out to have."""

import pytest
import torch
from transformers import AttentionInterface, PreTrainedConfig

from hf_distca import DistCAConfig, plan_settings
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.patches.attention import attention_chunk, distca_attention
from hf_distca.patches.kinds import attention_kinds, decoder_attentions
from hf_distca.plan import AttentionKind
from hf_distca.planner.cost import RowBytes
from tests.models import SMALL_LLAMA4, small_model

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 6,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
}
TWO_TYPES = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": ({}, [AttentionKind(None, 4, 2, 8, 8)]),
    "gpt2": ({"attn_pdrop": 0.0}, [AttentionKind(None, 4, 4, 8, 8)]),
    "mistral": ({"sliding_window": 24}, [AttentionKind(24, 4, 2, 8, 8)]),
    "gemma2": (TWO_TYPES, [AttentionKind(24, 4, 2, 8, 8), AttentionKind(None, 4, 2, 8, 8)]),
    "gemma4_text": (
        {**TWO_TYPES, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        [AttentionKind(24, 4, 2, 8, 8), AttentionKind(None, 4, 1, 16, 16)],
    ),
    "deepseek_v3": (LATENT, [AttentionKind(None, 4, 4, 12, 6)]),
    "longcat_flash": (LATENT, [AttentionKind(None, 4, 4, 12, 6)]),
    "mimo_v2_flash": (
        {**TWO_TYPES, "v_head_dim": 6, "swa_v_head_dim": 6, "n_group": 1, "topk_group": 1},
        [AttentionKind(24, 4, 4, 8, 6), AttentionKind(None, 4, 2, 8, 6)],
    ),
    "llama4_text": (SMALL_LLAMA4, [AttentionKind(None, 4, 2, 8, 8, 24), AttentionKind(None, 4, 2, 8, 8)]),
    "modernbert-decoder": (TWO_TYPES, [AttentionKind(24, 4, 4, 8, 8), AttentionKind(None, 4, 4, 8, 8)]),
}


@pytest.mark.parametrize("model_type", MODELS)
def test_kinds_are_those_that_the_layers_have(model_type, monkeypatch):
    config, expected = MODELS[model_type]
    model = small_model(model_type, **config).train()
    found = {}

    def attend(module, query, key, value, mask, *args, **kwargs):
        window, chunk = kwargs.get("sliding_window"), attention_chunk(module)
        sizes = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
        found[AttentionKind(window, *sizes, chunk)] = None
        return distca_attention(module, query, key, value, mask, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "distca", attend)
    model(input_ids=torch.arange(3, 11)[None])
    assert list(found) == expected
    assert list(attention_kinds(model, decoder_attentions(model))) == expected


@pytest.mark.parametrize(
    ("model_type", "config", "dtype", "expected"),
    [
        ("llama", {}, None, RowBytes(q=128, kv=128, o=128)),
        ("llama", {"num_key_value_heads": 1}, torch.bfloat16, RowBytes(q=64, kv=32, o=64)),
        ("deepseek_v3", LATENT, torch.float32, RowBytes(q=192, kv=288, o=96)),
        ("deepseek_v3", LATENT, torch.bfloat16, RowBytes(q=96, kv=144, o=48)),
    ],
)
def test_row_bytes(model_type, config, dtype, expected):
    model = small_model(model_type, **config)
    settings = plan_settings(model, DistCAConfig(), ranks=2, device=torch.device("cpu"), dtype=dtype)
    (kind,) = settings.kinds
    assert settings.row_bytes(kind) == expected


def test_a_config_that_does_not_say_how_many_heads():
    model = small_model()
    model.config = PreTrainedConfig()
    with pytest.raises(ValueError, match=r"does not say how many heads .*num_attention_heads.*train it with stock"):
        attention_kinds(model, decoder_attentions(model))


def test_row_bytes_by_kind():
    model = small_model("gemma4_text", **MODELS["gemma4_text"][0])
    settings = plan_settings(model, DistCAConfig(), ranks=2, device=torch.device("cpu"))
    sliding, full = settings.kinds
    assert settings.dominant_kind == full
    assert settings.row_bytes(sliding) == RowBytes(q=128, kv=128, o=128)
    assert settings.row_bytes(full) == RowBytes(q=256, kv=128, o=256)


def test_the_kernel_is_asked_about_every_kind(monkeypatch):
    asked = []

    def check(self, *, head_dim_qk, head_dim_v, params, **kwargs):
        asked.append((params.window, head_dim_qk, head_dim_v))
        if head_dim_qk > 12:
            raise ValueError("too wide")

    monkeypatch.setattr(CpuKernel, "check", check)
    model = small_model("gemma4_text", **TWO_TYPES, global_head_dim=16)
    with pytest.raises(ValueError, match="too wide"):
        plan_settings(model, DistCAConfig(), ranks=2, device=torch.device("cpu"))
    assert asked == [(24, 8, 8), (None, 16, 16)]

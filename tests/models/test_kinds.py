"""The kinds of attention that a model tells of, and those that its layers turn out to have."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import AttentionInterface, PreTrainedConfig

from hf_distca import DistCAConfig, plan_settings
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.models.kinds import layers_by_kind
from hf_distca.models.tensor_parallel import config_on_a_rank, ranks_of_share
from hf_distca.patches.attention import attention_chunk, distca_attention
from hf_distca.plan import AttentionKind
from hf_distca.planner.cost import RowBytes
from tests.models_and_batches import SMALL_LLAMA4, small_model

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
    assert list(layers_by_kind(model)) == expected


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
    with pytest.raises(ValueError, match=r"has no num_attention_heads, .*; train this model with stock"):
        layers_by_kind(model)


def test_bytes_and_kernel_of_every_kind(monkeypatch):
    asked = []
    monkeypatch.setattr(CpuKernel, "check", lambda self, need, device: asked.append(need))
    model = small_model("gemma4_text", **MODELS["gemma4_text"][0])
    settings = plan_settings(model, DistCAConfig(), ranks=2, device=torch.device("cpu"))
    sliding, full = settings.kinds
    assert settings.dominant_kind == full
    assert settings.row_bytes(sliding) == RowBytes(q=128, kv=128, o=128)
    assert settings.row_bytes(full) == RowBytes(q=256, kv=128, o=256)
    assert [(need.params.window, need.head_dim_qk, need.head_dim_v) for need in asked] == [(24, 8, 8), (None, 16, 16)]


WHOLE_HEADS = "rowwise_split_input"
"""How transformers names an output projection whose input each rank has whole, and takes its part of."""


def shared_by_two(model_type: str, whole_heads: bool, **config: Any) -> Any:
    """A model as transformers would load it on one of two ranks, but for its weights."""
    model = small_model(model_type, **config)
    model._tp_size = 2
    model.config.distributed_config = object()
    if whole_heads:
        model._tp_plan = {
            name: WHOLE_HEADS if name.endswith("o_proj") else style for name, style in model.tp_plan.items()
        }
    return model


@pytest.mark.parametrize(("whole_heads", "heads"), [(False, (2, 1)), (True, (4, 2))])
def test_a_rank_that_shares_a_model_has_its_part_of_the_heads(whole_heads, heads):
    model = shared_by_two("llama", whole_heads, num_hidden_layers=11)
    assert tuple(layers_by_kind(model)) == (AttentionKind(None, *heads, 8, 8),)
    model.config.head_dim = None  # as where a config says nothing of it
    config = config_on_a_rank(model)
    assert (config.num_attention_heads, config.num_key_value_heads) == heads
    assert (config.intermediate_size, config.head_dim) == (model.config.intermediate_size // 2, 8)
    assert config.distributed_config is None
    assert (model.config.num_attention_heads, model.config.distributed_config is None) == (4, False)


def _shares() -> list[int]:
    """Among how many ranks parameters are shared out by tensor parallelism."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    placed = [(Replicate(), Shard(0)), (Shard(0), Replicate())]
    divided = [DTensor.from_local(torch.zeros(2, 2), mesh, placements) for placements in placed]
    by_fsdp = DTensor.from_local(torch.zeros(2, 2), mesh["fsdp"], (Shard(0),))
    return [ranks_of_share(parameter) for parameter in (*divided, by_fsdp, torch.zeros(2))]


def test_a_parameter_that_all_ranks_have_is_not_shared_out(rank_pools):
    assert rank_pools[2].run(_shares) == [[2, 1, 1, 1]] * 2

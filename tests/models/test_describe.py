"""Kinds of attention that a model tells of, and those that its layers turn out to have; the kernel
that it gets.
"""

import logging
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import AttentionInterface, PreTrainedConfig

from hf_distca import Dispatcher, DistCAConfig, describe_run
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.models.decoder import decoder_attentions
from hf_distca.models.kinds import layers_by_kind
from hf_distca.models.tensor_parallel import config_on_a_rank, ranks_of_share
from hf_distca.patches.attention import attention_chunk, distca_attention
from hf_distca.plan import AttentionKind
from hf_distca.plan.cost import RowBytes
from tests.models_and_batches import SMALL_LLAMA4, small_model

CPU = torch.device("cpu")
LATENT = {
    **dict.fromkeys(("num_key_value_heads", "head_dim", "qk_rope_head_dim", "n_routed_experts"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **{"qk_nope_head_dim": 8, "v_head_dim": 6, "num_experts_per_tok": 2},
}
TWO_TYPES = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": ({}, [AttentionKind(None, 4, 2, 8, 8)]),
    "gpt2": ({"attn_pdrop": 0.0}, [AttentionKind(None, 4, 4, 8, 8)]),
    "mistral": ({"sliding_window": 24}, [AttentionKind(24, 4, 2, 8, 8)]),
    "moshi": (
        {"sliding_window": 24},
        [AttentionKind(None, 4, 2, 8, 8)],
    ),  # which ignores its window
    "gemma2": (TWO_TYPES, [AttentionKind(24, 4, 2, 8, 8), AttentionKind(None, 4, 2, 8, 8)]),
    "gemma4_text": (
        {
            **TWO_TYPES,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
        [AttentionKind(24, 4, 2, 8, 8), AttentionKind(None, 4, 1, 16, 16)],
    ),
    "deepseek_v3": (LATENT, [AttentionKind(None, 4, 4, 12, 6)]),
    "longcat_flash": (LATENT, [AttentionKind(None, 4, 4, 12, 6)]),
    "mimo_v2_flash": (
        {**TWO_TYPES, "v_head_dim": 6, "swa_v_head_dim": 6, "n_group": 1, "topk_group": 1},
        [AttentionKind(24, 4, 4, 8, 6), AttentionKind(None, 4, 2, 8, 6)],
    ),
    "llama4_text": (
        SMALL_LLAMA4,
        [AttentionKind(None, 4, 2, 8, 8, 24), AttentionKind(None, 4, 2, 8, 8)],
    ),
    "modernbert-decoder": (
        TWO_TYPES,
        [AttentionKind(24, 4, 4, 8, 8), AttentionKind(None, 4, 4, 8, 8)],
    ),
}


@pytest.mark.parametrize("model_type", MODELS)
def test_kinds_are_those_that_the_layers_have(model_type, monkeypatch):
    config, expected = MODELS[model_type]
    model = small_model(model_type, **config).train()
    kinds = {}

    def attend(module, query, key, value, mask, *args, **kwargs):
        window = kwargs.get("sliding_window")
        chunk = attention_chunk(module)
        sizes = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
        kinds[AttentionKind(window, *sizes, chunk)] = None
        return distca_attention(module, query, key, value, mask, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "distca", attend)
    model(input_ids=torch.arange(3, 11)[None])
    assert list(kinds) == expected
    assert list(layers_by_kind(model)) == expected


def test_attention_of_the_decoder_alone_counts():
    model = small_model()
    model.tower = small_model().model.layers[0]
    attentions = ["layers.0.self_attn", "layers.1.self_attn"]
    assert list(decoder_attentions(model)) == attentions
    # ModernBERT's decoder model gives a linear layer of its head.
    model.get_decoder = nn.Module
    assert list(decoder_attentions(model)) == attentions
    model.config = PreTrainedConfig()
    with pytest.raises(
        ValueError, match=r"has no num_attention_heads, .*; train this model with stock"
    ):
        layers_by_kind(model)


def test_bytes_of_rows_and_what_kernels_are_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(CpuKernel, "check", lambda self, need, device: asked.append(need))

    def row_bytes(model_type, dtype=None, **config) -> list[RowBytes]:
        model = small_model(model_type, **{**MODELS[model_type][0], **config})
        settings = describe_run(model, DistCAConfig(), ranks=2, device=CPU, dtype=dtype).plans
        return [settings.row_bytes(kind) for kind in settings.kinds]

    assert row_bytes("llama", torch.bfloat16, num_key_value_heads=1) == [
        RowBytes(q=64, kv=32, o=64)
    ]
    assert row_bytes("deepseek_v3", torch.bfloat16) == [RowBytes(q=96, kv=144, o=48)]
    asked.clear()
    assert row_bytes("gemma4_text") == [
        RowBytes(q=128, kv=128, o=128),
        RowBytes(q=256, kv=128, o=256),
    ]
    assert [(need.params.window, need.head_dim_qk, need.head_dim_v) for need in asked] == [
        (24, 8, 8),
        (None, 16, 16),
    ]


# Tensor parallelism

WHOLE_HEADS = "rowwise_split_input"
"""How transformers names an output projection whose input each rank has whole, and takes its part
of."""


@pytest.mark.parametrize(("whole_heads", "heads"), [(False, (2, 1)), (True, (4, 2))])
def test_a_rank_that_shares_a_model_has_its_part_of_the_heads(whole_heads, heads):
    model: Any = small_model(
        num_hidden_layers=11
    )  # as transformers would load it on one of two ranks
    model._tp_size = 2
    model.config.distributed_config = object()
    if whole_heads:
        model._tp_plan = {
            name: WHOLE_HEADS if name.endswith("o_proj") else style
            for name, style in model.tp_plan.items()
        }
    assert tuple(layers_by_kind(model)) == (AttentionKind(None, *heads, 8, 8),)
    model.config.head_dim = None  # as where a config says nothing of it
    config = config_on_a_rank(model)
    assert (config.num_attention_heads, config.num_key_value_heads) == heads
    assert config.intermediate_size == model.config.intermediate_size // 2
    assert config.head_dim == 8
    assert config.distributed_config is None
    assert model.config.num_attention_heads == 4
    assert model.config.distributed_config is not None


def _shares() -> list[int]:
    """Among how many ranks parameters are shared out by tensor parallelism."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    placed = [(Replicate(), Shard(0)), (Shard(0), Replicate())]
    divided = [DTensor.from_local(torch.zeros(2, 2), mesh, placements) for placements in placed]
    by_fsdp = DTensor.from_local(torch.zeros(2, 2), mesh["fsdp"], (Shard(0),))
    return [ranks_of_share(parameter) for parameter in (*divided, by_fsdp, torch.zeros(2))]


def test_a_parameter_that_all_ranks_have_is_not_shared_out(rank_pools):
    assert rank_pools[2].run(_shares) == [[2, 1, 1, 1]] * 2


# Kernels


def test_which_kernel_is_chosen_and_why_not_a_faster_one(caplog, monkeypatch):
    for module in ("flash_attn", "flash_attn_interface", "kernels"):  # no package
        monkeypatch.setitem(sys.modules, module, None)

    def chosen(model, capability, **options) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        cuda = torch.device("cuda")
        return describe_run(
            model, DistCAConfig(**options), ranks=1, device=cuda, dtype=torch.bfloat16
        ).plans.kernel

    with caplog.at_level(logging.INFO):
        assert (
            chosen(small_model(), (9, 0), attention_kernel="torch_varlen") == "torch_varlen"
        )  # named: not logged
        assert chosen(small_model(), (9, 0)) == chosen(small_model(), (8, 0)) == "torch_varlen"
    slower, fastest = caplog.records
    first, third, fourth = slower.getMessage().splitlines()
    assert (
        first
        == "core attention is computed by kernel 'torch_varlen'; faster here, but not to be had:"
    )
    assert "pip install flash-attn-3" in third
    assert "pip install --pre flash-attn-4" in fourth
    assert fastest.getMessage() == "core attention is computed by kernel 'torch_varlen'"
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]
    capped = small_model(
        "gemma2", query_pre_attn_scalar=8, attn_logit_softcapping=50.0, sliding_window=24
    )
    with pytest.raises(ValueError, match=r"(?s)no installed kernel.*softcap=50\.0") as error:
        chosen(capped, (9, 0))
    assert "pip install 'hf-distca[flash-attn]'" in str(error.value)


def _kernel_of_this_rank(*kernels: str) -> str:
    config = DistCAConfig(attention_kernel=kernels[torch.distributed.get_rank()])
    try:
        return Dispatcher(
            describe_run(small_model(), config, ranks=2, device=CPU).plans, CPU
        ).kernel.name
    except (ValueError, RuntimeError) as error:
        return str(error)


def test_ranks_have_one_kernel(rank_pools):
    assert rank_pools[2].run(_kernel_of_this_rank, "cpu", "auto") == ["cpu", "cpu"]
    for error in rank_pools[2].run(_kernel_of_this_rank, "cpu", "reference"):
        assert (
            "attention_kernel differs between ranks ('cpu' on rank 0, 'reference' on rank 1)"
            in error
        )

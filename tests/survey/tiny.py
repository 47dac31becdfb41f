"""A tiny model of any causal language model of transformers, made from its default config.

A model is named by its type ("llama"), or by its class if it is one that takes images or sound, too
("LlavaForConditionalGeneration").
"""

import copy
from collections.abc import Mapping
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from hf_distca.models.loading import attention_of
from hf_distca.plan import ATTENTION_NAME

OF_TEXT = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Types of models of which transformers has a causal language model."""
MULTIMODAL = {
    name: model_type
    for model_type, name in sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items(), reverse=True)
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
}
"""Types of further models, which take images or sound beside text, by class."""

SIZES: dict[str, Any] = {
    # width
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_dim", "embedding_size"), 32
    ),
    **dict.fromkeys(
        ("word_embed_proj_dim", "input_embedding_size", "output_embedding_size", "lru_width"), 32
    ),
    # towers
    **dict.fromkeys(("projection_dim", "embed_dim", "base_channels", "projector_hidden_size"), 32),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 32),
    **dict.fromkeys(("num_filters", "n_filters"), 2),
    **dict.fromkeys(("image_token_embed_dim", "num_embeddings", "codebook_size"), 64),
    **dict.fromkeys(("out_hidden_size", "text_hidden_size", "adapter_in_dim"), 32),
    **dict.fromkeys(("adapter_out_dim", "adapter_input_size", "audio_hidden_size"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "dff", "dim_ff", "ffn_hidden_size", "decoder_ffn_dim"), 48
    ),
    **dict.fromkeys(
        ("encoder_ffn_dim", "intermediate_size_mlp", "shared_intermediate_size", "d_inner"), 48
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24
    ),
    **dict.fromkeys(
        ("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 24
    ),
    "dense_intermediate_size": 48,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), 64),
    "hidden_size_per_layer_input": 8,
    # heads
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4
    ),
    **dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads", "swa_num_attention_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "dim_head", "d_head", "swa_head_dim", "kv_channels", "global_head_dim"), 8
    ),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    "rotary_dim": 4,
    "index_n_heads": 2,
    "index_topk": 8,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(
        ("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1
    ),
    "zero_expert_num": 2,
    "decoder_sparse_step": 1,
    # along the row
    **dict.fromkeys(
        ("sliding_window", "attention_window_size", "local_attention", "sliding_window_size"), 8
    ),
    **dict.fromkeys(("attention_chunk_size", "floor_scale", "keep_window_size", "window_size"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 1),
    "mamba_d_ssm": 64,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "block_multiple_of": 8,
    # the rest
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
    **dict.fromkeys(("n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 256),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    "pad_token_id": 0,
    "blank_token_id": 63,
    "use_cache": False,
    "is_decoder": True,
    "query_pre_attn_scalar": 8,
}
"""What a field of this name is in a tiny config, at most: a default that is smaller stays."""
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
)
NEAR_ZERO = ("drop", "layerdrop", "jitter")
"""In names of probabilities: nothing is to be drawn."""
FILLED = (
    "head_dim",
    "num_key_value_heads",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
)
"""Sizes that are also given where the default is None."""
_SHARING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
"""Two layers that read the keys and values of two others."""
_DBRX_EXPERTS = {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}
_INDEXER = {
    **dict.fromkeys(("indexer_n_heads", "indexer_compress_ratio"), 2),
    **dict.fromkeys(("indexer_head_dim", "indexer_budget"), 8),
    "indexer_kv_heads": 1,
}
_SHARED_BLOCKS = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
MORE: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
        }
    },
    "emu3": {"vocabulary_map": {"<image>": 3}},
    "exaone4_5": {"text_config": {"model_type": "exaone4"}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "glm5_next": {
        "text_config": {"index_kpool": 8, "qk_rope_head_dim": 0, "num_key_value_heads": 4}
    },
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64},
    },
    "kyutai_speech_to_text": {"audio_pad_token_id": 3, "codec_config": {"upsample_groups": 32}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 3},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 3},
    "qwen3_omni_moe": {
        "talker_config": {
            "spatial_merge_size": 2,
            "text_config": {"shared_expert_intermediate_size": 24},
        }
    },
    "muse_spark": {"audio_config": {"hidden_sizes": [16, 32]}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "bamba": {"attn_layer_indices": [1]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": _DBRX_EXPERTS,
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
        "vision_config": {"sam_config": {"downsample_channels": [16, 32]}},
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_n_heads": 4},
    "gemma3n_text": {
        **_SHARING,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5, 0.0] * 2,
    },
    "gemma4_text": {**_SHARING, "num_global_key_value_heads": 1, "global_head_dim": 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "qwen4_exp_text": _INDEXER,
    "paddleocr_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    },
    "perception_lm": {"vision_config": {"model_args": {"embed_dim": 32}}},
    "step3p5": {"sliding_window": 8},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": _SHARED_BLOCKS,
    "zamba2": {**_SHARED_BLOCKS, "hybrid_layer_ids": [1, 3]},
}
"""What a type of model needs besides."""


OF_TIMM = ("gemma3n_vision", "timm_wrapper")
"""Image towers of the package timm. Another tower takes their place: text reaches none."""
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}


def tiny_model(
    name: str, implementation: str, config: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """A tiny model of this name, as trainers load it.

    Args:
        implementation: of attention; of the decoder's alone if it is planned.
        config: in place of the tiny one.
    """
    auto: Any = AutoModelForMultimodalLM if name in MULTIMODAL else AutoModelForCausalLM
    config = config or tiny_config(name)
    attention = attention_of(config) if implementation == ATTENTION_NAME else implementation
    model: PreTrainedModel = auto.from_config(config, attn_implementation=attention)
    return model


def tiny_config(name: str, more: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The config of this model: about 32 wide, with a layer of each kind of the default config.

    Args:
        more: what the config has besides.
    """
    model_type = MULTIMODAL.get(name, name)
    config_class = CONFIG_MAPPING[model_type]
    wanted = dict(MORE.get(model_type, {}))
    for field, value in (more or {}).items():
        wanted[field] = {**wanted.get(field, {}), **value} if isinstance(value, dict) else value
    config = config_class(**_tiny(config_class(), wanted))
    tower = getattr(config, "vision_config", None)
    if getattr(tower, "model_type", None) in OF_TIMM:
        siglip = CONFIG_MAPPING["siglip_vision_model"](**TOWER)
        vars(siglip).update({**vars(tower), **vars(siglip)})
        vars(config)["vision_config"] = siglip  # some configs name a class of their own
    return config


def _tiny(default: PreTrainedConfig, more: dict[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    depth = next((fields[name] for name in LAYERS if isinstance(fields.get(name), int)), None)
    shown = shown_layers(fields, depth)
    tiny: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            tiny[name] = _tiny(value, {**MORE.get(value.model_type, {}), **more.get(name, {})})
        elif name in LAYERS and isinstance(value, int):
            tiny[name] = len(shown)
        elif isinstance(value, (list, tuple)) and depth and len(value) == depth:
            tiny[name] = [value[i] for i in shown]
        elif name in SIZES and isinstance(value, (int, float)):
            tiny[name] = (
                min(value, SIZES[name]) if isinstance(value, int) and value > 0 else SIZES[name]
            )
        elif value is None and (name in FILLED or (name in SIZES and name.endswith("token_id"))):
            tiny[name] = SIZES[name]
        elif isinstance(value, float) and any(word in name for word in NEAR_ZERO):
            tiny[name] = 0.0
    if fields.get("qk_rope_head_dim") and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        tiny["head_dim"] = tiny["qk_rope_head_dim"]  # latent attention's name for it
    if fields.get("qk_nope_head_dim") and "num_key_value_heads" in tiny:
        tiny["num_key_value_heads"] = tiny[
            "num_attention_heads"
        ]  # which has keys and values for every head
    rope = fields.get("rope_parameters") or {}
    has_sections = "mrope_section" in getattr(default, "ignore_keys_at_rope_validation", ())
    if has_sections and "rope_theta" in rope:
        tiny["rope_parameters"] = _in_sections(rope, {**fields, **tiny})
    return {
        **tiny,
        **{
            name: value
            for name, value in more.items()
            if name not in tiny or not isinstance(value, dict)
        },
    }


def _in_sections(rope: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters that divide the few frequencies among time, height and width."""
    share = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1))
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    frequencies = int(head_dim * share) // 2
    third = frequencies // 3
    return {**rope, "mrope_section": [third, third, frequencies - 2 * third]}


def shown_layers(fields: dict[str, Any], depth: int | None) -> list[int]:
    """The first layer of each kind, at least two."""
    if depth is None:
        return [0, 1]
    lists = [
        value
        for value in fields.values()
        if isinstance(value, (list, tuple)) and len(value) == depth
    ]
    kinds = [
        [value[layer] for value in lists if isinstance(value[layer], str)] for layer in range(depth)
    ]
    shown = [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]
    return shown if len(shown) > 1 else [0, depth - 1]


STRETCHED_BEYOND = 30
"""Tokens from which on a document has other frequencies, where they depend on its length."""


def stretched(model: PreTrainedModel, rope_type: str) -> PreTrainedConfig | None:
    """The config of a tiny model with rotary embeddings that depend on the length of a document;
    None without any.
    """
    config = copy.deepcopy(model.config)
    text: Any = config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None)
    buffers = {
        name.rpartition(".")[2]: buffer for name, buffer in model.get_decoder().named_buffers()
    }
    if not parameters or not any(name.endswith("inv_freq") for name in buffers):
        return None
    text.max_position_embeddings = STRETCHED_BEYOND
    of_types = {key: value for key, value in parameters.items() if isinstance(value, dict)}
    for layer_type, old in of_types.items() if of_types else [("", parameters)]:
        frequencies = buffers.get(f"{layer_type}_inv_freq" if layer_type else "inv_freq")
        if frequencies is None:
            continue
        steps = range(len(frequencies))
        if len(steps) == 1:  # dynamic NTK needs two frequencies
            old["partial_rotary_factor"] = 2 * old["partial_rotary_factor"]
            steps = range(2)
        new = {
            "rope_type": rope_type,
            "factor": 4.0,
            "original_max_position_embeddings": STRETCHED_BEYOND,
        }
        new |= {
            "short_factor": [1.0 + 0.1 * i for i in steps],
            "long_factor": [2.0 + i for i in steps],
        }
        new |= {"short_mscale": 1.1, "long_mscale": 1.3}  # Phi-3.5-MoE's
        old.update(new)
    return config

"""A rank's share of a model that transformers divides by tensor parallelism at load.

Ranks that share a model hold the same rows; each computes a share of every layer.
"""

import copy
import re
from dataclasses import replace
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_distca.plan import AttentionKind
from hf_distca.refusal import RefusedError

TAKES_SHARES = "rowwise"
"""transformers' style of a linear layer with divided input: the output projection of divided
attention.

The style is "rowwise_split_input" if each rank has all heads.
"""
HEADS = ("num_attention_heads", "num_key_value_heads")
FEATURES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Sizes that tensor parallelism divides, by their names in configs."""
MESH = "tp"
"""Name of the mesh dimension of ranks that share a model's layers."""


def kind_on_a_rank(
    kind: AttentionKind, model: PreTrainedModel, attention: nn.Module
) -> AttentionKind:
    """Return a layer's kind of attention with the heads of one rank.

    Raise ValueError if ranks cannot divide heads.
    """
    ranks: int = getattr(model, "tp_size", None) or 1
    name = next(name for name, module in model.named_modules() if module is attention)
    of_layer = re.sub(r"\.\d+(?=\.|$)", ".*", name) + "."
    rules = model.tp_plan.items() if ranks > 1 else ()
    if not any(rule.startswith(of_layer) and style == TAKES_SHARES for rule, style in rules):
        return kind
    for heads, what in ((kind.q_heads, "query heads"), (kind.kv_heads, "key/value heads")):
        if heads % ranks:
            raise RefusedError(
                f"{name} has {heads} {what}, which tensor parallelism cannot divide among {ranks} "
                f"ranks. Load {type(model).__name__} with a tp_size that divides {kind.q_heads} "
                f"and {kind.kv_heads}; raise fsdp_size to use the other ranks: "
                "DistributedConfig(tp_size=…, fsdp_size=…)"
            )
    return replace(kind, q_heads=kind.q_heads // ranks, kv_heads=kind.kv_heads // ranks)


def is_shared_out(parameter: Tensor) -> TypeGuard[DTensor]:
    """Return whether each rank holds and computes with a share of a parameter."""
    return isinstance(parameter, DTensor) and MESH in (parameter.device_mesh.mesh_dim_names or ())


def ranks_of_share(parameter: Tensor) -> int:
    """Return the number of ranks that share a parameter by tensor parallelism; 1 if each has all of it."""
    if not is_shared_out(parameter):
        return 1
    mesh = parameter.device_mesh
    dimension = (mesh.mesh_dim_names or ()).index(MESH)
    return mesh.shape[dimension] if parameter.placements[dimension].is_shard() else 1


def is_divided_at_load(model: Any) -> bool:
    """Return whether transformers divided a model among ranks at load, by a DistributedConfig."""
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def config_on_a_rank(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the config of a whole model that computes one rank's share, except for its vocabulary."""
    ranks: int = getattr(model, "tp_size", None) or 1
    taking_shares = (
        [rule for rule, style in model.tp_plan.items() if style == TAKES_SHARES]
        if ranks > 1
        else []
    )
    divided: tuple[str, ...] = HEADS if any("attn" in rule for rule in taking_shares) else ()
    if any("attn" not in rule for rule in taking_shares):
        divided = (*divided, *FEATURES)
    config = divided_config(model.config, ranks, divided)
    config.distributed_config = None
    return config


def divided_config(
    config: PreTrainedConfig, ranks: int, divided: tuple[str, ...] = (*HEADS, *FEATURES)
) -> PreTrainedConfig:
    """Return a copy of a config whose `divided` sizes are a rank's share, at least 1."""
    config = copy.deepcopy(config)
    of_decoder: Any = config.get_text_config(decoder=True)
    if ranks > 1:
        head_dim = getattr(of_decoder, "head_dim", None)
        of_decoder.head_dim = head_dim or of_decoder.hidden_size // of_decoder.num_attention_heads
    for name in divided:
        if size := getattr(of_decoder, name, None):
            setattr(of_decoder, name, max(size // ranks, 1))
    return config

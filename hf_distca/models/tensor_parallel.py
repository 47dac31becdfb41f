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

from hf_distca.checks.model_rules import Models
from hf_distca.plan import AttentionKind

TAKES_SHARES = "rowwise"
"""transformers' style of a linear layer with divided input: the output projection of divided
attention.

The style is "rowwise_split_input" if each rank has all heads.
"""
HEADS = ("num_attention_heads", "num_key_value_heads")
"""Numbers of heads that tensor parallelism divides, by their names in configs."""
FEATURES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Sizes of MLPs that tensor parallelism divides, by their names in configs."""
MESH = "tp"
"""Name of the mesh dimension of ranks that share a model's layers."""


def kind_on_a_rank(
    kind: AttentionKind, model: PreTrainedModel, attention: nn.Module
) -> AttentionKind:
    """Return a layer's kind of attention with the heads of one rank.

    Raise ValueError if ranks cannot divide heads.
    """
    ranks = _ranks_of_model(model)
    name = next(name for name, module in model.named_modules() if module is attention)
    # Rules of a plan have * in place of the number of a layer.
    prefix = re.sub(r"\.\d+(?=\.|$)", ".*", name) + "."
    if not any(rule.startswith(prefix) for rule in _rules_that_take_shares(model)):
        return kind
    for heads, kind_of_heads in ((kind.q_heads, "query heads"), (kind.kv_heads, "key/value heads")):
        if heads % ranks:
            raise Models.UNDIVIDED_HEADS.error(
                name=name,
                heads=heads,
                kind=kind_of_heads,
                ranks=ranks,
                model=type(model).__name__,
                q_heads=kind.q_heads,
                kv_heads=kind.kv_heads,
            )
    return replace(kind, q_heads=kind.q_heads // ranks, kv_heads=kind.kv_heads // ranks)


def _ranks_of_model(model: PreTrainedModel) -> int:
    """Return the number of ranks that share a model's layers."""
    return getattr(model, "tp_size", None) or 1


def _rules_that_take_shares(model: PreTrainedModel) -> list[str]:
    """Return the names in a model's plan of layers whose input is divided among ranks."""
    if _ranks_of_model(model) == 1:
        return []
    return [rule for rule, style in model.tp_plan.items() if style == TAKES_SHARES]


def is_shared_out(parameter: Tensor) -> TypeGuard[DTensor]:
    """Return whether each rank holds and computes with a share of a parameter."""
    return isinstance(parameter, DTensor) and MESH in (parameter.device_mesh.mesh_dim_names or ())


def ranks_of_share(parameter: Tensor) -> int:
    """Return the number of ranks that share a parameter by tensor parallelism; 1 if it is whole."""
    if not is_shared_out(parameter):
        return 1
    mesh = parameter.device_mesh
    dimension = (mesh.mesh_dim_names or ()).index(MESH)
    return mesh.shape[dimension] if parameter.placements[dimension].is_shard() else 1


def is_divided_at_load(model: Any) -> bool:
    """Return whether transformers divided a model among ranks at load, by a DistributedConfig."""
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def config_on_a_rank(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the config of a whole model that computes one rank's share.

    The vocabulary stays whole.
    """
    divided: tuple[str, ...] = ()
    rules = _rules_that_take_shares(model)
    if any("attn" in rule for rule in rules):
        divided += HEADS
    if any("attn" not in rule for rule in rules):
        divided += FEATURES
    config = divided_config(model.config, _ranks_of_model(model), divided)
    config.distributed_config = None
    return config


def divided_config(
    config: PreTrainedConfig, ranks: int, divided: tuple[str, ...] = (*HEADS, *FEATURES)
) -> PreTrainedConfig:
    """Return a copy of a config whose `divided` sizes are a rank's share, at least 1."""
    config = copy.deepcopy(config)
    text_config: Any = config.get_text_config(decoder=True)
    if ranks > 1:
        # Otherwise the head dim would follow from the divided number of heads.
        head_dim = getattr(text_config, "head_dim", None)
        text_config.head_dim = (
            head_dim or text_config.hidden_size // text_config.num_attention_heads
        )
    for name in divided:
        size = getattr(text_config, name, None)
        if size:
            setattr(text_config, name, max(size // ranks, 1))
    return config

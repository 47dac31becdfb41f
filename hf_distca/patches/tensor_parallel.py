"""What tensor parallelism leaves a rank of a model, as transformers divides it when it is loaded.

Ranks that share a model so hold the same rows, and each has a share of what a layer computes of them.
"""

import copy
import re
from dataclasses import replace
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_distca.plan import AttentionKind

TAKES_SHARES = "rowwise"
"""How transformers names a linear layer whose input is divided: the output projection of divided attention. It is
"rowwise_split_input" where each rank has all heads."""
HEADS = ("num_attention_heads", "num_key_value_heads")
FEATURES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""What tensor parallelism divides, as configs name it."""
MESH = "tp"
"""The dimension of a device mesh that ranks which share a model's layers make up."""


def kind_on_a_rank(kind: AttentionKind, model: PreTrainedModel, attention: nn.Module) -> AttentionKind:
    """The kind of attention that is left of a layer's, with the heads that each rank has.

    Args:
        kind: of the layer as it is in the model's config.
        model: that the layer is of.
        attention: the layer.

    Raises:
        ValueError: the heads cannot be divided among the ranks.
    """
    ranks: int = getattr(model, "tp_size", None) or 1
    name = next(name for name, module in model.named_modules() if module is attention)
    if ranks == 1 or not _divides_heads(model, name):
        return kind
    for heads, what in ((kind.q_heads, "query heads"), (kind.kv_heads, "key/value heads")):
        if heads % ranks:
            raise ValueError(
                f"{name} has {heads} {what}, which tensor parallelism cannot divide among {ranks} ranks. Load "
                f"{type(model).__name__} with a tp_size that divides {kind.q_heads} and {kind.kv_heads}; raise "
                "fsdp_size to use the other ranks: DistributedConfig(tp_size=…, fsdp_size=…)"
            )
    return replace(kind, q_heads=kind.q_heads // ranks, kv_heads=kind.kv_heads // ranks)


def _divides_heads(model: PreTrainedModel, name: str) -> bool:
    """Whether ranks share out the heads of the attention layer of this name."""
    of_layer = re.sub(r"\.\d+(?=\.|$)", ".*", name) + "."
    return any(rule.startswith(of_layer) and style == TAKES_SHARES for rule, style in model.tp_plan.items())


def is_shared_out(parameter: Tensor) -> TypeGuard[DTensor]:
    """Whether each rank has and computes with a share of a parameter."""
    return isinstance(parameter, DTensor) and MESH in _dimensions(parameter)


def ranks_of_share(parameter: Tensor) -> int:
    """How many ranks share out a parameter by tensor parallelism; 1 where each has all of it."""
    if not is_shared_out(parameter):
        return 1
    of_dimension = zip(_dimensions(parameter), parameter.device_mesh.shape, parameter.placements, strict=True)
    return next(ranks if placed.is_shard() else 1 for name, ranks, placed in of_dimension if name == MESH)


def is_divided_at_load(model: Any) -> bool:
    """Whether transformers has divided a model among ranks as it loaded it, by a DistributedConfig."""
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def config_on_a_rank(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of a whole model that computes what one rank does of a divided one, its vocabulary apart.

    Args:
        model: divided or not.
    """
    config = copy.deepcopy(model.config)
    config.distributed_config = None
    ranks: int = getattr(model, "tp_size", None) or 1
    if ranks == 1:
        return config
    of_decoder = config.get_text_config(decoder=True)
    taking_shares = [rule for rule, style in model.tp_plan.items() if style == TAKES_SHARES]
    divided: tuple[str, ...] = HEADS if any("attn" in rule for rule in taking_shares) else ()
    if any("attn" not in rule for rule in taking_shares):
        divided = (*divided, *FEATURES)
    head_dim = getattr(of_decoder, "head_dim", None)
    of_decoder.head_dim = head_dim or of_decoder.hidden_size // of_decoder.num_attention_heads
    for name in divided:
        if getattr(of_decoder, name, None):
            setattr(of_decoder, name, getattr(of_decoder, name) // ranks)
    return config


def _dimensions(parameter: DTensor) -> tuple[str, ...]:
    return parameter.device_mesh.mesh_dim_names or ()

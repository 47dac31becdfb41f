"""All changes to a model for planned steps, before accelerate, DDP, FSDP2 or DeepSpeed wrap it."""

from transformers import PreTrainedModel

from hf_distca.config import DistCAConfig
from hf_distca.patches.attention import distca_attention
from hf_distca.patches.chunked_mlp import chunk_mlps
from hf_distca.patches.head import plan_head
from hf_distca.patches.layers import mixing_layers, plan_layers
from hf_distca.patches.masks import distca_mask
from hf_distca.patches.register import register


def prepare_model(model: PreTrainedModel, config: DistCAConfig, *, ping_pong: bool) -> None:
    """Change a model in place so that it runs planned steps as the settings say.

    Args:
        model: a transformers model, or a PEFT model around one.
        ping_pong: whether micro-batches may have two nano-batches.

    Raises:
        ValueError: the model lacks the modules that a setting changes.
    """
    register(distca_attention, distca_mask)  # already imported: register them directly
    if ping_pong or mixing_layers(model):
        plan_layers(model)
    if config.mlp_chunk_rows:
        chunk_mlps(model, config.mlp_chunk_rows)
    plan_head(model, config.loss_chunk_bytes)

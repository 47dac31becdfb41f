"""All that planned steps change in a model, before accelerate, DDP, FSDP2 or DeepSpeed get it."""

from transformers import PreTrainedModel

from hf_distca.config import DistCAConfig
from hf_distca.patches.attention import distca_attention
from hf_distca.patches.chunked_mlp import chunk_mlps
from hf_distca.patches.head import plan_head
from hf_distca.patches.layers import mixing_layers, plan_layers
from hf_distca.patches.masks import distca_mask
from hf_distca.patches.register import register


def prepare_model(model: PreTrainedModel, config: DistCAConfig, *, ping_pong: bool) -> None:
    """Let a model run planned steps as the settings say; it is changed in place.

    Args:
        model: a transformers model, or a PEFT model around one.
        config: the settings.
        ping_pong: whether micro-batches may have two nano-batches.

    Raises:
        ValueError: the model does not have what a setting is about.
    """
    register(distca_attention, distca_mask)  # which are imported by now: no call between
    if ping_pong or mixing_layers(model):
        plan_layers(model)
    if config.mlp_chunk_rows:
        chunk_mlps(model, config.mlp_chunk_rows)
    plan_head(model, config.loss_chunk_bytes)

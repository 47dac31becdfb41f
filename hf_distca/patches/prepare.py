"""All changes to transformers, and to a model before it is wrapped.

Accelerate, DDP, FSDP2 or DeepSpeed wrap it.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_distca.plan import ATTENTION_NAME
from hf_distca.units import AUTO

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_distca.config import DistCAConfig

# transformers and its users are imported as late as possible: `register` is first called in the
# middle of imports.


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a function of `hf_distca.patches.attention`, which the first call imports."""
    from hf_distca.patches import attention

    return getattr(attention, name)(*args, **kwargs)


LATE_ATTENTION, LATE_MASK = partial(_call, "distca_attention"), partial(_call, "distca_mask")


def register(
    attention: Callable[..., Any] = LATE_ATTENTION, mask: Callable[..., Any] = LATE_MASK
) -> None:
    """Register the attention function and its mask function; further calls are harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, mask)


def prepare_model(
    model: "PreTrainedModel", config: "DistCAConfig", *, ping_pong: bool, memory: int | None = None
) -> None:
    """Change a model in place so that it runs planned steps as the settings say.

    Args:
        ping_pong: whether micro-batches may have two nano-batches.
        memory: bytes of the GPU with the least memory, the same on all ranks; None for CPUs.

    Raises:
        ValueError: the model lacks the modules that a setting changes.
    """
    from hf_distca.models.decoder import mixing_layers
    from hf_distca.patches.attention import PREPARED, distca_attention, distca_mask
    from hf_distca.patches.chunked_mlp import chunk_layers
    from hf_distca.patches.head import plan_head
    from hf_distca.patches.layers import plan_layers
    from hf_distca.patches.rotary import plan_rotary

    for module in model.modules():  # also those of towers, whose attention is not planned
        setattr(module, PREPARED, True)
    register(distca_attention, distca_mask)  # already imported: register them directly
    plan_rotary(model)  # before the layers, which may own rotary embeddings
    if ping_pong or mixing_layers(model):
        plan_layers(model)
    chunk_rows = config.mlp_chunk_rows
    if chunk_rows != AUTO and chunk_rows > 0:
        chunk_layers(model, chunk_rows)
    plan_head(model, config.loss_chunk_bytes, memory)

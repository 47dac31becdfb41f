"""All changes to transformers, and to a model before it is wrapped.

Accelerate, DDP, FSDP2 or DeepSpeed wrap it.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_distca.plan import ATTENTION_NAME

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_distca.run import RunSpec

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


def prepare_model(model: "PreTrainedModel", run: "RunSpec") -> None:
    """Change a model in place so that it runs planned steps as a run says.

    Raises:
        ValueError: the model lacks the modules that a setting changes.
    """
    from hf_distca.models.decoder import mixing_layers
    from hf_distca.models.loading import plan_attention
    from hf_distca.patches.attention import PREPARED, distca_attention, distca_mask
    from hf_distca.patches.chunked_mlp import chunk_layers
    from hf_distca.patches.encoders import plan_encoders
    from hf_distca.patches.head import plan_head
    from hf_distca.patches.layers import plan_layers
    from hf_distca.patches.rotary import plan_rotary

    for module in model.modules():  # also those of towers, whose attention is not planned
        setattr(module, PREPARED, True)
    register(distca_attention, distca_mask)  # already imported: register them directly
    plan_attention(model)
    plan_encoders(model)
    plan_rotary(model)  # before the layers, which may own rotary embeddings
    if run.plans.may_ping_pong or mixing_layers(model):
        plan_layers(model)
    if run.mlp_chunk_rows > 0:
        chunk_layers(model, run.mlp_chunk_rows)
    plan_head(model, run.loss_chunk_bytes, run.device_memory)

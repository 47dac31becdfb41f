"""Build a dispatcher from a model and its settings, for the trainer and for custom training loops."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_distca.config import DistCAConfig
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.groups import RankMesh, mesh_ranks, raised_together
from hf_distca.dispatch.nodes import ranks_per_node
from hf_distca.models.decoder import base_model
from hf_distca.models.settings import plan_settings
from hf_distca.patches.prepare import prepare_model
from hf_distca.trainer.choices import choices_of


def is_checkpointed(model: PreTrainedModel) -> bool:
    """Return whether layers run again in the backward pass.

    Older versions of transformers have only the attribute `is_gradient_checkpointing`.
    """
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return bool(getattr(model, next(name for name in names if hasattr(type(base_model(model)), name))))


def make_dispatcher(
    model: PreTrainedModel,
    config: DistCAConfig,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    mesh: RankMesh | None = None,
    checkpointing: bool | None = None,
    folder: Path | None = None,
) -> Dispatcher:
    """Prepare a model for planned core attention and return its dispatcher.

    This is a collective call: every process of the world makes it at the same point, before `Accelerator.prepare`,
    DDP, FSDP2 or DeepSpeed wraps the model. It changes the model in place: decoder layers for `config.ping_pong`, MLPs
    for `config.mlp_chunk_rows`, and the output head for `config.loss_chunk_bytes`.

    Args:
        model: A model that was loaded with `attn_implementation="distca"`.
        config: Settings for packing, balancing and exchanging.
        device: Device of this rank.
        dtype: Dtype of core attention. None takes the model's. Under autocast give autocast's dtype.
        mesh: Ranks that train together: one dimension of a device mesh, or a process group. None takes all ranks.
        checkpointing: Whether layers run again in the backward pass; this affects the choice of plans. None takes the
            model's current setting.
        folder: Folder in which the measured costs of the device are kept for the same run. None keeps nothing.

    Raises:
        ValueError: The model cannot be planned, or the kernel does not support its attention. Also if nodes do not add
            up to the number of ranks, or settings differ between ranks. The message says what to change.
        RuntimeError: This rank cannot reach the others.
        ImportError: The package of the kernel is not installed.
    """
    launched = ranks_per_node(mesh, config.exchange_timeout)
    with raised_together(config.exchange_timeout):
        settings = plan_settings(
            model, config, ranks=len(mesh_ranks(mesh)), device=device, dtype=dtype, ranks_per_node=launched
        )
    dispatcher = Dispatcher(
        settings,
        device,
        mesh,
        keep_received=config.keep_received,
        keep_core_attention=config.keep_core_attention,
        exchange_timeout=config.exchange_timeout,
    )
    again = is_checkpointed(model) if checkpointing is None else checkpointing
    dispatcher.choose_by(choices_of(model, dispatcher, config, checkpointing=again, folder=folder))
    with raised_together(config.exchange_timeout):
        prepare_model(model, config, ping_pong=settings.ping_pong)
    return dispatcher

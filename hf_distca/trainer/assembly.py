"""From a model and its settings to a dispatcher: the one way of the trainer and of loops of one's own."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_distca.config import DistCAConfig
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.groups import RankMesh, mesh_ranks, raised_together
from hf_distca.dispatch.nodes import ranks_per_node
from hf_distca.patches.model import base_model, plan_settings
from hf_distca.patches.prepare import prepare_model
from hf_distca.trainer.choices import choices_of


def is_checkpointed(model: PreTrainedModel) -> bool:
    """Whether layers are run again in the backward; older transformers know it by its first name alone."""
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
    """Make a model's dispatcher; let its decoder layers run two nano-batches in turns, and its loss do without logits.

    A collective of the world: every process calls it at the same point, before the model is wrapped by
    `Accelerator.prepare`, DDP, FSDP2 or DeepSpeed.

    Args:
        model: a model with attn_implementation="distca"; its decoder layers are changed where `config.ping_pong` says
            so, their MLPs where `config.mlp_chunk_rows` and its output head where `config.loss_chunk_bytes` does.
        config: how documents are packed and their core attention is balanced and exchanged.
        device: the rank's device.
        dtype: what core attention is computed in; None for the model's own. Under autocast give autocast's.
        mesh: the ranks that train together, one dimension of a device mesh or a process group; None for all ranks of
            the world.
        checkpointing: whether layers are run again in the backward, which counts where plans are chosen by seconds;
            None: as the model is set now.
        folder: where the measured costs of the device are kept, for the same run to take them again; None for nowhere.

    Raises:
        ValueError: the model cannot be planned, the kernel cannot compute its attention, nodes have another number of
            ranks together, or the settings differ between ranks; says why and what to do.
        RuntimeError: this rank cannot reach the others.
        ImportError: the package of the kernel is missing.
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

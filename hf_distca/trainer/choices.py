"""Choices that the planner has in a training, and the measured costs for choosing."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_distca.config import DistCAConfig
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.groups import raised_together
from hf_distca.measure.device import measured_profile, name_of, query_rows
from hf_distca.measure.links import with_links
from hf_distca.models.shape import model_shape
from hf_distca.planner.settings import Choices, PlanSettings
from hf_distca.sim.costs import DeviceProfile
from hf_distca.sim.strategies import Setup
from hf_distca.units import AUTO

PROFILE_FILE = "device_profile.json"
"""File in the output folder with the costs that this run measured."""
LIMIT_S = 1.0
"""Seconds after which no longer kernel call and no larger exchange is measured."""


def choices_of(
    model: PreTrainedModel,
    dispatcher: Dispatcher,
    config: DistCAConfig,
    *,
    checkpointing: bool,
    folder: Path | None = None,
) -> Choices | None:
    """Return the planner's choices and costs; None if nothing is chosen. A collective.

    Nothing is chosen with dedicated servers: every plan is then balanced again for the servers that are present.

    Args:
        dispatcher: its kernel and its exchange are measured if the settings name no profile.
        checkpointing: whether layers run again in the backward pass.
        folder: keeps measured costs for the same run; None keeps nothing.

    Raises:
        ValueError: the named profile does not exist.
    """
    settings = dispatcher.settings
    chooses = config.chooses or config.device_profile is not None
    if not chooses or settings.ranks == 1 or config.attention_servers != 0:
        return None
    profile = _profile(model, dispatcher, config, folder)
    costs = setup_of(model, settings, profile, checkpointing=checkpointing).costs
    if checkpointing and not config.keep_core_attention:
        again = tuple(replace(each, backward=each.backward.plus(each.forward)) for each in costs.kinds)
        costs = replace(costs, kinds=again)
    return Choices.beside(
        settings,
        costs,
        groups=config.document_layout == AUTO,
        coarser=config.balance_tolerance == AUTO,
        nano_batches=(1, 2) if config.ping_pong == AUTO else (2,),
    )


def setup_of(model: PreTrainedModel, settings: PlanSettings, profile: DeviceProfile, *, checkpointing: bool) -> Setup:
    """Return the training in the terms of a simulation: model shape, device, ranks and tokens."""
    return Setup(
        model_shape(model),
        profile,
        settings.ranks,
        settings.tokens_per_rank,
        settings.ranks_per_node,
        checkpointing=checkpointing,
    )


def _profile(
    model: PreTrainedModel, dispatcher: Dispatcher, config: DistCAConfig, folder: Path | None
) -> DeviceProfile:
    """Return the profile named by the user, kept by this run or measured now; the same on every rank."""
    with raised_together(config.exchange_timeout):
        if config.device_profile is not None:
            return DeviceProfile.load(config.device_profile)
    settings, device, groups = dispatcher.settings, dispatcher.device, dispatcher.groups
    source = _source(dispatcher)
    kept: DeviceProfile | None = groups.all_gather(_kept(folder, source), in_world=True)[0]
    if kept is not None:
        return kept
    dtype = torch.float32 if settings.bytes_per_value == 4 else torch.bfloat16
    profile = measured_profile(
        dispatcher.kernel,
        settings.dominant_kind,
        model_shape(model).hidden,
        dtype,
        device,
        queries=query_rows(device, settings.tokens_per_rank),
        limit_s=LIMIT_S,
    )
    measured = with_links(profile, groups, device, settings.ranks_per_node, collectives=False, limit_s=LIMIT_S)
    # Ranks that share layers belong to several groups of ranks, and need the same plans.
    agreed: DeviceProfile = groups.all_gather(replace(measured, source=source), in_world=True)[0]
    if folder is not None and groups.members[groups.rank] == 0:
        folder.mkdir(parents=True, exist_ok=True)
        agreed.save(folder / PROFILE_FILE)
    return agreed


def _source(dispatcher: Dispatcher) -> str:
    """Describe what measured costs depend on; a kept profile with another description is measured again."""
    settings = dispatcher.settings
    return (
        f"Measured when training began: {settings.ranks} ranks on nodes of {settings.ranks_per_node}, "
        f"{name_of(dispatcher.device)}, kernel {dispatcher.kernel.name}, {settings.dominant_kind}, "
        f"{settings.bytes_per_value} bytes a value, at most {settings.tokens_per_rank} tokens a rank, "
        f"torch {torch.__version__}"
    )


def _kept(folder: Path | None, source: str) -> DeviceProfile | None:
    """Return the profile that an earlier run kept in a folder, if ranks, kernel and devices are the same."""
    if folder is None or not (folder / PROFILE_FILE).exists():
        return None
    try:
        profile = DeviceProfile.load(str(folder / PROFILE_FILE))
    except ValueError:  # a run ended while it wrote: measure again
        return None
    return profile if profile.source == source else None

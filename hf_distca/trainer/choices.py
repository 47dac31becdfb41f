"""What the planner may choose in a training, with costs of the device that the user names."""

from transformers import PreTrainedModel

from hf_distca.config import AUTO, DistCAConfig
from hf_distca.patches.model import base_model, layers_by_kind
from hf_distca.patches.weights import matrix_weights
from hf_distca.planner.settings import Choices, PlanSettings
from hf_distca.sim.costs import DeviceProfile
from hf_distca.sim.model import ModelShape
from hf_distca.sim.ways import Setup


def choices_of(
    model: PreTrainedModel, settings: PlanSettings, config: DistCAConfig, *, checkpointing: bool
) -> Choices | None:
    """Return what plans are chosen by; None where nothing is chosen.

    Without a profile nothing is known of the device and its links. With dedicated servers every plan is balanced again
    for those that are there.

    Args:
        model: a model with attn_implementation="distca".
        settings: of its plans.
        config: names the profile.
        checkpointing: whether layers are run again in the backward.

    Raises:
        ValueError: there is no such profile.
    """
    if config.device_profile is None:
        return None
    profile = DeviceProfile.load(config.device_profile)
    if config.attention_servers != 0 or settings.ranks == 1:
        return None
    base, layers = base_model(model), layers_by_kind(model)
    weights = matrix_weights(base, layers)
    shape = ModelShape(layers, weights.hidden, weights.before, weights.after, weights.head, base.num_parameters())
    setup = Setup(
        shape,
        profile,
        settings.ranks,
        settings.tokens_per_rank,
        settings.ranks_per_node,
        checkpointing=checkpointing,
    )
    return Choices.beside(settings, setup.costs, groups=config.document_layout == AUTO)

"""The shape of a model that a user names, for simulations."""

import torch

from hf_distca.cli.input_error import InputError
from hf_distca.cli.model_memory import read_config
from hf_distca.memory.live import without_numbers
from hf_distca.memory.models import model_of_config
from hf_distca.patches.model import layers_by_kind
from hf_distca.patches.weights import matrix_weights
from hf_distca.sim.model import ModelShape


def shape_of(name: str) -> ModelShape:
    """Count a model's weights before and behind core attention.

    Args:
        name: a config.json, a folder with one, or a name on the hub.

    Raises:
        InputError: there is no such model, or it cannot be planned.
    """
    config = read_config(name)
    try:
        model = model_of_config(config, torch.float32, without_numbers())
        layers = layers_by_kind(model)
    except ValueError as error:
        raise InputError(str(error)) from error
    weights = matrix_weights(model, layers)
    return ModelShape(layers, weights.hidden, weights.before, weights.after, weights.head, model.num_parameters())

"""The shape of a model that a user names, for simulations."""

import torch

from hf_distca.cli.lengths_file import InputError
from hf_distca.cli.model_memory import read_config
from hf_distca.memory.live import without_numbers
from hf_distca.memory.models import model_of_config
from hf_distca.patches.model import layers_by_kind
from hf_distca.patches.weights import weights_met
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
    text = model.config.get_text_config(decoder=True)
    met = sum(weights_met(model).values())
    before = sum(
        count * text.hidden_size * (kind.q_heads * kind.dim_qk + kind.kv_heads * (kind.dim_qk + kind.dim_v))
        for kind, count in layers.items()
    )
    depth = sum(layers.values())
    head = model.get_output_embeddings()
    return ModelShape(
        layers=layers,
        hidden=text.hidden_size,
        before=before // depth,
        after=int(met - before) // depth,
        head=0 if head is None else head.weight.numel(),
        parameters=model.num_parameters(),
    )

"""Read a user's model: its config, and its shape for simulations."""

import torch
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from hf_distca.cli.input_error import InputError
from hf_distca.memory.live import without_numbers
from hf_distca.models.fake import model_of_config
from hf_distca.models.refusals import check_model
from hf_distca.models.shape import model_shape
from hf_distca.sim.model import MODELS, ModelShape


def shape_of(name: str) -> ModelShape:
    """Count a model's weights before and after core attention.

    Args:
        name: a config.json, a folder with one, or a name on the hub.

    Raises:
        InputError: there is no such model, or it cannot be planned.
    """
    config = read_config(name)
    try:
        model = model_of_config(config, torch.float32, without_numbers())
        check_model(model)
        return model_shape(model)
    except ValueError as error:
        raise InputError(str(error)) from error


def read_config(name: str) -> PreTrainedConfig:
    """Return the config of a model.

    Args:
        name: a name of `MODELS`, a config.json, a folder with one, or a name on the hub.

    Raises:
        InputError: there is no config, or transformers does not know the model.
    """
    if name in MODELS:
        return config_of_shape(MODELS[name])
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise InputError(
            f"no model config at {name!r}: expected {', '.join(MODELS)}, a config.json, a folder with one, or a name "
            f"on the hub, which must be reachable ({first_line})"
        ) from error
    return config


def config_of_shape(shape: ModelShape) -> LlamaConfig:
    """Return the config of a LLaMA-like model of this shape, see `ModelShape.llama`."""
    (kind,) = shape.layers
    output = shape.hidden * kind.q_heads * kind.dim_v
    return LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=(shape.after - output) // (3 * shape.hidden),
        num_hidden_layers=shape.depth,
        num_attention_heads=kind.q_heads,
        num_key_value_heads=kind.kv_heads,
        head_dim=kind.dim_qk,
        vocab_size=shape.head // shape.hidden,
    )

"""Models of fake tensors, from a config or as a copy, and configs of shallower models."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_distca.models.decoder import base_model, decoder_layers
from hf_distca.models.kinds import attention_reaches
from hf_distca.plan import ATTENTION_NAME


def fake_tensors() -> FakeTensorMode:
    """Return a mode in which all tensors are fake, and raise an error for who asks for their addresses."""
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        return FakeTensorMode(allow_non_fake_inputs=True)


def model_of_config(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a causal language model of a config, in training mode.

    Raise ValueError if transformers has none.
    """
    with fake_tensors():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION_NAME, dtype=dtype
        )
    model.train()
    return model


def model_after(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of a model in training mode, with its adapters and other changes.

    Args:
        model: a model on any device, before it is wrapped for several ranks; ZeRO-3 may have
            divided its parameters.
        dtype: dtype of the copy's weights; None for the model's own.
    """

    def emptied(x: Tensor) -> Tensor:
        shape = getattr(x, "ds_shape", x.shape)  # ZeRO-3 leaves an empty tensor
        empty = torch.empty(shape, dtype=dtype if dtype and x.is_floating_point() else x.dtype)
        return nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty

    with fake_tensors():
        tensors = [*model.parameters(), *model.buffers()]
        memo: dict[int, Any] = {id(x): emptied(x) for x in tensors}  # tied weights stay tied
        copied = copy.deepcopy(model, memo).train()
    # A forward set on the instance, such as a fused loss, would run the original model.
    vars(base_model(copied)).pop("forward", None)
    return copied


def repeated_layers(model: PreTrainedModel) -> int | None:
    """Return after how many decoder layers a model's layers repeat; None if they do not."""
    reaches = attention_reaches(model.config)
    layers = [
        (type(layer), reaches[i % len(reaches)], sum(p.numel() for p in layer.parameters()))
        for i, layer in enumerate(decoder_layers(model))
    ]
    periods = range(1, len(layers) // 3 + 1)
    return next(
        (p for p in periods if all(layer == layers[i % p] for i, layer in enumerate(layers))), None
    )


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Return the config of a model with only the first `layers` layers."""
    shallow = copy.deepcopy(config)
    text: Any = shallow.get_text_config(decoder=True)
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return shallow

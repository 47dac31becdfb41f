"""Models of fake tensors, from a config or as a copy, and configs of shallower models."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig, PreTrainedModel

from hf_distca.models.decoder import base_model, decoder_layers
from hf_distca.models.kinds import Reach, attention_reaches
from hf_distca.models.loading import attention_of, auto_class


def fake_tensors() -> FakeTensorMode:
    """Return a mode in which all tensors are fake. Asking for a tensor's address is an error."""
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        return FakeTensorMode(allow_non_fake_inputs=True)


def model_of_config(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a causal language model of a config, in training mode.

    Raise ValueError if transformers has none.
    """
    with fake_tensors():
        model: PreTrainedModel = auto_class(config).from_config(
            config, attn_implementation=attention_of(config), dtype=dtype
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

    def emptied(tensor: Tensor) -> Tensor:
        shape = getattr(tensor, "ds_shape", tensor.shape)  # ZeRO-3 leaves an empty tensor
        changes_dtype = dtype is not None and tensor.is_floating_point()
        empty = torch.empty(shape, dtype=dtype if changes_dtype else tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, tensor.requires_grad)
        return empty

    with fake_tensors():
        tensors = [*model.parameters(), *model.buffers()]
        # deepcopy takes these instead of copies, so that tied weights stay tied.
        memo: dict[int, Any] = {id(tensor): emptied(tensor) for tensor in tensors}
        copied = copy.deepcopy(model, memo).train()
    # A forward set on the instance, such as a fused loss, would run the original model.
    vars(base_model(copied)).pop("forward", None)
    return copied


def repeated_layers(model: PreTrainedModel) -> int | None:
    """Return after how many decoder layers a model's layers repeat; None if they do not."""
    reaches = attention_reaches(model.config)
    layers: list[tuple[type, Reach, int]] = []
    for index, layer in enumerate(decoder_layers(model)):
        numbers = sum(parameter.numel() for parameter in layer.parameters())
        layers.append((type(layer), reaches[index % len(reaches)], numbers))
    # A period counts if it comes at least three times.
    for period in range(1, len(layers) // 3 + 1):
        if all(layer == layers[index % period] for index, layer in enumerate(layers)):
            return period
    return None


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Return the config of a model with only the first `layers` layers."""
    shallow = copy.deepcopy(config)
    text: Any = shallow.get_text_config(decoder=True)
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return shallow

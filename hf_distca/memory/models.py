"""Models without numbers, which take no memory: of a config, or after a model that is there."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_distca.patches.model import base_model
from hf_distca.patches.register import ATTENTION_NAME


def model_of_config(config: PreTrainedConfig, dtype: torch.dtype, mode: FakeTensorMode) -> PreTrainedModel:
    """A causal language model of a config, in training.

    Args:
        config: of the model.
        dtype: of its weights.
        mode: in which it is made and used.

    Raises:
        ValueError: transformers has no causal language model of this config.
    """
    with mode:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION_NAME, dtype=dtype
        )
    model.train()
    return model


def model_after(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of a model, with its adapters and whatever else is set on it, in training.

    Args:
        model: on any device, before it is wrapped for several ranks; ZeRO-3 may have divided its parameters.
        mode: in which the copy is used.
        dtype: of its weights; None for those that the model has.
    """

    def emptied(x: Tensor) -> Tensor:
        shape = getattr(x, "ds_shape", x.shape)  # ZeRO-3 leaves an empty tensor
        empty = torch.empty(shape, dtype=dtype if dtype and x.is_floating_point() else x.dtype)
        return nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty

    with mode:
        tensors = [*model.parameters(), *model.buffers()]
        memo: dict[int, Any] = {id(x): emptied(x) for x in tensors}  # what is tied stays so
        copied = copy.deepcopy(model, memo).train()
    # A forward that was put on the model alone, for a fused loss, would run the model that it was made for.
    vars(base_model(copied)).pop("forward", None)
    return copied

"""What all changed modules share: a pickled model is the model of transformers again."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from hf_distca import DistCAConfig, make_dispatcher, pack_padded
from tests.models_and_batches import SMALL_HYBRID, small_model

IDS_BL = torch.arange(3, 11).view(2, 4)


SIZES: dict[str, dict[str, Any]] = {"llama": {}, "qwen3_5_text": SMALL_HYBRID}


def changed_model(model_type: str, *, padded: bool) -> nn.Module:
    model = small_model(model_type, **SIZES[model_type])
    config = DistCAConfig(
        tokens_per_rank=64, device_profile="cpu", mlp_chunk_rows=4, planning={"ping_pong": True}
    )
    (pack_padded if padded else make_dispatcher)(model, config, torch.device("cpu"))
    return model


def own_classes(model: nn.Module) -> set[type]:
    """Classes of modules that are not those of the library their names come from."""
    return {
        type(module)
        for module in model.modules()
        if any(base.__module__.startswith("hf_distca.") for base in type(module).__mro__)
    }


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("model_type", SIZES)
def test_a_pickled_model_is_stock(model_type: str, padded: bool) -> None:
    model = changed_model(model_type, padded=padded)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: Any = torch.load(file, weights_only=False)
    assert own_classes(model)
    assert own_classes(loaded) == set()
    torch.testing.assert_close(loaded(IDS_BL).logits, model(IDS_BL, use_cache=True).logits)


@pytest.mark.parametrize("padded", [False, True])
def test_a_copy_keeps_the_changes(padded: bool) -> None:
    model = changed_model("llama", padded=padded)
    copied = copy.deepcopy(model)
    assert [type(module) for module in copied.modules()] == [
        type(module) for module in model.modules()
    ]
    assert copied.lm_head.weight is not model.lm_head.weight

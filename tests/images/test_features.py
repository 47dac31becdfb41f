"""What users combine, on documents with images: beside transformers' Trainer in one process."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from tests.images.families import IMAGE, documents, tiny_model
from tests.trainer.comparison import (
    LENGTHS,
    Result,
    Run,
    assert_equal,
    pad,
    train_alone,
    train_planned,
)
from tests.trainer.features import lora

COUNTS = [3, 0, 1, 0, 0, 0, 0, 0, 1, 2, 0, 1]
"""Numbers of images. Micro-batches of four documents have some with and some without images; the
second micro-batch has none.
"""
EXAMPLES = documents("qwen3_vl", COUNTS, LENGTHS)


def pad_with_images(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A padded batch as a processor makes it."""
    batch = pad(examples)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    of_images = [example for example in examples if "pixel_values" in example]
    for name in ("pixel_values", "image_grid_thw") if of_images else ():
        batch[name] = torch.cat([torch.as_tensor(example[name]) for example in of_images])
    return batch


def given(model: nn.Module) -> dict[str, Any]:
    """Arguments of a trainer; a padded batch for the stock model."""
    is_stock = model.config._attn_implementation != "distca"
    data = {"train_dataset": EXAMPLES, "eval_dataset": EXAMPLES}
    return {**data, "data_collator": pad_with_images} if is_stock else data


def seeing(implementation: str) -> nn.Module:
    """The model."""
    return tiny_model("qwen3_vl", implementation)


def with_frozen_encoder(implementation: str) -> nn.Module:
    """The model, of which text alone is trained."""
    model = seeing(implementation)
    model.model.visual.requires_grad_(False)
    return model


ARGUMENTS = {
    "max_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "remove_unused_columns": False,
    "max_grad_norm": 0.5,
}
SHARED: dict[str, Any] = {
    "given": given,
    "planned": {"document_layout": "fixed", "save_strategy": "steps", "save_steps": 2},
}
RUNS = {
    "whole": Run(ARGUMENTS, seeing, **SHARED),
    "resumed": Run(ARGUMENTS, seeing, **SHARED, resumes="whole/checkpoint-2"),
    "frozen encoder, accumulation": Run(
        {**ARGUMENTS, "gradient_accumulation_steps": 2}, with_frozen_encoder, **SHARED
    ),
    "autocast, LoRA": Run(
        {**ARGUMENTS, "bf16": True, "max_steps": 2, "eval_steps": 2},
        seeing,
        lora("q_proj", "o_proj", "up_proj"),  # which the encoder does not have
        rounds=True,
        **SHARED,
    ),
}


def _train(folder: str, strategy: str) -> dict[str, Result]:
    return {name: train_planned(folder, run, strategy, name) for name, run in RUNS.items()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_features(rank_pools, tmp_path, strategy, subtests):
    results = rank_pools[2].run(_train, str(tmp_path), strategy)
    for name, run in RUNS.items():
        with subtests.test(name):

            @cache
            def expected(exact: bool = False, run: Run = run, name: str = name) -> Result:
                return train_alone(str(tmp_path / name / str(exact)), run, exact)

            for result in results:
                assert_equal(run, result[name], expected, strategy)

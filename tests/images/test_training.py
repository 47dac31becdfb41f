"""Trainings on documents with images, beside the stock model on one document at a time."""

from functools import cache
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hf_distca
from hf_distca.checks.setting_names import CHECKPOINTING
from tests.images.families import CONFIGS, documents, stock_inputs, tiny_model
from tests.trainer.comparison import QUIET, launched

COUNTS = [2, 0, 3, 1, 1]
"""Numbers of images of the documents."""
LEARNING_RATE = 0.05
EXCHANGING = {"balance_block_size": 8, "balance_tolerance": 0.01}
"""Plans under which the rows of small documents travel."""
STEPS = 3
Examples = list[dict[str, Any]]
WITHIN = 1e-5
"""Largest error of losses and weights, relative to the largest value."""


@cache
def stock_training(family: str, layers: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The stock training of a family on its documents."""
    return stock_training_on(family, documents(family, COUNTS), layers)


def stock_training_on(
    family: str, examples: Examples, layers: int = 2
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of steps of plain gradient descent on all documents, and the weights after them."""
    model = tiny_model(family, "sdpa", layers)
    targets = sum(len(example["input_ids"]) - 1 for example in examples)
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        total = 0.0
        for example in examples:
            inputs = stock_inputs(model, example)
            labels = inputs.pop("labels")[0, 1:]
            logits = model(**inputs).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / targets
            loss.backward()
            total += loss.item()
        losses.append(total)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
    return losses, {name: weight.detach() for name, weight in model.named_parameters()}


def train(
    folder: str,
    family: str,
    strategy: str,
    arguments: dict[str, Any],
    ping_pong: bool,
    given: Examples | None = None,
    layers: int = 2,
) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    """Losses and weights of a training with hf_distca, and the images that this rank encoded.

    Args:
        given: documents of a stored data set; None for a list of documents.
        layers: of the text model.
    """
    encoded: list[int] = []
    with launched(strategy, {}):
        unset_hf_deepspeed_config()
        model = tiny_model(family, "distca", layers)
        examples = given or documents(family, COUNTS)
        tokens = sum(len(example["input_ids"]) for example in examples)
        args = hf_distca.DistCATrainingArguments(
            folder,
            **{
                **QUIET,
                "max_steps": STEPS,
                "optim": "sgd",
                "learning_rate": LEARNING_RATE,
                "max_grad_norm": 0.0,
                "bf16": False,
                "tokens_per_rank": -(-tokens // dist.get_world_size()),
                "document_layout": "fixed",
                "planning": {
                    "balance_block_size": 8,
                    "balance_tolerance": 0.01,
                    "ping_pong": ping_pong,
                },
                **arguments,
            },
        )
        dataset = examples if given is None else datasets.Dataset.from_list(given)
        trainer = hf_distca.DistCATrainer(model=model, args=args, train_dataset=dataset)
        bind = trainer.dispatcher.bind

        def noted(plan: Any) -> Any:
            encoded.append(len(plan.images["image"].encoded_by(dist.get_rank())))
            return bind(plan)

        trainer.dispatcher.bind = noted
        trainer.train()
        weights = {
            name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            for name, parameter in trainer.model.named_parameters()
        }
        if strategy == "zero3":
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(weights.values())):
                weights = {name: weight.detach().clone() for name, weight in weights.items()}
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.close()
        return losses, {name: weight.detach() for name, weight in weights.items()}, encoded


def assert_equal(found: Any, expected: Any) -> None:
    """Losses and weights are equal up to roundings of float32."""
    losses, weights, _ = found
    assert losses == pytest.approx(expected[0], rel=WITHIN, abs=1e-4)
    for name, weight in expected[1].items():
        # Biases of keys have no gradient but roundings.
        error = (weights[name] - weight).abs().max() / weight.abs().max().clamp(min=0.05)
        assert error <= WITHIN, (name, error)


@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_families(rank_pools, tmp_path, family, ranks, ping_pong):
    if ping_pong and ranks != 2:
        pytest.skip("one number of ranks is enough")
    expected = stock_training(family)
    results = rank_pools[ranks].run(train, str(tmp_path), family, "ddp", {}, ping_pong)
    for result in results:
        assert_equal(result, expected)
    # Each image is encoded once in each micro-batch.
    encoded = [sum(step) for step in zip(*(result[2] for result in results), strict=True)]
    assert set(encoded) == {sum(COUNTS)}
    if ranks == 2:  # images are divided
        assert all(0 < images < sum(COUNTS) for result in results for images in result[2])


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_activation_checkpoints_on_the_host(rank_pools, tmp_path, family):
    """Features enter between layers whose checkpoints are on the host."""
    expected = stock_training(family, layers=4)
    arguments = {CHECKPOINTING: True, "offload_activations": True}
    for result in rank_pools[2].run(train, str(tmp_path), family, "ddp", arguments, True, None, 4):
        assert_equal(result, expected)


def test_equal_tokens_stand_for_other_images(rank_pools, tmp_path):
    """Documents with equal tokens and other pixels share no prefix; another document has text."""
    seen, text = documents("qwen3_vl", [2, 0], [200, 40])
    other = {**seen, "pixel_values": -seen["pixel_values"]}
    examples = [
        {name: np.asarray(value).tolist() for name, value in example.items()}
        for example in (seen, text, other)
    ]
    expected = stock_training_on("qwen3_vl", examples)
    for result in rank_pools[2].run(train, str(tmp_path), "qwen3_vl", "ddp", {}, True, examples):
        assert_equal(result, expected)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_strategies(rank_pools, tmp_path, strategy):
    expected = stock_training("qwen3_vl")
    arguments = {CHECKPOINTING: True}
    for result in rank_pools[2].run(
        train, str(tmp_path), "qwen3_vl", strategy, arguments, True, keeps_groups=True
    ):
        assert_equal(result, expected)

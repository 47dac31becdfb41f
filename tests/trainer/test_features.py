"""Features under each strategy: two ranks with planned attention beside transformers' Trainer with "sdpa" in one
process, on the same documents; or refused, with cause and remedy, on every rank.

What is computed in float32 may differ by roundings of float32. What is computed in bfloat16 is held against one
process in float32 as well: norms and weights may be at most twice as far from it as those of one process in bfloat16.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from itertools import chain
from typing import Any

import datasets
import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hf_distca
from tests.models_and_batches import exchanging
from tests.trainer.comparison import (
    ALONE,
    COMMON,
    PER_MICRO_BATCH,
    PLANNED,
    ROUNDING,
    TARGETS,
    TYPES,
    examples,
    launched,
)
from tests.trainer.features import (
    ARGUMENTS,
    FEATURES,
    OTHERS,
    PAGE,
    TOGETHER,
    Average,
    Feature,
    Pad,
    page,
    together,
    whole,
)

EXACT_LOSS, EXACT = 1e-6, 1e-4
"""Relative errors in float32: a few roundings of 2^-24 of a loss, and of gradients, whose summands have both signs."""
Result = dict[str, Any]


def trained(trainer: Trainer, model: nn.Module) -> Result:
    """What a training gives: losses, norms, and by how much every trained weight and its average changed."""
    before = {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}
    if trainer.is_deepspeed_enabled and trainer.args.bf16:  # what DeepSpeed starts from
        before = {name: weight.bfloat16().float() for name, weight in before.items()}
    with pytest.MonkeyPatch.context() as patch:
        # NEFTune's noise, as if it were drawn alike everywhere: its scale is by the length of the row.
        patch.setattr(torch.Tensor, "uniform_", lambda noise, *between: noise.fill_(0.05))
        trainer.train()
    history = trainer.state.log_history
    averages = [callback.average for callback in trainer.callback_handler.callbacks if isinstance(callback, Average)]
    after = dict(trainer.model.named_parameters())
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "learned": {name: whole(after[name]) - before[name] for name in before},
        "averages": {name: whole(average) for each in averages for name, average in each.items()},
        "history": history,
    }


def planned(folder: str, names: tuple[str, ...], strategy: str) -> Result:
    """A rank's training with hf_distca, or the error and how far it had come."""
    feature = together(*names)
    # Before the arguments: once those know of ZeRO-3, a model's parameters are drawn in another way.
    unset_hf_deepspeed_config()
    model = feature.model("distca")
    given = {"model": model, "train_dataset": datasets.Dataset.from_list(examples(feature)), **feature.given(model)}
    with launched(strategy, feature.environment) as patch:
        feature.patched(patch)
        try:
            args = hf_distca.DistCATrainingArguments(
                output_dir=folder,
                **{**COMMON, **PLANNED, **exchanging(model), "dataloader_num_workers": 0, **feature.planned}
                | feature.arguments,
            )
            trainer = hf_distca.DistCATrainer(args=args, **given)
            result = trained(trainer, model)
            result["strategy"] = str(trainer.accelerator.distributed_type)
            trainer.close()
        except (ValueError, ImportError, RuntimeError) as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        return result


def in_one_process(folder: str, feature: Feature, exact: bool = False) -> Result:
    """What transformers' Trainer makes of a feature; with `exact` in float32, from the same weights."""
    arguments = {**feature.arguments, "bf16": False} if exact else feature.arguments
    idle = feature.steps_without_targets
    alone = {**ALONE, "max_steps": 2 - idle}
    model = feature.model("sdpa")
    documents = datasets.Dataset.from_list(examples(feature)[idle * PER_MICRO_BATCH :])
    if exact:
        model = model.float()
    with launched("ddp", {} if exact else feature.environment) as patch:
        feature.patched(patch)
        args = TrainingArguments(output_dir=folder, **{**COMMON, **alone, **arguments})
        given = {"model": model, "args": args, "train_dataset": documents, "data_collator": Pad()}
        result = trained(Trainer(**{**given, **feature.given(model)}), model)
    return {**result, "losses": [0.0] * idle + result["losses"], "norms": [0.0] * idle + result["norms"]}


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Callable[..., Result]:
    """What one process makes of features, trained once."""
    folder = str(tmp_path_factory.mktemp("one"))
    return cache(lambda names, exact=False: in_one_process(folder, together(*names), exact))


@pytest.fixture(scope="module")
def run(rank_pools, zero_pools, tmp_path_factory) -> Callable[[tuple[str, ...], str], list[Result]]:
    """Trains features under a strategy, and gives what became of them on each rank."""
    folder = str(tmp_path_factory.mktemp("two"))

    def trains(names: tuple[str, ...], strategy: str) -> list[Result]:
        pool = zero_pools.get(strategy, rank_pools[2])
        return pool.run(planned, folder, names, strategy, keeps_groups=strategy in zero_pools)

    return trains


SINGLE = [(strategy, (name,)) for name, feature in FEATURES.items() for strategy in feature.only]


@pytest.mark.features
@pytest.mark.parametrize(
    ("strategy", "names"),
    [*TOGETHER, *(pytest.param(*each, marks=pytest.mark.further_strategy) for each in SINGLE if each not in TOGETHER)],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_features(run, reference, strategy, names):
    feature = together(*names)
    pytest.importorskip(feature.needs)
    for result in run(names, strategy):
        if strategy in feature.refused:
            assert feature.refused[strategy] in result.get("error", "no error")
            continue
        assert "error" not in result, result["error"]
        assert TYPES[strategy] in result["strategy"]
        expected = reference(names)
        losses, others = errors(result, expected)
        if not feature.rounds:
            assert losses < EXACT_LOSS
            assert others < EXACT
            continue
        assert losses < (ROUNDING if strategy == "fsdp2" else ROUNDING / TARGETS**0.5)
        exact = reference(names, exact=True)
        _, of_one_process = errors(expected, exact)
        _, others = errors(result, exact)
        assert others < 2 * of_one_process


def test_each_feature_is_among_those_that_are_always_tried():
    assert set(FEATURES) == {name for _, names in TOGETHER for name in names}
    for strategy, names in TOGETHER:
        assert all(strategy in FEATURES[name].only and strategy not in FEATURES[name].refused for name in names)


def errors(result: Result, expected: Result) -> tuple[float, float]:
    """The largest relative errors: of losses; of gradients' norms, what each weight learned, and its average."""
    losses = [abs(got - wanted) for got, wanted in zip(result["losses"], expected["losses"], strict=True)]
    norms = zip(result["norms"], expected["norms"], strict=True)
    others = [abs(got - wanted) / max(wanted, 1e-6) for got, wanted in norms]
    assert result["learned"].keys() == expected["learned"].keys()
    for kind in ("learned", "averages"):
        least = 1e-2 * max((wanted.norm() for wanted in expected[kind].values()), default=0.0)
        for name, wanted in expected[kind].items():
            others.append(float((result[kind][name] - wanted).norm() / max(wanted.norm(), least)))
    return max(losses) / max(expected["losses"]), max(others)


def test_the_page_is_of_these_features():
    assert PAGE.read_text() == page()


def test_every_argument_of_trainer_is_accounted_for():
    accounted = [*chain.from_iterable(ARGUMENTS.values()), *OTHERS]
    assert len(accounted) == len(set(accounted))
    assert {each.name for each in fields(TrainingArguments)} <= set(accounted)

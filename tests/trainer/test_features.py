"""Each feature under each strategy: two ranks with planned attention beside transformers' Trainer with "sdpa" in one
process, on the same documents; or refused, with cause and remedy, on every rank.
"""

from dataclasses import fields
from functools import cache
from itertools import chain
from typing import Any

import accelerate
import datasets
import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import hf_distca
from tests.models import random_documents
from tests.trainer.features import EXACT, FEATURES, SGD, STRATEGIES, Average, Example, Feature, Pad, whole
from tests.trainer.features_page import ARGUMENTS, OTHERS, PAGE, page
from tests.trainer.launches import CHECKPOINTING
from tests.trainer.test_nodes import LAUNCHED

LENGTHS = [90, 50, 33, 19, 120, 40, 31, 1, 64, 64, 37, 27]
PER_MICRO_BATCH, TOKENS_PER_RANK = 4, 96
"""Each four documents fill both ranks, so that micro-batches are the same for anybody who takes them in order."""
COMMON: dict[str, Any] = {
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "save_strategy": "no",
    "lr_scheduler_type": "constant",
    "train_sampling_strategy": "sequential",
    "max_steps": 2,
    "bf16": True,
    CHECKPOINTING: True,
    **SGD,
}
LOSSES_WITHIN = {"ddp": 2e-4, "fsdp2": 8e-3}  # as in test_launch.py
PLANNED = {"tokens_per_rank": TOKENS_PER_RANK, "balance_block_size": 8, "loss_chunk_bytes": 4096}
Result = dict[str, Any]


def examples(feature: Feature) -> list[Example]:
    return [
        feature.example(index, {"input_ids": document.tolist()})
        for index, document in enumerate(random_documents(LENGTHS))
    ]


def trained(trainer: Trainer, model: nn.Module) -> Result:
    """What a training gives: losses, norms, and by how much every trained weight and its average changed."""
    before = {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}
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


def planned(folder: str, name: str, strategy: str) -> Result:
    """A rank's training with hf_distca, or the error and how far it had come."""
    feature = FEATURES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ACCELERATE_USE_CPU", raising=False)
        for variable, value in {**LAUNCHED[strategy], **feature.environment}.items():
            patch.setenv(variable, value)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        try:
            args = hf_distca.DistCATrainingArguments(
                output_dir=folder, **{**COMMON, **PLANNED, "dataloader_num_workers": 0, **feature.arguments}
            )
            model = feature.model("distca")
            given = {"model": model, "train_dataset": datasets.Dataset.from_list(examples(feature))}
            trainer = hf_distca.DistCATrainer(args=args, **{**given, **feature.given(model)})
            result = trained(trainer, model)
            result["strategy"] = str(trainer.accelerator.distributed_type)
            result["bytes"] = trainer.dispatcher.settings.bytes_per_value
        except (ValueError, ImportError, RuntimeError) as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        finally:
            torch.use_deterministic_algorithms(False)
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        return result


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What one process makes of a feature, trained once."""
    return cache(lambda name: in_one_process(str(tmp_path_factory.mktemp("one")), FEATURES[name]))


def in_one_process(folder: str, feature: Feature) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in feature.environment.items():
            patch.setenv(variable, value)
        patch.setenv("ACCELERATE_USE_CPU", "true")
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        idle = feature.steps_without_targets
        alone = {"use_cpu": True, "per_device_train_batch_size": PER_MICRO_BATCH, "max_steps": 2 - idle}
        args = TrainingArguments(output_dir=folder, **{**COMMON, **alone, **feature.arguments})
        model = feature.model("sdpa")
        documents = datasets.Dataset.from_list(examples(feature)[idle * PER_MICRO_BATCH :])
        trainer = Trainer(
            **{
                "model": model,
                "args": args,
                "train_dataset": documents,
                "data_collator": Pad(),
                **feature.given(model),
            }
        )
        result = trained(trainer, model)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        torch.use_deterministic_algorithms(False)
        return {**result, "losses": [0.0] * idle + result["losses"], "norms": [0.0] * idle + result["norms"]}


@pytest.mark.survey
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", FEATURES)
def test_feature(rank_pools, tmp_path, reference, name, strategy):
    feature = FEATURES[name]
    if reason := feature.missing():
        pytest.skip(reason)
    results = rank_pools[2].run(planned, str(tmp_path), name, strategy)
    refusal = feature.refusal(strategy)
    for result in results:
        if refusal is not None:
            cause, remedy = refusal
            assert cause in result.get("error", "no error")
            assert remedy in result["error"]
            continue
        assert "error" not in result, result["error"]
        assert result["strategy"] == {"ddp": "DistributedType.MULTI_CPU", "fsdp2": "DistributedType.FSDP"}[strategy]
        expected = reference(name)
        losses, others = errors(result, expected)
        assert losses < (1e-5 if feature.within == EXACT else LOSSES_WITHIN[strategy])
        assert others < feature.within


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

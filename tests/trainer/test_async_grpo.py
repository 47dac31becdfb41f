"""Asynchronous GRPO beside TRL's own trainer, on the same recorded rollouts."""

import re
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher

import hf_distca
from hf_distca.planner import prefixes
from tests.models_and_batches import exchanging, small_model, with_planning
from tests.trainer.chats import tokenizer
from tests.trainer.comparison import QUIET, launched, whole
from tests.trainer.preferences import asked
from tests.trainer.recorded import (
    BLOCK,
    KeptWeights,
    RecordedWorker,
    recording,
    trl_on_cpu,
)

RANKS, TOKENS_PER_RANK = 3, 96
CAPACITY = RANKS * TOKENS_PER_RANK
LONGEST = 5 * TOKENS_PER_RANK // 2
WITHIN = 1e-4
"""Largest relative difference of a logged figure or of what a weight has learned, in float32."""
OTHER_FIGURES = re.compile(
    r"distca/.*|perf/.*|.*(time|runtime|per_second|flos).*|epoch|sample/(rollout_queue_size|staleness.*)"
    r"|batch/(row.*|packing_ratio|samples_per_row|pad_frac|forwarded_tokens_per_step)"
)
"""Figures of time, and of the rows and trees of a rank."""
AHEAD = re.compile(r"sample/.*|reward.*|tools/.*|batch/(masked_token_frac|groups_per_step)")
"""Figures of rollouts, which are logged when a loader has read them."""
COMMON: dict[str, Any] = {
    **QUIET,
    "bf16": False,
    "optim": "sgd",
    "learning_rate": 0.2,
    "seed": 3,
    "max_staleness": 1000,
    "epsilon": 0.2,
    "epsilon_high": 0.3,
}


@dataclass(frozen=True)
class Case:
    """What is set in a training."""

    steps: int = 4
    strategy: str = "ddp"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)  # of the model's config
    planned: Mapping[str, Any] = field(default_factory=dict)  # settings of hf_distca

    @property
    def micro_batches(self) -> int:
        return self.steps * self.arguments.get("gradient_accumulation_steps", 1)


def train(folder: str, case: Case, planned: bool) -> dict[str, Any]:
    """Logs and changed weights of a training."""
    path = f"{folder}/model"
    if dist.get_rank() == 0 and not planned:
        small_model(**case.model).save_pretrained(path)
        tokenizer().save_pretrained(path)
    # Two more micro-batches: TRL's loader reads one ahead.
    samples = [
        sample
        for step in recording(case.micro_batches + 2, CAPACITY, LONGEST)
        for sample in step
    ]
    shares = patch.multiple(prefixes, BLOCK=BLOCK, LEAST_SAVED=0.0)
    with (
        shares,
        launched(case.strategy, {}),
        warnings.catch_warnings(),
        ExitStack() as contexts,
    ):
        warnings.simplefilter("ignore", FutureWarning)  # TRL uses transformers' earlier names
        arguments = {
            **COMMON,
            **case.arguments,
            "max_steps": case.steps,
            "output_dir": f"{folder}/{planned}",
        }
        transfer = KeptWeights()
        given = {
            "train_dataset": asked(),
            "processing_class": tokenizer(),
            "rollout_worker": RecordedWorker(samples),
            "weight_transfer": transfer,
        }
        if planned:
            arguments |= {
                "tokens_per_rank": CAPACITY // dist.get_world_size(),
                "balance_block_size": 8,
                **exchanging(small_model(**case.model)),
                **case.planned,
            }
            args = hf_distca.DistCAAsyncGRPOConfig(**with_planning(arguments))
            trainer: Any = hf_distca.DistCAAsyncGRPOTrainer(path, args=args, **given)
        else:
            args = AsyncGRPOConfig(**arguments, token_budget=CAPACITY)
            contexts.enter_context(trl_on_cpu())
            trainer = AsyncGRPOTrainer(path, args=args, **given)
        before = {name: whole(weight) for name, weight in trainer.model.named_parameters()}
        trainer.train()
        after = {
            name.replace("_checkpoint_wrapped_module.", ""): whole(weight)
            for name, weight in trainer.model.named_parameters()
        }
        result = {
            "history": trainer.state.log_history,
            "learned": {name: after[name] - weight for name, weight in before.items()},
            "sent": transfer.weights,
            "calls": transfer.calls,
        }
        if planned:
            trainer.close()
    return result


def compare(trained: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare every weight and every logged figure.

    TRL's loader is one micro-batch ahead of the training: it logs figures of the rollouts of the
    next step.
    """
    ours, stock = trained["history"], expected["history"]
    assert len(ours) == len(stock)
    for step, entry in enumerate(stock):
        for name, value in entry.items():
            ahead = 1 if AHEAD.fullmatch(name) else 0
            if OTHER_FIGURES.fullmatch(name) or not isinstance(value, int | float):
                continue
            if ahead and not 0 < step < len(stock) - 2:  # the first log has two micro-batches
                continue
            got = ours[step + ahead][name]
            assert abs(got - value) <= WITHIN * max(abs(value), 0.01), (step, name, got, value)
    for name, expected_value in expected["learned"].items():
        difference = float((trained["learned"][name] - expected_value).norm())
        assert difference <= WITHIN * max(float(expected_value.norm()), 1e-3), name


CASES = {"20 steps": Case(20)}


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_trl(rank_pools, tmp_path, name):
    case = CASES[name]
    (expected,) = rank_pools[1].run(train, str(tmp_path), case, False)
    trained = rank_pools[RANKS].run(train, str(tmp_path), case, True)
    compare(trained[0], expected)

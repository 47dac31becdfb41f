"""Asynchronous GRPO beside TRL's own trainer, on the same recorded rollouts."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher

from hf_distca.collator.rollouts import fitting_micro_batches
from hf_distca.planner import prefixes
from hf_distca.planner.settings import PlanSettings
from hf_distca.trainer.trl.async_grpo import with_functions
from tests.trainer.comparison import HYBRID
from tests.trainer.recorded import (
    BLOCK,
    COMMON,
    RANKS,
    TOKENS_PER_RANK,
    WITHIN,
    Case,
    compare,
    compare_weights,
    generated,
    train,
)

LAYERS = ["sliding_attention", "full_attention"]
SINKS = {
    "model_type": "gpt_oss",
    "layer_types": LAYERS,
    "sliding_window": 9,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
NO_AUXILIARY_LOSS = {"router_aux_loss_coef": 0.0}


def lora() -> dict[str, Any]:
    """LoRA whose B is not 0 at first."""
    return {
        "peft_config": peft.LoraConfig(
            r=4,
            init_lora_weights=False,
            task_type="CAUSAL_LM",
            target_modules=["q_proj", "up_proj"],
            lora_alpha=8,
        )
    }


BESIDE_TRL = {
    "20 steps": Case(20),
    "adapters, several micro-batches a step": Case(
        3,
        arguments={"gradient_accumulation_steps": 2, "temperature": 0.7},
        given=lora,
        model={
            "model_type": "qwen3",
            "layer_types": LAYERS,
            "sliding_window": 9,
            "use_sliding_window": True,
        },
    ),
    "fsdp2": Case(2, "fsdp2", is_loaded=True),
}
"""Trainings by name."""


@pytest.mark.parametrize("name", BESIDE_TRL)
def test_trainings_are_those_of_trl(rank_pools, tmp_path, name):
    """TRL's, on one rank that holds as many rows as all ranks together, drops no rollout."""
    case = BESIDE_TRL[name]
    (expected,) = rank_pools[1].run(train, str(tmp_path), replace(case, strategy="ddp"), False)
    trained = rank_pools[RANKS].run(train, str(tmp_path), case, True)[0]
    compare(trained, expected)
    check_rows(trained["history"])
    check_saved(f"{tmp_path}/saved", trained)


def check_rows(history: list[dict[str, Any]]) -> None:
    """Rollouts share rows, and ranks hold equally many of them."""
    steps = [entry for entry in history if "loss" in entry]
    assert all(entry["batch/row_tokens_max"] <= TOKENS_PER_RANK for entry in steps)
    assert all(
        entry["batch/row_tokens_max"] - entry["batch/row_tokens_mean"] < 8 for entry in steps
    )
    assert sum(entry.get("distca/shared_rows", 0) for entry in steps) > 0
    assert sum(entry["distca/exchange_bytes"] for entry in steps) > 0
    assert max(entry["sample/forwarded_tokens_max"] for entry in steps) > TOKENS_PER_RANK
    assert not any("batch/dropped_oversize_total" in entry for entry in steps)


def check_saved(folder: str, trained: dict[str, Any]) -> None:
    """The server gets the weights of the saved model, by the names of transformers' model.

    Both models generate the same.
    """
    sent = trained["sent"]
    is_adapted = Path(folder, "adapter_config.json").exists()
    stock = AutoModelForCausalLM.from_pretrained(f"{folder}/../model" if is_adapted else folder)
    weights = dict(stock.named_parameters())
    assert sent.keys() == weights.keys()
    if is_adapted:  # the weights that were sent include the adapter
        return
    for name, weight in weights.items():
        torch.testing.assert_close(sent[name], weight.detach(), rtol=0, atol=0)
    if "generated" in trained:
        assert trained["generated"].tolist() == generated(stock).tolist()


# What TRL's trainer refuses

ALONE: dict[str, dict[str, Any]] = {"hybrid": HYBRID, "sinks": SINKS}


@pytest.mark.parametrize("name", ALONE)
def test_models_that_trl_refuses(rank_pools, tmp_path, name):
    rank_pools[RANKS].run(compare_with_loss_by_hand, str(tmp_path), ALONE[name])


def compare_with_loss_by_hand(folder: str, model: Mapping[str, Any]) -> None:
    """Compare a step with the loss of each rollout alone, in transformers' model."""
    case = Case(1, arguments=NO_AUXILIARY_LOSS, model=model)
    trained = train(folder, case, planned=True)
    stock: Any = AutoModelForCausalLM.from_pretrained(
        f"{folder}/model", dtype=torch.float32, attn_implementation="eager"
    )
    logged = trained["history"][0]
    samples = case.samples[: round(logged["batch/samples_per_step"])]
    count = sum(int(sample["completion_mask"][1:].sum()) for sample in samples)
    total = 0.0
    for sample in samples:
        tokens = torch.from_numpy(sample["input_ids"])
        log_probs = stock(input_ids=tokens[None]).logits[0].float().log_softmax(-1)
        chosen = log_probs[:-1].gather(1, tokens[1:, None])[:, 0]
        ratio = (chosen - torch.from_numpy(sample["old_log_probs"])[1:]).exp()
        clipped = ratio.clamp(1 - COMMON["epsilon"], 1 + COMMON["epsilon_high"])
        gain = torch.min(ratio * sample["advantage"], clipped * sample["advantage"])
        loss = -(gain * torch.from_numpy(sample["completion_mask"])[1:]).sum() / count
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), 1.0)
    assert logged["loss"] == pytest.approx(total, rel=WITHIN, abs=1e-6)
    assert logged["grad_norm"] == pytest.approx(float(norm), rel=WITHIN)
    learned = {
        name: torch.zeros_like(weight) if weight.grad is None else -0.2 * weight.grad
        for name, weight in stock.named_parameters()
    }
    compare_weights(trained["learned"], learned, trained["rounding"])
    if dist.get_rank() == 0:
        assert trained["sent"].keys() == learned.keys()
    assert logged["distca/exchange_bytes"] > 0


# Micro-batches


def planned_micro_batches(samples: list[dict[str, Any]], **settings: Any) -> list[list[int]]:
    """Lengths of the rollouts of each micro-batch, and of those that are dropped in the last."""
    dropped: list[int] = []
    planning = PlanSettings(ranks=3, rows_per_rank=96, **settings)
    filled = fitting_micro_batches(samples, planning, dropped.append, shares=True)
    return [[len(sample["input_ids"]) for sample in members] for members in filled] + [dropped]


def of_length(length: int, mask: int = 1) -> dict[str, Any]:
    """A rollout that has nothing in common with those of other lengths."""
    tokens = np.arange(length) * 1000 + length
    return {"input_ids": tokens, "completion_mask": np.full(length, mask)}


def test_a_rollout_is_dropped_where_all_ranks_together_cannot_hold_it():
    samples = [of_length(length) for length in (240, 40, 289, 20, 288, 1)]
    assert planned_micro_batches(samples) == [[240, 40], [20], [288], [289]]


def test_where_documents_stay_whole_micro_batches_fit_into_whole_ranks():
    samples = [of_length(length) for length in (97, 60, 61, 62, 37, 36, 63)]
    assert planned_micro_batches(samples, document_layout="whole") == [[60, 61, 62], [97]]


def test_micro_batches_without_a_target_are_left_out():
    samples = [of_length(200, 0), of_length(201), of_length(202, 0), of_length(203)]
    assert planned_micro_batches(samples) == [[201], []]


def test_targets_of_equal_rollouts_are_limited():
    with patch.multiple(prefixes, BLOCK=BLOCK, LEAST_SAVED=0.0):
        assert planned_micro_batches([of_length(100)] * 4) == [[100, 100], []]


def test_trl_drops_rollouts_of_the_recording():
    PartialState()  # TRL's logger needs it
    metrics: dict[str, list[float]] = defaultdict(list)
    list(TokenBudgetBatcher(Case(20).samples, RANKS, TOKENS_PER_RANK, metrics))
    assert len(metrics["batch/dropped_oversize_total"]) > 1
    assert planned_micro_batches(Case(20).samples)[-1] == []


def test_another_version_of_trl_is_named():
    with pytest.raises(ImportError, match="no longer calls a_name"):
        with_functions(AsyncGRPOTrainer.__init__, a_name=print)

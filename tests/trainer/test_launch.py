"""Training under `accelerate launch` with 2 processes against one process with "sdpa".

There is one launch for each way to train in parallel; its processes do all runs of RUNS one after another. Most of a
launch is imports.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_distca.collator.long_documents import fit_documents
from hf_distca.collator.sampler import GlobalBatchSampler
from tests.launch import results_of, run_launch
from tests.models import random_documents, small_model
from tests.trainer.train_script import make_model

SCRIPT = Path(__file__).parent / "train_script.py"
LENGTHS = [150, 3, 17, 60, 1, 33, 90, 45, 7, 120, 64, 31, 28, 5, 77, 12] * 3
STEPS, ACCUMULATION, TOKENS_PER_RANK, LEARNING_RATE = 20, 2, 96, 1e-3
FEW_STEPS = 4
ARGUMENTS = {
    "max_steps": STEPS,
    "gradient_accumulation_steps": ACCUMULATION,
    "tokens_per_rank": TOKENS_PER_RANK,
    "learning_rate": LEARNING_RATE,
    "optim": "adamw_torch",
    "balance_block_size": 8,
    "dataloader_num_workers": 0,
    "save_strategy": "no",
}
# Older transformers know it by its first name alone.
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)
FEW = {**ARGUMENTS, "max_steps": FEW_STEPS, CHECKPOINTING: True}
PLAIN = {**FEW, CHECKPOINTING: False}
FSDP_CHECKPOINTS = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}  # --fsdp_activation_checkpointing true
LORA = {**FEW, "max_steps": 8, "learning_rate": 3e-2}
BF16 = {**LORA, "bf16": True}
WHOLE = {**ARGUMENTS, "eval_on_start": True, "save_strategy": "steps", "save_steps": STEPS // 2}

RUNS: dict[str, dict[str, Any]] = {
    "whole": {"arguments": WHOLE, "save": True},
    "resumed": {"arguments": WHOLE, "resume": f"whole/checkpoint-{STEPS // 2}"},
    "lora": {"arguments": LORA, "lora": True, "save": True},
    "frozen": {"arguments": FEW, "frozen": ["embed_tokens"]},
    "lora without checkpoints": {"arguments": PLAIN, "lora": True},
    "frozen without checkpoints": {"arguments": PLAIN, "frozen": ["embed_tokens"]},
    "bf16": {"arguments": BF16, "lora": True},
    "bf16 evaluated": {"arguments": BF16, "lora": True, "calls": ["evaluate", "train", "evaluate"]},
    "checkpointed by FSDP": {"arguments": PLAIN, "environment": FSDP_CHECKPOINTS, "calls": ["train"]},
    "computed again": {
        "arguments": {**PLAIN, "keep_core_attention": False},
        "environment": FSDP_CHECKPOINTS,
        "calls": ["train"],
    },
    "evaluated": {"arguments": FEW, "calls": ["evaluate", "train", "evaluate"]},
    "twice": {"arguments": FEW, "calls": ["train", "train", "evaluate"]},
    "anew": {"arguments": FEW, "calls": ["train", "new trainer", "train", "evaluate"]},
    "mistral": {"arguments": FEW, "model": {"model_type": "mistral", "sliding_window": 24}},
    "gemma2": {
        "arguments": FEW,
        "model": {"model_type": "gemma2", "sliding_window": 24, "query_pre_attn_scalar": 8},
    },
    "mixtral": {"arguments": FEW, "model": {"model_type": "mixtral", "num_local_experts": 4}},
}
ALL = ["whole", "lora", "bf16", "evaluated", "twice"]
LAUNCHES = {
    "ddp": [*ALL, "resumed", "bf16 evaluated", "mistral", "anew"],
    "fsdp2": [*ALL, "resumed", "frozen", "gemma2", "checkpointed by FSDP", "computed again"],
    "zero1": ALL,
    "zero2": [*ALL, "resumed", "mistral"],
    "zero3": [
        *ALL,
        "resumed",
        "frozen",
        "mixtral",
        "anew",
        "lora without checkpoints",
        "frozen without checkpoints",
    ],
}
"""The runs of each launch, in their order."""

REPLICATED = ("ddp", "zero1", "zero2")
"""Strategies under which each rank holds all parameters."""

REFUSES_TO_EVALUATE_FIRST = ("fsdp2", "zero1", "zero2")


class Launched:
    """What became of a launch.

    Attributes:
        folder: with the files of the launch.
    """

    def __init__(self, strategy: str, folder: Path) -> None:
        runs = {name: {"lengths": LENGTHS, **RUNS[name]} for name in LAUNCHES[strategy]}
        self.folder, self._process = folder, run_launch(strategy, SCRIPT, runs, folder)
        self._results = results_of(folder)

    def __getitem__(self, name: str) -> dict[str, Any]:
        """The result of a run."""
        assert name in self._results, self._process.stdout[-6000:]
        return self._results[name]

    def saved(self, name: str) -> Path:
        """Where a run has saved its model."""
        return self.folder / name / "saved"

    def check_end(self) -> None:
        """The launch came to its end without a failure."""
        assert self._process.returncode == 0, self._process.stdout[-6000:]


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> Callable[[str], Launched]:
    """The launch of a strategy, done when a test first asks for it."""
    return cache(lambda strategy: Launched(strategy, tmp_path_factory.mktemp(strategy)))


@pytest.fixture(scope="module")
def expected() -> Callable[[str], dict[str, Any]]:
    """What one process makes of a run."""
    return cache(lambda name: reference_run(RUNS[name]))


def reference_losses() -> list[float]:
    """The losses of the long run in one process."""
    return reference_run(RUNS["whole"])["losses"]


def reference_run(run: dict[str, Any]) -> dict[str, Any]:
    """Losses and evaluation losses of a run in one process, without hf_distca's trainer and attention.

    The global micro-batches are those of two ranks.
    """
    arguments, documents = run["arguments"], random_documents(LENGTHS)
    model = make_model(run, "eager" if run.get("model", {}).get("model_type") == "gemma2" else "sdpa")
    # Around each forward: autocast keeps the weights that it has cast until it ends.
    model.forward = torch.autocast("cpu", torch.bfloat16, enabled=arguments.get("bf16", False))(model.forward)
    optimizer = new_optimizer(model, arguments)
    result: dict[str, Any] = {"losses": [], "evaluations": []}
    for call in run.get("calls", ["train", "evaluate"]):
        if call == "train":
            for step in optimizer_steps(documents, arguments["max_steps"]):
                result["losses"].append(optimizer_step(model, optimizer, step))
        elif call == "evaluate":
            result["evaluations"].append(evaluation_loss(model))
        else:
            optimizer = new_optimizer(model, arguments)
    return result


def new_optimizer(model: nn.Module, arguments: dict[str, Any]) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=arguments["learning_rate"], weight_decay=0.0)


def optimizer_steps(documents: list[Tensor], number: int) -> list[list[Tensor]]:
    """The documents of each optimizer step from the first epoch on."""
    excerpts = fit_documents(np.array(list(map(len, documents))), 2 * TOKENS_PER_RANK, "error", "tokens")
    sampler = GlobalBatchSampler(excerpts, 2 * TOKENS_PER_RANK, seed=42)
    steps: list[list[Tensor]] = []
    epoch = 0
    while len(steps) < number:
        sampler.set_epoch(epoch)
        micro_batches = [micro_batch.excerpts["document"] for (micro_batch,) in sampler]
        for first in range(0, len(micro_batches), ACCUMULATION):
            indices = np.concatenate(micro_batches[first : first + ACCUMULATION])
            steps.append([documents[index] for index in indices])
        epoch += 1
    return steps[:number]


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, documents: list[Tensor]) -> float:
    total = 0.0
    for loss in document_losses(model, documents):
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


@torch.no_grad()
def evaluation_loss(model: nn.Module) -> float:
    """The mean loss over all targets of all documents."""
    return sum(loss.item() for loss in document_losses(model, random_documents(LENGTHS)))


def document_losses(model: nn.Module, documents: list[Tensor]) -> Iterator[Tensor]:
    """Each document's share of the mean over the targets of all."""
    targets = sum(len(document) - 1 for document in documents)
    for document in documents:
        if len(document) > 1:
            logits = model(input_ids=document[None]).logits[0, :-1].float()
            yield nn.functional.cross_entropy(logits, document[1:], reduction="sum") / targets


def pairs(*names: str) -> list[tuple[str, str]]:
    """Each strategy with those of the runs that its launch does."""
    return [(strategy, name) for strategy, runs in LAUNCHES.items() for name in runs if name in names]


@pytest.mark.parametrize("strategy", LAUNCHES)
def test_the_launch_comes_to_its_end(strategy, launched):
    launched(strategy).check_end()


@pytest.mark.parametrize("strategy", LAUNCHES)
def test_loss_curve_is_that_of_one_process(strategy, launched, expected):
    result = launched(strategy)["whole"]
    assert {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}.get(strategy, "DEEPSPEED") in result["distributed_type"]
    assert result["world_size"] == 2
    # Some micro-batches have a document of more than half of their tokens: both kinds in one run.
    shares = [entry["ping_pong_share"] for entry in result["history"] if "ping_pong_share" in entry]
    assert min(shares) < 1.0
    assert max(shares) > 0.0
    assert result["losses"] == pytest.approx(expected("whole")["losses"], rel=2e-5)


@pytest.mark.parametrize("strategy", LAUNCHES)
def test_evaluation_before_the_first_step(strategy, launched, expected):
    history = launched(strategy)["whole"]["history"]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert losses == pytest.approx(
        expected("evaluated")["evaluations"][:1] + expected("whole")["evaluations"], rel=2e-5
    )


@pytest.mark.parametrize(("strategy", "name"), pairs("resumed"))
def test_resuming(strategy, name, launched):
    whole, resumed = launched(strategy)["whole"], launched(strategy)[name]
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    # Both evaluate twice.
    assert resumed["kernel_forwards"] < 0.75 * whole["kernel_forwards"]


@pytest.mark.parametrize(
    ("strategy", "name"),
    pairs(
        "lora",
        "lora without checkpoints",
        "frozen",
        "frozen without checkpoints",
        "mistral",
        "gemma2",
        "mixtral",
        "anew",
    ),
)
def test_few_steps(strategy, name, launched, expected):
    result = launched(strategy)[name]
    assert max(entry.get("ping_pong_share", 0.0) for entry in result["history"]) > 0.0
    assert result["losses"] == pytest.approx(expected(name)["losses"], rel=2e-5)
    assert result["evaluations"] == pytest.approx(expected(name)["evaluations"], rel=2e-5)


def test_core_attention_is_kept_through_checkpoints_of_fsdp(launched, expected):
    kept, again = (launched("fsdp2")[name] for name in ("checkpointed by FSDP", "computed again"))
    for result in (kept, again):
        assert result["losses"] == pytest.approx(expected("checkpointed by FSDP")["losses"], rel=2e-5)
    assert again["kernel_forwards"] == 2 * kept["kernel_forwards"] > 0


@pytest.mark.parametrize(("strategy", "name"), pairs("bf16", "bf16 evaluated"))
def test_few_steps_in_bfloat16(strategy, name, launched, expected):
    result = launched(strategy)[name]
    # FSDP2 gives losses in bfloat16, with steps of 1/128 and less; the evaluation's are averaged outside.
    losses_within, evaluations_within = (8e-3, 1e-3) if strategy == "fsdp2" else (2e-4, 2e-4)
    assert result["losses"] == pytest.approx(expected(name)["losses"], rel=losses_within)
    assert result["evaluations"] == pytest.approx(expected(name)["evaluations"], rel=evaluations_within)
    # What training changes is more than what bfloat16 does.
    assert expected(name)["evaluations"][-1] < 0.996 * expected("evaluated")["evaluations"][0]


@pytest.mark.parametrize("strategy", LAUNCHES)
def test_evaluating_before_training(strategy, launched, expected):
    result = launched(strategy)["evaluated"]
    if strategy in REFUSES_TO_EVALUATE_FIRST:
        assert result["error"].startswith("evaluate() before train() is not possible under FSDP, ZeRO-1 and ZeRO-2")
        assert "set eval_on_start=True" in result["error"]
    else:
        assert result["losses"] == pytest.approx(expected("evaluated")["losses"], rel=2e-5)
        assert result["evaluations"] == pytest.approx(expected("evaluated")["evaluations"], rel=2e-5)


@pytest.mark.parametrize("strategy", LAUNCHES)
def test_training_twice(strategy, launched, expected):
    result = launched(strategy)["twice"]
    if "zero" in strategy:
        assert "trains once under DeepSpeed" in result["error"]
        assert result["losses"] == pytest.approx(expected("twice")["losses"][:FEW_STEPS], rel=2e-5)
    else:
        assert result["losses"] == pytest.approx(expected("twice")["losses"], rel=2e-5)


@pytest.mark.parametrize("strategy", REPLICATED)
def test_ranks_hold_the_same_parameters(strategy, launched):
    for name in LAUNCHES[strategy]:
        result = launched(strategy)[name]
        if "error" not in result:
            first, second = result["parameters"]
            assert first == second, name


@pytest.mark.parametrize("strategy", LAUNCHES)
def test_saved_model_is_the_trained_one(strategy, launched):
    model = AutoModelForCausalLM.from_pretrained(launched(strategy).saved("whole"), attn_implementation="sdpa")
    assert evaluation_loss(model) == pytest.approx(launched(strategy)["whole"]["evaluations"][0], rel=2e-5)


@pytest.mark.parametrize("strategy", LAUNCHES)
def test_saved_adapters_are_the_trained_ones(strategy, launched):
    base = small_model("llama", "sdpa")
    model = peft.PeftModel.from_pretrained(base, launched(strategy).saved("lora"))
    assert evaluation_loss(model) == pytest.approx(launched(strategy)["lora"]["evaluations"][0], rel=2e-5)


@pytest.mark.parametrize(
    ("strategy", "shards"), [("fsdp2", "pytorch_model_fsdp_0"), ("zero3", f"global_step{STEPS // 2}")]
)
def test_checkpoints_stay_in_shards(strategy, shards, launched):
    checkpoint = launched(strategy).folder / "whole" / f"checkpoint-{STEPS // 2}"
    assert len(list((checkpoint / shards).iterdir())) >= 2
    assert not list(checkpoint.glob("*.safetensors"))

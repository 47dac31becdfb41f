"""Runs of launches, their results, and the same runs in one process with "sdpa"."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_distca.collator.lengths import fit_documents
from hf_distca.collator.sampler import GlobalBatchSampler
from tests.launch import LOG, results_of, run_in_forks, run_launch, write_options
from tests.models_and_batches import SMALL_HYBRID, random_documents
from tests.trainer.train_script import VOCABULARY, generated, make_model

SCRIPT = Path(__file__).parent / "train_script.py"
LENGTHS = [150, 3, 17, 60, 1, 33, 90, 45, 7, 120, 64, 31, 28, 5, 77, 12] * 3
STEPS, ACCUMULATION, TOKENS_PER_RANK, LEARNING_RATE = 10, 2, 96, 1e-3
ARGUMENTS = {
    "max_steps": STEPS,
    "gradient_accumulation_steps": ACCUMULATION,
    "tokens_per_rank": TOKENS_PER_RANK,
    "learning_rate": LEARNING_RATE,
    "optim": "adamw_torch",
    "balance_block_size": 8,
    "dataloader_num_workers": 0,
    "save_strategy": "no",
    "loss_chunk_bytes": 16 * 4 * VOCABULARY,  # 16 rows
}
FEW_LENGTHS = LENGTHS[:16]
"""Two optimizer steps are a pass over them."""
# Older transformers know it by its first name alone.
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)
PLAIN = {**ARGUMENTS, "max_steps": 3, "exchange_buffer_bytes": 2048}  # 16 rows, or 32
FEW = {**PLAIN, CHECKPOINTING: True}
FSDP_CHECKPOINTS = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}  # --fsdp_activation_checkpointing true
BF16 = {**FEW, "learning_rate": 3e-2, "max_steps": 6, "bf16": True}
WHOLE_STEPS, SAVED = 5, 3
WHOLE = {
    **ARGUMENTS,
    "max_steps": WHOLE_STEPS,
    "eval_on_start": True,
    "save_strategy": "steps",
    "save_steps": SAVED,  # in the middle of the second pass
}

HYBRID = {"model_type": "qwen3_next", **SMALL_HYBRID}
SETS = {"few": 5, "most": 14}
# The more a step has lowered the loss, the worse: the first is the best, and two later ones are waited for.
BEST = {
    **PLAIN,
    "max_steps": 8,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 1,
    "metric_for_best_model": "eval_most_loss",
    "greater_is_better": True,
    "load_best_model_at_end": True,
}

RUNS: dict[str, dict[str, Any]] = {
    "whole": {"arguments": WHOLE, "save": True},
    "resumed": {"arguments": WHOLE, "resume": f"whole/checkpoint-{SAVED}"},
    # FSDP2 rounds each micro-batch's loss to bfloat16: the mean of many is closer.
    "bf16": {"arguments": BF16, "lengths": LENGTHS, "lora": True, "watched": True, "save": True},
    "bf16 evaluated": {
        **{"arguments": BF16, "lora": True, "watched": True, "save": True},
        "calls": ["evaluate", "train", "evaluate"],
    },
    "evaluated": {"arguments": FEW, "calls": ["evaluate"]},
    "twice": {"arguments": FEW, "calls": ["train", "train", "evaluate"]},
    "anew": {"arguments": FEW, "calls": ["train", "new trainer", "train", "evaluate"]},
    "checkpointed by FSDP": {"arguments": PLAIN, "environment": FSDP_CHECKPOINTS, "calls": ["train"]},
    "computed again": {
        "arguments": {**PLAIN, "keep_core_attention": False},
        "environment": FSDP_CHECKPOINTS,
        "calls": ["train"],
    },
    "hybrid": {"arguments": {**FEW, "document_layout": "joint"}, "model": HYBRID},  # documents are cut
    "best": {"arguments": BEST, "sets": SETS, "patience": 2, "generates": 4},
    "sft": {"arguments": {**FEW, "learning_rate": 3e-2}, "sft": True},
}
OF_SHARDS = ["whole", "resumed", "twice", "best", "sft", "hybrid"]
LAUNCHES = {
    "ddp": ["whole", "resumed", "bf16 evaluated", "twice", "sft"],
    "fsdp2": [*OF_SHARDS, "bf16", "evaluated", "checkpointed by FSDP", "computed again"],
    "zero2": ["whole", "resumed", "evaluated"],
    "zero3": [*OF_SHARDS, "bf16 evaluated", "anew"],
}
"""Runs of each launch, in their order."""

LAUNCHED = {
    "ddp": {"ACCELERATE_USE_CPU": "true"},
    "fsdp2": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    },
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}
"""Variables of `accelerate launch` that decide the strategy."""

REPLICATED = ("ddp", "zero2")
"""Strategies under which each rank holds all parameters."""


class Launched:
    """Results of a launch, whose files are in `folder`."""

    def __init__(self, strategy: str, folder: Path) -> None:
        runs = {name: {"lengths": FEW_LENGTHS, **RUNS[name]} for name in LAUNCHES[strategy]}
        self.folder = folder
        if strategy == "ddp":
            self.codes, self._log = [run_launch(strategy, SCRIPT, runs, folder).returncode], folder / LOG
        else:
            options = write_options(runs, folder)
            self.codes, self._log = run_in_forks(strategy, SCRIPT, [str(options)], folder), folder / "output-0"
        self._results = results_of(folder)

    def __getitem__(self, name: str) -> dict[str, Any]:
        """Result of a run."""
        assert name in self._results, self._log.read_text(errors="replace")[-6000:]
        return self._results[name]


def reference_losses() -> list[float]:
    """The losses of `ARGUMENTS` on all documents, in one process."""
    return reference_run({"arguments": ARGUMENTS, "lengths": LENGTHS, "calls": ["train"]})["losses"]


def reference_run(run: dict[str, Any]) -> dict[str, Any]:
    """Losses and evaluation losses of a run in one process, without hf_distca's trainer and attention.

    The global micro-batches are those of two ranks.
    """
    arguments, lengths = run["arguments"], run.get("lengths", FEW_LENGTHS)
    documents = random_documents(lengths)
    model = make_model(run, "sdpa")
    # Around each forward: autocast keeps the weights that it has cast until it ends.
    model.forward = torch.autocast("cpu", torch.bfloat16, enabled=arguments.get("bf16", False))(model.forward)
    optimizer = new_optimizer(model, arguments)
    result: dict[str, Any] = {"losses": [], "evaluations": []}
    for call in run.get("calls", ["train", "evaluate"]):
        if call == "train":
            for step in optimizer_steps(documents, arguments):
                result["losses"].append(optimizer_step(model, optimizer, step))
        elif call == "evaluate":
            result["evaluations"].append(evaluation_loss(model, lengths))
        else:
            optimizer = new_optimizer(model, arguments)
    return result


def reference_evaluations(run: dict[str, Any], steps: int) -> list[tuple[list[float], list[int]]]:
    """In one process after each step: the losses of a run's evaluation sets, and what its callback generates."""
    documents, model, found = random_documents(FEW_LENGTHS), make_model(run, "sdpa"), []
    optimizer = new_optimizer(model, run["arguments"])
    for step in optimizer_steps(documents, {**run["arguments"], "max_steps": steps}):
        optimizer_step(model, optimizer, step)
        losses = [evaluation_loss(model, FEW_LENGTHS[:count]) for count in run["sets"].values()]
        found.append((losses, generated(model, run["generates"])))
    return found


def new_optimizer(model: nn.Module, arguments: dict[str, Any]) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=arguments["learning_rate"], weight_decay=0.0)


def optimizer_steps(documents: list[Tensor], arguments: dict[str, Any]) -> list[list[Tensor]]:
    """The documents of each optimizer step from the first epoch on."""
    count, tokens = arguments["max_steps"], arguments["tokens_per_rank"]
    excerpts = fit_documents(np.array(list(map(len, documents))), 2 * tokens, "error", "tokens")
    sampler = GlobalBatchSampler(excerpts, 2 * tokens, seed=42)
    steps: list[list[Tensor]] = []
    epoch = 0
    while len(steps) < count:
        sampler.set_epoch(epoch)
        micro_batches = [micro_batch.excerpts["document"] for (micro_batch,) in sampler]
        for first in range(0, len(micro_batches), ACCUMULATION):
            indices = np.concatenate(micro_batches[first : first + ACCUMULATION])
            steps.append([documents[index] for index in indices])
        epoch += 1
    return steps[:count]


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
def evaluation_loss(model: nn.Module, lengths: Sequence[int] = FEW_LENGTHS) -> float:
    """The mean loss over all targets of documents."""
    return sum(loss.item() for loss in document_losses(model, random_documents(lengths)))


def document_losses(model: nn.Module, documents: list[Tensor]) -> Iterator[Tensor]:
    """Each document's share of the mean over the targets of all."""
    targets = sum(len(document) - 1 for document in documents)
    for document in documents:
        if len(document) > 1:
            logits = model(input_ids=document[None]).logits[0, :-1].float()
            yield nn.functional.cross_entropy(logits, document[1:], reduction="sum") / targets

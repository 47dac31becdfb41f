"""A million tokens on four CPU ranks: a step of four narrow layers, exact on sampled rows.

Two mixes of as many tokens: one document, and a document of 600,000 of 1,048,576 tokens beside 400
short ones. DistCATrainer takes one step. Layers are checkpointed, their checkpoints go to other
memory and back (`offload_activations`), MLPs and norms run in chunks, K/V rows travel in stages.
Only sampled rows have a target. Their loss and the gradients of all weights are compared with one
process that runs the same model document by document by PyTorch's own attention. Memory is the most
that a rank's process held, above what it held before the step; on a CPU the checkpoints that left
are part of it.

Times of the reference and of the ranks are of this machine, on which ranks share cores.

Run: python benchmarks/million_tokens.py [--tokens 1048576]
"""

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from harness import begin_peak, follow_tensors, options_parser, peak, print_json, run_ranks, table
from harness.models import documents_of, llama, rows_of_documents
from harness.padded import lengths_that_add_up
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback

from hf_distca import DistCATrainer, DistCATrainingArguments
from hf_distca.models.checkpointing import CHECKPOINTING

RANKS = 4
SHORT = 400
LONG_SHARE = 600_000 / 1_048_576
SAMPLES = 64
VOCABULARY = 512
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
}
IGNORED = -100


class Step(NamedTuple):
    """Loss and gradients of a step, and what the step took."""

    loss: float
    gradients: dict[str, Tensor]
    seconds: float
    peak_bytes: int
    offloaded_bytes: int = 0  # memory for checkpoints of layers


def lengths_of(tokens: int) -> dict[str, list[int]]:
    """Lengths of the documents of each mix."""
    long = round(tokens * LONG_SHARE)
    return {
        "one document": [tokens],
        f"one and {SHORT} short": [long, *lengths_that_add_up(SHORT, tokens - long, seed=0)],
    }


def sampled_targets(documents: Sequence[Tensor]) -> list[Tensor]:
    """Next token of sampled rows of the documents; all other rows have no target."""
    rows = sum(len(document) for document in documents)
    generator = torch.Generator().manual_seed(2)
    is_sampled = torch.zeros(rows, dtype=torch.bool)
    is_sampled[torch.randperm(rows, generator=generator)[:SAMPLES]] = True
    targets = []
    for document, sampled in zip(
        documents, is_sampled.split([len(document) for document in documents]), strict=True
    ):
        following = torch.cat([document[1:], torch.tensor([IGNORED])])
        targets.append(torch.where(sampled, following, IGNORED))
    return targets


class Measured(TrainerCallback):
    """Gradients of a trainer's only step, and what its passes took."""

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Begin to measure."""
        self._before = begin_peak()
        self._began = time.perf_counter()

    def on_pre_optimizer_step(self, *_args: Any, model: Any, **_kwargs: Any) -> None:
        """Note the gradients of all ranks."""
        self.seconds = time.perf_counter() - self._began
        self.peak_bytes = peak() - self._before
        named = model.named_parameters()
        self.gradients = {name: weight.grad.clone() for name, weight in named}


def examples_of(lengths: list[int]) -> list[dict[str, Tensor]]:
    """Documents as a data set has them: labels are not shifted."""
    documents = documents_of(lengths, VOCABULARY)
    unknown = torch.tensor([IGNORED])
    return [
        {"input_ids": document, "labels": torch.cat([unknown, targets[:-1]])}
        for document, targets in zip(documents, sampled_targets(documents), strict=True)
    ]


def planned_step(lengths: list[int], folder: str) -> Step:
    """Train one step on this rank; return the loss and the gradients of all ranks."""
    follow_tensors()
    tokens = -(-sum(lengths) // RANKS)
    arguments = DistCATrainingArguments(
        output_dir=folder,
        tokens_per_rank=tokens,
        document_layout="joint",
        exchange_buffer_bytes=tokens * 16,
        mlp_chunk_rows=1024,
        offload_activations=True,
        max_steps=1,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        **{CHECKPOINTING: True},
    )
    measured = Measured()
    model: Any = llama(max(lengths), **SIZES)
    data: Any = examples_of(lengths)
    trainer = DistCATrainer(model, arguments, train_dataset=data, callbacks=[measured])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    (loss,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.dispatcher.offload is not None
    host_bytes = trainer.dispatcher.offload.host.reserved
    trainer.close()
    return Step(loss, measured.gradients, measured.seconds, measured.peak_bytes, host_bytes)


def reference_step(lengths: list[int]) -> Step:
    """Run the documents one after another in this process, by PyTorch's attention."""
    model = llama(max(lengths), "sdpa", **SIZES)
    documents = documents_of(lengths, VOCABULARY)
    targets_of_all = sampled_targets(documents)
    # The last row of a document has no target, even if the row is sampled.
    count = sum(int((targets != IGNORED).sum()) for targets in targets_of_all)
    before = begin_peak()
    began = time.perf_counter()
    loss_of_all = 0.0
    for document, targets in zip(documents, targets_of_all, strict=True):
        if (targets != IGNORED).any():
            batch: dict[str, Any] = rows_of_documents([document], torch.device("cpu"))
            batch["labels"] = batch["shift_labels"] = targets[None]
            loss = model(**batch, num_items_in_batch=count).loss
            loss.backward()
            loss_of_all += loss.item()
    seconds = time.perf_counter() - began
    named = model.named_parameters()
    gradients = {name: weight.grad for name, weight in named if weight.grad is not None}
    return Step(loss_of_all, gradients, seconds, peak() - before)


def compare(lengths: list[int]) -> dict[str, Any]:
    """Return how far a step of the ranks is from the reference, and what both took."""
    with tempfile.TemporaryDirectory() as folder:
        by_rank: list[Step] = run_ranks(RANKS, partial(planned_step, folder=folder), lengths)
    expected = reference_step(lengths)
    errors = [
        ((by_rank[0].gradients[name] - wanted).norm() / wanted.norm()).item()
        for name, wanted in expected.gradients.items()
    ]
    return {
        "documents": len(lengths),
        "tokens": sum(lengths),
        "loss": by_rank[0].loss,
        "loss error": abs(by_rank[0].loss / expected.loss - 1),
        "largest gradient error": max(errors),
        "step, s": max(step.seconds for step in by_rank),
        "reference, s": expected.seconds,
        "peak of a rank, MiB": max(step.peak_bytes for step in by_rank) / 2**20,
        "checkpoints of a rank in other memory, MiB": by_rank[0].offloaded_bytes / 2**20,
        "peak of the reference, MiB": expected.peak_bytes / 2**20,
    }


def main() -> None:
    tokens = options_parser(__doc__, tokens=(1 << 20, "of a micro-batch")).parse_args().tokens
    found = {mix: compare(lengths) for mix, lengths in lengths_of(tokens).items()}
    columns = [key for key in next(iter(found.values())) if key not in ("documents", "tokens")]
    table(
        ["", *columns],
        [[mix, *(f"{row[key]:.3g}" for key in columns)] for mix, row in found.items()],
    )
    print_json(tokens=tokens, sampled_rows=SAMPLES, mixes=found)


if __name__ == "__main__":
    main()

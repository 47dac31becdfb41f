"""A million tokens on four CPU ranks: a step of two narrow layers, exact on sampled rows.

Two mixes of as many tokens: one document, and a document of 600,000 of 1,048,576 tokens beside 400
short ones. Layers are checkpointed, MLPs and norms run in chunks, K/V rows travel in stages. Only
sampled rows have a target. Their loss and the gradients of all weights are compared with one
process that runs the same model document by document by PyTorch's own attention. Memory is the most
that a rank's process held, above what it held before the step.

Times of the reference and of the ranks are of this machine, on which ranks share cores.

Run: python benchmarks/million_tokens.py [--tokens 1048576]
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import begin_peak, follow_tensors, options_parser, peak, print_json, run_ranks, table
from harness.models import documents_of, llama, rows_of_documents, rows_of_rank, settings_of
from harness.padded import lengths_that_add_up
from torch import Tensor, nn

from hf_distca import Dispatcher, DistCAConfig
from hf_distca.models.checkpointing import enable_checkpointing
from hf_distca.patches.prepare import prepare_model
from hf_distca.planner.micro_batch import plan_micro_batch

RANKS = 4
SHORT = 400
LONG_SHARE = 600_000 / 1_048_576
SAMPLES = 64
VOCABULARY = 512
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
}
IGNORED = -100
DEVICE = torch.device("cpu")


class Step(NamedTuple):
    """Loss and gradients of a step, and what the step took."""

    loss: float
    gradients: dict[str, Tensor]
    seconds: float
    peak_bytes: int


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


def take_step(model: nn.Module, batches: Sequence[dict[str, Any]], targets: int) -> Step:
    """Run forward and backward of all batches."""
    before = begin_peak()
    began = time.perf_counter()
    total = 0.0
    for batch in batches:
        loss = model(**batch, num_items_in_batch=targets).loss
        loss.backward()
        total += loss.item()
    seconds = time.perf_counter() - began
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return Step(total, gradients, seconds, peak() - before)


def planned_step(lengths: list[int]) -> Step:
    """Run a step of this rank; return the loss and the gradients of all ranks."""
    follow_tensors()
    rank, tokens = dist.get_rank(), -(-sum(lengths) // RANKS)
    model = llama(max(lengths), **SIZES)
    config = {"exchange_buffer_bytes": tokens * 16, "mlp_chunk_rows": 1024}
    settings = settings_of(model, RANKS, tokens, DEVICE, **config)
    options = DistCAConfig(tokens_per_rank=tokens, **config)
    prepare_model(model, options, ping_pong=settings.ping_pong)
    enable_checkpointing(model, {"use_reentrant": False})
    dispatcher = Dispatcher(settings, DEVICE)
    documents = documents_of(lengths, VOCABULARY)
    plan = plan_micro_batch(lengths, settings)
    batch = rows_of_rank(plan, rank, documents, DEVICE)
    sampled = sampled_targets(documents)
    held = [sampled[number][start:stop] for number, start, stop in plan.held_by(rank)]
    batch["labels"] = batch["shift_labels"] = torch.cat(held)[None]
    bound = dispatcher.bind(plan)
    dist.barrier()
    step = take_step(model, [{**batch, "distca_plan": bound}], SAMPLES)
    loss = torch.tensor(step.loss, dtype=torch.float64)
    for summed in (loss, *step.gradients.values()):
        dist.all_reduce(summed)
    return step._replace(loss=loss.item())


def reference_step(lengths: list[int]) -> Step:
    """Run the documents one after another in this process, by PyTorch's attention."""
    model = llama(max(lengths), "sdpa", **SIZES)
    enable_checkpointing(model, {"use_reentrant": False})
    documents = documents_of(lengths, VOCABULARY)
    batches = []
    for document, targets in zip(documents, sampled_targets(documents), strict=True):
        if (targets != IGNORED).any():
            batch = rows_of_documents([document], DEVICE)
            batch["labels"] = batch["shift_labels"] = targets[None]
            batches.append(batch)
    return take_step(model, batches, SAMPLES)


def compare(lengths: list[int]) -> dict[str, Any]:
    """Return how far a step of the ranks is from the reference, and what both took."""
    by_rank: list[Step] = run_ranks(RANKS, planned_step, lengths)
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

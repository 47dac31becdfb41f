"""Estimates of hf_distca.memory beside what processes really take, on the CPU.

Each configuration trains a small LLaMA under DistributedDataParallel for three optimizer steps of
two micro-batches, in processes of its own. Measured is the most resident memory above what was
resident before there was a model. The estimate is made of the model's config and the plan alone.

With offload, activation checkpoints go to a part of the same memory that stands for the host's.
The estimate is then of device and host together. Bytes that a forward copies to the host are
compared with the estimate of host memory.

Run: python benchmarks/memory_estimate.py [--tokens 4096] [--offload]
"""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import begin_peak, follow_tensors, options_parser, peak, print_json, run_ranks
from harness.models import documents_of, rows_of_rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from hf_distca import DistCAConfig, make_dispatcher
from hf_distca.dispatch.host_copies import ActivationOffload
from hf_distca.memory.counter import MemoryCounter
from hf_distca.models.describe import describe_run
from hf_distca.models.fake import model_of_config
from hf_distca.planner.micro_batch import plan_micro_batch

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "use_cache": False,
}
DEEP = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 8}
"""Sizes of a model whose checkpoints take more memory than its weights and gradients."""
STEPS, MICRO_BATCHES = 3, 2
"""DistributedDataParallel makes its buckets anew in the second step."""


@dataclass(frozen=True)
class Case:
    """A configuration of a training, whose documents share a micro-batch's tokens evenly."""

    ranks: int
    autocast: bool
    checkpointing: bool
    documents: int
    tokens: int
    sizes: dict[str, Any]
    offload: bool = False

    @property
    def lengths(self) -> list[int]:
        return [self.ranks * self.tokens // self.documents] * self.documents

    @property
    def dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.autocast else None


def cases(tokens: int, sizes: dict[str, Any]) -> dict[str, Case]:
    return {
        "1 rank, float32": Case(1, False, False, 1, tokens, sizes),
        "1 rank, bfloat16, checkpoints": Case(1, True, True, 1, tokens, sizes),
        "2 ranks, one document, float32, checkpoints": Case(2, False, True, 1, tokens, sizes),
        "2 ranks, bfloat16": Case(2, True, False, 8, tokens, sizes),
    }


def offloaded_cases(tokens: int, sizes: dict[str, Any]) -> dict[str, Case]:
    return {
        f"2 ranks, {name}, float32, offload": Case(
            2, False, True, documents, tokens, {**sizes, **DEEP}, offload=True
        )
        for name, documents in {"one document": 1, "8 documents": 8}.items()
    }


class Taken(NamedTuple):
    """Bytes of memory."""

    total: int
    host: int = 0  # of these, activation checkpoints of layers on the host


def train(case: Case) -> Taken:
    """Train, on one of the ranks; the most resident bytes above those at the start."""
    follow_tensors()
    small = {**case.sizes, "hidden_size": 64, "intermediate_size": 64}
    _train(replace(case, tokens=64, sizes=small))  # loads libraries
    before = begin_peak()
    copied = _train(case)
    return Taken(peak() - before, copied)


def _train(case: Case) -> int:
    """Train; the bytes that the last forward copied to the host."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **case.sizes), attn_implementation="distca"
    ).train()
    if case.checkpointing:
        model.activation_checkpointing_enable()
    config = DistCAConfig(tokens_per_rank=case.tokens, offload_activations=case.offload)
    dispatcher = make_dispatcher(model, config, CPU, dtype=case.dtype)
    copied = count_copies(dispatcher.offload) if dispatcher.offload is not None else []
    wrapped: nn.Module = DistributedDataParallel(model) if case.ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    plan = plan_micro_batch(case.lengths, dispatcher.settings)
    documents = documents_of(case.lengths, case.sizes["vocab_size"])
    batch = rows_of_rank(plan, dist.get_rank(), documents, CPU)
    targets = torch.tensor(sum(case.lengths))
    for _ in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            last = micro_batch == MICRO_BATCHES - 1
            with nullcontext() if last or case.ranks == 1 else wrapped.no_sync():
                with torch.autocast(
                    "cpu", dtype=case.dtype or torch.bfloat16, enabled=case.autocast
                ):
                    bound = dispatcher.bind(plan)
                    copied.clear()
                    loss = wrapped(**batch, num_items_in_batch=targets, distca_plan=bound).loss
                copied_to_host = sum(copied)  # the backward copies to the device
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return copied_to_host


def count_copies(offload: ActivationOffload) -> list[int]:
    """Return a list to which the bytes of each copy will be added."""
    sizes: list[int] = []
    begin = offload.copies.begin

    def counted(targets_and_sources: Iterable[tuple[Tensor, Tensor]]) -> Any:
        pairs = list(targets_and_sources)
        sizes.extend(target.nbytes for target, _ in pairs)
        return begin(pairs)

    offload.copies.begin = counted
    return sizes


def estimated(case: Case) -> list[Taken]:
    """Bytes that each rank takes, estimated from config and plan."""
    model = model_of_config(AutoConfig.for_model("llama", **case.sizes), torch.float32)
    config = DistCAConfig(tokens_per_rank=case.tokens)
    run = describe_run(
        model,
        config,
        ranks=case.ranks,
        device=CPU,
        dtype=case.dtype,
        mixed=case.autocast,
        checkpointing={} if case.checkpointing else None,
        offload=case.offload,
    )
    plan = plan_micro_batch(case.lengths, run.plans)
    counter = MemoryCounter(model, by_config=True)
    counted = [counter.count(plan, run, rank) for rank in range(case.ranks)]
    return [Taken(memory.total + memory.host, memory.host) for memory in counted]


def main() -> None:
    parser = options_parser(__doc__, tokens=(4096, "on each rank"))
    parser.add_argument("--offload", action="store_true", help="only configurations with offload")
    options = parser.parse_args()
    results = {}
    chosen = offloaded_cases if options.offload else cases
    for name, case in chosen(options.tokens, SIZES).items():
        guessed = estimated(case)
        taken = run_ranks(case.ranks, train, case)
        results[name] = {
            "estimated_mb": [round(size.total / 1e6, 1) for size in guessed],
            "measured_mb": [round(size.total / 1e6, 1) for size in taken],
            "estimated_over_measured": [
                round(a.total / b.total, 3) for a, b in zip(guessed, taken, strict=True)
            ],
        }
        if case.offload:
            results[name]["host_estimated_over_copied"] = [
                round(a.host / b.host, 3) for a, b in zip(guessed, taken, strict=True)
            ]
        print(name, results[name])
    print_json(tokens=options.tokens, configurations=results)


if __name__ == "__main__":
    main()

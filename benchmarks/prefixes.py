"""Time and memory of padded batches on CPU ranks, with and without shared prefixes.

There are three cases:

  groups    each rank has a group of GRPO: a prompt of 1,024 tokens with 8 completions of 64 to 256
  pairs     each rank has four pairs of DPO: a prompt of 256 to 1,024 tokens with two answers of 64
            to 256
  sessions  each rank has a session of an agent: 512 tokens with which all sessions begin, then
            eight turns of 64 to 256. Each turn is an example, which has all turns before it

There are two models, each with two layers. "llama" has a quarter of the width of a Qwen3-0.6B.
"hybrid" has a quarter of the width of a Qwen3.5-0.8B: a layer with a gated delta rule, and one with
attention. They train in float32 with gradient checkpointing. Each rank calls the model with eight
sequences at a time. Only completions, answers and the last turn of an example get logits. Both
strategies pack:

  unshared  pack_padded with share_prefixes=False computes each sequence by itself
  shared    pack_padded shares prefixes

A round runs all cases by both strategies in shuffled order. A step is a forward and a backward. It
includes reading the batches, hashing, exchanging hashes, planning and binding. Each round has new
lengths and tokens, so that each step makes its plan. Rows are the rows of all ranks. Memory is the
peak of a rank in a step, without what the rank held before. Each strategy has its own processes.
Rows and memory come from the first round.

Run: python benchmarks/prefixes.py [--rounds 8] [--scale 1] [--model llama]
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    Ranks,
    Round,
    begin_peak,
    follow_tensors,
    keep_freed_memory,
    over,
    peak,
    report,
    rounds_parser,
    run_ranks,
    slowest,
    take_rounds,
)
from harness.models import QUARTER_OF_600M, VOCABULARY, hybrid, llama
from harness.padded import (
    Batch,
    batch_of,
    forward_backward,
    keep_only_inputs_of_layers,
    norm_of_gradients,
)
from harness.prefixes import (
    CASES,
    EXAMPLES,
    Example,
    batch_of_examples,
    rows_of,
    targets_of,
)
from torch import nn

from hf_distca import DistCAConfig, pack_padded

CPU = torch.device("cpu")
RANKS = 2
STRATEGIES = ("unshared", "shared")
POSITIONS = 4096
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": partial(llama, POSITIONS, **QUARTER_OF_600M),
    "hybrid": partial(hybrid, POSITIONS),
}


def model_of(name: str, strategy: str) -> nn.Module:
    """The model of a strategy. A collective call."""
    model = MODELS[name]()
    keep_only_inputs_of_layers(model)
    # All sequences of a call fit at once.
    config = DistCAConfig(tokens_per_rank=EXAMPLES * POSITIONS, share_prefixes=strategy == "shared")
    pack_padded(model, config, CPU)
    return model


def examples_of(case: str, seed: int, scale: int) -> list[Example]:
    """Examples of all ranks, rank by rank."""
    return CASES[case](RANKS, VOCABULARY, seed, scale)


def batch_of_rank(examples: Sequence[Example]) -> Batch:
    """The batch of this rank."""
    return batch_of_examples(examples[dist.get_rank() * EXAMPLES :][:EXAMPLES], CPU)


def step_of(case: str, model: nn.Module, seed: int, scale: int) -> Callable[[], float]:
    """Forward and backward of this rank's batch, which is made before.

    The call returns the loss of the rank.
    """
    examples = examples_of(case, seed, scale)
    return partial(forward_backward, model, [batch_of_rank(examples)], targets_of(examples))


def checked(name: str, scale: int) -> dict[str, Any]:
    """Rows, loss and norm of gradients of each case and strategy, for the first examples."""
    found: dict[str, Any] = {}
    models = {strategy: model_of(name, strategy) for strategy in STRATEGIES}
    for case, strategy in product(CASES, STRATEGIES):
        model = models[strategy]
        rows = rows_of(model, batch_of_rank(examples_of(case, 0, scale)))
        loss = torch.tensor(step_of(case, model, 0, scale)())
        dist.all_reduce(loss)
        found[f"{case}, {strategy}"] = {
            "rows": rows,
            "loss": loss.item(),
            "norm of gradients": norm_of_gradients(model),
        }
    return found


def memory_of(name: str, strategy: str, scale: int) -> dict[str, float]:
    """MiB above the start in a step of each case, in processes that compute no other strategy."""
    follow_tensors()
    model = model_of(name, strategy)
    # What is made once, such as threads, and code that is loaded.
    warm = batch_of([torch.arange(3, 11), torch.arange(3, 7)], CPU)
    forward_backward(model, [warm], 20)
    found = {}
    for case in CASES:
        model.zero_grad()
        step = step_of(case, model, 0, scale)
        dist.barrier()
        before = begin_peak()
        step()
        found[f"{case}, {strategy}, MiB"] = (peak() - before) / 2**20
    return found


def prepare(name: str, scale: int) -> Callable[[], Round]:
    """Make the models on this rank, and a round: every case by both strategies once, in an order
    that is the same on all ranks.
    """
    keep_freed_memory()
    models = {strategy: model_of(name, strategy) for strategy in STRATEGIES}
    order = random.Random(0)
    seeds = iter(range(1 << 30))
    runs = list(product(CASES, STRATEGIES))

    def take() -> Round:
        seed = next(seeds)
        seconds = {}
        for case, strategy in order.sample(runs, len(runs)):
            step = step_of(case, models[strategy], seed, scale)
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            seconds[case, strategy] = time.perf_counter() - begin
            models[strategy].zero_grad()
        figures = {f"{case}, {strategy}, s": seconds[case, strategy] for case, strategy in runs}
        return {**figures, "load average": os.getloadavg()[0]}

    take()  # warms up
    return take


def largest_differences(found: dict[str, Any]) -> dict[str, float]:
    """The largest relative difference of loss and norm between the strategies, by case."""
    differences = {}
    for case in CASES:
        unshared, shared = (found[f"{case}, {strategy}"] for strategy in STRATEGIES)
        differences[case] = max(
            abs(shared[name] - unshared[name]) / abs(unshared[name])
            for name in ("loss", "norm of gradients")
        )
    return differences


def main() -> None:
    parser = rounds_parser(
        __doc__, rounds=8, scale=(1, "divides all lengths; below 128 tokens nothing is shared")
    )
    parser.add_argument("--model", choices=MODELS, default="llama", help="which model trains")
    options = parser.parse_args()
    found = run_ranks(RANKS, checked, options.model, options.scale)[0]
    memory: dict[str, float] = {}
    for strategy in STRATEGIES:
        memory |= slowest(run_ranks(RANKS, memory_of, options.model, strategy, options.scale))
    with Ranks(RANKS, prepare, options.model, options.scale) as ranks:
        measured = take_rounds(options, lambda: slowest(ranks.take()))
    ratios = {
        f"{case}, unshared / shared": over(f"{case}, unshared, s", f"{case}, shared, s")
        for case in CASES
    }
    report(
        measured,
        ratios,
        rows={name: figures["rows"] for name, figures in found.items()},
        memory=memory,
        largest_difference=largest_differences(found),
    )


if __name__ == "__main__":
    main()

"""Time of a training step on two CPU ranks with unequal documents: DDP, hf_distca, and the ideal.

Rank 0 holds one document of 8192 tokens, rank 1 sixteen of 512. Forward and backward of a 4-layer LLaMA of
hidden size 256 under DDP, one thread per rank, four ways, interleaved in one run:

  ddp     every rank computes the core attention of its own documents, with the same kernel
  fixed   hf_distca: the same documents on the same ranks, core attention balanced
  joint   hf_distca: the same documents, placed by the joint layout
  ideal   DDP on other documents: both ranks hold the same lengths, with the same pairs in all

Medians are over the half of the rounds in which other users of the machine disturbed least (harness.CalmSteps); the
table shows those of all steps beside them.

Run: python benchmarks/step_time.py [--rounds 16]
"""

import argparse
import random
import statistics
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from harness import CalmSteps, print_json, run_ranks, table
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from hf_distca import Dispatcher, PlanSettings
from hf_distca.kernels import get_kernel
from hf_distca.plan import AttentionKind
from hf_distca.planner.cost import pairs
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed

TOKENS = 8192
ROWS = [[TOKENS], [512] * 16]
UNBALANCED = 100.0  # a tolerance at which no task moves


def equal_rows() -> list[list[int]]:
    """Documents of the same lengths on both ranks, with as many pairs in all as ROWS has."""
    goal = sum(pairs(0, length) for row in ROWS for length in row) / 2

    def lengths(longest: int) -> list[int]:
        short, rest = divmod(TOKENS - longest, 512)
        return [longest, *[512] * short, *([rest] if rest else [])]

    best = min(range(512, TOKENS), key=lambda longest: abs(sum(pairs(0, n) for n in lengths(longest)) - goal))
    return [lengths(best), lengths(best)]


def measure_steps(rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of the calmest steps, and of all steps, by way; on this rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=1024,
        max_position_embeddings=TOKENS,
        attn_implementation="distca",
    )
    model = DistributedDataParallel(LlamaForCausalLM(config))
    kernel = get_kernel("auto", torch.device("cpu"))
    settings = PlanSettings(
        ranks=2,
        tokens_per_rank=TOKENS,
        kinds=(AttentionKind(q_heads=4, kv_heads=4, dim_qk=64, dim_v=64),),
        bytes_per_value=4,
        row_overhead=kernel.row_overhead,
        gather_cost=kernel.gather_cost,
    )
    unmoved = replace(settings, balance_tolerance=UNBALANCED)
    dispatcher = Dispatcher(settings, torch.device("cpu"))
    plans = {
        "ddp": plan_placed(ROWS, unmoved),
        "fixed": plan_placed(ROWS, settings),
        "joint": plan_micro_batch([length for row in ROWS for length in row], settings),
        "ideal": plan_placed(equal_rows(), unmoved),
    }
    batches = {}
    for way, plan in plans.items():
        segments = plan.nano_batches[0].layout.of_rank(dist.get_rank())
        positions = torch.cat([torch.arange(s["start"], s["stop"]) for s in segments])[None]
        tokens = torch.randint(0, 1024, positions.shape)
        batches[way] = {
            "input_ids": tokens,
            "position_ids": positions,
            "labels": tokens,
            "shift_labels": tokens,
        }

    def step(way: str) -> None:
        bound = dispatcher.bind(plans[way])
        model(**batches[way], distca_plan=bound, num_items_in_batch=2 * TOKENS).loss.backward()
        model.zero_grad()

    for way in plans:
        step(way)  # warms up
    calm = CalmSteps()
    order = random.Random(0)
    for _ in range(rounds):
        for way in order.sample(list(plans), len(plans)):
            calm.run(way, partial(step, way))
    return calm.seconds(), calm.all_seconds()


def main() -> None:
    """Measure, print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16, help="steps of each kind")
    seconds, everything = run_ranks(2, measure_steps, parser.parse_args().rounds)[0]
    median = {way: statistics.median(times) for way, times in seconds.items()}
    table(
        ["", "step (median)", "of all steps", "over ddp", "of ideal"],
        [
            [
                way,
                f"{t:.3f} s",
                f"{statistics.median(everything[way]):.3f} s",
                f"{median['ddp'] / t:.3f}x",
                f"{median['ideal'] / t:.3f}",
            ]
            for way, t in median.items()
        ],
    )
    print_json(
        **{f"{way}_s": t for way, t in median.items()},
        fixed_speedup=median["ddp"] / median["fixed"],
        fixed_fraction=median["ideal"] / median["fixed"],
        joint_speedup=median["ddp"] / median["joint"],
        joint_fraction=median["ideal"] / median["joint"],
    )


if __name__ == "__main__":
    main()

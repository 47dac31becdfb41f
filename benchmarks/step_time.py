"""Time of a training step on two CPU ranks: hf_distca with its defaults beside the best that plain DDP can do.

Forward, backward and AdamW of a 2-layer LLaMA of hidden size 256 under DistributedDataParallel, float32, one thread a
rank, on 16384 tokens of both ranks together. Three mixes of documents: one that is half of all tokens with sixteen
short ones, lengths with a long tail, and lengths alike. Five ways, each once a round, in shuffled order:

  default    hf_distca as it comes: joint layout, ping-pong
  no turns   the same without ping-pong
  fixed      hf_distca, documents placed as plain DDP has them, ping-pong
  plain      DDP without hf_distca: whole documents, divided over the ranks so that the larger number of query-key
             pairs is as small as whole documents allow; packed, one call of the same attention kernel a layer
  ideal      plain, on other documents: both ranks hold the same lengths, with as many pairs in all

`attention` is the CPU time of the attention kernel in an ideal step. A step ends when all ranks are done;
binding the plan is part of it, planning is not. Ratios are formed within a round. The table shows medians and
quartiles over all rounds, and beside them the median over the half of the rounds in which a small kernel, run between
steps on both ranks at once, was fastest.

Run: python benchmarks/step_time.py [--rounds 12] [--tokens 8192]
     python benchmarks/step_time.py --against OTHER_CHECKOUT      two checkouts in turns
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from harness import PROBE, Probe, Ranks, Round, over, report, rounds_parser, take_rounds
from harness.models import PlainAttention, documents_of, llama, rows_of_documents, rows_of_rank, settings_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hf_distca import Dispatcher
from hf_distca.kernels import TaskShapes, get_kernel
from hf_distca.patches.layers import plan_layers
from hf_distca.planner.build import plan_placed
from hf_distca.planner.cost import pairs
from hf_distca.planner.micro_batch import plan_micro_batch

RANKS = 2
SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 4}
MIXES = {
    "one long": [8192, *[512] * 16],
    "long tail": [5248, 2816, 1792, 1408, 1024, 832, 768, 608, 512, 448, 352, 256, 192, 128],
    "alike": [2048, 1920, 1824, 1760, 1696, 1632, 1568, 1408, 1344, 1184],
}
"""Tokens of the documents of a micro-batch, in all those of two ranks of LENGTHS_FOR tokens; multiples of 32."""
LENGTHS_FOR = 8192
WAYS = ("default", "no turns", "fixed", "plain", "ideal")


def balanced_rows(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Whole documents on two ranks of at most `tokens` each, so that the larger number of pairs is the least."""
    held, cost = np.zeros(1), np.zeros(1)  # of every choice of documents for the first rank
    for length in lengths:
        held = np.concatenate([held, held + length])
        cost = np.concatenate([cost, cost + pairs(0, length)])
    fits = (held <= tokens) & (sum(lengths) - held <= tokens)
    if not fits.any():
        raise ValueError(f"documents of {lengths} tokens do not fit two ranks of {tokens} uncut")
    choice = int(np.where(fits, np.maximum(cost, cost.max() - cost), np.inf).argmin())
    chosen = [bool(choice >> index & 1) for index in range(len(lengths))]
    return [[n for n, first in zip(lengths, chosen, strict=True) if first is rank] for rank in (True, False)]


def equal_rows(lengths: Sequence[int]) -> list[list[int]]:
    """The same documents on both ranks, with as many pairs and tokens in all: a long one and short ones."""
    goal, tokens = sum(pairs(0, length) for length in lengths) / 2, sum(lengths) // 2

    def row(longest: int) -> list[int]:
        short, rest = divmod(tokens - longest, tokens // 16)
        return [longest, *[tokens // 16] * short, *([rest] if rest else [])]

    best = min(range(tokens // 16, tokens), key=lambda longest: abs(sum(pairs(0, n) for n in row(longest)) - goal))
    return [row(best), row(best)]


class Step:
    """Both models of a rank and what each way runs on, of one mix.

    Args:
        tokens: of a rank.
    """

    def __init__(self, tokens: int) -> None:
        self._rank, device = dist.get_rank(), torch.device("cpu")
        self.plain = PlainAttention("plain", get_kernel("auto", device))
        models = {name: llama(RANKS * tokens, name, **SIZES) for name in ("distca", "plain")}
        plan_layers(models["distca"])
        settings = settings_of(models["distca"], RANKS, tokens, device)
        unturned = settings_of(models["distca"], RANKS, tokens, device, ping_pong=False)
        dispatcher = Dispatcher(settings, device)
        trained = {name: DistributedDataParallel(model) for name, model in models.items()}
        optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-5) for name, model in trained.items()}
        self.steps: dict[str, Callable[[], None]] = {}
        for mix, lengths in MIXES.items():
            lengths = [length * tokens // LENGTHS_FOR for length in lengths]
            rows = balanced_rows(lengths, tokens)
            in_order = [length for row in rows for length in row]
            planned = {
                "default": (lengths, plan_micro_batch(lengths, settings)),
                "no turns": (lengths, plan_micro_batch(lengths, unturned)),
                "fixed": (in_order, plan_placed(rows, settings)),
            }

            def step(name: str, batch: dict[str, Tensor], extra: Callable[[], dict], targets: int) -> None:
                trained[name](**batch, **extra(), num_items_in_batch=targets).loss.backward()
                optimizers[name].step()
                optimizers[name].zero_grad()

            targets = sum(length - 1 for length in lengths)
            for way, (documents, plan) in planned.items():
                batch = rows_of_rank(plan, self._rank, documents_of(documents), device)
                extra = partial(lambda plan: {"distca_plan": dispatcher.bind(plan)}, plan)
                self.steps[f"{mix}, {way}"] = partial(step, "distca", batch, extra, targets)
            for way, held in (("plain", rows), ("ideal", equal_rows(lengths))):
                own = held[self._rank]
                extra = partial(lambda own: {"plain_shapes": TaskShapes.build(own, own, "cpu")}, own)
                self.steps[f"{mix}, {way}"] = partial(
                    step, "plain", rows_of_documents(documents_of(own), device), extra, targets
                )


def prepare(tokens: int) -> Callable[[], Round]:
    """Make the models on this rank, and a round: every step once, in shuffled order, the same on all ranks."""
    made, probe, order = Step(tokens), Probe(), random.Random(0)

    def reading() -> float:
        dist.barrier()
        slowest = torch.tensor(probe.take())
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    def take() -> Round:
        figures = {PROBE: reading()}
        for name in order.sample(list(made.steps), len(made.steps)):
            attention = made.plain.seconds
            dist.barrier()
            begin = time.perf_counter()
            made.steps[name]()
            dist.barrier()
            figures[f"{name}, s"] = time.perf_counter() - begin
            if name.endswith("ideal"):
                figures[f"{name.removesuffix('ideal')}attention, s"] = made.plain.seconds - attention
            figures[PROBE] = max(figures[PROBE], reading())
        return {name: figures[name] for name in sorted(figures)}

    take()  # warms up
    return take


def main() -> None:
    """Measure, print tables and one JSON object."""
    parser = rounds_parser(__doc__, rounds=12)
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank (default: 8192)")
    options = parser.parse_args()
    with Ranks(RANKS, prepare, options.tokens) as ranks:
        measured = take_rounds(options, lambda: ranks.take()[0])
    ratios: dict[str, Callable[[Round], float]] = {}
    for mix in MIXES:
        for way in ("default", "no turns", "fixed"):
            ratios[f"{mix}: plain / {way}"] = over(f"{mix}, plain, s", f"{mix}, {way}, s")
        ratios[f"{mix}: ideal / default"] = over(f"{mix}, ideal, s", f"{mix}, default, s")
        ratios[f"{mix}: no turns / default"] = over(f"{mix}, no turns, s", f"{mix}, default, s")
        ratios[f"{mix}: share of attention in ideal"] = over(f"{mix}, attention, s", f"{mix}, ideal, s")
    report(measured, ratios)


if __name__ == "__main__":
    main()

"""One document of a hybrid model over four ranks: its mixing modules alone, exact, in what time and
memory.

The modules have the shapes of Qwen3-Next (gated delta rule) and of Nemotron-H 8B (Mamba-2), divided
by `--share`: 1 in so many heads and hidden numbers. They run transformers' own functions on the
CPU, in float32. Each round runs in shuffled order, forward and backward on all ranks at once:

  quarter    the module as transformers has it, on a quarter of the tokens
  whole      a planned step of four documents of a quarter each, none of which is cut
  cut        a planned step of one document, whose every segment is cut

Times are those of the slowest rank. The peak is the most that a rank's process held above what it
held before. The output and all gradients of "cut" are compared with one process that has the whole
document.

Run: python benchmarks/cut_mixing.py [--rounds 5] [--tokens 16384] [--share 4]
"""

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    Ranks,
    begin_peak,
    follow_tensors,
    over,
    peak,
    report,
    rounds_parser,
    run_ranks,
    take_rounds,
)
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from hf_distca import Dispatcher
from hf_distca.patches.mixing import layer_runs, plan_mixing
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed
from hf_distca.planner.settings import PlanSettings

RANKS = 4
MODULES = ("gated delta rule", "Mamba-2")
CASES = ("quarter", "whole", "cut")


def make_module(name: str, share: int) -> nn.Module:
    """A mixing module with a share of the heads, the same in every process."""
    torch.manual_seed(0)
    if name == "gated delta rule":
        config = AutoConfig.for_model(
            "qwen3_next",
            hidden_size=2048 // share,
            linear_num_key_heads=16 // share,
            linear_num_value_heads=32 // share,
            layer_types=["linear_attention"],
            num_hidden_layers=1,
        )
        return Qwen3NextGatedDeltaNet(config, 0)
    config = AutoConfig.for_model(
        "nemotron_h",
        hidden_size=4096 // share,
        mamba_num_heads=128 // share,
        n_groups=8 // min(share, 8),
    )
    module = NemotronHMamba2Mixer(config, 0)
    with torch.no_grad():
        module.A_log.copy_(torch.linspace(0, 2, len(module.A_log)))
        module.dt_bias.copy_(torch.linspace(-6, -2, len(module.dt_bias)))
    return module


def rows(module: nn.Module, start: int, stop: int) -> Tensor:
    """Rows of the document [1, stop - start, hidden], the same in every process."""
    width = module.out_proj.weight.shape[0]
    return torch.cat(
        [
            torch.randn(
                1,
                min(start + 1024, stop) - start,
                width,
                generator=torch.Generator().manual_seed(start),
            )
            for start in range(start, stop, 1024)
        ],
        1,
    )


def step(module: nn.Module, x: Tensor, bound: Any = None) -> tuple[Tensor, Tensor]:
    """Forward and backward of some rows; the output and the gradient of the rows."""
    x = x.clone().requires_grad_()
    with nullcontext() if bound is None else layer_runs(bound):
        out = module(hidden_states=x)
    out.backward(out.detach().sin())
    return out.detach(), x.grad


def prepare(name: str, tokens: int, share: int) -> Callable[[], dict[str, float]]:
    follow_tensors()
    rank = dist.get_rank()
    quarter = tokens // RANKS
    module = make_module(name, share)
    planned = nn.Module()
    planned.module = make_module(name, share)
    plan_mixing(planned)
    settings = PlanSettings(RANKS, quarter, document_layout="fixed")
    dispatcher = Dispatcher(settings, torch.device("cpu"))
    plans = {
        "whole": plan_placed([[quarter]] * RANKS, settings),
        "cut": plan_micro_batch([tokens], settings),
    }
    x = rows(module, rank * quarter, (rank + 1) * quarter)

    order = random.Random(0)  # the same on every rank

    def take() -> dict[str, float]:
        figures = {}
        for case in order.sample(CASES, len(CASES)):
            run = (
                partial(step, module, x) if case == "quarter" else partial(step, planned.module, x)
            )
            bound = None if case == "quarter" else dispatcher.bind(plans[case])
            dist.barrier()
            before = begin_peak()
            begin = time.perf_counter()
            run(bound)
            figures[f"{case}, s"] = time.perf_counter() - begin
            figures[f"{case}, peak MiB"] = (peak() - before) / 2**20
        return figures

    step(module, x[:, :64])  # code that is loaded, threads that are started
    return take


def results(name: str, tokens: int, share: int) -> dict[str, Tensor]:
    """Output and gradients of the whole document: one process, or this rank's part and a sum over
    the ranks.
    """
    ranks = dist.get_world_size()
    holder = nn.Module()
    holder.module = make_module(name, share)
    bound = None
    rank = dist.get_rank()
    if ranks > 1:
        plan_mixing(holder)
        settings = PlanSettings(ranks, tokens // ranks, document_layout="fixed")
        bound = Dispatcher(settings, torch.device("cpu")).bind(plan_micro_batch([tokens], settings))
    out, gradient = step(
        holder.module,
        rows(holder.module, rank * tokens // ranks, (rank + 1) * tokens // ranks),
        bound,
    )
    found = {"output": out, "gradient of the rows": gradient}
    for parameter, p in holder.module.named_parameters():
        if ranks > 1:
            dist.all_reduce(p.grad)
        found[f"gradient of {parameter}"] = p.grad
    return found


def errors(name: str, tokens: int, share: int) -> dict[str, float]:
    """Largest deviation from one process, over the largest value."""
    of_ranks = run_ranks(RANKS, results, name, tokens, share)
    (reference,) = run_ranks(1, results, name, tokens, share)
    found = dict(of_ranks[0])
    for part in ("output", "gradient of the rows"):
        found[part] = torch.cat([of_rank[part] for of_rank in of_ranks], 1)
    return {
        part: ((found[part] - x).abs().max() / x.abs().max()).item()
        for part, x in reference.items()
    }


def main() -> None:
    numbers = {
        "tokens": (1 << 14, "of the document"),
        "share": (4, "a module has 1 in so many heads"),
    }
    options = rounds_parser(__doc__, rounds=5, **numbers).parse_args()
    arguments = [(name, options.tokens, options.share) for name in MODULES]
    with (
        Ranks(RANKS, prepare, *arguments[0]) as delta,
        Ranks(RANKS, prepare, *arguments[1]) as scan,
    ):

        def take() -> dict[str, float]:
            figures = {}
            for name, ranks in zip(MODULES, (delta, scan), strict=True):
                of_ranks = ranks.take()
                for figure in of_ranks[0]:
                    figures[f"{name}: {figure}"] = max(map(itemgetter(figure), of_ranks))
            return figures

        measured = take_rounds(options, take)
    derived = {
        f"{name}: {case} / quarter": over(f"{name}: {case}, s", f"{name}: quarter, s")
        for name in MODULES
        for case in ("cut", "whole")
    }
    found = {name: errors(*each) for name, each in zip(MODULES, arguments, strict=True)}
    for name, of_module in found.items():
        print(f"{name}: largest relative error {max(of_module.values()):.1e}")
    report(
        measured,
        derived,
        tokens=options.tokens,
        ranks=RANKS,
        share=options.share,
        relative_errors=found,
    )


if __name__ == "__main__":
    main()

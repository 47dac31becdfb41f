"""Two ranks on one device, over gloo: what a plan moves between them gives the result of one process."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.gpu.compared import compare
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.models import (
    HEADS,
    StepResult,
    gradients,
    planned_loss,
    settings_of,
    small_model,
)
from benchmarks.gpu.planned_steps import stock_result
from benchmarks.gpu.setting import Setting
from benchmarks.harness import run_ranks
from benchmarks.harness.models import documents_of
from hf_distca import Dispatcher, plan_layers
from hf_distca.planner.build import plan_placed
from hf_distca.planner.micro_batch import plan_micro_batch

RANKS = 2
TIMEOUT_S = 20
"""Seconds after which a rank whose partner has failed gives up."""


@dataclass(frozen=True)
class Way:
    """How two ranks compute a step.

    Attributes:
        layout: "joint", or "fixed": documents stay on their rank.
        ping_pong: two nano-batches that take turns.
        heads: query and key-value heads.
        keep_received: as in DistCAConfig.
    """

    layout: str
    ping_pong: bool = True
    heads: tuple[int, int] = HEADS
    keep_received: bool = False


WAYS = {
    "joint": Way("joint", ping_pong=False),
    "fixed": Way("fixed", ping_pong=False),
    "joint, ping-pong": Way("joint"),
    "fixed, ping-pong": Way("fixed"),
    "fixed, ping-pong, received rows kept": Way("fixed", keep_received=True),
    "fixed, 14 heads": Way("fixed", heads=(14, 2)),
    "joint, 9 heads": Way("joint", heads=(9, 3)),
}
RunRanks = Callable[..., list[Any]]
"""Runs a function with arguments on so many ranks: returns what each returned."""


@dataclass(frozen=True)
class RankResult:
    """A step of all ranks. Arrays, since tensors would go from process to process in /dev/shm, which may be small.

    Attributes:
        loss: over all targets.
        grads: by parameter.
        bytes_moved: through the busiest rank in one layer's forward.
    """

    loss: float
    grads: dict[str, NDArray[np.float64]]
    bytes_moved: int


def check_two_ranks(setting: Setting, run: RunRanks = run_ranks) -> Findings:
    """One step in all ways, beside one process with stock attention.

    Args:
        setting: sizes and device.
        run: starts the ranks.
    """
    findings = Findings()
    deviations = findings.figures["largest_deviation_of_a_gradient"] = {}
    moved = findings.figures["bytes_moved"] = {}
    expected = {
        heads: tuple(stock_result(setting, "sdpa", exact=exact, heads=heads) for exact in (False, True))
        for heads in dict.fromkeys(way.heads for way in WAYS.values())
    }
    (results, _) = run(RANKS, rank_steps, setting)
    for name, way in WAYS.items():
        if isinstance(results[name], str):
            findings.check(False, f"{name}: {results[name]}")
            continue
        result = StepResult(
            results[name].loss, {key: torch.from_numpy(array) for key, array in results[name].grads.items()}
        )
        moved[name] = results[name].bytes_moved
        findings.check(moved[name] > 0, f"{name}: the plan moves nothing between ranks")
        stock, exact = expected[way.heads]
        deviations[name] = compare(findings, name, result, stock, exact, setting.dtype)
    return findings


def rank_steps(setting: Setting) -> dict[str, RankResult | str] | None:
    """The steps on one rank; what rank 0 returns is of all ranks, by way: a result, or the error.

    A way that fails on any rank is the last one: ranks are no longer in step then.
    """
    if setting.device.type == "cuda":
        torch.cuda.set_device(setting.device)
    results: dict[str, RankResult | str] = {}
    for name, way in WAYS.items():
        try:
            results[name] = _step(setting, way)
        except Exception as error:
            traceback.print_exc()
            results.update({left: f"{type(error).__name__}: {error}" for left in WAYS if left not in results})
            break
    return results if dist.get_rank() == 0 else None


def _step(setting: Setting, way: Way) -> RankResult:
    lengths = list(setting.lengths)
    model = small_model(setting, "distca", heads=way.heads).train()
    settings = settings_of(model, setting, ping_pong=way.ping_pong, ranks=RANKS, balance_block_size=_block(setting))
    dispatcher = Dispatcher(settings, setting.device, keep_received=way.keep_received, exchange_timeout=TIMEOUT_S)
    if way.ping_pong:
        plan_layers(model)
    if way.layout == "joint":
        plan = plan_micro_batch(lengths, settings)
    else:
        # The long documents on one rank, the short ones on the other.
        lengths.sort(reverse=True)
        plan = plan_placed([lengths[:2], lengths[2:]], settings)
    if len(plan.nano_batches) != 1 + way.ping_pong:
        raise RuntimeError(f"the plan has {len(plan.nano_batches)} nano-batches")
    documents = documents_of(setting.lengths)
    if way.layout == "fixed":
        documents.sort(key=len, reverse=True)
    error = None
    try:
        with dispatcher.groups.failures.reported():
            with setting.autocast():
                loss = planned_loss(model, plan, dispatcher, documents)
            loss.backward()
    except Exception as caught:
        error = caught
    dispatcher.groups.raise_together(error)
    total, grads = loss.detach().double().cpu(), gradients(model)
    dist.all_reduce(total)
    for grad in grads.values():  # on the CPU: this is not what is being looked at
        dist.all_reduce(grad)
    arrays = {name: grad.numpy() for name, grad in grads.items()}
    return RankResult(total.item(), arrays, plan.summary.exchange.bytes_bottleneck)


def _block(setting: Setting) -> int:
    """Cuts fall on multiples of so many rows: a kernel's block, less where documents are tiny."""
    return 128 if max(setting.lengths) > 1024 else 8

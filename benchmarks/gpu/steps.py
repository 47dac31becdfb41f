"""Planned steps against stock attention document by document: on one rank, on two, and many steps
in a row.
"""

import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hf_distca
from benchmarks.gpu.findings import Findings, StepResult, compare, waits
from benchmarks.gpu.models import (
    HEADS,
    dispatcher_of,
    gradients,
    planned_loss,
    small_model,
    stock_result,
    stock_step,
)
from benchmarks.gpu.setting import Setting
from benchmarks.harness import run_ranks
from benchmarks.harness.models import documents_of
from hf_distca.models.checkpointing import enable_checkpointing
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed

LEARNING_RATE = 1e-3
TIMES_STOCK = 4.0
"""Largest allowed ratio of our deviation from exact losses to the deviation of stock attention."""
TIMEOUT_S = 20
"""Seconds after which a rank whose partner has failed gives up."""


@dataclass(frozen=True)
class Variant:
    """Variant of a planned step; `reentrant` is the kind of checkpointing."""

    layout: str = "auto"
    ping_pong: bool = True
    heads: tuple[int, int] = HEADS
    reentrant: bool | None = None


ON_ONE_RANK = {
    "one nano-batch": Variant(ping_pong=False),
    "ping-pong": Variant(),
    "checkpoint": Variant(reentrant=False),
    "reentrant": Variant(reentrant=True),
}
ON_TWO_RANKS = {
    "auto": Variant("auto", ping_pong=False),
    "fixed": Variant("fixed", ping_pong=False),
    "auto, ping-pong": Variant("auto"),
    "fixed, ping-pong": Variant("fixed"),
    "fixed, 14 heads": Variant("fixed", heads=(14, 2)),
    "auto, 9 heads": Variant("auto", heads=(9, 3)),
}
WINDOWS = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, 14 heads": ("sdpa", {"model_type": "qwen2", "heads": (14, 2)}),
    "9 heads": ("sdpa", {"heads": (9, 3)}),
    "gemma3, windows": ("eager", {"model_type": "gemma3_text", "heads": (4, 2), **WINDOWS}),
    "gpt_oss, sinks and windows": (
        "eager",
        {
            "model_type": "gpt_oss",
            "sliding_window": 128,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
        },
    ),
}
"""Stock attention that a model is compared with, and what the model is."""


def planned_result(
    setting: Setting, variant: Variant, **model_options: Any
) -> tuple[StepResult, int]:
    """A planned step of all ranks; bytes through the busiest rank in one layer's forward."""
    ranks, lengths = (dist.get_world_size() if dist.is_initialized() else 1), list(setting.lengths)
    model = small_model(setting, "distca", **{"heads": variant.heads, **model_options})
    dispatcher = dispatcher_of(
        model,
        setting,
        ping_pong=variant.ping_pong,
        ranks=ranks,
        exchange_timeout=TIMEOUT_S,
    )
    if variant.reentrant is not None:
        enable_checkpointing(model, {"use_reentrant": variant.reentrant})
    documents = documents_of(lengths)
    if variant.layout == "auto":
        plan = plan_micro_batch(lengths, dispatcher.settings)
    else:  # the long documents on one rank, the short ones on the other
        documents.sort(key=len, reverse=True)
        lengths.sort(reverse=True)
        plan = plan_placed([lengths[:2], lengths[2:]], dispatcher.settings)
    if len(plan.nano_batches) != 1 + variant.ping_pong:
        raise RuntimeError(f"the plan has {len(plan.nano_batches)} nano-batches")
    with setting.autocast():
        loss = planned_loss(model, plan, dispatcher, documents)
    loss.backward()
    total, grads = loss.detach().double().cpu(), gradients(model)
    if ranks > 1:
        for summed in (total, *grads.values()):  # on the CPU: their sum is not what is looked at
            dist.all_reduce(summed)
    return StepResult(total.item(), grads), plan.summary.exchange.bytes_bottleneck


def check_planned_steps(setting: Setting) -> Findings:
    """One step in all variants, and of some models; then steps with an optimizer."""
    findings = Findings()
    exact, stock = (stock_result(setting, "sdpa", exact=exact) for exact in (True, False))
    largest = findings.figures["largest_deviation_of_a_gradient"] = {}
    for name, variant in ON_ONE_RANK.items():
        with findings.trying(name), waits(setting.device) as places:
            result, _ = planned_result(setting, variant)
            largest[name] = compare(findings, name, result, stock, exact, setting.dtype)
        ours = {place for place in places if place.startswith(str(Path(hf_distca.__file__).parent))}
        findings.check(not ours, f"{name}: the host waits for the device in {sorted(ours)}")
    for name, (implementation, options) in MODELS.items():
        with findings.trying(name):
            exact, stock = (
                stock_result(setting, implementation, exact=exact, **options)
                for exact in (True, False)
            )
            result, _ = planned_result(setting, Variant(), **options)
            largest[name] = compare(findings, name, result, stock, exact, setting.dtype)
    with findings.trying(f"{setting.steps} steps"):
        _many_steps(setting, findings)
    return findings


def _many_steps(setting: Setting, findings: Findings) -> None:
    """Check that losses of many steps with changing plans are as close to exact losses as stock
    attention's.
    """
    exact = _losses(setting, "sdpa", exact=True)
    stock, planned = _losses(setting, "sdpa"), _losses(setting, "distca")
    farthest = max(abs(a - b) for a, b in zip(stock, exact, strict=True))
    bound = max(TIMES_STOCK * farthest, 1e-6 * exact[0])
    for step, (mine, theirs) in enumerate(zip(planned, exact, strict=True)):
        findings.at_most(abs(mine - theirs), bound, f"deviation of the loss of step {step}")
    findings.check(exact[-1] < exact[0], f"the model does not learn: {exact}")
    findings.figures["losses"] = {"planned": planned, "stock": stock, "exact": exact}


def _losses(setting: Setting, implementation: str, *, exact: bool = False) -> list[float]:
    """Losses of steps on documents that come in another order each time, fewer and more of them."""
    model = small_model(setting, implementation).to(setting.exact if exact else torch.float32)
    dispatcher = (
        dispatcher_of(model, setting, ping_pong=True) if implementation == "distca" else None
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    everything, order, losses = documents_of(setting.lengths), random.Random(0), []
    for _ in range(setting.steps):
        documents = order.sample(
            everything, order.randrange(len(everything) - 2, len(everything) + 1)
        )
        with torch.autocast(setting.device.type, enabled=False) if exact else setting.autocast():
            if dispatcher is None:
                losses.append(stock_step(model, documents))
            else:
                plan = plan_micro_batch(
                    [len(document) for document in documents], dispatcher.settings
                )
                loss = planned_loss(model, plan, dispatcher, documents)
        if dispatcher is not None:
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check_two_ranks(setting: Setting, run: Callable[..., list[Any]] = run_ranks) -> Findings:
    """One step of two ranks on one device over gloo in all variants, beside one process with stock
    attention.
    """
    findings = Findings()
    largest = findings.figures["largest_deviation_of_a_gradient"] = {}
    moved = findings.figures["bytes_moved"] = {}
    results, _ = run(2, rank_steps, setting)
    for name, variant in ON_TWO_RANKS.items():
        if isinstance(results[name], str):
            findings.check(False, f"{name}: {results[name]}")
            continue
        loss, arrays, moved[name] = results[name]
        findings.check(moved[name] > 0, f"{name}: the plan moves nothing between ranks")
        stock, exact = (
            stock_result(setting, "sdpa", exact=exact, heads=variant.heads)
            for exact in (False, True)
        )
        result = StepResult(loss, {key: torch.from_numpy(array) for key, array in arrays.items()})
        largest[name] = compare(findings, name, result, stock, exact, setting.dtype)
    return findings


def rank_steps(setting: Setting) -> dict[str, Any] | None:
    """The steps on one rank; rank 0 returns loss, gradients and bytes of each, or the error.

    Gradients are arrays: tensors would go from process to process in /dev/shm, which may be small.
    The first error ends the steps: ranks are no longer in step then.
    """
    if setting.on_cuda:
        torch.cuda.set_device(setting.device)
    results: dict[str, Any] = {}
    for name, variant in ON_TWO_RANKS.items():
        try:
            result, moved = planned_result(setting, variant)
        except Exception as error:
            traceback.print_exc()
            results |= {
                left: f"{type(error).__name__}: {error}"
                for left in ON_TWO_RANKS
                if left not in results
            }
            break
        results[name] = (
            result.loss,
            {key: grad.numpy() for key, grad in result.grads.items()},
            moved,
        )
    return results if dist.get_rank() == 0 else None

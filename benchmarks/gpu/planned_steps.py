"""Planned steps against stock attention document by document: checkpointing, ping-pong, and many steps in a row."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.gpu.compared import compare
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.models import (
    StepResult,
    gradients,
    planned_loss,
    settings_of,
    small_model,
    stock_step,
)
from benchmarks.gpu.setting import Setting
from benchmarks.harness.models import documents_of
from hf_distca import Dispatcher, plan_layers
from hf_distca.planner.micro_batch import plan_micro_batch

LEARNING_RATE = 1e-3
TIMES_STOCK = 4.0
"""So many times as far from the exact losses as those of stock attention they may be, which wander apart too."""


@dataclass(frozen=True)
class Way:
    """How a planned step runs.

    Attributes:
        ping_pong: two nano-batches that take turns.
        reentrant: kind of gradient checkpointing; None: none.
        keep_core_attention: as in DistCAConfig.
    """

    ping_pong: bool = True
    reentrant: bool | None = None
    keep_core_attention: bool = True


WAYS = {
    "one nano-batch": Way(ping_pong=False),
    "ping-pong": Way(),
    "checkpoint": Way(reentrant=False),
    "checkpoint, attention again": Way(reentrant=False, keep_core_attention=False),
    "reentrant": Way(reentrant=True),
    "reentrant, attention again": Way(reentrant=True, keep_core_attention=False),
}


@dataclass(frozen=True)
class Model:
    """A model that is compared.

    Attributes:
        model_type: as transformers names it.
        stock: the attention that it is compared with.
        heads: query and key-value heads.
        config: what else its configuration says.
    """

    model_type: str
    stock: str
    heads: tuple[int, int]
    config: dict[str, Any]


MODELS = {
    "qwen2, 14 heads": Model("qwen2", "sdpa", (14, 2), {}),
    "9 heads": Model("llama", "sdpa", (9, 3), {}),
    "gemma3, windows": Model(
        "gemma3_text",
        "eager",
        (4, 2),
        {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss, sinks and windows": Model(
        "gpt_oss", "eager", (8, 2), {"sliding_window": 128, "num_local_experts": 2, "num_experts_per_tok": 2}
    ),
}


def stock_result(
    setting: Setting, implementation: str, *, exact: bool = False, model_type: str = "llama", **config: Any
) -> StepResult:
    """A step with stock attention, in the usual precision or a higher one."""
    model = small_model(setting, implementation, model_type, **config).train()
    if exact:
        model = model.to(setting.exact)
        loss = stock_step(model, documents_of(setting.lengths))
    else:
        with setting.autocast():
            loss = stock_step(model, documents_of(setting.lengths))
    return StepResult(loss, gradients(model))


def planned_result(setting: Setting, way: Way, *, model_type: str = "llama", **config: Any) -> StepResult:
    """A planned step."""
    model = small_model(setting, "distca", model_type, **config).train()
    dispatcher = dispatcher_of(model, setting, way)
    if way.reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": way.reentrant})
    plan = plan_micro_batch(setting.lengths, dispatcher.settings)
    if len(plan.nano_batches) != 1 + way.ping_pong:
        raise RuntimeError(f"the plan has {len(plan.nano_batches)} nano-batches")
    with setting.autocast():
        loss = planned_loss(model, plan, dispatcher, documents_of(setting.lengths))
    loss.backward()
    return StepResult(loss.item(), gradients(model))


def dispatcher_of(model: PreTrainedModel, setting: Setting, way: Way) -> Dispatcher:
    """A dispatcher for one rank; prepares the model's layers too."""
    settings = settings_of(model, setting, ping_pong=way.ping_pong)
    if way.ping_pong:
        plan_layers(model)
    return Dispatcher(settings, setting.device, keep_core_attention=way.keep_core_attention)


def check_planned_steps(setting: Setting) -> Findings:
    """One step in all ways, and of some models; then steps with an optimizer."""
    findings = Findings()
    exact = stock_result(setting, "sdpa", exact=True)
    stock = stock_result(setting, "sdpa")
    largest = findings.figures["largest_deviation_of_a_gradient"] = {}
    for name, way in WAYS.items():
        with findings.trying(name):
            result = planned_result(setting, way)
            largest[name] = compare(findings, name, result, stock, exact, setting.dtype)
    for name, model in MODELS.items():
        with findings.trying(name):
            options = {"model_type": model.model_type, "heads": model.heads, **model.config}
            exact = stock_result(setting, model.stock, exact=True, **options)
            stock = stock_result(setting, model.stock, **options)
            result = planned_result(setting, Way(), **options)
            largest[name] = compare(findings, name, result, stock, exact, setting.dtype)
    with findings.trying(f"{setting.steps} steps"):
        _many_steps(setting, findings)
    return findings


def _many_steps(setting: Setting, findings: Findings) -> None:
    """The losses of many steps with changing plans stay as close to exact ones as those of stock attention."""
    exact = _losses(setting, "sdpa", exact=True)
    stock, planned = _losses(setting, "sdpa"), _losses(setting, "distca")
    farthest = max(abs(a - b) for a, b in zip(stock, exact, strict=True))
    bound = max(TIMES_STOCK * farthest, 1e-6 * exact[0])
    for step, (mine, theirs) in enumerate(zip(planned, exact, strict=True)):
        findings.at_most(abs(mine - theirs), bound, f"deviation of the loss of step {step}")
    findings.check(exact[-1] < exact[0], f"the model does not learn: {exact}")
    findings.figures["losses"] = {"planned": planned, "stock": stock, "exact": exact}


def _losses(setting: Setting, implementation: str, *, exact: bool = False) -> list[float]:
    """Losses of steps on documents that come in another order each time, less and more of them."""
    model = small_model(setting, implementation).train()
    if exact:
        model = model.to(setting.exact)
    dispatcher = dispatcher_of(model, setting, Way()) if implementation == "distca" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    everything, order, losses = documents_of(setting.lengths), random.Random(0), []
    for _ in range(setting.steps):
        documents = order.sample(everything, order.randrange(len(everything) - 2, len(everything) + 1))
        if dispatcher is None and exact:
            losses.append(stock_step(model, documents))
        elif dispatcher is None:
            with setting.autocast():
                losses.append(stock_step(model, documents))
        else:
            plan = plan_micro_batch([len(document) for document in documents], dispatcher.settings)
            with setting.autocast():
                loss = planned_loss(model, plan, dispatcher, documents)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses

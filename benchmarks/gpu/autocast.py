"""Autocast in both halves: what is open across a pause must be found again by each half, and by what comes after."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.models import documents_of, planned_loss, small_model
from benchmarks.gpu.planned_steps import Way, dispatcher_of
from benchmarks.gpu.setting import Setting
from hf_distca.planner.micro_batch import plan_micro_batch

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
LINEAR_LAYERS = 7
"""Of a LLaMA layer: four around its attention, three in its MLP."""


class Products(TorchDispatchMode):
    """Counts matrix products by rows and dtype.

    Attributes:
        count: by (rows, dtype).
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[tuple[int, torch.dtype], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count it if it is a product."""
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            key = (result.shape[0], result.dtype)
            self.count[key] = self.count.get(key, 0) + 1
        return result


def check_autocast(setting: Setting) -> Findings:
    """The forward of a planned step in bfloat16 autocast, with two nano-batches of different rows."""
    findings = Findings()
    model = small_model(setting, "distca").train()
    dispatcher = dispatcher_of(model, setting, Way())
    plan = plan_micro_batch(setting.lengths, dispatcher.settings)
    halves = [int(nano.layout.tokens[0]) for nano in plan.nano_batches]
    if len(set(halves)) != 2:
        raise ValueError(f"the halves must differ in rows to be told apart, got {halves}")
    device_type = setting.device.type
    with findings.trying("the step"):
        with torch.autocast(device_type, torch.bfloat16), Products() as products:
            loss = planned_loss(model, plan, dispatcher, documents_of(setting.lengths))
            after = (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
        findings.check(after == (True, torch.bfloat16), f"autocast is (on, dtype) = {after} after the model")
        _check_products(findings, products, halves, LINEAR_LAYERS * model.config.num_hidden_layers)
        loss.backward()
        findings.check(
            all(p.grad is not None and p.grad.isfinite().all().item() for p in model.parameters()),
            "a gradient is missing or not finite",
        )
    return findings


def _check_products(findings: Findings, products: Products, halves: list[int], expected: int) -> None:
    """Every linear layer's product is in bfloat16, on the rows of each half."""
    for number, rows in enumerate(halves):
        counts = {dtype: count for (of, dtype), count in products.count.items() if of == rows}
        findings.check(counts == {torch.bfloat16: expected}, f"half {number}: products by dtype are {counts}")
        findings.figures[f"products_of_half_{number}"] = {str(dtype): count for dtype, count in counts.items()}

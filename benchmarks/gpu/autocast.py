"""Autocast in two nano-batches: what is open across a pause each must find again, and what comes after them too."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.models import planned_loss, small_model
from benchmarks.gpu.planned_steps import Way, dispatcher_of
from benchmarks.gpu.setting import Setting
from benchmarks.harness.models import documents_of
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
    rows = [int(nano.layout.tokens[0]) for nano in plan.nano_batches]
    if len(set(rows)) != 2:
        raise ValueError(f"nano-batches must differ in rows to be told apart, got {rows}")
    device_type = setting.device.type
    with findings.trying("the step"):
        with torch.autocast(device_type, torch.bfloat16), Products() as products:
            loss = planned_loss(model, plan, dispatcher, documents_of(setting.lengths))
            after = (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
        findings.check(after == (True, torch.bfloat16), f"autocast is (on, dtype) = {after} after the model")
        _check_products(findings, products, rows, LINEAR_LAYERS * model.config.num_hidden_layers)
        loss.backward()
        findings.check(
            all(p.grad is not None and p.grad.isfinite().all().item() for p in model.parameters()),
            "a gradient is missing or not finite",
        )
    return findings


def _check_products(findings: Findings, products: Products, rows_of: list[int], expected: int) -> None:
    """Every linear layer's product is in bfloat16, on the rows of each nano-batch."""
    for index, rows in enumerate(rows_of):
        counts = {dtype: count for (of, dtype), count in products.count.items() if of == rows}
        findings.check(counts == {torch.bfloat16: expected}, f"nano-batch {index}: products by dtype are {counts}")
        findings.figures[f"products_of_nano_batch_{index}"] = {str(dtype): count for dtype, count in counts.items()}

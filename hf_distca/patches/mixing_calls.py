"""Calls of mixing modules in a planned step."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from hf_distca.dispatch.bound import BoundNanoBatch, BoundPlan

Function = Callable[..., Any]

running_call: ContextVar["MixingCall"] = ContextVar("mixing module that runs")


class MixingCall:
    """One call of a mixing module in a planned step."""

    def __init__(self, module: nn.Module, plan: BoundPlan) -> None:
        self.module = module
        self.plan = plan
        self.mixed: list[str] = []  # functions that the module has called, in order

    def run(self, forward: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward. Replaced functions find this call while it runs."""
        token = running_call.set(self)
        try:
            return forward(*args, **kwargs)
        finally:
            running_call.reset(token)

    def pause(self) -> None:
        """Let the other nano-batch run while rows or states travel."""
        if self.plan.exchanges_states:
            self.plan.pause()

    def exchange(self, nano: BoundNanoBatch) -> dict[str, Any]:
        """Return the arguments of an exchange of the module on a nano-batch."""
        runtime = self.plan.runtime
        return {
            "nano_batch": nano.index,
            "module": self.module,
            "exchange": runtime.exchange,
            "recorder": runtime.recorder,
            "kept": self.plan.kept_results,
        }

    def of_nano_batches(self, x_1T: Tensor) -> Sequence[Tensor]:
        """Divide rows [1, T, ...] between the nano-batches of the call."""
        return torch.split(x_1T, [nano.rows for nano in self.plan.nano_batches], 1)

"""Findings of a part: figures and errors."""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TIMES_STOCK, ROUNDINGS = 2.0, 4.0
"""Largest deviation from the exact result: a multiple of stock attention's deviation, plus some
roundings."""


class Findings:
    """The findings of one part. What is wrong does not end the part: the rest is looked at too.

    Attributes:
        figures: by name; ready for JSON.
        wrong: what is wrong, a sentence each.
        skipped: why the part has nothing to do here; empty if it has.
    """

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.wrong: list[str] = []
        self.skipped = ""

    def check(self, right: bool, otherwise: str) -> None:
        """Note a sentence unless something is right; it is printed at once, should the part never
        end.
        """
        if not right:
            self.wrong.append(otherwise)
            print("wrong:", otherwise, flush=True)

    def at_most(self, value: float, bound: float, what: str) -> None:
        """Note a number above its bound; NaN is never within one."""
        self.check(value <= bound, f"{what}: {value:.3g}, at most {bound:.3g} is expected")

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.check(False, f"{what}: {type(error).__name__}: {str(error)[:500]}")


@dataclass(frozen=True)
class StepResult:
    """One forward and backward over all documents.

    Attributes:
        loss: over all targets.
        grads: by parameter, on the CPU.
    """

    loss: float
    grads: dict[str, Tensor]


def compare(
    findings: Findings,
    what: str,
    got: StepResult,
    stock: StepResult,
    exact: StepResult,
    dtype: torch.dtype,
) -> float:
    """Note what deviates further than stock attention does.

    Returns:
        The largest deviation of a parameter's gradient.
    """
    slack, scale = ROUNDINGS * torch.finfo(dtype).eps, abs(exact.loss)
    bound = TIMES_STOCK * abs(stock.loss - exact.loss) / scale + slack
    findings.at_most(abs(got.loss - exact.loss) / scale, bound, f"{what}: deviation of the loss")
    mine, theirs = deviations(got.grads, exact.grads), deviations(stock.grads, exact.grads)
    for name, deviation in mine.items():
        bound = TIMES_STOCK * theirs[name] + slack
        findings.at_most(deviation, bound, f"{what}: deviation of the gradient of {name}")
    return max(mine.values())


def deviations(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """By parameter, the norm of the difference over the norm; infinite where a gradient is missing.

    Gradients that are next to nothing beside the others count by a thousandth of the largest norm.
    """
    least = 1e-3 * max(grad.norm().item() for grad in want.values())
    return {
        name: (got[name] - grad).norm().item() / max(grad.norm().item(), least)
        if name in got
        else float("inf")
        for name, grad in want.items()
    }


@contextmanager
def waits(device: torch.device) -> Iterator[list[str]]:
    """Record the file and line of each time that the host waits for the device."""
    places: list[str] = []
    if device.type != "cuda":
        yield places
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
            # Torch warns of the debug mode itself too, once: it may miss "synchronizing
            # operations".
            places += [
                f"{w.filename}:{w.lineno}"
                for w in caught
                if "called a synchronizing" in str(w.message)
            ]

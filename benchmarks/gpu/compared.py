"""Whether a result is as good as that of stock attention: what is exact, in higher precision, says what good is."""

import torch

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.models import StepResult, deviations

TIMES_STOCK = 2.0
"""So many times as far from the exact result as stock attention a result may be,"""
ROUNDINGS = 4.0
"""and so many roundings of the dtype further, where stock attention happens to be close."""


def compare(
    findings: Findings, what: str, got: StepResult, stock: StepResult, exact: StepResult, dtype: torch.dtype
) -> float:
    """Note what deviates further than stock attention does.

    Args:
        findings: where it is noted.
        what: was done.
        got: its result.
        stock: of stock attention in the same precision.
        exact: of stock attention in a higher precision.
        dtype: that core attention was computed in.

    Returns:
        The largest deviation of a parameter's gradient.
    """
    slack = ROUNDINGS * torch.finfo(dtype).eps
    scale = abs(exact.loss)
    findings.at_most(
        abs(got.loss - exact.loss) / scale,
        TIMES_STOCK * abs(stock.loss - exact.loss) / scale + slack,
        f"{what}: deviation of the loss",
    )
    mine, theirs = deviations(got.grads, exact.grads), deviations(stock.grads, exact.grads)
    for name, deviation in mine.items():
        bound = TIMES_STOCK * theirs[name] + slack
        findings.at_most(deviation, bound, f"{what}: deviation of the gradient of {name}")
    return max(mine.values())

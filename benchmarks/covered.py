"""How much of an exchange lies under computation, read from a trace of torch.profiler.

On CUDA a trace tells when each kernel ran, and NCCL's kernel of sends and receives is an exchange. On the CPU it tells
when each operator ran, and when gloo's threads carried an exchange.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]
"""Begin and end, in microseconds."""

DIRECTIONS = ("forward", "backward")
"""Names that a traced step gives to its two parts; each is over on the device before it ends."""

_EXCHANGE = re.compile(r"^nccl.*(SendRecv|AllToAll)|^gloo:all_to_all")
_ATTENTION = re.compile(r"flash|fmha|attention", re.IGNORECASE)


@dataclass(frozen=True)
class Covered:
    """The exchanges of one direction of a step on one rank.

    Attributes:
        exchanges: how many.
        exchange_ms: time in which at least one was on its way.
        under_attention: share of that time in which a kernel of core attention ran.
        under_computation: share in which any kernel ran but those of communication.
    """

    exchanges: int
    exchange_ms: float
    under_attention: float
    under_computation: float


def covered_exchange(events: Sequence[dict[str, Any]]) -> dict[str, Covered]:
    """What computation covers of the exchanges, by direction.

    Args:
        events: `traceEvents` of a Chrome trace of one rank's step, its parts in `record_function` of DIRECTIONS.

    Raises:
        ValueError: a part of the step, or an exchange in it, is not in the trace.
    """
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    parts = {event["name"]: _interval(event) for event in events if event.get("cat") == "user_annotation"}
    exchanges, attention, computation = [], [], []
    for event in events:
        if event.get("cat") in ("kernel", "user_annotation") and _EXCHANGE.search(event["name"]):
            exchanges.append(_interval(event))
        elif _computes(event, on_gpu):
            computation.append(_interval(event))
            if _ATTENTION.search(event["name"]):
                attention.append(_interval(event))
    found = {}
    for direction in DIRECTIONS:
        if direction not in parts:
            raise ValueError(f"the trace has no part called {direction!r}, only {sorted(parts)}")
        inside = [_clipped(interval, parts[direction]) for interval in exchanges]
        inside = [interval for interval in inside if interval[0] < interval[1]]
        if not inside:
            raise ValueError(f"the trace has no exchange in the {direction}: every row stayed on its rank")
        time = length(merged(inside))
        found[direction] = Covered(
            exchanges=len(inside),
            exchange_ms=time / 1e3,
            under_attention=length(common(merged(inside), merged(attention))) / time,
            under_computation=length(common(merged(inside), merged(computation))) / time,
        )
    return found


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that do not touch, in order.

    >>> merged([(5, 7), (0, 2), (1, 3)])
    [(0, 3), (5, 7)]
    """
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Time that is in both.

    Args:
        first, second: from `merged`.

    >>> common([(0, 3), (5, 7)], [(2, 6)])
    [(2, 3), (5, 6)]
    """
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            found.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Sum of the lengths."""
    return sum(end - begin for begin, end in intervals)


def _computes(event: dict[str, Any], on_gpu: bool) -> bool:
    """Whether it is a kernel that is not communication; without a GPU, an operator: beside one these only launch."""
    if on_gpu:
        return event.get("cat") == "kernel" and not event["name"].startswith("nccl")
    return event.get("cat") == "cpu_op" and str(event["name"]).startswith("aten::")


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _clipped(interval: Interval, part: Interval) -> Interval:
    return max(interval[0], part[0]), min(interval[1], part[1])

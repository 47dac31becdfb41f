"""Costs of core attention: query-key pairs, bytes of a row, speed of a worker."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hf_distca.checks.plan_rules import Plans
from hf_distca.plan import AttentionKind
from hf_distca.plan.arrays import FloatArray, IntArray

BALANCE_TOLERANCE = 0.01
"""Default for how far above the mean a worker's attention may lie, as a fraction of the mean; below
it bytes still grow, while the time of a step no longer changes measurably."""
MOST_TOKENS = 2**31 - 1
"""Maximum number of tokens whose query-key pairs fit into 64 bits."""

Rows = TypeVar("Rows", int, IntArray)
Amount = TypeVar("Amount", float, FloatArray)


@dataclass(frozen=True)
class RowBytes:
    """Bytes of an exchanged row: Q, K and V together, O, of all heads.

    By default of Llama-3-8B in bfloat16.
    """

    q: int = 8192
    kv: int = 4096
    o: int = 8192

    @classmethod
    def of_kind(cls, kind: AttentionKind, bytes_per_value: int) -> "RowBytes":
        """Return the bytes of rows of a kind of attention."""
        values = (
            kind.q_heads * kind.dim_qk,
            kind.kv_heads * (kind.dim_qk + kind.dim_v),
            kind.q_heads * kind.dim_v,
        )
        return cls(*(count * bytes_per_value for count in values))


def pairs(start: Rows | int, stop: Rows, window: int | None = None) -> Rows:
    """Return the query-key pairs of query rows [start, stop).

    Row p attends to min(p + 1, window) keys.
    """
    if window is None:
        return (stop * (stop + 1) - start * (start + 1)) // 2
    pair_count: Rows = _pairs_before(stop, window) - _pairs_before(start, window)
    return pair_count


def _pairs_before(row: IntArray | int, window: int) -> Any:
    """Return the pairs of rows [0, row); beyond the window each row adds `window`."""
    ramp_rows = min(row, window) if isinstance(row, int) else np.minimum(row, window)
    return ramp_rows * (ramp_rows + 1) // 2 + (row - ramp_rows) * window


def row_reaching(amount: Amount, window: int | None = None) -> Amount:
    """Return the fractional row x for which rows [0, x) hold `amount` pairs.

    This is the inverse of pairs(0, x).

    x (x + 1) / 2 = amount gives x = √(2 amount + 1/4) − 1/2; beyond the window a row adds `window`.
    """
    ramp = math.inf if window is None else window * (window + 1) / 2
    if not isinstance(amount, np.ndarray):
        if amount > ramp:
            return (window or 1) + (amount - ramp) / (window or 1)
        return math.sqrt(2.0 * max(amount, 0.0) + 0.25) - 0.5
    ramp_row = np.sqrt(2.0 * np.maximum(amount, 0.0) + 0.25) - 0.5
    return (
        ramp_row
        if window is None
        else np.where(amount <= ramp, ramp_row, window + (amount - ramp) / window)
    )


def pairs_at(row: FloatArray, window: int | None = None) -> FloatArray:
    """Return pairs(0, row) for fractional rows: the inverse of row_reaching."""
    if window is None:
        return row * (row + 1) / 2
    ramp_rows = np.minimum(row, window)
    return np.asarray(ramp_rows * (ramp_rows + 1) / 2 + (row - ramp_rows) * window)


@dataclass(frozen=True)
class Workers:
    """Workers that compute core attention; worker w finishes at base_load[w] + pairs / speed[w]."""

    speed: tuple[float, ...]  # pairs per unit of time, relative to the usual worker (1.0)
    base_load: tuple[float, ...]  # time outside core attention, in pairs of a worker of speed 1.0

    def __post_init__(self) -> None:
        pairs_of = tuple(zip(self.speed, self.base_load, strict=True))
        assert all(0 < speed < math.inf and 0 <= base < math.inf for speed, base in pairs_of), self

    @classmethod
    def uniform(cls, count: int) -> "Workers":
        """Return `count` equal workers without base load."""
        return cls((1.0,) * count, (0.0,) * count)

    def __len__(self) -> int:
        return len(self.speed)

    def finishing(self, loads: IntArray) -> FloatArray:
        """Return [workers] float64: when each worker finishes, for [workers] pairs."""
        return np.asarray(np.asarray(self.base_load) + loads / np.asarray(self.speed))

    def ideal(self, total: int) -> float:
        """Return the earliest time at which all workers can finish `total` pairs, divided at will.

        This is the level t with Σ speed · max(t − base, 0) = total, or the largest base load if
        that is later.
        """
        base, speed = np.array(sorted(zip(self.base_load, self.speed, strict=True))).T
        # The level if the workers up to each one share the pairs.
        levels = (total + np.cumsum(base * speed)) / np.cumsum(speed)
        return float(max(levels.min(), base[-1]))


def as_lengths(lengths: Sequence[int] | IntArray) -> IntArray:
    """Return any sequence of document lengths as [documents] int64.

    Raises:
        ValueError: a length is not a positive integer, or there are too many tokens.
    """
    array = np.asarray(lengths if len(lengths) else np.zeros(0, np.int64))
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise Plans.NOT_LENGTHS.error(given=f"{lengths!r:.80}")
    if len(array) and float(array.astype(np.float64).sum()) > MOST_TOKENS:
        raise Plans.TOO_MANY_TOKENS.error(most=MOST_TOKENS)
    if len(array) and array.min() < 1:
        raise Plans.EMPTY_DOCUMENT.error(document=array.argmin(), length=array.min())
    return array.astype(np.int64)

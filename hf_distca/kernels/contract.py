"""Contract of all kernels: options, lengths of tasks, methods, and checks of tensors.

Shape suffixes: T tasks, Q packed query rows, K packed key/value rows, H query heads, G key/value
heads (H is a multiple of G; query head h reads key/value head h // (H / G)), D head dim of queries
and keys, E head dim of values.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Made = TypeVar("_Made")

ALIGNMENT = 16
"""Bytes that kernels load at once: rows, columns and tables begin at multiples of it."""

MAX_SOURCES = 6
"""Most tensors whose rows `sum_rows` adds up."""

SOURCE_BITS = 3
"""Low bits of an addend of `sum_rows` that hold the index of its source; the bits above hold its
row."""


def aligned(size: int) -> int:
    """Round a size in bytes up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class AttentionParams:
    """Options of a layer's core attention.

    If causal, row i of a task attends to its keys j <= i + k_len - q_len (aligned bottom right),
    and with a window to j > i + k_len - q_len - window. Else rows attend to all keys of their task;
    no window then.
    """

    scale: float  # factor on the scores q·k, usually 1/√D
    window: int | None = (
        None  # the most keys of a row, up to and including its own (sliding window); None: all
    )
    softcap: float | None = (
        None  # scores become softcap·tanh(scores/softcap); None: they stay as they are
    )
    causal: bool = True

    def __post_init__(self) -> None:
        if self.softcap is not None and self.softcap <= 0:  # a server is sent it
            raise ValueError(f"softcap must be positive or None, got {self.softcap}")


@dataclass(frozen=True)
class Need:
    """Needs of one kind of a model's attention."""

    dtype: torch.dtype
    head_dim_qk: int
    head_dim_v: int
    params: AttentionParams


@dataclass(frozen=True, eq=False)
class TaskShapes:
    """Lengths of the tasks of one kernel call, built once per micro-batch.

    The query rows of the tasks lie packed one after another, and so do the key/value rows: a
    key/value row that two tasks need appears twice.
    """

    q_lens: tuple[int, ...]  # rows of each task; may be 0
    k_lens: tuple[int, ...]  # with causal attention k_lens[i] >= q_lens[i]
    cu_q: Tensor  # [T + 1] int32 on the device, first packed row of each task, then the total
    cu_k: Tensor
    max_q: int  # largest of q_lens, 0 without tasks
    max_k: int
    _results: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def once(self, key: Hashable, compute: Callable[[], _Made]) -> _Made:
        """Return the first result of `compute` for this key.

        Every layer of a micro-batch asks again.
        """
        if key not in self._results:
            self._results[key] = compute()
        result: _Made = self._results[key]
        return result

    @staticmethod
    def build(
        q_lens: Sequence[int],
        k_lens: Sequence[int],
        device: torch.device | str | Callable[[NDArray[np.int32]], Tensor],
    ) -> "TaskShapes":
        """Return shapes on the device.

        Where `device` is a function, it copies numbers to the device, perhaps many together.
        """

        def place(numbers: NDArray[np.int32]) -> Tensor:
            if isinstance(device, torch.device | str):
                return torch.from_numpy(numbers).to(device, non_blocking=True)
            return device(numbers)

        q_lens, k_lens = tuple(map(int, q_lens)), tuple(map(int, k_lens))
        cu_q = place(np.array([0, *accumulate(q_lens)], np.int32))
        cu_k = cu_q if k_lens == q_lens else place(np.array([0, *accumulate(k_lens)], np.int32))
        return TaskShapes(
            q_lens, k_lens, cu_q, cu_k, max(q_lens, default=0), max(k_lens, default=0)
        )


class Kernel(Protocol):
    """Core attention over several tasks in one kernel call, in both directions.

    Implementations hold no state, compute exactly what `AttentionParams` says, and never hand over
    to another one.
    """

    name: str
    # Cost of a query row besides its pairs, in pairs: a row's last tile of keys is partly masked,
    # and some work is done once a row.
    row_overhead: int
    # Cost of a byte of K and V that a rank gathers in its own memory, because one document has two
    # tasks there that do not touch, in bytes sent to another rank.
    gather_cost: float

    def check(self, need: Need, device: torch.device) -> None:
        """Raise ValueError if the kernel cannot do what is needed, with the kernels that can."""
        ...

    def forward(
        self,
        q_QHD: Tensor,
        k_KGD: Tensor,
        v_KGE: Tensor,
        shapes: TaskShapes,
        params: AttentionParams,
    ) -> tuple[Tensor, Tensor]:
        """Compute attention. Queries, keys and values have one dtype and any strides.

        Returns:
            o_QHE in the dtype of q, contiguous, and lse_QH, the natural logarithm of the softmax's
            denominator, of any strides, float32 (float64 for float64 inputs). A row without keys
            has o = 0 and lse = -inf.

        Raises:
            ValueError: the tensors do not fit one another or the shapes.
        """
        ...

    def backward(
        self,
        do_QHE: Tensor,
        q_QHD: Tensor,
        k_KGD: Tensor,
        v_KGE: Tensor,
        o_QHE: Tensor,
        lse_QH: Tensor,
        shapes: TaskShapes,
        params: AttentionParams,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of attention.

        They follow from do in the dtype of q, and from o and lse of `forward`.

        Where a row's keys were split over several kernel calls whose results were merged, the
        backward of each gets the merged o and lse, of any strides, and the gradients add up.

        Returns:
            dq_QHD, dk_KGD and dv_KGE in the dtype of q, contiguous. They are 0 where no pair of row
            and key exists.
        """
        ...


def check_tensors(
    q_QHD: Tensor, k_KGD: Tensor, v_KGE: Tensor, shapes: TaskShapes, causal: bool
) -> None:
    """Raise ValueError unless the tensors of a kernel call fit one another and the shapes."""

    def count() -> tuple[int, int]:
        for i, (q_len, k_len) in enumerate(zip(shapes.q_lens, shapes.k_lens, strict=True)):
            if causal and k_len < q_len:
                raise ValueError(
                    f"task {i} has {q_len} query rows but only {k_len} key/value rows; causal "
                    "attention aligns the last query with the last key, so a task needs at least "
                    "as many keys as queries"
                )
        return sum(shapes.q_lens), sum(shapes.k_lens)

    q_rows, k_rows = shapes.once(("rows", causal), count)
    q_shape, k_shape, v_shape = (tuple(tensor.shape) for tensor in (q_QHD, k_KGD, v_KGE))
    if (
        (len(q_shape), len(k_shape), len(v_shape)) != (3, 3, 3)
        or (q_shape[0], k_shape[0], v_shape[0]) != (q_rows, k_rows, k_rows)
        or (q_shape[2], k_shape[1]) != (k_shape[2], v_shape[1])
        or q_shape[1] % k_shape[1]
    ):
        raise ValueError(
            f"kernels take q [{q_rows}, H, D], k [{k_rows}, G, D] and v [{k_rows}, G, E] for these "
            f"tasks, with H a multiple of G; got {q_shape}, {k_shape} and {v_shape}"
        )

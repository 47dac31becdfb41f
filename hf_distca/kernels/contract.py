"""What every kernel computes.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads (H is a multiple of G;
query head h reads key/value head h // (H / G)), D head dim of queries and keys, E head dim of values.
"""

from typing import Protocol

import torch
from torch import Tensor

from .params import AttentionParams
from .shapes import TaskShapes


class Kernel(Protocol):
    """Core attention over several tasks in one kernel call, in both directions.

    Implementations hold no state. They compute exactly what `AttentionParams` says, and never hand over to
    another implementation.

    Attributes:
        name: what `get_kernel` knows it by.
        row_overhead: what a query row costs besides its pairs, in pairs: a kernel computes whole tiles of keys, of
            which a row's last one is partly masked, and some of its work is done once a row.
        gather_cost: what a byte of K and V costs that is gathered in the memory of a rank, because one document has
            two tasks there that do not touch, compared with a byte sent to another rank.
    """

    name: str
    row_overhead: int
    gather_cost: float

    def check(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        head_dim_qk: int,
        head_dim_v: int,
        params: AttentionParams,
    ) -> None:
        """Raise ValueError if the kernel cannot do this: what was asked, what it can do, which kernel can."""
        ...

    def forward(
        self, q_QHD: Tensor, k_KGD: Tensor, v_KGE: Tensor, shapes: TaskShapes, params: AttentionParams
    ) -> tuple[Tensor, Tensor]:
        """Compute attention.

        Args:
            q_QHD: packed queries; need not be contiguous.
            k_KGD: packed keys, in the dtype of the queries.
            v_KGE: packed values, in the dtype of the queries.
            shapes: lengths of the tasks.
            params: scale, mask and softcap.

        Returns:
            o_QHE in the dtype of q, contiguous, and lse_QH, the natural logarithm of the softmax's denominator, of
            any strides, float32 (float64 for float64 inputs). A row without keys has o = 0 and lse = -inf.

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

        o and lse are taken as given, never computed again: where a row's keys were split over several kernel
        calls whose results were merged, the backward of each gets the merged o and lse, and the gradients add up.

        Args:
            do_QHE: gradient of the loss with respect to o, in the dtype of q.
            q_QHD: as in forward.
            k_KGD: as in forward.
            v_KGE: as in forward.
            o_QHE: the rows' outputs (merged, where their keys were split).
            lse_QH: the rows' log-sum-exp (merged, where their keys were split), of any strides.
            shapes: as in forward.
            params: as in forward.

        Returns:
            dq_QHD, dk_KGD and dv_KGE in the dtype of q, contiguous. They are 0 where no pair of row and key exists.

        Raises:
            ValueError: the tensors do not fit one another or the shapes.
        """
        ...

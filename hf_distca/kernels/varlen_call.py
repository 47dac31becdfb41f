"""What a FlashAttention varlen kernel is told besides its tensors of rows."""

from dataclasses import dataclass

from torch import Tensor

from .params import AttentionParams
from .shapes import TaskShapes
from .split import TaskRange


@dataclass(frozen=True)
class VarlenCall:
    """The arguments of a varlen kernel besides its tensors of rows.

    Attributes:
        shapes: of all tasks, of which the kernel call computes a range.
        cu_q: [tasks + 1] int32, first row of each task, then the total.
        cu_k: likewise for keys.
        max_q: no task has more rows.
        max_k: no task has more keys.
        scale: factor on the scores.
        causal: aligned bottom right; otherwise every row sees every key.
        window_left: keys seen before the row's own, None: all.
        window_right: keys seen after the row's own, None: as `causal` says.
        softcap: bound of the scores, 0: none.
    """

    shapes: TaskShapes
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    scale: float
    causal: bool
    window_left: int | None
    window_right: int | None
    softcap: float

    @staticmethod
    def build(shapes: TaskShapes, tasks: TaskRange, params: AttentionParams) -> "VarlenCall":
        """Translate what the contract says."""
        return VarlenCall(
            shapes=shapes,
            cu_q=tasks.cu_q,
            cu_k=tasks.cu_k,
            # At 1 the kernels assume one row in *every* task, which empty tasks break. It is only a bound.
            max_q=max(tasks.max_q, 2),
            max_k=tasks.max_k,
            scale=params.scale,
            causal=params.causal,
            window_left=None if params.window is None else params.window - 1,
            window_right=None if params.window is None else 0,
            softcap=params.softcap or 0.0,
        )

    def window(self) -> dict[str, int]:
        """The window as FlashAttention-2 and 3 are told of it: -1 for all."""
        left, right = self.window_left, self.window_right
        return {
            "window_size_left": -1 if left is None else left,
            "window_size_right": -1 if right is None else right,
        }

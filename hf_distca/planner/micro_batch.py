"""From the document lengths of a global micro-batch to its plan: the planner's front door."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hf_distca.plan import Layout, MicroBatchPlan, NanoBatch, Plan, PlanSummary
from hf_distca.planner.balance import balance
from hf_distca.planner.cost import RowBytes, pairs
from hf_distca.planner.layout import fixed_layout, joint_layout
from hf_distca.planner.metrics import measure


@dataclass(frozen=True)
class PlanSettings:
    """Everything besides the lengths that a plan depends on; the same on every rank.

    Attributes:
        ranks: ranks that hold tokens.
        tokens_per_rank: the most rows that a rank holds.
        windows: the attention windows of the model's layers; None stands for full causal attention.
        row_bytes: size of a row of Q, of K and V, and of O, in one layer.
        document_layout: "joint" places tokens and attention together; "fixed" packs documents in order, with
            equal tokens per rank.
        tolerance: how far above the mean a worker's attention may lie, as a fraction of the mean.
        block_size: rows; tasks are cut at multiples of it.
    """

    ranks: int
    tokens_per_rank: int
    windows: tuple[int | None, ...] = (None,)
    row_bytes: RowBytes = field(default_factory=RowBytes)
    document_layout: Literal["joint", "fixed"] = "joint"
    tolerance: float = 0.0
    block_size: int = 128

    @property
    def dominant_window(self) -> int | None:
        """The window of the layers that cost the most, for which the joint layout is made."""
        if None in self.windows:
            return None
        return max(window for window in self.windows if window is not None)


def plan_micro_batch(lengths: Sequence[int], settings: PlanSettings) -> MicroBatchPlan:
    """Lay out the documents of one global micro-batch and balance their core attention.

    Args:
        lengths: tokens of each document, at most ranks · tokens_per_rank in all.
        settings: see PlanSettings.
    """
    if settings.document_layout == "joint":
        layout = joint_layout(
            lengths,
            settings.ranks,
            settings.tokens_per_rank,
            window=settings.dominant_window,
            tolerance=settings.tolerance,
            block_size=settings.block_size,
        )
    else:
        layout = fixed_layout([lengths], settings.ranks)
    return plan_layout(layout, settings)


def plan_layout(layout: Layout, settings: PlanSettings) -> MicroBatchPlan:
    """Balance the core attention of rows that already lie where they are to stay."""
    plans = {
        window: balance(
            layout,
            window=window,
            tolerance=settings.tolerance,
            block_size=settings.block_size,
            row_bytes=settings.row_bytes,
        )
        for window in settings.windows
    }
    return MicroBatchPlan((NanoBatch(layout, plans),), _summary(plans[settings.dominant_window], settings))


def _summary(plan: Plan, settings: PlanSettings) -> PlanSummary:
    packed = fixed_layout([plan.layout.lengths.tolist()], plan.layout.ranks)
    segments = packed.segments
    cost = pairs(segments["start"], segments["stop"], plan.window)
    loads = np.bincount(segments["rank"], weights=cost, minlength=packed.ranks)
    achieved = measure(plan, settings.row_bytes)
    return PlanSummary(float(loads.max() / loads.mean()), achieved.max_over_mean, achieved.bytes_bottleneck)

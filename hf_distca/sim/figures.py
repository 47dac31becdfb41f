"""Figures of a simulation: of each strategy, and of all together."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_distca.planner.cost import pairs
from hf_distca.sim.lengths import LengthBin
from hf_distca.sim.ways import Setup, StepTime, Way

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class WayFigures:
    """Figures of a strategy over many micro-batches.

    Attributes:
        document_layout: layout of plans; None if nothing is planned.
        step_seconds: mean of a step.
        step_seconds_quartiles: half of the steps lie between these.
        attention_seconds: mean of the busiest rank's core attention.
        attention_mean_seconds: mean core attention over ranks.
        other_seconds: mean of all other computation on the busiest rank.
        other_mean_seconds: mean of all other computation over ranks.
        exchange_seconds: mean of the waits of the rank that waits the longest.
        exchange_mean_seconds: mean of the waits over ranks.
        idle_seconds: mean over ranks of the rest of the step: waits for the slowest rank.
        idle: mean share of the ranks' time without computation, waits for exchanges included.
        mfu: model FLOPs utilization: the model's operations over the GPUs' peak in the same time.
        bytes_bottleneck: mean bytes of the busiest rank in one layer's forward.
        tokens_most: the most rows that a rank ever holds.
        rows_bytes: memory for rows on a GPU of the rank with the most rows; None if unknown.
        state_bytes: memory of a GPU for weights, gradients and optimizer; None if not asked for.
        documents_cut: share of documents that lose context.
    """

    name: str
    document_layout: str | None
    servers: int
    gpus: int
    step_seconds: float
    step_seconds_quartiles: tuple[float, float]
    attention_seconds: float
    attention_mean_seconds: float
    other_seconds: float
    other_mean_seconds: float
    exchange_seconds: float
    exchange_mean_seconds: float
    idle_seconds: float
    idle: float
    tokens_per_second: float
    mfu: float
    bytes_bottleneck: float
    tokens_most: int
    rows_bytes: int | None
    state_bytes: int | None
    documents_cut: float

    @classmethod
    def of(
        cls,
        way: Way,
        steps: Sequence[StepTime],
        every: Sequence[IntArray],
        setup: Setup,
        rows_bytes: int | None,
        state_bytes: int | None,
    ) -> "WayFigures":
        """Return the figures of a strategy.

        Args:
            every: lengths of the documents of each micro-batch.
        """
        seconds = np.array([step.seconds for step in steps])
        gpus = (setup.ranks + way.servers) * setup.tensor_parallel
        low, high = np.quantile(seconds, (0.25, 0.75)).tolist()

        def mean(field: str) -> float:
            return float(np.mean([getattr(step, field) for step in steps]))

        busy = mean("attention_mean") + mean("other_mean") + mean("waited_mean")
        flops = sum(_flops(lengths, setup) for lengths in every)
        return cls(
            name=way.name,
            document_layout=way.document_layout,
            servers=way.servers,
            gpus=gpus,
            step_seconds=float(seconds.mean()),
            step_seconds_quartiles=(low, high),
            attention_seconds=mean("attention"),
            attention_mean_seconds=mean("attention_mean"),
            other_seconds=mean("other"),
            other_mean_seconds=mean("other_mean"),
            exchange_seconds=mean("waited"),
            exchange_mean_seconds=mean("waited_mean"),
            idle_seconds=max(float(seconds.mean()) - busy, 0.0),
            idle=mean("idle"),
            tokens_per_second=float(sum(int(lengths.sum()) for lengths in every) / seconds.sum()),
            mfu=float(flops / seconds.sum() / gpus / setup.profile.peak_flops),
            bytes_bottleneck=mean("bytes_bottleneck"),
            tokens_most=max(step.tokens_most for step in steps),
            rows_bytes=rows_bytes,
            state_bytes=state_bytes,
            documents_cut=float(sum(step.documents_cut for step in steps) / sum(map(len, every))),
        )


@dataclass(frozen=True)
class RankLoad:
    """Core attention of each rank in the first micro-batch.

    Attributes:
        attention_seconds: [ranks] seconds of each rank, to the microsecond.
        attention_most: seconds of the busiest rank.
        attention_mean: mean seconds over ranks.
    """

    name: str
    attention_seconds: tuple[float, ...]
    attention_most: float
    attention_mean: float
    max_over_mean: float

    @classmethod
    def of(cls, name: str, step: StepTime) -> "RankLoad":
        """Return the load of a strategy's step."""
        mean = step.attention_mean
        return cls(
            name,
            tuple(round(seconds, 6) for seconds in step.attention_by_rank),
            step.attention,
            mean,
            step.attention / mean if mean else 1.0,
        )


@dataclass(frozen=True)
class Gain:
    """Speed of the best planned strategy over the speed of another one.

    Attributes:
        least: smallest ratio of any micro-batch.
        most: largest ratio of any micro-batch.
    """

    name: str
    speed_up: float
    least: float
    most: float

    @classmethod
    def of(cls, name: str, other: Sequence[StepTime], planned: Sequence[StepTime]) -> "Gain":
        """Compare the steps of the same micro-batches."""
        before, after = (np.array([step.seconds for step in steps]) for steps in (other, planned))
        ratios = before / after
        return cls(name, float(before.sum() / after.sum()), float(ratios.min()), float(ratios.max()))


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation.

    Attributes:
        tokens_per_rank: the most rows of a rank.
        best_plain: name of the fastest strategy without plans, of those that cut the fewest documents.
        best_planned: name of the strategy that plans by default; or of the fastest planned strategy on as many GPUs,
            where that is at least 2 % faster.
        load: loads of plain packing, of `best_plain` and of `best_planned`.
        imbalance: core attention of the busiest rank over the mean, with plain packing; mean over steps.
        over_packing: `best_planned` compared with plain packing.
        over_best: `best_planned` compared with `best_plain`.
        speed_up: step of `best_plain` over that of `best_planned`.
        attention_speed_up: the same ratio for core attention alone.
    """

    ranks: int
    tokens_per_rank: int
    documents: int
    tokens: int
    lengths: tuple[int, ...]
    histogram: tuple[LengthBin, ...]
    ways: tuple[WayFigures, ...]
    best_plain: str
    best_planned: str
    load: tuple[RankLoad, ...]
    imbalance: float
    over_packing: Gain
    over_best: Gain
    speed_up: float
    attention_speed_up: float
    advice: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, without the lengths of every document."""
        return {name: value for name, value in asdict(self).items() if name != "lengths"}


def _flops(lengths: IntArray, setup: Setup) -> float:
    """Count the operations of the model for a micro-batch, forward and backward, without recomputation."""
    model = setup.model
    matrices = 6.0 * (model.depth * (model.before + model.after) + model.head) * float(lengths.sum())
    attention = sum(
        2.0
        * count
        * kind.q_heads
        * (kind.dim_qk + kind.dim_v)
        * float(np.sum(pairs(np.zeros_like(lengths), lengths, kind.window)))
        for kind, count in model.layers.items()
    )
    return matrices + 3.0 * attention

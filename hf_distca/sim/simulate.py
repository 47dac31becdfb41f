"""Many global micro-batches of documents, each trained in every way: what a step takes, and what limits it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_distca.planner.cost import pairs
from hf_distca.planner.micro_batch import PlanSettings
from hf_distca.sim.lengths import LengthBin, histogram
from hf_distca.sim.memory import kept_bytes, state_bytes
from hf_distca.sim.ways import Setup, StepTime, data_and_context_parallel, plain, planned

IntArray = NDArray[np.int64]
NOT_WORTH = 1.02
"""Steps that are not so many times as fast are not worth another way to train: runs differ by as much."""


@dataclass(frozen=True)
class WayFigures:
    """What a way to train comes to over many micro-batches.

    Attributes:
        name: of the way.
        gpus: how many it takes, servers included.
        step_seconds: mean of a step.
        step_seconds_quartiles: half of the steps lie between these.
        attention_seconds: mean of the busiest rank's core attention.
        attention_mean_seconds: mean over ranks.
        other_seconds: mean of everything else, of the busiest rank.
        other_mean_seconds: mean over ranks.
        exchange_seconds: mean of the waits of the rank that waits the longest.
        exchange_mean_seconds: mean over ranks.
        idle_seconds: mean over ranks of what is left of the step: waits for the slowest rank.
        idle: mean share of the ranks' time in which they compute nothing, waits for exchanges included.
        tokens_per_second: of all ranks.
        mfu: model FLOPs utilization: operations of the model over what the GPUs could do in the same time.
        bytes_bottleneck: mean bytes of the busiest rank in one layer's forward.
        tokens_most: the most rows that a rank ever holds.
        kept_bytes: what the rank with the most rows keeps of them for the backward, see `memory.kept_bytes`.
        state_bytes: of a rank, see `memory.state_bytes`.
        documents_cut: share of documents that lose context.
    """

    name: str
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
    kept_bytes: int | None
    state_bytes: int
    documents_cut: float


@dataclass(frozen=True)
class RankLoad:
    """Core attention of each rank in the first micro-batch.

    Attributes:
        name: of the way to train.
        attention_seconds: [ranks] what each computes, to the microsecond.
        attention_most: of the busiest rank.
        attention_mean: the mean over ranks.
        max_over_mean: the busiest rank's over the mean.
    """

    name: str
    attention_seconds: tuple[float, ...]
    attention_most: float
    attention_mean: float
    max_over_mean: float

    @classmethod
    def of(cls, name: str, step: StepTime) -> "RankLoad":
        """The load of a way's step."""
        mean = step.attention_mean
        return cls(
            name,
            tuple(round(seconds, 6) for seconds in step.attention_by_rank),
            step.attention,
            mean,
            step.attention / mean if mean else 1.0,
        )


@dataclass(frozen=True)
class Simulation:
    """The result.

    Attributes:
        ranks: how many train.
        tokens_per_rank: the most rows of a rank.
        documents: documents of all micro-batches.
        tokens: tokens of all micro-batches.
        lengths: of the documents of all micro-batches.
        histogram: of these lengths.
        ways: figures of each.
        best_plain: name of the fastest way without plans, of those that cut the fewest documents.
        best_planned: name of the fastest planned way on as many GPUs.
        load: before and after, of plain packing, of the best way without plans and of the best planned one.
        imbalance: pairs of the busiest rank over the mean, as documents are packed in order; the mean over steps.
        speed_up: step of `best_plain` over that of `best_planned`.
        attention_speed_up: the same of core attention alone.
        advice: what to do, in sentences.
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
    speed_up: float
    attention_speed_up: float
    advice: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; without the lengths of every document."""
        return {name: value for name, value in asdict(self).items() if name != "lengths"}


PLAIN, WHOLE, FIXED, JOINT = "plain packing", "whole documents balanced", "hf_distca, fixed", "hf_distca, joint"


def simulate(
    micro_batches: Iterable[IntArray], setup: Setup, settings: PlanSettings, count: int, servers: int = 0
) -> Simulation:
    """Train micro-batches in every way.

    Args:
        micro_batches: lengths of the documents of each.
        setup: who trains what.
        settings: of plans; the layout is taken from each way.
        count: how many micro-batches.
        servers: dedicated attention servers; above 0 a further way is tried with them.
    """
    ways = _ways(setup, settings, servers)
    steps: dict[str, list[StepTime]] = {name: [] for name in ways}
    every: list[IntArray] = []
    for _, lengths in zip(range(count), micro_batches, strict=False):
        every.append(lengths)
        for name, way in ways.items():
            steps[name].append(way(lengths))
    tokens = int(sum(lengths.sum() for lengths in every))
    flops = [_flops(lengths, setup) for lengths in every]
    figures = tuple(_figures(name, steps[name], every, flops, setup, servers) for name in ways)
    imbalance = float(np.mean([step.attention / max(step.attention_mean, 1e-12) for step in steps[PLAIN]]))
    # Ways that cut fewer documents first: the others train on something else.
    by_plain = min(
        (way for way in figures if not _is_planned(way)), key=lambda way: (way.documents_cut, way.step_seconds)
    )
    by_plan = min(
        (way for way in figures if _is_planned(way) and way.gpus == figures[0].gpus), key=lambda way: way.step_seconds
    )
    lengths = np.concatenate(every)
    return Simulation(
        setup.ranks,
        setup.tokens_per_rank,
        len(lengths),
        tokens,
        tuple(lengths.tolist()),
        histogram(lengths),
        figures,
        by_plain.name,
        by_plan.name,
        tuple(RankLoad.of(name, steps[name][0]) for name in dict.fromkeys((PLAIN, by_plain.name, by_plan.name))),
        imbalance,
        by_plain.step_seconds / by_plan.step_seconds,
        by_plain.attention_seconds / by_plan.attention_seconds,
        _advice(figures, by_plain, by_plan, setup),
    )


def _is_planned(way: WayFigures) -> bool:
    return way.name.startswith("hf_distca")


def _ways(setup: Setup, settings: PlanSettings, servers: int) -> dict[str, Callable[[IntArray], StepTime]]:
    ways: dict[str, Callable[[IntArray], StepTime]] = {
        PLAIN: partial(plain, setup=setup),
        WHOLE: partial(data_and_context_parallel, setup=setup, context=1),
    }
    context = 2
    while setup.ranks % context == 0:
        name = f"context parallel, {setup.ranks // context} × {context}"
        ways[name] = partial(data_and_context_parallel, setup=setup, context=context)
        context *= 2
    for name, layout in ((FIXED, "fixed"), (JOINT, "joint")):
        ways[name] = partial(_planned, setup=setup, settings=replace(settings, document_layout=layout))
    if servers:
        ways[f"{JOINT}, {servers} servers"] = partial(_planned, setup=setup, settings=settings, servers=servers)
    return ways


def _planned(lengths: IntArray, setup: Setup, settings: PlanSettings, servers: int = 0) -> StepTime:
    return planned(lengths, setup, settings, servers)[0]


def _flops(lengths: IntArray, setup: Setup) -> float:
    """Operations of the model for a micro-batch, forward and backward, nothing computed twice."""
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


def _figures(
    name: str,
    steps: Sequence[StepTime],
    every: Sequence[IntArray],
    flops: Sequence[float],
    setup: Setup,
    servers: int,
) -> WayFigures:
    seconds = np.array([step.seconds for step in steps])
    gpus = (setup.ranks + (servers if "servers" in name else 0)) * setup.tensor_parallel
    low, high = np.quantile(seconds, (0.25, 0.75)).tolist()

    def mean(field: str) -> float:
        return float(np.mean([getattr(step, field) for step in steps]))

    busy = mean("attention_mean") + mean("other_mean") + mean("waited_mean")
    tokens_most = max(step.tokens_most for step in steps)
    return WayFigures(
        name=name,
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
        mfu=float(sum(flops) / seconds.sum() / gpus / setup.profile.peak_flops),
        bytes_bottleneck=mean("bytes_bottleneck"),
        tokens_most=tokens_most,
        kept_bytes=kept_bytes(setup, tokens_most),
        state_bytes=state_bytes(setup),
        documents_cut=float(sum(step.documents_cut for step in steps) / sum(map(len, every))),
    )


def _advice(ways: Sequence[WayFigures], by_plain: WayFigures, by_plan: WayFigures, setup: Setup) -> tuple[str, ...]:
    """What to do, in sentences."""
    gain = by_plain.step_seconds / by_plan.step_seconds
    share = by_plan.attention_mean_seconds / by_plan.step_seconds
    said = []
    if gain < NOT_WORTH:
        said.append(
            f"It does not pay here: a step takes {gain:.2f} times as long by {by_plain.name!r}, the best of the other "
            f"ways. Core attention is {share:.0%} of a step; longer documents, or more of them beside short ones, "
            "would change that."
        )
    else:
        layout = "joint" if by_plan.name.startswith(JOINT) else "fixed"
        said.append(
            f"A step is {gain:.2f} times as fast as by {by_plain.name!r}, the best of the other ways; core attention "
            f"alone of the busiest rank {by_plain.attention_seconds / by_plan.attention_seconds:.2f} times. Set "
            f"document_layout={layout!r}, tokens_per_rank={setup.tokens_per_rank}."
        )
    if by_plan.exchange_seconds > 0.05 * by_plan.step_seconds:
        said.append(
            f"Ranks wait {by_plan.exchange_seconds / by_plan.step_seconds:.0%} of a step for exchanges: a larger "
            "balance_tolerance moves fewer rows, and more tokens_per_rank give more to hide them behind."
        )
    if by_plain.documents_cut:
        said.append(
            f"Every other way cuts documents: {by_plain.name!r} {by_plain.documents_cut:.1%} of them, which train on "
            "less context than planned ones."
        )
    fastest = min((way for way in ways if not _is_planned(way)), key=lambda way: way.step_seconds)
    if fastest.documents_cut > by_plain.documents_cut and fastest.step_seconds < by_plain.step_seconds:
        said.append(
            f"{fastest.name!r} takes {fastest.step_seconds:.3f} s a step, but cuts {fastest.documents_cut:.1%} of the "
            "documents, which then train on less context: it is not compared for that."
        )
    return tuple(said)

"""Simulation of many global micro-batches under every strategy: figures, comparison and advice."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.cost import pairs
from hf_distca.planner.settings import Choices, PlanSettings
from hf_distca.planner.whole_ranks import fitting, whole_ranks_pay
from hf_distca.predict.seconds import FloatArray
from hf_distca.predict.setup import Setup
from hf_distca.progress import terminal_bar
from hf_distca.sim.lengths import IntArray, histogram
from hf_distca.sim.strategies import CHOSEN, PLAIN, StepTime, Strategy, all_strategies

NOT_WORTH = 1.02
"""Least speed-up that counts as a gain; runs differ by as much."""
MOST_WAITS = 0.05
"""Share of a step in waits for exchanges, above which the advice mentions them."""
DRAWN_FOR_RANKS = (
    "Micro-batches of all strategies hold documents that fit into whole ranks, as training draws "
    "them here: full ones would wait for exchanges."
)
"""Advice where micro-batches are not full."""
TOO_LONG = (
    "{count:,} of {documents:,} documents {are} longer than the {tokens:,} tokens that all ranks "
    "hold; the longest has {longest:,}. Here they are cut to {tokens:,}. Training refuses them by "
    "default: raise tokens_per_rank or the number of ranks, or set long_documents to 'split' or "
    "'truncate'."
)
"""Advice where documents are longer than a micro-batch."""
Memory = Callable[[Strategy, int, MicroBatchPlan | None], tuple[int | None, int | None]]
"""Function that returns a GPU's bytes for rows (None if unknown) and for model state.

Its arguments are a strategy, the most rows of a rank, and the plan of the micro-batch with the
largest exchange.
"""


@dataclass(frozen=True)
class StrategyFigures:
    """Figures of a strategy, most of them means over many micro-batches."""

    name: str
    document_layout: str | None  # None if nothing is planned
    servers: int
    gpus: int
    step_seconds: float
    attention_seconds: float  # core attention of the busiest rank
    attention_mean_seconds: float  # mean over ranks
    other_seconds: float  # all other computation on the busiest rank
    other_mean_seconds: float
    exchange_seconds: float  # waits of the rank that waits the longest
    exchange_mean_seconds: float
    idle: float  # share of the ranks' time without computation, waits for exchanges included
    tokens_per_second: float
    # Model FLOPs utilization: the model's operations over the GPUs' peak in the same time.
    mfu: float
    bytes_bottleneck: float  # of the busiest rank in one layer's forward
    tokens_most: int  # the most rows that a rank ever holds
    rows_bytes: int | None  # memory of a GPU for rows; None if unknown
    state_bytes: (
        int | None
    )  # memory of a GPU for weights, gradients and optimizer; None if not asked for
    documents_cut: float  # share of documents that lose context
    mixing_seconds: float  # the part of `other_seconds` in layers that mix rows in order
    mixing_mean_seconds: float
    mixing_runs: float  # as in `StepTime`
    mixing_bytes: float


SECONDS = "Seconds of the mean rank: step = attention + other + waits + idle."
"""Meaning of the first columns of a table of strategies."""


def parts_of_step(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of the mean rank in a step by what it does.

    They add up to the step. `figures` are fields of `StrategyFigures`.
    """
    busy = {
        "attention": figures["attention_mean_seconds"],
        "other": figures["other_mean_seconds"],
        "waits": figures["exchange_mean_seconds"],
    }
    return {**busy, "idle": max(figures["step_seconds"] - sum(busy.values()), 0.0)}


def columns_of(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of a table of strategies, from the fields of `StrategyFigures`.

    Seconds of a step's parts are of the mean rank, and add up to the step. A hybrid model has three
    more columns: of mixing layers, the part of the other time, kernel runs, and bytes of states a
    layer.
    """
    in_bytes = figures["rows_bytes"], figures["state_bytes"]
    busiest, mean = figures["attention_seconds"], figures["attention_mean_seconds"]
    of_mixing = {
        "mixing": f"{figures['mixing_mean_seconds']:.3f}",
        "runs": f"{figures['mixing_runs']:.1f}",
        "states, MB": f"{figures['mixing_bytes'] / 1e6:,.1f}",
    }
    return {
        "": figures["name"],
        "step, s": f"{figures['step_seconds']:.3f}",
        **{name: f"{seconds:.3f}" for name, seconds in parts_of_step(figures).items()},
        **(of_mixing if figures["mixing_seconds"] else {}),
        "imbalance": f"{busiest / mean if mean else 1.0:.2f}",
        "tokens/s": f"{figures['tokens_per_second']:,.0f}",
        "MFU": f"{figures['mfu']:.1%}",
        "GB": "" if None in in_bytes else f"{sum(in_bytes) / 1e9:.1f}",
        "cut": f"{figures['documents_cut']:.1%}",
    }


@dataclass(frozen=True)
class Gain:
    """Speed of the best planned strategy over that of another strategy.

    Least and most of any micro-batch.
    """

    speed_up: float
    least: float
    most: float


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation."""

    ranks: int
    tokens_per_rank: int
    documents: int
    tokens: int
    histogram: list[dict[str, float]]
    strategies: tuple[StrategyFigures, ...]
    best_plain: str  # the fastest strategy without plans, of those that cut the fewest documents
    # What plans by default; or the fastest planned one on as many GPUs, if at least 2 % faster.
    best_planned: str
    # By strategy: [ranks] seconds of core attention in the first micro-batch, for plain packing and
    # the best two.
    load: dict[str, tuple[float, ...]]
    over_packing: Gain  # of `best_planned` over plain packing
    over_best: Gain  # of `best_planned` over `best_plain`
    speed_up: float
    attention_speed_up: float  # core attention of `best_plain` over that of `best_planned`
    advice: tuple[str, ...]


def simulate(
    micro_batches: Iterable[IntArray],
    setup: Setup,
    settings: PlanSettings,
    count: int,
    servers: int = 0,
    memory: Memory = lambda *_: (None, None),
) -> Simulation:
    """Simulate micro-batches under `all_strategies`; the default `memory` leaves memory out.

    A document that is longer than all ranks hold is cut for every strategy, and counts as cut.
    """
    given, capacity = list(islice(micro_batches, count)), setup.ranks * setup.tokens_per_rank
    every, fitted = _as_drawn([np.minimum(lengths, capacity) for lengths in given], setup, settings)
    lengths, flops = np.concatenate(every), 0.0
    uncut = np.concatenate(given)
    too_long = int((uncut > capacity).sum())
    per_pair = {
        kind: layers * kind.q_heads * (kind.dim_qk + kind.dim_v)
        for kind, layers in setup.model.layers.items()
    }
    for each in every:  # the model's operations, forward and backward, without recomputation
        in_kinds = (
            float(np.sum(pairs(0 * each, each, kind.window))) * per_pair[kind] for kind in per_pair
        )
        flops += 6.0 * setup.model.operations * float(each.sum()) + 6.0 * sum(in_kinds)

    seconds: dict[str, FloatArray] = {}  # [steps] of each strategy
    load: dict[str, FloatArray] = {}  # [ranks] in core attention of the first step
    figures: dict[str, StrategyFigures] = {}
    for strategy in terminal_bar(all_strategies(setup, settings, servers), "Simulating strategies"):
        steps: list[StepTime] = []
        largest, most = None, 0  # plan whose busiest rank exchanges the most, and these bytes
        for each in every:
            step, plan = strategy.step(each)
            steps.append(step)
            if step.bytes_bottleneck >= most:
                largest, most = plan, step.bytes_bottleneck
        tokens_most = max(step.tokens_most for step in steps)
        rows_bytes, state_bytes = memory(strategy, tokens_most, largest)
        name, gpus = strategy.name, (setup.ranks + strategy.servers) * setup.tensor_parallel
        seconds[name], load[name] = np.array([step.seconds for step in steps]), steps[0].attention
        attention, other, waited = (
            np.array([getattr(step, what) for step in steps])
            for what in ("attention", "other", "waited")
        )  # [steps, ranks] each
        figures[name] = StrategyFigures(
            name=name,
            document_layout=strategy.document_layout,
            servers=strategy.servers,
            gpus=gpus,
            step_seconds=float(seconds[name].mean()),
            attention_seconds=float(attention.max(1).mean()),
            attention_mean_seconds=float(attention.mean()),
            other_seconds=float(other.max(1).mean()),
            other_mean_seconds=float(other.mean()),
            exchange_seconds=float(waited.max(1).mean()),
            exchange_mean_seconds=float(waited.mean()),
            idle=float(1.0 - ((attention + other).mean(1) / seconds[name]).mean()),
            tokens_per_second=float(lengths.sum() / seconds[name].sum()),
            mfu=float(flops / seconds[name].sum() / gpus / setup.profile.peak_flops),
            bytes_bottleneck=float(np.mean([step.bytes_bottleneck for step in steps])),
            tokens_most=tokens_most,
            rows_bytes=rows_bytes,
            state_bytes=state_bytes,
            # Strategies that cut to fewer tokens than `capacity` cut these documents too, and count
            # them.
            documents_cut=max(too_long, sum(step.documents_cut for step in steps)) / len(lengths),
            mixing_seconds=float(np.mean([step.mixing.max() for step in steps])),
            mixing_mean_seconds=float(np.mean([step.mixing.mean() for step in steps])),
            mixing_runs=float(np.mean([step.mixing_runs for step in steps])),
            mixing_bytes=float(np.mean([step.mixing_bytes for step in steps])),
        )

    # Strategies that cut more documents train on other data, so those that cut the fewest come
    # first.
    plain = min(
        (each for each in figures.values() if each.document_layout is None),
        key=lambda each: (each.documents_cut, each.step_seconds),
    )
    on_same_gpus = (
        each for each in figures.values() if each.document_layout is not None and not each.servers
    )
    fastest, default = min(on_same_gpus, key=lambda each: each.step_seconds), figures[CHOSEN]
    # Users change a setting only where it pays.
    planned = fastest if default.step_seconds / fastest.step_seconds >= NOT_WORTH else default

    def gain_over(name: str) -> Gain:
        before, after = seconds[name], seconds[planned.name]
        ratios = before / after
        return Gain(float(before.sum() / after.sum()), float(ratios.min()), float(ratios.max()))

    shown = (PLAIN, plain.name, planned.name)
    return Simulation(
        ranks=setup.ranks,
        tokens_per_rank=setup.tokens_per_rank,
        documents=len(lengths),
        tokens=int(lengths.sum()),
        histogram=histogram(lengths),
        strategies=tuple(figures.values()),
        best_plain=plain.name,
        best_planned=planned.name,
        load={name: tuple(round(seconds, 6) for seconds in load[name].tolist()) for name in shown},
        over_packing=gain_over(PLAIN),
        over_best=gain_over(plain.name),
        speed_up=plain.step_seconds / planned.step_seconds,
        attention_speed_up=plain.attention_seconds / planned.attention_seconds,
        advice=(
            *advice(tuple(figures.values()), plain, planned, setup.tokens_per_rank),
            *([DRAWN_FOR_RANKS] if fitted else []),
            *([too_long_advice(uncut, capacity)] if too_long else []),
        ),
    )


def too_long_advice(lengths: IntArray, capacity: int) -> str:
    """Return the advice on documents that are longer than all ranks hold."""
    count = int((lengths > capacity).sum())
    of_lengths = {"documents": len(lengths), "longest": int(lengths.max()), "tokens": capacity}
    return TOO_LONG.format(count=count, are="is" if count == 1 else "are", **of_lengths)


def _as_drawn(
    full: list[IntArray], setup: Setup, settings: PlanSettings
) -> tuple[list[IntArray], bool]:
    """Return micro-batches as training draws them by default.

    The second value says whether their documents fit into whole ranks.
    """
    chosen = replace(settings, choices=Choices.beside(settings, setup.costs))
    fitted = (fitting(lengths, setup.ranks, setup.tokens_per_rank) for lengths in full)
    longest = max(int(lengths.max()) for lengths in full)
    if longest > setup.tokens_per_rank or not whole_ranks_pay(full, fitted, chosen):
        return full, False
    return [fitting(lengths, setup.ranks, setup.tokens_per_rank) for lengths in full], True


def advice(
    every: Sequence[StrategyFigures],
    by_plain: StrategyFigures,
    by_plan: StrategyFigures,
    tokens_per_rank: int,
) -> Iterator[str]:
    """Yield sentences of advice from the figures of every strategy.

    The figures of two strategies are compared.
    """
    gain = by_plain.step_seconds / by_plan.step_seconds
    speed = f"{gain:.2f}× the speed of {by_plain.name}, the best other strategy."
    if gain < NOT_WORTH:
        share = by_plan.attention_mean_seconds / by_plan.step_seconds
        yield (
            f"No gain expected: {speed} Core attention is {share:.0%} of a step. Longer documents "
            "beside short ones would gain more."
        )
    else:
        layout = (
            ""
            if by_plan.document_layout == "auto"
            else f"document_layout={by_plan.document_layout!r}, "
        )
        yield f"{speed} Set {layout}tokens_per_rank={tokens_per_rank}."
    waits = by_plan.exchange_seconds / by_plan.step_seconds
    if waits > MOST_WAITS:
        yield (
            f"Ranks wait {waits:.0%} of a step for exchanges. A larger tokens_per_rank hides more "
            "of them behind computation."
        )
        if by_plan.document_layout != "auto":
            yield "A larger balance_tolerance moves fewer rows."
    if by_plain.documents_cut > by_plan.documents_cut:
        yield (
            f"Every other strategy cuts documents: {by_plain.name} cuts "
            f"{by_plain.documents_cut:.1%} of them. A document that is cut trains on less "
            "context."
        )
    fastest = min(
        (each for each in every if each.document_layout is None), key=lambda each: each.step_seconds
    )
    if (
        fastest.documents_cut > by_plain.documents_cut
        and fastest.step_seconds < by_plain.step_seconds
    ):
        yield (
            f"{fastest.name} takes {fastest.step_seconds:.3f} s a step, but it cuts "
            f"{fastest.documents_cut:.1%} of the documents. The comparison leaves it out, because "
            "a document that is cut trains on less context."
        )

"""Simulation of many global micro-batches under every strategy: figures, comparison and advice."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from hf_distca.checks.capacity_rules import CUT_IN_SIMULATION
from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.arrays import FloatArray, IntArray
from hf_distca.plan.cost import pairs
from hf_distca.planner.whole_ranks import fitting, whole_ranks_pay
from hf_distca.predict.shapes import ModelShape
from hf_distca.progress import terminal_bar
from hf_distca.run import RunSpec
from hf_distca.sim.encoders import SimulatedImages, with_encoders
from hf_distca.sim.lengths import histogram
from hf_distca.sim.strategies import CHOSEN, PLAIN, StepTime, Strategy, all_strategies
from hf_distca.units import counted

NOT_WORTH = 1.02
"""Least speed-up that counts as a gain; runs differ by as much."""
MOST_WAITS = 0.05
"""Share of a step in waits for exchanges, above which the advice mentions them."""
DRAWN_FOR_RANKS = (
    "Micro-batches of all strategies hold documents that fit into whole ranks, as training draws "
    "them here: full ones would wait for exchanges."
)
"""Advice where micro-batches are not full."""
Memory = Callable[[Strategy, int, MicroBatchPlan | None, int], tuple[int | None, int | None]]
"""Function that returns a GPU's bytes for rows (None if unknown) and for model state.

Its arguments are a strategy, the most rows of a rank, the plan of the micro-batch with the largest
exchange, and the most patches that a rank encodes.
"""


@dataclass(frozen=True)
class StrategyFigures:
    """Figures of a strategy, most of them means over many micro-batches."""

    name: str
    document_layout: str | None  # None if nothing is planned
    in_transformers: bool  # whether transformers, accelerate or TRL run it on packed documents
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
    # Memory of a GPU for weights, gradients and optimizer; None if not asked for.
    state_bytes: int | None
    documents_cut: float  # share of documents that lose context
    mixing_seconds: float  # the part of `other_seconds` in layers that mix rows in order
    mixing_mean_seconds: float
    mixing_runs: float  # as in `StepTime`
    mixing_bytes: float
    # In encoders of images, as of `attention_seconds`; 0 without images.
    encoder_seconds: float
    encoder_mean_seconds: float
    encoder_patches: int  # the most patches that a rank ever encodes


def parts_of_step(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of the mean rank in a step by what it does.

    They add up to the step. `figures` are fields of `StrategyFigures`.
    """
    encoder = figures["encoder_mean_seconds"]
    busy = {
        **({"encoder": encoder} if encoder else {}),
        "attention": figures["attention_mean_seconds"],
        "other": figures["other_mean_seconds"],
        "waits": figures["exchange_mean_seconds"],
    }
    return {**busy, "idle": max(figures["step_seconds"] - sum(busy.values()), 0.0)}


def meaning_of_seconds(figures: Mapping[str, Any]) -> str:
    """Return the meaning of the first columns of a table of strategies.

    Args:
        figures: fields of `StrategyFigures`.
    """
    return f"Seconds of the mean rank: step = {' + '.join(parts_of_step(figures))}."


def columns_of(figures: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of a table of strategies, from the fields of `StrategyFigures`.

    Seconds of a step's parts are of the mean rank, and add up to the step. A hybrid model has three
    more columns: of mixing layers, the part of the other time, kernel runs, and bytes of states a
    layer.
    """
    memory_bytes = [figures["rows_bytes"], figures["state_bytes"]]
    busiest = figures["attention_seconds"]
    mean = figures["attention_mean_seconds"]
    encoder = figures["encoder_mean_seconds"]
    mixing_columns = {
        "mixing": f"{figures['mixing_mean_seconds']:.3f}",
        "runs": f"{figures['mixing_runs']:.1f}",
        "states, MB": f"{figures['mixing_bytes'] / 1e6:,.1f}",
    }
    return {
        "": figures["name"],
        "step, s": f"{figures['step_seconds']:.3f}",
        **{name: f"{seconds:.3f}" for name, seconds in parts_of_step(figures).items()},
        **(mixing_columns if figures["mixing_seconds"] else {}),
        **({"encoder max/mean": f"{figures['encoder_seconds'] / encoder:.2f}"} if encoder else {}),
        "imbalance": f"{busiest / mean if mean else 1.0:.2f}",
        "tokens/s": f"{figures['tokens_per_second']:,.0f}",
        "MFU": f"{figures['mfu']:.1%}",
        "GB": "" if None in memory_bytes else f"{sum(memory_bytes) / 1e9:.1f}",
        "cut": f"{figures['documents_cut']:.1%}",
    }


@dataclass(frozen=True)
class Compared:
    """Strategies that are compared with the best planned one."""

    packing: StrategyFigures  # plain packing
    in_transformers: StrategyFigures  # the best that transformers, accelerate or TRL run
    best: StrategyFigures  # the best without plans
    planned: StrategyFigures

    def gain_over(self, other: StrategyFigures) -> float:
        """Return the speed-up of the planned strategy over another one."""
        return other.step_seconds / self.planned.step_seconds

    @property
    def pays(self) -> bool:
        """Whether plans are worth it over one of the other strategies."""
        others = (self.packing, self.in_transformers, self.best)
        return max(map(self.gain_over, others)) >= NOT_WORTH


@dataclass(frozen=True)
class Gain:
    """Speed-up of the best planned strategy over another strategy."""

    speed_up: float  # of all micro-batches together
    least: float  # of a single micro-batch
    most: float


def ranks_of_tokens(figures: Mapping[str, Any]) -> str:
    """Return how many ranks there are, and how many tokens each may hold, as words."""
    ranks = counted(figures["ranks"], "rank")
    return f"{ranks} of at most {figures['tokens_per_rank']:,} tokens"


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
    best_in_transformers: str  # the same of the strategies that transformers, accelerate or TRL run
    # What plans by default; or the fastest planned one on as many GPUs, if at least 2 % faster.
    best_planned: str
    # By strategy: [ranks] seconds of core attention in the first micro-batch, for plain packing and
    # the best two.
    load: dict[str, tuple[float, ...]]
    # Of `best_planned` over plain packing, over `best_in_transformers` and over `best_plain`.
    over_packing: Gain
    over_transformers: Gain
    over_best: Gain
    pays: bool  # whether plans are worth it over one of these
    advice: tuple[str, ...]


def simulate(
    micro_batches: Iterable[IntArray],
    run: RunSpec,
    count: int,
    others: Sequence[Strategy] = (),
    memory: Memory = lambda *_: (None, None),
    images: Sequence[SimulatedImages] = (),
) -> Simulation:
    """Simulate micro-batches under `all_strategies` and others; by default without memory.

    A document that is longer than all ranks hold is cut for every strategy, and counts as cut.

    Args:
        images: of each micro-batch; none for text.
    """
    # 1. The micro-batches as training draws them, and the operations of the model in them.
    capacity = run.plans.capacity
    uncut = list(islice(micro_batches, count))
    full = [np.minimum(lengths, capacity) for lengths in uncut]
    drawn, drawn_for_ranks = _as_drawn(full, run)
    lengths = np.concatenate(drawn)
    uncut_lengths = np.concatenate(uncut)
    too_long = int((uncut_lengths > capacity).sum())
    flops = sum(_operations(micro_batch, run.model) for micro_batch in drawn)

    # 2. Every micro-batch under every strategy.
    seconds: dict[str, FloatArray] = {}  # [steps] of each strategy
    load: dict[str, FloatArray] = {}  # [ranks] in core attention of the first step
    figures: dict[str, StrategyFigures] = {}
    strategies = (*all_strategies(run), *others)
    for strategy in terminal_bar(strategies, "Simulating strategies"):
        steps, largest_plan = _steps_of(strategy, drawn, images, run)
        name = strategy.name
        seconds[name] = np.array([step.seconds for step in steps])
        load[name] = steps[0].attention
        tokens_most = max(step.tokens_most for step in steps)
        patches_most = max(step.encoder_patches for step in steps)
        rows_bytes, state_bytes = memory(strategy, tokens_most, largest_plan, patches_most)
        figures[name] = _strategy_figures(
            strategy,
            steps,
            run,
            flops=flops,
            tokens=int(lengths.sum()),
            rows_bytes=rows_bytes,
            state_bytes=state_bytes,
            # Strategies that cut to fewer tokens than `capacity` cut these documents too, and count
            # them.
            documents_cut=max(too_long, sum(step.documents_cut for step in steps)) / len(lengths),
        )

    # 3. The strategies that are compared.
    compared = _compared(figures)
    plain, planned = compared.best, compared.planned

    def gain_over(name: str) -> Gain:
        other_seconds = seconds[name]
        planned_seconds = seconds[planned.name]
        ratios = other_seconds / planned_seconds
        speed_up = float(other_seconds.sum() / planned_seconds.sum())
        return Gain(speed_up, float(ratios.min()), float(ratios.max()))

    # 4. The result.
    sentences = list(advice(compared, run.plans.rows_per_rank))
    if drawn_for_ranks:
        sentences.append(DRAWN_FOR_RANKS)
    if too_long:
        sentences.append(too_long_advice(uncut_lengths, capacity))
    return Simulation(
        ranks=run.plans.ranks,
        tokens_per_rank=run.plans.rows_per_rank,
        documents=len(lengths),
        tokens=int(lengths.sum()),
        histogram=histogram(lengths),
        strategies=tuple(figures.values()),
        best_plain=plain.name,
        best_in_transformers=compared.in_transformers.name,
        best_planned=planned.name,
        load={
            name: tuple(load[name].round(6).tolist()) for name in (PLAIN, plain.name, planned.name)
        },
        over_packing=gain_over(PLAIN),
        over_transformers=gain_over(compared.in_transformers.name),
        over_best=gain_over(plain.name),
        pays=compared.pays,
        advice=tuple(sentences),
    )


def _operations(lengths: IntArray, model: ModelShape) -> float:
    """Return the model's operations on a micro-batch, forward and backward.

    Recomputation under gradient checkpointing does not count.
    """
    operations = model.operations * float(lengths.sum())
    for kind, layers in model.layers.items():
        document_pairs = float(np.sum(pairs(np.zeros_like(lengths), lengths, kind.window)))
        operations += layers * kind.q_heads * (kind.dim_qk + kind.dim_v) * document_pairs
    # A multiply-add is two operations, and the backward has twice those of the forward.
    return 6.0 * operations


def _steps_of(
    strategy: Strategy,
    micro_batches: Sequence[IntArray],
    images: Sequence[SimulatedImages],
    run: RunSpec,
) -> tuple[list[StepTime], MicroBatchPlan | None]:
    """Return the steps of a strategy, and the plan whose busiest rank exchanges the most."""
    steps: list[StepTime] = []
    plans: list[MicroBatchPlan] = []
    for index, lengths in enumerate(micro_batches):
        step, plans_of_pods = strategy.step(lengths)
        if images:
            batch = images[index].of_first(len(lengths))
            step = with_encoders(step, plans_of_pods, batch, lengths, run)
        steps.append(step)
        plans += plans_of_pods
    return steps, max(plans, key=lambda plan: plan.summary.exchange.bytes_bottleneck, default=None)


def _strategy_figures(
    strategy: Strategy,
    steps: Sequence[StepTime],
    run: RunSpec,
    *,
    flops: float,
    tokens: int,
    rows_bytes: int | None,
    state_bytes: int | None,
    documents_cut: float,
) -> StrategyFigures:
    """Return the figures of a strategy.

    Args:
        flops, tokens: operations and tokens of all steps.
        rows_bytes, state_bytes, documents_cut: as in `StrategyFigures`.
    """
    gpus = run.plans.ranks * run.tensor_parallel + strategy.extra_gpus
    seconds = np.array([step.seconds for step in steps])
    # [steps, ranks] each
    attention = np.array([step.attention for step in steps])
    other = np.array([step.other for step in steps])
    waited = np.array([step.waited for step in steps])
    encoder = np.array([np.zeros(len(s.other)) if s.encoder is None else s.encoder for s in steps])
    busy_share = (attention + other + encoder).mean(axis=1) / seconds
    return StrategyFigures(
        name=strategy.name,
        document_layout=strategy.document_layout,
        in_transformers=strategy.in_transformers,
        gpus=gpus,
        step_seconds=float(seconds.mean()),
        attention_seconds=float(attention.max(axis=1).mean()),
        attention_mean_seconds=float(attention.mean()),
        other_seconds=float(other.max(axis=1).mean()),
        other_mean_seconds=float(other.mean()),
        exchange_seconds=float(waited.max(axis=1).mean()),
        exchange_mean_seconds=float(waited.mean()),
        idle=float(1.0 - busy_share.mean()),
        tokens_per_second=float(tokens / seconds.sum()),
        mfu=float(flops / seconds.sum() / gpus / run.device.peak_flops),
        bytes_bottleneck=float(np.mean([step.bytes_bottleneck for step in steps])),
        tokens_most=max(step.tokens_most for step in steps),
        rows_bytes=rows_bytes,
        state_bytes=state_bytes,
        documents_cut=documents_cut,
        mixing_seconds=float(np.mean([step.mixing.max() for step in steps])),
        mixing_mean_seconds=float(np.mean([step.mixing.mean() for step in steps])),
        mixing_runs=float(np.mean([step.mixing_runs for step in steps])),
        mixing_bytes=float(np.mean([step.mixing_bytes for step in steps])),
        encoder_seconds=float(encoder.max(axis=1).mean()),
        encoder_mean_seconds=float(encoder.mean()),
        encoder_patches=max(step.encoder_patches for step in steps),
    )


def _compared(strategies: Mapping[str, StrategyFigures]) -> Compared:
    """Return the strategies that are compared.

    Of strategies without plans the fastest counts that cuts the fewest documents: strategies that
    cut more train on other data.

    Args:
        strategies: figures by the name of the strategy.
    """

    def best_of(figures: Iterable[StrategyFigures]) -> StrategyFigures:
        return min(figures, key=lambda figures: (figures.documents_cut, figures.step_seconds))

    without_plans = [each for each in strategies.values() if each.document_layout is None]
    return Compared(
        packing=strategies[PLAIN],
        in_transformers=best_of(each for each in without_plans if each.in_transformers),
        best=best_of(without_plans),
        planned=_best_planned(strategies),
    )


def _best_planned(strategies: Mapping[str, StrategyFigures]) -> StrategyFigures:
    """Return what plans by default; or the fastest planned strategy, if that pays.

    Strategies with more GPUs do not count. Users change a setting only where it pays.

    Args:
        strategies: figures by the name of the strategy.
    """
    default = strategies[CHOSEN]
    same_gpus = [
        figures
        for figures in strategies.values()
        if figures.document_layout is not None and figures.gpus == default.gpus
    ]
    fastest = min(same_gpus, key=lambda figures: figures.step_seconds)
    pays = default.step_seconds / fastest.step_seconds >= NOT_WORTH
    return fastest if pays else default


def too_long_advice(lengths: IntArray, capacity: int) -> str:
    """Return the advice on documents that are longer than all ranks hold."""
    count = int((lengths > capacity).sum())
    return CUT_IN_SIMULATION.format(
        count=count,
        are="is" if count == 1 else "are",
        documents=len(lengths),
        longest=int(lengths.max()),
        tokens=capacity,
    )


def _as_drawn(full: list[IntArray], run: RunSpec) -> tuple[list[IntArray], bool]:
    """Return micro-batches as training draws them by default.

    The second value says whether their documents fit into whole ranks.
    """
    chosen = replace(run.plans, costs=run.costs)
    fitted = (fitting(lengths, run.plans.ranks, run.plans.rows_per_rank) for lengths in full)
    longest = max(int(lengths.max()) for lengths in full)
    if longest > run.plans.rows_per_rank or not whole_ranks_pay(full, fitted, chosen):
        return full, False
    return [fitting(lengths, run.plans.ranks, run.plans.rows_per_rank) for lengths in full], True


def advice(compared: Compared, rows_per_rank: int) -> Iterator[str]:
    """Yield sentences of advice from the figures of the strategies that are compared."""
    # 1. What plans gain, and what other strategies cut.
    yield from _gains(compared, rows_per_rank)
    best = compared.best
    planned = compared.planned
    if best.documents_cut > planned.documents_cut:
        yield (
            f"Every other strategy cuts documents: {best.name} cuts {best.documents_cut:.1%} of "
            "them."
        )
    # 2. What exchanges cost.
    waits = planned.exchange_seconds / planned.step_seconds
    if waits > MOST_WAITS:
        yield (
            f"Ranks wait {waits:.0%} of a step for exchanges. A larger tokens_per_rank hides more "
            "of them behind computation."
        )
        if planned.document_layout != "auto":
            yield "A larger tolerance moves fewer rows: planning={'balance_tolerance': 0.1}."


def _gains(compared: Compared, rows_per_rank: int) -> Iterator[str]:
    """Yield sentences on the speed over the best other strategy, and over what transformers run."""
    best = compared.best
    planned = compared.planned
    over_best = compared.gain_over(best)
    over_packing = compared.gain_over(compared.packing)
    by_packing = f"{over_packing:.2f}× the speed of {PLAIN}, TRL's packing=True"
    by_best = f"{over_best:.2f}× the speed of {best.name}, the best other strategy"
    if best == compared.packing:
        by_best = f"{by_packing}, the best other strategy"

    # 1. The gain, and what to set for it.
    layout = ""
    if planned.document_layout != "auto":
        layout = f"document_layout={planned.document_layout!r}, "
    if not compared.pays:
        share = planned.attention_mean_seconds / planned.step_seconds
        yield (
            f"No gain expected: {by_best}. Core attention is {share:.0%} of a step. Longer "
            "documents beside short ones would gain more."
        )
    else:
        yield f"{by_best}. Set {layout}tokens_per_rank={rows_per_rank}."
    # 2. The gain over what transformers run.
    today = compared.in_transformers
    if today not in (best, compared.packing):
        yield (
            f"{compared.gain_over(today):.2f}× the speed of {today.name}, the best of those that "
            "transformers, accelerate or TRL run."
        )
    if best != compared.packing:
        cut = compared.packing.documents_cut
        loss = ""
        if cut > planned.documents_cut:
            loss = (
                f" It cuts {cut:.1%} of the documents, and a document that is cut trains on less "
                "context."
            )
        yield f"{by_packing}.{loss}"

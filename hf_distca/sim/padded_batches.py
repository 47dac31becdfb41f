"""Simulation of padded batches.

Their sequences are padded, packed on each rank, balanced as whole sequences, or planned as
micro-batches.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_distca.plan.arrays import Table
from hf_distca.plan.nodes import node_sizes
from hf_distca.planner.padding import NO_RANK, PlannedPadding
from hf_distca.run import RunSpec
from hf_distca.sim.strategies import StepTime, on_ranks, step_of_plan, whole_documents
from hf_distca.sim.trees import DrawnBatch

PADDED = "padded to the longest"
PACKED = "packed on each rank"
BALANCED = "whole sequences balanced"
UNSHARED = "hf_distca, no prefix sharing"
PLANNED = "hf_distca"
"""Strategies that are compared; UNSHARED only where sequences have equal prefixes."""
INTEGER_BYTES = 16
"""Bytes of a token that travels: its id and its position."""

Batches = Sequence[Sequence[int]]
"""[ranks] lengths of the sequences in each rank's batch."""


@dataclass(frozen=True)
class PaddedFigures:
    """Figures of a strategy, means over many batches."""

    name: str
    forward_seconds: float  # without gradients
    step_seconds: float  # forward and backward
    imbalance: float  # computation of the busiest rank over the mean
    rows: float  # that all ranks compute, padding included
    tokens_per_second: float


def simulate_padded(
    batches: Iterable[DrawnBatch],
    run: RunSpec,
    plan: Callable[[DrawnBatch, RunSpec], PlannedPadding],
) -> tuple[PaddedFigures, ...]:
    """Simulate batches of sequences under every strategy.

    Args:
        plan: makes plans for a batch, for a run with or without a backward. Prefixes are shared if
            the batch has hashes.
    """
    forwards: dict[str, list[StepTime]] = {}
    steps: dict[str, list[StepTime]] = {}
    rows: dict[str, int] = {}
    tokens = 0
    # 1. A forward and a step of each batch under each strategy, and the rows that are computed.
    for batch in batches:
        for step_times, run_of_batch in (
            (forwards, replace(run, forward_only=True)),
            (steps, run),
        ):
            planned = {PLANNED: plan(batch, run_of_batch)}
            if batch.hashes is not None:
                planned = {UNSHARED: plan(DrawnBatch(batch.lengths), run_of_batch), **planned}
            for name, step in steps_of(batch.lengths, planned, run_of_batch).items():
                step_times.setdefault(name, []).append(step)
        batch_tokens = sum(map(sum, batch.lengths))
        tokens += batch_tokens
        computed = {name: plans.sequences.computed_rows for name, plans in planned.items()}
        computed[PADDED] = sum(map(sum, padded(batch.lengths)))
        for name in steps:
            rows[name] = rows.get(name, 0) + computed.get(name, batch_tokens)
    # 2. Means over the batches.
    figures = []
    for name, strategy_steps in steps.items():
        forward_seconds = [step.seconds for step in forwards[name]]
        step_seconds = [step.seconds for step in strategy_steps]
        imbalances = [_imbalance(step) for step in strategy_steps]
        figures.append(
            PaddedFigures(
                name=name,
                forward_seconds=float(np.mean(forward_seconds)),
                step_seconds=float(np.mean(step_seconds)),
                imbalance=float(np.mean(imbalances)),
                rows=rows[name] / len(strategy_steps),
                tokens_per_second=tokens / sum(step_seconds),
            )
        )
    return tuple(figures)


def steps_of(
    batch: Batches, planned: Mapping[str, PlannedPadding], run: RunSpec
) -> dict[str, StepTime]:
    """Predict a step of each strategy; only plans divide a batch that is more than ranks hold.

    Args:
        planned: the plans of each planned strategy by name.
    """
    lengths = np.concatenate([np.array(row, np.int64) for row in batch])
    enough = replace(run, plans=replace(run.plans, rows_per_rank=int(lengths.sum())))
    return {
        PADDED: on_ranks(padded(batch), run),
        PACKED: on_ranks(batch, run),
        BALANCED: whole_documents(lengths, enough),
        **{name: _planned(plans, run) for name, plans in planned.items()},
    }


def padded(batch: Batches) -> list[list[int]]:
    """Return the rows of each rank's padded batch, all as long as its longest sequence."""
    return [[max(row)] * len(row) for row in batch]


def _planned(planned: PlannedPadding, run: RunSpec) -> StepTime:
    """Predict the micro-batches one after another, and the travel of rows, which nothing hides."""
    first, *others = (step_of_plan(plan, run) for plan in planned.sequences.plans)
    for step in others:
        sums = {
            name: getattr(first, name) + getattr(step, name)
            for name in ("seconds", "attention", "other", "waited")
        }
        first = replace(first, **sums)
    travel = _travel_seconds(planned, run)
    return replace(first, seconds=first.seconds + travel, waited=first.waited + travel)


def _travel_seconds(planned: PlannedPadding, run: RunSpec) -> float:
    """Return the seconds in which tokens travel forth and hidden states back.

    A row that several sequences have comes from one of them, and goes back to each. Gradients of
    the hidden states travel forth, too.
    """
    one_node = run.plans.ranks <= max(node_sizes(run.plans.ranks, run.plans.ranks_per_node))
    link = run.device.exchange.within if one_node else run.device.exchange.between
    hidden_bytes = run.model.hidden * run.device.bytes_per_value
    hidden_travels = 1 if run.forward_only else 2
    sent = _most_rows(planned.travelling(planned.sequences.rank_rows), run)
    returned = _most_rows(planned.travelling(planned.sequences.sequence_tokens), run)
    token_seconds = link.seconds(np.array(sent * INTEGER_BYTES, float))
    state_seconds = link.seconds(np.array(returned * hidden_bytes, float))
    return float(token_seconds + hidden_travels * state_seconds)


def _most_rows(travelling: Table, run: RunSpec) -> int:
    """Return the most rows that a rank sends, or receives."""
    leaves = (travelling["source"] != NO_RANK) & (travelling["source"] != travelling["rank"])
    rows = (travelling["stop"] - travelling["start"])[leaves]
    ends = (
        np.bincount(travelling[leaves][end], rows, run.plans.ranks) for end in ("source", "rank")
    )
    return int(max(rows_of_ranks.max() for rows_of_ranks in ends))


def _imbalance(step: StepTime) -> float:
    busy = step.attention + step.other
    return float(busy.max() / busy.mean()) if busy.any() else 1.0


def padded_columns(figures: PaddedFigures, padding: PaddedFigures) -> dict[str, str]:
    """Return the columns of a table of strategies, which compares them with padding."""
    return {
        "": figures.name,
        "forward, s": f"{figures.forward_seconds:.3f}",
        "forward + backward, s": f"{figures.step_seconds:.3f}",
        "rows": f"{figures.rows:,.0f}",
        "imbalance": f"{figures.imbalance:.2f}",
        "tokens/s": f"{figures.tokens_per_second:,.0f}",
        "over padding": f"{padding.step_seconds / figures.step_seconds:.2f}",
    }


def padded_advice(figures_of_strategies: Sequence[PaddedFigures]) -> str:
    """Return a sentence that compares plans with the other strategies."""
    seconds = {figures.name: figures.step_seconds for figures in figures_of_strategies}
    gains = (
        f"{seconds[name] / seconds[PLANNED]:.2f}× the speed of {described}"
        for name, described in COMPARED.items()
        if name in seconds
    )
    return f"Padded batches: hf_distca has {', '.join(gains)}."


COMPARED = {
    PADDED: "padding",
    PACKED: "packing each rank's own rows",
    BALANCED: "balancing whole sequences",
    UNSHARED: "planning without prefix sharing",
}
"""Strategies in the order in which the advice names them, and their names in a sentence."""

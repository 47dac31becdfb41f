"""Simulation of padded batches.

Their sequences are padded, packed on each rank, balanced as whole sequences, or planned as
micro-batches.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.nodes import node_sizes
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.setup import Setup
from hf_distca.sim.strategies import StepTime, data_and_context_parallel, on_ranks, step_of_plan

PADDED, PACKED, BALANCED, PLANNED = (
    "padded to the longest",
    "packed on each rank",
    "whole sequences balanced",
    "hf_distca",
)
"""Strategies that are compared."""
INTEGER_BYTES = 16
"""Bytes of a token that travels: its id and its position."""

Batches = Sequence[Sequence[int]]
"""[ranks] lengths of the sequences that each rank is given."""


class PlannedBatches(Protocol):
    """Plans for the sequences of all ranks, and which rank holds which rows.

    `plan_sequences` makes them.
    """

    @property
    def plans(self) -> Sequence[MicroBatchPlan]:
        """Plans of the micro-batches, one after another."""

    @property
    def shares(self) -> NDArray[np.void]:
        """Rows [start, stop) of sequences, with the rank that holds them and their source.

        The source of fillers is negative.
        """


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
    batches: Iterable[Batches],
    setup: Setup,
    settings: PlanSettings,
    plan: Callable[[Batches, Setup], PlannedBatches],
) -> tuple[PaddedFigures, ...]:
    """Simulate batches of sequences under every strategy.

    Args:
        plan: makes plans for a batch, for a setup with or without a backward.
    """
    forwards: dict[str, list[StepTime]] = {}
    steps: dict[str, list[StepTime]] = {}
    rows: dict[str, int] = {}
    tokens = 0
    for batch in batches:
        for found, of in ((forwards, replace(setup, forward_only=True)), (steps, setup)):
            for name, step in steps_of(batch, plan(batch, of), of, settings).items():
                found.setdefault(name, []).append(step)
        in_batch = sum(map(sum, batch))
        tokens += in_batch
        for name in steps:
            computed = sum(map(sum, padded(batch))) if name == PADDED else in_batch
            rows[name] = rows.get(name, 0) + computed
    return tuple(
        PaddedFigures(
            name=name,
            forward_seconds=float(np.mean([step.seconds for step in forwards[name]])),
            step_seconds=float(np.mean([step.seconds for step in of_strategy])),
            imbalance=float(np.mean([_imbalance(step) for step in of_strategy])),
            rows=rows[name] / len(of_strategy),
            tokens_per_second=tokens / sum(step.seconds for step in of_strategy),
        )
        for name, of_strategy in steps.items()
    )


def steps_of(
    batch: Batches, planned: PlannedBatches, setup: Setup, settings: PlanSettings
) -> dict[str, StepTime]:
    """Predict a step of each strategy; only plans divide a batch that is more than ranks hold."""
    lengths = np.concatenate([np.array(row, np.int64) for row in batch])
    enough = replace(setup, tokens_per_rank=int(lengths.sum()))
    return {
        PADDED: on_ranks(padded(batch), setup),
        PACKED: on_ranks(batch, setup),
        BALANCED: data_and_context_parallel(lengths, enough, 1),
        PLANNED: _planned(planned, setup, settings),
    }


def padded(batch: Batches) -> list[list[int]]:
    """Return the rows of each rank's padded batch, all as long as its longest sequence."""
    return [[max(row)] * len(row) for row in batch]


def _planned(planned: PlannedBatches, setup: Setup, settings: PlanSettings) -> StepTime:
    """Predict the micro-batches one after another, and the travel of rows, which nothing hides."""
    first, *others = (step_of_plan(plan, setup, settings) for plan in planned.plans)
    for step in others:
        sums = {
            name: getattr(first, name) + getattr(step, name)
            for name in ("seconds", "attention", "other", "waited")
        }
        first = replace(first, **sums)
    travel = _travel_seconds(planned.shares, setup)
    return replace(first, seconds=first.seconds + travel, waited=first.waited + travel)


def _travel_seconds(shares: NDArray[np.void], setup: Setup) -> float:
    """Return the seconds in which tokens travel forth and hidden states back.

    Gradients of the hidden states travel forth, too.
    """
    leaves = (shares["source"] >= 0) & (shares["source"] != shares["rank"])
    rows = (shares["stop"] - shares["start"])[leaves]
    most = max(
        np.bincount(shares[leaves][end], rows, setup.ranks).max() for end in ("source", "rank")
    )
    one_node = setup.ranks <= max(node_sizes(setup.ranks, setup.ranks_per_node))
    link = setup.profile.exchange.within if one_node else setup.profile.exchange.between
    of_hidden = setup.model.hidden * setup.profile.bytes_per_value
    sizes = (
        [INTEGER_BYTES, of_hidden] if setup.forward_only else [INTEGER_BYTES, of_hidden, of_hidden]
    )
    return float(link.seconds(most * np.array(sizes, float)).sum())


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


def padded_advice(every: Sequence[PaddedFigures]) -> str:
    """Return a sentence that compares plans with the other strategies."""
    seconds = {figures.name: figures.step_seconds for figures in every}
    gains = (
        f"{seconds[name] / seconds[PLANNED]:.2f}× the speed of {what}"
        for name, what in COMPARED.items()
    )
    return f"Padded batches: hf_distca has {', '.join(gains)}."


COMPARED = {
    PADDED: "padding",
    PACKED: "packing each rank's own rows",
    BALANCED: "balancing whole sequences",
}
"""Strategies in the order in which the advice names them, and their names in a sentence."""

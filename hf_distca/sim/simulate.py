"""Simulation of many global micro-batches under every strategy."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.settings import PlanSettings
from hf_distca.sim.advice import NOT_WORTH, advice
from hf_distca.sim.figures import Gain, RankLoad, Simulation, WayFigures
from hf_distca.sim.lengths import histogram
from hf_distca.sim.ways import CHOSEN, PLAIN, Setup, StepTime, Way, ways_to_train

IntArray = NDArray[np.int64]
Memory = Callable[[Way, int, MicroBatchPlan | None], tuple[int | None, int | None]]
"""Function that returns a GPU's bytes for rows (None if unknown) and for model state.

Its arguments are a strategy, the most rows of a rank, and the plan of the micro-batch with the largest exchange.
"""


@dataclass(eq=False)
class _Taken:
    """Steps of one strategy, and the plan of the micro-batch whose busiest rank exchanged the most."""

    steps: list[StepTime] = field(default_factory=list)
    plan: MicroBatchPlan | None = None

    def add(self, step: StepTime, plan: MicroBatchPlan | None) -> None:
        """Add the step of a micro-batch."""
        if step.bytes_bottleneck >= max((before.bytes_bottleneck for before in self.steps), default=0):
            self.plan = plan
        self.steps.append(step)


def simulate(
    micro_batches: Iterable[IntArray],
    setup: Setup,
    settings: PlanSettings,
    count: int,
    servers: int = 0,
    memory: Memory | None = None,
) -> Simulation:
    """Simulate micro-batches under every strategy.

    Args:
        settings: settings of plans; each strategy sets its own layout.
        servers: dedicated attention servers; above 0 one more strategy uses them.
        memory: returns a GPU's memory, such as `hf_distca.memory.simulated`; None to leave memory out.
    """
    ways = ways_to_train(setup, settings, servers)
    taken = {way: _Taken() for way in ways}
    every: list[IntArray] = []
    for _, lengths in zip(range(count), micro_batches, strict=False):
        every.append(lengths)
        for way in ways:
            taken[way].add(*way.step(lengths))
    figures = {way: _figures(way, taken[way], every, setup, memory) for way in ways}
    # Strategies that cut more documents train on other data, so those that cut the fewest come first.
    plain = min(
        (way for way in ways if way.document_layout is None),
        key=lambda way: (figures[way].documents_cut, figures[way].step_seconds),
    )
    on_same_gpus = [way for way in ways if way.document_layout is not None and not way.servers]
    fastest = min(on_same_gpus, key=lambda way: figures[way].step_seconds)
    default = next(way for way in on_same_gpus if way.name == CHOSEN)
    # Users change a setting only where it pays.
    pays = figures[default].step_seconds / figures[fastest].step_seconds >= NOT_WORTH
    planned = fastest if pays else default
    packed = next(way for way in ways if way.name == PLAIN)
    lengths = np.concatenate(every)
    by_plain, by_plan = figures[plain], figures[planned]
    return Simulation(
        setup.ranks,
        setup.tokens_per_rank,
        len(lengths),
        int(lengths.sum()),
        tuple(lengths.tolist()),
        histogram(lengths),
        tuple(figures.values()),
        plain.name,
        planned.name,
        tuple(RankLoad.of(way.name, taken[way].steps[0]) for way in dict.fromkeys((packed, plain, planned))),
        float(np.mean([step.attention / max(step.attention_mean, 1e-12) for step in taken[packed].steps])),
        Gain.of(packed.name, taken[packed].steps, taken[planned].steps),
        Gain.of(plain.name, taken[plain].steps, taken[planned].steps),
        by_plain.step_seconds / by_plan.step_seconds,
        by_plain.attention_seconds / by_plan.attention_seconds,
        advice(tuple(figures.values()), by_plain, by_plan, setup.tokens_per_rank),
    )


def _figures(way: Way, taken: _Taken, every: Sequence[IntArray], setup: Setup, memory: Memory | None) -> WayFigures:
    rows = max(step.tokens_most for step in taken.steps)
    rows_bytes, state_bytes = memory(way, rows, taken.plan) if memory else (None, None)
    return WayFigures.of(way, taken.steps, every, setup, rows_bytes, state_bytes)

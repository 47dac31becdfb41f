"""Simulation of many global micro-batches under every strategy."""

from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np

from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.settings import PlanSettings
from hf_distca.sim.figures import NOT_WORTH, Gain, Simulation, StrategyFigures, advice
from hf_distca.sim.lengths import IntArray, histogram
from hf_distca.sim.strategies import CHOSEN, PLAIN, Setup, StepTime, Strategy, all_strategies

Memory = Callable[[Strategy, int, MicroBatchPlan | None], tuple[int | None, int | None]]
"""Function that returns a GPU's bytes for rows (None if unknown) and for model state.

Its arguments are a strategy, the most rows of a rank, and the plan of the micro-batch with the largest exchange.
"""


def simulate(
    micro_batches: Iterable[IntArray],
    setup: Setup,
    settings: PlanSettings,
    count: int,
    servers: int = 0,
    memory: Memory = lambda *_: (None, None),
) -> Simulation:
    """Simulate micro-batches under every strategy.

    Args:
        settings: settings of plans; each strategy sets its own layout.
        servers: dedicated attention servers; above 0 one more strategy uses them.
        memory: returns a GPU's memory, such as `hf_distca.memory.simulated`; the default leaves memory out.
    """
    strategies = all_strategies(setup, settings, servers)
    every = list(islice(micro_batches, count))
    steps: dict[str, list[StepTime]] = {}
    figures: dict[str, StrategyFigures] = {}
    for strategy in strategies:
        of_strategy: list[StepTime] = []
        largest, most = None, 0  # plan whose busiest rank exchanges the most, and these bytes
        for lengths in every:
            step, plan = strategy.step(lengths)
            of_strategy.append(step)
            if step.bytes_bottleneck >= most:
                largest, most = plan, step.bytes_bottleneck
        bytes_of_gpu = memory(strategy, max(step.tokens_most for step in of_strategy), largest)
        steps[strategy.name] = of_strategy
        figures[strategy.name] = StrategyFigures.of(strategy, of_strategy, every, setup, *bytes_of_gpu)
    # Strategies that cut more documents train on other data, so those that cut the fewest come first.
    plain = min(
        (each for each in figures.values() if each.document_layout is None),
        key=lambda each: (each.documents_cut, each.step_seconds),
    )
    on_same_gpus = (each for each in figures.values() if each.document_layout is not None and not each.servers)
    fastest, default = min(on_same_gpus, key=lambda each: each.step_seconds), figures[CHOSEN]
    # Users change a setting only where it pays.
    planned = fastest if default.step_seconds / fastest.step_seconds >= NOT_WORTH else default
    lengths = np.concatenate(every)
    return Simulation(
        setup.ranks,
        setup.tokens_per_rank,
        len(lengths),
        int(lengths.sum()),
        histogram(lengths),
        tuple(figures.values()),
        plain.name,
        planned.name,
        {
            name: tuple(round(seconds, 6) for seconds in steps[name][0].attention.tolist())
            for name in (PLAIN, plain.name, planned.name)
        },
        Gain.of(steps[PLAIN], steps[planned.name]),
        Gain.of(steps[plain.name], steps[planned.name]),
        plain.step_seconds / planned.step_seconds,
        plain.attention_seconds / planned.attention_seconds,
        tuple(advice(tuple(figures.values()), plain, planned, setup.tokens_per_rank)),
    )

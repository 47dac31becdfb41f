"""Plans of sequences with equal prefixes: planning time, and K/V rows that attention gathers.

An 8B model, nodes of 8 H100, at most 32768 tokens on each rank. Each kind of sequences is planned
with prefix sharing and without. Counted are the K/V rows that all ranks gather for kernel calls in
the forward of one layer, and the query rows whose results are merged because their keys come in
several calls. Beside them stand the rows that would be gathered if each task gathered its whole
path.

Run: python benchmarks/prefix_plans.py [--rounds 5] [--ranks 64]
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from harness import Round, report, rounds_parser, take_rounds
from harness.simulated import simulated_run

from hf_distca import PlanSettings
from hf_distca.plan.cost import RowBytes
from hf_distca.plan.routes import Routes, make_routes
from hf_distca.planner.padding import plan_padded
from hf_distca.planner.prefixes import hashes_of
from hf_distca.planner.sequences import PlannedSequences
from hf_distca.predict.shapes import LLAMA_8B
from hf_distca.sim.trees import DrawnBatch, turns_of_ranks

TOKENS, NODE = 32768, 8
"""Tokens of a rank, and ranks of a node."""
FILLED = 0.9
"""Share of all ranks' rows that the sequences take, each equal prefix counted once."""
COMPLETIONS = 8
"""Completions of a prompt."""
TURNS_OF_RANK = 20
"""Turns of sessions in the batch of each rank."""
KIND = next(iter(LLAMA_8B.layers))


@dataclass(frozen=True)
class Prompts:
    """Prompts with completions; tasks under one system prompt if that has tokens."""

    system: int
    prompt: tuple[int, int]  # least and most tokens
    completion: tuple[int, int]

    def drawn(self, ranks: int) -> DrawnBatch:
        """Return prompts with completions that fill the ranks."""
        random = np.random.default_rng(1)
        system = np.arange(self.system)
        rows, number = self.system, 0
        lengths: list[list[int]] = [[] for _ in range(ranks)]
        hashes: list[list[tuple[bytes, ...]]] = [[] for _ in range(ranks)]
        while rows < FILLED * ranks * TOKENS:
            prompt = random.integers(1 << 30, size=random.integers(*self.prompt))
            rows += len(prompt)
            for _ in range(COMPLETIONS):
                completion = random.integers(1 << 30, size=random.integers(*self.completion))
                rows += len(completion)
                tokens = np.concatenate([system, prompt, completion])
                lengths[number % ranks].append(len(tokens))
                hashes[number % ranks].append(hashes_of(tokens[:, None]))
                number += 1
        return DrawnBatch(lengths, hashes)


PROMPTS = {
    "long prompts": Prompts(0, (8192, 8193), (256, 1024)),
    "long completions": Prompts(0, (1024, 1025), (500, 16000)),
    "tasks under one system prompt": Prompts(8192, (200, 2000), (300, 3000)),
}


def drawn(ranks: int) -> Iterator[tuple[str, DrawnBatch]]:
    """Yield the batches by kind."""
    for name, prompts in PROMPTS.items():
        yield name, prompts.drawn(ranks)
    yield "turns of sessions", next(turns_of_ranks(1, ranks, TURNS_OF_RANK))


def gathered_rows(routes: Routes) -> int:
    """Return K/V rows that a rank gathers in the forward of a layer."""
    calls = [routes.local]
    for stage in routes.stages:
        calls += [stage.remote_kv, stage.remote_query, stage.remote_query_prefix]
    return sum(len(call.k_rows) for call in calls)


def merged_rows(routes: Routes) -> int:
    """Return query rows whose results are merged with those of another call."""
    return sum(
        len(stage.remote_kv.q_rows) + len(stage.remote_query_prefix.q_rows)
        for stage in routes.stages
    )


def counted(planned: PlannedSequences, ranks: int) -> dict[str, float]:
    """Return gigabytes that are gathered and merged, read and written.

    A merge reads a row of O in float32 twice and writes it once.
    """
    row_bytes = RowBytes.of_kind(KIND, 2)
    gathered = merged = paths = 0
    for plan in planned.plans:
        for nano in plan.nano_batches:
            of_kind = nano.plans[KIND]
            paths += int(of_kind.tasks["stop"].sum())
            for rank in range(ranks):
                routes = make_routes(of_kind, rank)
                gathered += gathered_rows(routes)
                merged += merged_rows(routes)
    return {
        "gathered, GB": 2 * row_bytes.kv * gathered / 1e9,
        "merged, GB": 3 * 2 * row_bytes.o * merged / 1e9,
        "whole paths gathered, GB": 2 * row_bytes.kv * paths / 1e9,
    }


def planning_ms(
    batch: DrawnBatch, settings: PlanSettings, hashes: Sequence[Sequence[tuple[bytes, ...]]] | None
) -> float:
    """Return milliseconds of planning a batch on one core."""
    begin = time.process_time()
    plan_padded(batch.lengths, settings, hashes)
    return (time.process_time() - begin) * 1000


def shared_over_unshared(name: str, figures: Round) -> float:
    """Return the planning time of a kind with sharing over that without."""
    return figures[f"{name}, shared, ms"] / figures[f"{name}, unshared, ms"]


def main() -> None:
    parser = rounds_parser(__doc__, rounds=5, ranks=(64, "how many"))
    options = parser.parse_args()
    ranks = options.ranks
    settings = simulated_run(LLAMA_8B, ranks, TOKENS, NODE).plans
    batches = dict(drawn(ranks))
    counts = {}
    for name, batch in batches.items():
        planned = plan_padded(batch.lengths, settings, batch.hashes).sequences
        rows = {"computed rows": planned.computed_rows, "shared rows": planned.shared_rows}
        counts[name] = {**rows, **counted(planned, ranks)}

    def take() -> Round:
        figures = {}
        for name, batch in batches.items():
            figures[f"{name}, shared, ms"] = planning_ms(batch, settings, batch.hashes)
            figures[f"{name}, unshared, ms"] = planning_ms(batch, settings, None)
        return figures

    measured = take_rounds(options, take)
    ratios = {
        f"{name}, shared over unshared": partial(shared_over_unshared, name) for name in batches
    }
    report(measured, ratios, counts=counts)


if __name__ == "__main__":
    main()

"""What each kind of plan buys in the search for the fastest: an 8B model on H100, simulated.

Every plan that may be chosen is made for the same micro-batches, and its step is predicted. The
ratio is the fastest plan without the kind over the fastest of all plans; 1 means that the kind buys
nothing.

8 and 64 GPUs have the documents of `typical_data.py`, in nodes of 8. 16 GPUs have those of
`chosen.py`, with 1 and with 8 GPUs in a node, over each of its networks.

Run: PYTHONPATH=. python benchmarks/plan_kinds.py [--batches 4]
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from math import inf
from typing import Any

import numpy as np
from chosen import NETWORKS, RANKS, TOKENS, grid_documents, profile_with, run_of
from harness import options_parser, print_json, print_rows
from harness.simulated import simulated_run
from typical_data import RANKS_PER_NODE, TOKENS_PER_RANK, data

from hf_distca.plan.arrays import IntArray
from hf_distca.planner.build import lay_out_as_set
from hf_distca.planner.choose import Candidate, Division, PlannedCandidate, _Search
from hf_distca.planner.settings import COARSER_TOLERANCE, PlanSettings
from hf_distca.predict.shapes import LLAMA_8B
from hf_distca.sim.lengths import micro_batches

Inputs = Iterator[tuple[IntArray, PlanSettings]]
"""Lengths of the documents of a micro-batch, and the settings that it is planned by."""


def in_groups(candidate: Candidate) -> bool:
    return len(candidate.placing.sizes) > 1


def divides_over_all(candidate: Candidate) -> bool:
    return candidate.division == "over all" and max(candidate.placing.sizes) > 1


def divides_over_few(candidate: Candidate) -> bool:
    return candidate.division == "over few"


def has_two_nano_batches(candidate: Candidate) -> bool:
    return candidate.nano_batches == 2


def has_coarse_tolerance(candidate: Candidate) -> bool:
    return candidate.tolerance == COARSER_TOLERANCE


def joins_some_nodes(candidate: Candidate) -> bool:
    return len(set(candidate.placing.sizes)) > 1


PLAN_KINDS: Mapping[str, Callable[[Candidate], bool]] = {
    "groups of ranks": in_groups,
    "division over all": divides_over_all,
    "division over few": divides_over_few,
    "two nano-batches": has_two_nano_batches,
    "tolerance 0.1": has_coarse_tolerance,
    "groups of unequal size": joins_some_nodes,
}
"""By name: whether a candidate is of the kind."""


class EveryCandidate(_Search):
    """Candidates that combine each division with each number of nano-batches and each tolerance."""

    def in_groups(self) -> list[Candidate]:
        """List all candidates whose documents lie inside groups of ranks, however slow."""
        listed = []
        for placing in self._placings():
            # Whole documents on single ranks are divided in one way only.
            divisions: list[Division] = ["over all"]
            if self._may_have_cuts(placing):
                divisions.append("over few")
            bound = self._bound(placing)
            listed += [
                Candidate(placing, bound, division, tolerance, count)
                for division in divisions
                for count in self._settings.nano_batches
                for tolerance in self._settings.tolerances
            ]
        return listed


def every_plan(lengths: IntArray, settings: PlanSettings) -> Iterator[PlannedCandidate]:
    """Plan every candidate that can be planned."""
    as_set = partial(lay_out_as_set, lengths)
    search = EveryCandidate(lengths, settings, as_set)
    planned = map(search.planned, search.in_groups())
    return (candidate for candidate in planned if candidate is not None)


def typical_inputs(ranks: int, network: float, count: int) -> Inputs:
    """Yield micro-batches of the data sets, on GPUs with `network` GB/s between nodes."""
    profile = profile_with(network)
    run = simulated_run(LLAMA_8B, ranks, TOKENS_PER_RANK, RANKS_PER_NODE, profile)
    for _, draw in data():
        for lengths in islice(micro_batches(draw, ranks * TOKENS_PER_RANK, seed=0), count):
            yield lengths, run.plans


def grid_inputs(count: int) -> Inputs:
    """Yield micro-batches of all documents, networks and nodes of `chosen.py`."""
    for ranks_per_node in (1, RANKS_PER_NODE):
        for network in NETWORKS:
            settings = run_of(ranks_per_node, network).plans
            for _, draw, first in grid_documents(RANKS * TOKENS):
                for lengths in islice(micro_batches(draw, RANKS * TOKENS, 0, first), count):
                    yield lengths, settings


def ratios_without(lengths: IntArray, settings: PlanSettings) -> dict[str, float]:
    """Return, for each kind, the fastest plan without it over the fastest of all plans."""
    fastest = inf
    fastest_without = dict.fromkeys(PLAN_KINDS, inf)
    for planned in every_plan(lengths, settings):
        fastest = min(fastest, planned.seconds)
        for name, is_of_kind in PLAN_KINDS.items():
            if not is_of_kind(planned.candidate):
                fastest_without[name] = min(fastest_without[name], planned.seconds)
    return {name: seconds / fastest for name, seconds in fastest_without.items()}


def rows_of(setting: str, inputs: Inputs) -> Iterator[dict[str, Any]]:
    """Yield the mean and the worst ratio of each kind over some micro-batches."""
    ratios = [ratios_without(lengths, settings) for lengths, settings in inputs]
    for name in PLAN_KINDS:
        of_kind = [found[name] for found in ratios]
        yield {
            "setting": setting,
            "without": name,
            "mean": float(np.mean(of_kind)),
            "worst": max(of_kind),
        }


def main() -> None:
    parser = options_parser(__doc__, batches=(4, "micro-batches of each kind of documents"))
    count = parser.parse_args().batches
    found = [
        *rows_of("8 GPUs", typical_inputs(8, 50.0, count)),
        *rows_of("64 GPUs, 50 GB/s", typical_inputs(64, 50.0, count)),
        *rows_of("64 GPUs, 6 GB/s", typical_inputs(64, 6.0, count)),
        *rows_of("16 GPUs, 1 to 50 GB/s", grid_inputs(count)),
    ]
    print_rows(found)
    print_json(batches=count, kinds=found)


if __name__ == "__main__":
    main()

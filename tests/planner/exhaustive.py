"""The fastest plan of a few blocks of rows, found by trying all of them.

Nothing of the planner is used here. The seconds of each plan are those that are predicted of any
plan.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from hf_distca.plan import SEGMENT, TASK, Layout, MicroBatchPlan, NanoBatch, Plan, PlanSummary
from hf_distca.plan.data import ExchangeFigures
from hf_distca.predict.seconds import StepCosts
from hf_distca.predict.walk import predict_plan

Blocks = Sequence[tuple[int, int, int]]
"""(document, start, stop) of all rows."""
NOTHING = PlanSummary(0, 0, ExchangeFigures(0, 0, 0, 0, 0, 0, 0, 0, 0))


def blocks_of(lengths: Sequence[int], rows: int) -> Blocks:
    return [
        (document, start, min(start + rows, length))
        for document, length in enumerate(lengths)
        for start in range(0, length, rows)
    ]


def runs(blocks: Blocks, owners: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """(document, start, stop, owner) by owner: neighbouring blocks of one owner are one."""
    joined: list[tuple[int, int, int, int]] = []
    for (document, start, stop), owner in zip(blocks, owners, strict=True):
        if joined and (joined[-1][0], joined[-1][2:]) == (document, (start, owner)):
            start = joined.pop()[1]
        joined.append((document, start, stop, owner))
    return sorted(joined, key=lambda run: run[3])


def layout_of(lengths: Sequence[int], blocks: Blocks, holders: Sequence[int], ranks: int) -> Layout:
    filled = [0] * ranks
    segments = []
    for document, start, stop, rank in runs(blocks, holders):
        segments.append((document, start, stop, rank, filled[rank]))
        filled[rank] += stop - start
    return Layout(np.array(lengths), np.array(segments, SEGMENT), ranks)


def every_plan(
    lengths: Sequence[int], rows: int, costs: StepCosts, ranks: int, tokens_per_rank: int
) -> Iterator[MicroBatchPlan]:
    """All plans in which every block is held by a rank and computed by a rank.

    Ranks are alike: the first block is held by the first rank.
    """
    (kind,) = [kind_costs.kind for kind_costs in costs.kinds]
    blocks = blocks_of(lengths, rows)
    for others in product(range(ranks), repeat=len(blocks) - 1):
        layout = layout_of(lengths, blocks, (0, *others), ranks)
        if layout.tokens.max() > tokens_per_rank:
            continue
        for workers in product(range(ranks), repeat=len(blocks)):
            plan = Plan(layout, np.array(runs(blocks, workers), TASK), ranks)
            nano_batch = NanoBatch(np.arange(len(lengths)), layout, {kind: plan})
            yield MicroBatchPlan((nano_batch,), NOTHING)


def seconds_of(plan: MicroBatchPlan, costs: StepCosts) -> float:
    """Predicted seconds of a plan for ranks that are all alike."""
    ranks = plan.nano_batches[0].layout.ranks
    return predict_plan(plan, costs, range(ranks), 2).seconds


def fewest_seconds_of_whole_documents(
    lengths: Sequence[int], ranks: int, tokens_per_rank: int, pair_s: float, token_s: float
) -> float:
    """The fewest seconds of the busiest rank, over all ways to give each document to a rank."""
    fewest = np.inf
    for owners in product(range(ranks), repeat=len(lengths)):
        seconds, tokens = [0.0] * ranks, [0] * ranks
        for length, rank in zip(lengths, owners, strict=True):
            seconds[rank] += pair_s * length * (length + 1) / 2 + token_s * length
            tokens[rank] += length
        if max(tokens) <= tokens_per_rank:
            fewest = min(fewest, max(seconds))
    return fewest

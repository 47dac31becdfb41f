"""Choice between full micro-batches and slightly smaller ones.

The documents of the smaller ones fit into whole ranks. Documents in whole ranks exchange nothing,
but their lengths rarely fill every rank to the last token. Smaller micro-batches pay where the
exchanges of full ones are not hidden behind computation.
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice

import numpy as np

from hf_distca.plan.arrays import IntArray
from hf_distca.planner.bin_packing import ranks_of_whole
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.walk import document_seconds

PAYS = 1.05
"""Least predicted speed-up per token for which micro-batches are smaller.

It exceeds what measured costs vary by, so that a training draws the same micro-batches from run to
run.
"""
COMPARED_BATCHES = 4
"""Number of micro-batches of each kind that are planned for the comparison."""


def fitting(lengths: IntArray, ranks: int, rows_per_rank: int) -> IntArray:
    """Return the lengths of a micro-batch without its last documents.

    The others fit into whole ranks.

    Args:
        lengths: [documents] of at most rows_per_rank tokens each.
    """

    def too_many(count: int) -> bool:
        return ranks_of_whole(lengths[:count], ranks, rows_per_rank) is None

    counts = range(len(lengths) + 1)
    first_too_many = bisect_left(counts, True, key=too_many)
    return lengths[: first_too_many - 1]


def may_choose_whole_ranks(settings: PlanSettings) -> bool:
    """Return whether the planner may have documents drawn for ranks.

    It may if it places documents as it likes.
    """
    return settings.document_layout == "auto" and settings.costs is not None


def whole_ranks_pay(
    full: Iterable[IntArray], fitted: Iterable[IntArray], settings: PlanSettings
) -> bool:
    """Return whether fitted micro-batches clearly take less predicted time per token.

    Every rank decides alike, since predictions depend on lengths and settings alone.

    Args:
        full: [documents] lengths of micro-batches that are full; the first ones are read.
        fitted: of micro-batches whose documents fit into whole ranks; read only if full ones could
            be improved.
    """
    if not may_choose_whole_ranks(settings) or settings.costs is None:
        return False
    compared = list(islice(full, COMPARED_BATCHES))
    if max(int(lengths.max()) for lengths in compared) > settings.rows_per_rank:
        return False
    costs = settings.costs
    speeds = 1 / np.array(costs.slowness or (1.0,) * settings.ranks)
    work_s = sum(float(document_seconds(lengths, costs).sum()) for lengths in compared)
    # Seconds per token if ranks computed alike and never waited.
    computing_s = work_s / float(speeds.sum()) / _tokens(compared)
    full_s = _seconds_per_token(compared, settings)
    if full_s < PAYS * computing_s:
        return False
    fitted_s = _seconds_per_token(list(islice(fitted, COMPARED_BATCHES)), settings)
    return full_s >= PAYS * fitted_s


def _tokens(micro_batches: Iterable[IntArray]) -> int:
    return sum(int(lengths.sum()) for lengths in micro_batches)


def _seconds_per_token(micro_batches: list[IntArray], settings: PlanSettings) -> float:
    """Return the predicted seconds of micro-batches over their tokens."""
    choices = [plan_micro_batch(lengths.tolist(), settings).choice for lengths in micro_batches]
    return sum(choice.seconds for choice in choices if choice is not None) / _tokens(micro_batches)

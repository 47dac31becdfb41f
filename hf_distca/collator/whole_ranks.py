"""Choice for a data set: full micro-batches, or slightly smaller ones whose documents fit into whole ranks."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hf_distca.collator.sampler import GlobalBatchSampler, fit_documents
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.whole_ranks import may_choose_whole_ranks, whole_ranks_pay

SAMPLED_BATCHES = 32
"""Maximum number of micro-batches that are drawn of a large data set for the choice."""


def draws_for_whole_ranks(lengths: NDArray[np.int64], settings: PlanSettings, seed: int) -> bool:
    """Return whether micro-batches of a data set should have documents that fit into whole ranks.

    Args:
        lengths: [documents] int64 tokens of each document of the data set.
        seed: seed of the order of documents.
    """
    longest = int(lengths.max(initial=0))
    if not may_choose_whole_ranks(settings) or not 0 < longest <= settings.tokens_per_rank:
        return False
    capacity = settings.ranks * settings.tokens_per_rank
    sampled = np.random.default_rng(seed).permutation(lengths)
    sampled = sampled[
        : np.searchsorted(np.cumsum(sampled), SAMPLED_BATCHES * capacity, side="right")
    ]
    excerpts = fit_documents(sampled, settings.tokens_per_rank, "error", "tokens_per_rank")

    def drawn(bins: int) -> Iterator[NDArray[np.int64]]:
        for (micro_batch,) in GlobalBatchSampler(excerpts, capacity // bins, seed=seed, bins=bins):
            yield micro_batch.excerpts["stop"]

    return whole_ranks_pay(drawn(1), drawn(settings.ranks), settings)

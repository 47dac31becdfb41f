"""Choice for a data set between two kinds of micro-batches.

They are full, or slightly smaller with documents that fit into whole ranks.
"""

from collections.abc import Iterator

import numpy as np

from hf_distca.checks.capacity_rules import A_RANK
from hf_distca.collator.sampler import GlobalBatchSampler, fit_documents
from hf_distca.plan.arrays import IntArray
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.whole_ranks import may_choose_whole_ranks, whole_ranks_pay

SAMPLED_BATCHES = 32
"""Maximum number of micro-batches that are drawn of a large data set for the choice."""


def draws_for_whole_ranks(lengths: IntArray, settings: PlanSettings, seed: int) -> bool:
    """Return whether micro-batches of a data set should have documents that fit into whole ranks.

    Args:
        lengths: [documents] int64 tokens of each document of the data set.
        seed: seed of the order of documents.
    """
    longest = int(lengths.max(initial=0))
    if not may_choose_whole_ranks(settings) or not 0 < longest <= settings.rows_per_rank:
        return False
    capacity = settings.micro_batch_tokens
    # As many documents of a random order as fill so many micro-batches.
    shuffled = np.random.default_rng(seed).permutation(lengths)
    tokens_up_to = np.cumsum(shuffled)
    count = np.searchsorted(tokens_up_to, SAMPLED_BATCHES * capacity, side="right")
    spans = fit_documents(shuffled[:count], settings.rows_per_rank, "error", A_RANK)

    def micro_batches(bins: int) -> Iterator[IntArray]:
        """Yield the lengths of each micro-batch's documents."""
        for (micro_batch,) in GlobalBatchSampler(spans, capacity // bins, seed=seed, bins=bins):
            yield micro_batch.spans["stop"]

    return whole_ranks_pay(micro_batches(1), micro_batches(settings.ranks), settings)

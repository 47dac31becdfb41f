"""Plans for the padded batches of all ranks.

The sequences of all ranks are the sequences of one or several planned micro-batches.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hf_distca.checks.batch_rules import Batch
from hf_distca.plan.arrays import IntArray, Table
from hf_distca.planner.given_images import GivenImages, plan_given_images
from hf_distca.planner.prefixes import Hashes, SequencePaths, share_prefixes
from hf_distca.planner.sequences import (
    TOKENS,
    PlannedSequences,
    even_micro_batches,
    plan_sequences,
)
from hf_distca.planner.settings import PlanSettings

NO_RANK = -1
"""Source of a filler's row, which is in no rank's batch."""
TRAVELLING = np.dtype([*TOKENS.descr, ("source", np.int64), ("index", np.int64)])
"""Tokens of a sequence on the rank that holds them.

`source` is the rank whose batch has the sequence, and `index` the sequence's index there.
"""


@dataclass(frozen=True, eq=False)
class PlannedPadding:
    """Planned micro-batches for the padded batches of all ranks, the same on every rank."""

    sequences: PlannedSequences
    sources: IntArray  # [sequences] the rank whose batch has each one
    indices: IntArray  # [sequences] its index in the batch of that rank
    images: tuple[Table, ...] = ()  # of each micro-batch those that ranks encode, of dtype IMAGE

    def travelling(self, tokens: Table) -> Table:
        """Return tokens of sequences as entries of dtype TRAVELLING."""
        table = np.empty(len(tokens), TRAVELLING)
        for name in TOKENS.names or ():
            table[name] = tokens[name]
        for name, values in (("source", self.sources), ("index", self.indices)):
            table[name] = np.append(values, NO_RANK)[tokens["sequence"]]
        return table


def plan_padded(
    lengths_of_ranks: Sequence[Sequence[int]],
    settings: PlanSettings,
    hashes_of_ranks: Sequence[Sequence[Hashes]] | None = None,
    images_of_ranks: Sequence[GivenImages] = (),
    always: Collection[str] = (),
) -> PlannedPadding:
    """Plan the micro-batches for sequences of [ranks] lengths each.

    Sequences without tokens are left out.

    Args:
        hashes_of_ranks: of each sequence of each rank; None without prefix sharing.
        images_of_ranks: images of each rank's batch; empty for models without images.
        always: modalities that are planned in a micro-batch without them, too.

    Raises:
        ValueError: A sequence has more tokens than all ranks, or one rank where documents stay
            whole, may hold.
    """
    sequences = [
        (rank, index, length)
        for rank, lengths in enumerate(lengths_of_ranks)
        for index, length in enumerate(lengths)
        if length > 0
    ]
    sources, indices, lengths = np.array(sequences, np.int64).reshape(-1, 3).T
    stay_whole = settings.document_layout == "whole"
    capacity = settings.document_capacity
    if len(lengths) and lengths.max() > capacity:
        raise Batch.LONG_SEQUENCE.error(
            length=lengths.max(),
            limit=capacity,
            where="one rank" if stay_whole else "all ranks together",
        )
    if hashes_of_ranks is None:
        paths = SequencePaths.unshared(lengths)
    else:
        hashes = [hashes_of_ranks[rank][index] for rank, index, _ in sequences]
        paths = share_prefixes(lengths.tolist(), hashes, capacity)
    micro_batches = even_micro_batches(paths.trees, settings)
    planned = plan_sequences(paths, lengths, settings, micro_batches)
    images: tuple[Table, ...] = ()
    if images_of_ranks:
        planned, images = plan_given_images(planned, sources, indices, images_of_ranks, always)
    return PlannedPadding(planned, sources, indices, images)

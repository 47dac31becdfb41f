"""Plans for the padded batches of all ranks, or of the ranks of a pod.

The sequences of these ranks are the sequences of one or several planned micro-batches. All pods
have equally many micro-batches.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hf_distca.checks.capacity_rules import Capacity
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

A_POD = "the ranks of a pod (pod_ranks of planning) together"
"""Name of the ranks that plan together, in errors."""
NO_RANK = -1
"""Source of a filler's row, which is in no rank's batch."""
TRAVELLING = np.dtype([*TOKENS.descr, ("source", np.int64), ("index", np.int64)])
"""Tokens of a sequence on the rank that holds them.

`source` is the rank whose batch has the sequence, and `index` the sequence's index there.
"""


@dataclass(frozen=True)
class PodNeeds:
    """What the other pods must know of the padded batches of one pod."""

    micro_batches: int  # as few as possible
    rows: int  # that the pod computes
    shared_rows: int
    modalities: frozenset[str] = frozenset()  # of its images


@dataclass(frozen=True)
class PodShare:
    """A pod that plans the padded batches of its ranks, beside other pods.

    Attributes:
        first_rank: of the pod.
        micro_batches: number of micro-batches, the same in all pods.
        other_rows: rows that the other pods compute.
        other_shared_rows: tokens that the other pods do not compute again.
        most_rows: rows that the pod with the most rows computes.
        modalities: of images in all pods. Every rank runs these encoders in every micro-batch.
    """

    first_rank: int = 0
    micro_batches: int = 1
    other_rows: int = 0
    other_shared_rows: int = 0
    most_rows: int = 0
    modalities: frozenset[str] = frozenset()

    @classmethod
    def of(cls, first_rank: int, own: PodNeeds, of_pods: Sequence[PodNeeds]) -> "PodShare":
        """Return the share of a pod, from the needs of all pods."""
        return cls(
            first_rank,
            max(needs.micro_batches for needs in of_pods),
            sum(needs.rows for needs in of_pods) - own.rows,
            sum(needs.shared_rows for needs in of_pods) - own.shared_rows,
            max(needs.rows for needs in of_pods),
            frozenset().union(*(needs.modalities for needs in of_pods)),
        )


ALL_RANKS = PodShare()
"""The share of all ranks, where they plan together."""


@dataclass(frozen=True, eq=False)
class PlannedPadding:
    """Planned micro-batches for the padded batches of a pod, the same on every rank of the pod."""

    sequences: PlannedSequences
    sources: IntArray  # [sequences] the rank whose batch has each one
    indices: IntArray  # [sequences] its index in the batch of that rank
    images: tuple[Table, ...] = ()  # of each micro-batch those that ranks encode, of dtype IMAGE
    share: PodShare = ALL_RANKS

    @property
    def most_rows(self) -> int:
        """Rows that the pod with the most rows computes."""
        return max(self.share.most_rows, self.sequences.computed_rows)

    def travelling(self, tokens: Table) -> Table:
        """Return tokens of sequences as entries of dtype TRAVELLING."""
        table = np.empty(len(tokens), TRAVELLING)
        for name in TOKENS.names or ():
            table[name] = tokens[name]
        for name, values in (("source", self.sources), ("index", self.indices)):
            table[name] = np.append(values, NO_RANK)[tokens["sequence"]]
        return table


class _Given(NamedTuple):
    """Sequences with tokens in the padded batches of ranks."""

    sources: IntArray  # [sequences] the rank whose batch has each one
    indices: IntArray  # [sequences] its index in the batch of that rank
    lengths: IntArray  # [sequences]
    paths: SequencePaths


def pod_needs(
    lengths_of_ranks: Sequence[Sequence[int]],
    settings: PlanSettings,
    hashes_of_ranks: Sequence[Sequence[Hashes]] | None = None,
    images_of_ranks: Sequence[GivenImages] = (),
) -> PodNeeds:
    """Return what the other pods must know of the padded batches of one pod.

    Args:
        lengths_of_ranks, settings, hashes_of_ranks, images_of_ranks: as in `plan_padded`.

    Raises:
        ValueError: as `plan_padded` does.
    """
    given = _given(lengths_of_ranks, settings, hashes_of_ranks, A_POD)
    rows = given.paths.trees.rows
    micro_batches = len(even_micro_batches(given.paths.trees, settings))
    modalities = frozenset().union(*(images.present for images in images_of_ranks))
    return PodNeeds(micro_batches, rows, int(given.lengths.sum()) - rows, modalities)


def plan_padded(
    lengths_of_ranks: Sequence[Sequence[int]],
    settings: PlanSettings,
    hashes_of_ranks: Sequence[Sequence[Hashes]] | None = None,
    images_of_ranks: Sequence[GivenImages] = (),
    always: Collection[str] = (),
    share: PodShare = ALL_RANKS,
) -> PlannedPadding:
    """Plan the micro-batches for sequences of [ranks] lengths each.

    Sequences without tokens are left out. A padded batch stays in the pod of its rank.

    Args:
        lengths_of_ranks: of the ranks that plan together.
        settings: of these ranks.
        hashes_of_ranks: of each sequence of each rank; None without prefix sharing.
        images_of_ranks: images of each rank's batch; empty for models without images.
        always: modalities that are planned in a micro-batch without them, too.
        share: of these ranks, where they are a pod.

    Raises:
        ValueError: A sequence has more tokens than these ranks, or one rank where documents stay
            whole, may hold.
    """
    given = _given(lengths_of_ranks, settings, hashes_of_ranks)
    sources = given.sources + share.first_rank
    micro_batches = even_micro_batches(given.paths.trees, settings, share.micro_batches)
    planned = plan_sequences(
        given.paths, given.lengths, settings, micro_batches, first_rank=share.first_rank
    )
    # What the other pods compute in all micro-batches counts with the first one.
    first, *others = planned.plans
    first = replace(
        first,
        rows_of_other_pods=share.other_rows,
        shared_rows=first.shared_rows + share.other_shared_rows,
    )
    planned = replace(planned, plans=(first, *others))
    images: tuple[Table, ...] = ()
    if images_of_ranks:
        planned, images = plan_given_images(
            planned, sources, given.indices, images_of_ranks, {*always, *share.modalities}
        )
    return PlannedPadding(planned, sources, given.indices, images, share)


def _given(
    lengths_of_ranks: Sequence[Sequence[int]],
    settings: PlanSettings,
    hashes_of_ranks: Sequence[Sequence[Hashes]] | None,
    ranks: str = "all ranks together",
) -> _Given:
    """Return the sequences with tokens, and their paths in prefix trees.

    Args:
        ranks: name of the ranks that plan together, in errors.
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
        raise Capacity.LONG_SEQUENCE.error(
            length=lengths.max(),
            limit=capacity,
            where="one rank" if stay_whole else ranks,
        )
    if hashes_of_ranks is None:
        paths = SequencePaths.unshared(lengths)
    else:
        hashes = [hashes_of_ranks[rank][index] for rank, index, _ in sequences]
        paths = share_prefixes(lengths.tolist(), hashes, capacity)
    return _Given(sources, indices, lengths, paths)

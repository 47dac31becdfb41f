"""From sequences to the rows of each rank: prefix trees, micro-batches and plans.

A sequence is a document of packed data, or a sequence of a padded batch. Sequences are paths in
prefix trees (`SequencePaths`). Trees are divided among micro-batches, and each micro-batch is
planned with its branches as documents. One rank holds a row of a shared prefix, which several
sequences read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import numpy as np

from hf_distca.plan import Branches, MicroBatchPlan
from hf_distca.plan.arrays import IntArray, Table
from hf_distca.plan.intervals import ROWS, by_document, overlaps, rows_before_in, table_of
from hf_distca.plan.paths import along_paths
from hf_distca.planner.bin_packing import largest_first, place_evenly
from hf_distca.planner.micro_batch import plan_micro_batch, plan_pod
from hf_distca.planner.prefix_trees import PrefixTrees
from hf_distca.planner.prefixes import SequencePaths
from hf_distca.planner.settings import PlanSettings

NO_SEQUENCE = -1
"""Sequence of the row of a filler."""

TOKENS = np.dtype(
    [(name, np.int64) for name in ("rank", "micro_batch", "sequence", "start", "stop", "offset")]
)
"""Tokens [start, stop) of a sequence, on one rank in one micro-batch.

`offset` is the row of token `start` among the rows of all micro-batches of the rank.
"""
_BRANCH_ROWS = np.dtype(
    [(name, np.int64) for name in ("rank", "micro_batch", "document", "start", "stop", "offset")]
)
"""As TOKENS, with the document of a prefix tree in place of a sequence."""


@dataclass(frozen=True, eq=False)
class PlannedSequences:
    """Micro-batches of sequences, planned alike on every rank of a pod.

    With pods, the rows of the pod's ranks are known and no others.

    A one-token filler stands where a rank would have no row: that rank would be missing in every
    exchange.
    """

    plans: tuple[MicroBatchPlan, ...]
    paths: SequencePaths
    lengths: IntArray  # [sequences] tokens of each
    _rows: Table  # of dtype _BRANCH_ROWS, by rank

    @cached_property
    def rank_rows(self) -> Table:
        """[entries] of dtype TOKENS, by rank and row: each row of each rank once.

        The sequence is one of those that have the row, or NO_SEQUENCE.
        """
        return _tokens(self._rows, self.paths.owners_of(self._rows["document"]))

    @cached_property
    def sequence_tokens(self) -> Table:
        """[entries] of dtype TOKENS, by rank: each token of each sequence once.

        Tokens of several sequences may have the same row.
        """
        # 1. Find the branches on the path of each sequence with rows on the ranks of the pod.
        in_pod = np.flatnonzero(np.isin(self.paths.ends, self._rows["document"]))
        whole_sequences = table_of(
            ROWS, document=self.paths.ends[in_pod], stop=self.lengths[in_pod]
        )
        on_path, sequence = along_paths(whole_sequences, self.paths.trees.branches)
        sequence = in_pod[sequence]
        rows_of_branches = by_document(self._rows.compress(self._rows["document"] != NO_SEQUENCE))
        # 2. Find the ranks that hold these rows.
        part, entry, start, stop = overlaps(on_path, rows_of_branches)
        rows = rows_of_branches.take(entry)
        rows["offset"] += start - rows["start"]
        rows["start"], rows["stop"] = start, stop
        order = np.argsort(rows["rank"], kind="stable")
        return _tokens(rows.take(order), sequence[part][order])

    @property
    def computed_rows(self) -> int:
        """Rows that all ranks compute, without fillers."""
        return self.paths.trees.rows

    @property
    def shared_rows(self) -> int:
        """Tokens that are not computed, because another sequence has the same row."""
        return int(self.lengths.sum()) - self.paths.trees.rows


def plan_sequences(
    paths: SequencePaths,
    lengths: IntArray,
    settings: PlanSettings,
    micro_batches: Sequence[IntArray] | None = None,
    rank: int | None = None,
    first_rank: int = 0,
) -> PlannedSequences:
    """Plan micro-batches of sequences.

    Args:
        paths: of the sequences, in prefix trees.
        lengths: [sequences] tokens of each.
        micro_batches: numbers of the trees of each micro-batch; None for one micro-batch of all
            trees.
        rank: a rank, whose pod alone is planned; None to plan all ranks together.
        first_rank: number of the first rank that `settings` describe.
    """
    trees = paths.trees
    if micro_batches is None:
        micro_batches = [np.arange(len(trees.tree_lengths))]
    tokens_of_trees = np.bincount(paths.tree_of_sequences, lengths, len(trees.tree_lengths)).astype(
        np.int64
    )
    stay_whole = settings.document_layout == "whole"
    plans: list[MicroBatchPlan] = []
    parts: list[Table] = []
    for number, members in enumerate(micro_batches):
        rows = int(trees.tree_lengths[members].sum())
        # There are enough rows as soon as there are as many as ranks, or trees that stay whole.
        fillers = max(settings.ranks - (len(members) if stay_whole else rows), 0)
        branches = trees.documents_of(members)
        # A micro-batch with fewer rows than ranks is planned at once on all ranks.
        plan = _plan_branches(trees, branches, fillers, settings, None if fillers else rank)
        plan = replace(
            plan,
            first_rank=first_rank + plan.first_rank,
            shared_rows=int(tokens_of_trees[members].sum()) - rows,
        )
        plans.append(plan)
        parts.append(_rows_of_plan(plan, number, branches))
    return PlannedSequences(tuple(plans), paths, lengths, _with_offsets(np.concatenate(parts)))


def on_rank(tokens: Table, rank: int) -> Table:
    """Return the entries of dtype TOKENS of one rank."""
    return tokens.compress(tokens["rank"] == rank)


def even_micro_batches(
    trees: PrefixTrees, settings: PlanSettings, at_least: int = 1
) -> list[IntArray]:
    """Divide trees among as few micro-batches as possible, with about as many rows each.

    Every tree fits into the rows of all ranks, or of one rank with document_layout="whole".

    Args:
        at_least: least number of micro-batches, some of which may be empty.
    """
    stay_whole = settings.document_layout == "whole"
    capacity = settings.document_capacity
    bins_per_micro_batch = settings.ranks if stay_whole else 1
    lengths = trees.tree_lengths
    longest_first = largest_first(lengths)
    fewest = max(at_least, -(-int(lengths.sum()) // settings.capacity))
    for micro_batches in count(fewest):  # trees fit at the latest with a bin for each
        bin_of_trees = place_evenly(
            lengths, longest_first, micro_batches * bins_per_micro_batch, capacity
        )
        if bin_of_trees is not None:
            break
    bins = [
        np.flatnonzero(bin_of_trees == number)
        for number in range(micro_batches * bins_per_micro_batch)
    ]
    return [
        np.concatenate(bins[first : first + bins_per_micro_batch])
        for first in range(0, len(bins), bins_per_micro_batch)
    ]


def _plan_branches(
    trees: PrefixTrees,
    branches: IntArray,
    fillers: int,
    settings: PlanSettings,
    rank: int | None,
) -> MicroBatchPlan:
    """Plan the branches of some trees, and fillers of one token each.

    Args:
        rank: as in `plan_sequences`.
    """
    lengths = np.append(trees.lengths[branches], np.ones(fillers, np.int64))
    number = np.full(len(trees.lengths) + 1, -1)  # the last one is for roots
    number[branches] = np.arange(len(branches))
    parents = np.append(number[trees.branches.parents[branches]], np.full(fillers, -1))
    starts = np.append(trees.branches.starts[branches], np.zeros(fillers, np.int64))
    renumbered = Branches(parents, starts)
    if rank is None:
        plan = plan_micro_batch(lengths.tolist(), settings, renumbered)
    else:
        plan = plan_pod(lengths.tolist(), settings, rank, renumbered)
    return replace(plan, fillers=fillers)


def _rows_of_plan(plan: MicroBatchPlan, micro_batch: int, branches: IntArray) -> Table:
    """Return the rows of one micro-batch by nano-batch, rank and row; offsets are left at 0.

    Args:
        branches: of the micro-batch, without fillers.
    """
    # Fillers come after all branches of a micro-batch.
    padded_branches = np.append(branches, np.full(plan.fillers, NO_SEQUENCE))
    parts = []
    for nano in plan.nano_batches:
        segments = nano.layout.segments
        part = np.zeros(len(segments), _BRANCH_ROWS)
        for name in ("rank", "start", "stop"):
            part[name] = segments[name]
        part["rank"] += plan.first_rank
        part["micro_batch"] = micro_batch
        part["document"] = padded_branches[nano.documents[segments["document"]]]
        parts.append(part)
    return np.concatenate(parts)


def _with_offsets(rows_of_ranks: Table) -> Table:
    """Return entries by rank, whose rows follow each other on each rank."""
    rows_of_ranks = rows_of_ranks.take(np.argsort(rows_of_ranks["rank"], kind="stable"))
    rows_of_ranks["offset"] = rows_before_in(rows_of_ranks, "rank")
    return rows_of_ranks


def _tokens(rows: Table, sequence: IntArray) -> Table:
    """Return rows of branches as tokens of `sequence`, of dtype TOKENS."""
    tokens = np.empty(len(rows), TOKENS)
    for name in ("rank", "micro_batch", "start", "stop", "offset"):
        tokens[name] = rows[name]
    tokens["sequence"] = sequence
    return tokens

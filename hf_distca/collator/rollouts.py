"""Rollouts as planned micro-batches: as many as fit into all ranks together.

A rollout is a sequence of tokens, some of which the policy generated and is trained on: its
targets. The rows of a rollout may lie on several ranks. Each rank computes the log-probs of the
targets whose preceding rows it holds.

Shape suffixes: L tokens of a rollout, R rows of this rank, T targets of this rank, M targets of all
ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hf_distca.batches.limits import IGNORED_TARGET
from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.arrays import IntArray
from hf_distca.plan.figures import loads_of
from hf_distca.plan.intervals import rounds_of, row_counts
from hf_distca.planner import prefixes
from hf_distca.planner.prefixes import Hashes, SequencePaths
from hf_distca.planner.sequences import (
    NO_SEQUENCE,
    PlannedSequences,
    even_micro_batches,
    on_rank,
    plan_sequences,
)
from hf_distca.planner.settings import PlanSettings

Rollout = Mapping[str, Any]
"""A rollout as TRL's queue gives it. `input_ids`, `completion_mask` and `old_log_probs` are [L].
`advantage` is a number, and `metrics` are numbers by name."""


def fitting_micro_batches(
    rollouts: Iterable[Rollout],
    settings: PlanSettings,
    drop: Callable[[int], None],
    *,
    shares: bool,
) -> Iterator[list[Rollout]]:
    """Divide rollouts in their order into micro-batches that fit into all ranks together.

    A micro-batch is complete when the next rollout does not fit.

    Args:
        drop: is called with the tokens of a rollout that no micro-batch can hold.
        shares: whether rollouts share prefixes, whose rows then count once.
    """
    filling = _Filling(settings, shares)
    for rollout in rollouts:
        tokens = len(rollout["input_ids"])
        if tokens > settings.document_capacity:
            drop(tokens)
            continue
        hashes = _hashes(rollout) if shares else ()
        while not filling.has_room_for(rollout, hashes):
            count = filling.fitting()
            complete = filling.rollouts[:count]
            if any(len(target_positions(member)) for member in complete):
                yield complete
            rest = zip(filling.rollouts[count:], filling.hashes[count:], strict=True)
            filling = _Filling(settings, shares)
            for member, hashes_of_member in rest:
                filling.add(member, hashes_of_member)
        filling.add(rollout, hashes)


@dataclass
class _Filling:
    """Rollouts of the micro-batch that is being filled."""

    settings: PlanSettings
    shares: bool
    rollouts: list[Rollout] = field(default_factory=list)
    hashes: list[Hashes] = field(default_factory=list)
    _blocks: set[Any] = field(default_factory=set)
    _rows: int = 0  # if every equal prefix is shared
    _targets: int = 0

    def has_room_for(self, rollout: Rollout, hashes: Hashes) -> bool:
        """Return whether the rollout fits, if every equal prefix is shared.

        Targets are limited like rows: a row may have a target of each rollout that shares it.
        """
        if not self.rollouts:
            return True
        capacity = self.settings.capacity
        rows = self._rows + self._new_rows(rollout, hashes)
        targets = self._targets + len(target_positions(rollout))
        return rows <= capacity and targets <= capacity

    def add(self, rollout: Rollout, hashes: Hashes) -> None:
        self._rows += self._new_rows(rollout, hashes)
        self._targets += len(target_positions(rollout))
        self._blocks.update(hashes)
        self.rollouts.append(rollout)
        self.hashes.append(hashes)

    def _new_rows(self, rollout: Rollout, hashes: Hashes) -> int:
        """Return the rows of a rollout that no other one has."""
        tokens = len(rollout["input_ids"])
        shared_blocks = sum(block in self._blocks for block in hashes)
        return max(tokens - shared_blocks * prefixes.BLOCK, 0)

    def fitting(self) -> int:
        """Return the number of the first rollouts that one micro-batch can be planned with.

        A prefix that saves few rows is not shared, and whole documents leave gaps on ranks.
        """
        count = len(self.rollouts)
        while count > 1:
            hashes = self.hashes[:count] if self.shares else None
            paths = _paths(self.rollouts[:count], hashes, self.settings)
            if len(even_micro_batches(paths.trees, self.settings)) == 1:
                break
            count -= 1
        return count


def _hashes(rollout: Rollout) -> Hashes:
    return prefixes.hashes_of(np.asarray(rollout["input_ids"], np.int64)[:, None])


def _paths(
    rollouts: Sequence[Rollout], hashes: Sequence[Hashes] | None, settings: PlanSettings
) -> SequencePaths:
    """Return the paths of rollouts in prefix trees.

    Args:
        hashes: of each rollout; None without prefix sharing.
    """
    lengths = np.array([len(rollout["input_ids"]) for rollout in rollouts], np.int64)
    if hashes is None:
        return SequencePaths.unshared(lengths)
    return prefixes.share_prefixes(lengths.tolist(), hashes, settings.document_capacity)


def target_positions(rollout: Rollout) -> IntArray:
    """Return the positions of the rows that predict a rollout's targets."""
    return np.flatnonzero(np.asarray(rollout["completion_mask"])[1:])


@dataclass(frozen=True)
class RankRows:
    """Rows and query-key pairs of a rank."""

    tokens: range
    load: int


@dataclass(frozen=True, eq=False)
class RankBatch:
    """A rank's part in a micro-batch of rollouts, and the targets of all ranks."""

    plan: MicroBatchPlan
    input_ids: torch.Tensor  # [1, R]
    position_ids: torch.Tensor  # [1, R]
    labels: torch.Tensor  # [1, T]; without any target one that does not count
    target_rows: list[
        torch.Tensor
    ]  # rows of the labels, in parts in each of which a row comes once
    targets: torch.Tensor  # numbers of this rank's targets among those of all ranks, as `labels`
    old_log_probs: torch.Tensor  # [M]
    advantages: torch.Tensor  # [M]
    numbers: torch.Tensor  # [M] number of the rollout of each target


@dataclass(frozen=True, eq=False)
class PlannedRollouts:
    """A planned micro-batch of rollouts, the same on every rank."""

    rollouts: list[Rollout]
    sequences: PlannedSequences

    @classmethod
    def of(
        cls, rollouts: list[Rollout], settings: PlanSettings, *, shares: bool
    ) -> "PlannedRollouts":
        """Plan a micro-batch.

        Args:
            rollouts: as many as fit, from `fitting_micro_batches`.
            settings: of the plan.
            shares: whether rollouts share prefixes.
        """
        hashes = [_hashes(rollout) for rollout in rollouts] if shares else None
        paths = _paths(rollouts, hashes, settings)
        lengths = np.array([len(rollout["input_ids"]) for rollout in rollouts], np.int64)
        return cls(rollouts, plan_sequences(paths, lengths, settings))

    @cached_property
    def _positions(self) -> list[IntArray]:
        """Positions of the rows that predict the targets of each rollout."""
        return [target_positions(rollout) for rollout in self.rollouts]

    @property
    def plan(self) -> MicroBatchPlan:
        """Plan of the micro-batch."""
        (plan,) = self.sequences.plans
        return plan

    def rows_of_ranks(self, ranks: int) -> list[RankRows]:
        """Return the rows that each rank holds, and the query-key pairs that it computes."""
        entries = self.sequences.rank_rows
        rows = np.bincount(entries["rank"], row_counts(entries), ranks).astype(int)
        loads = np.zeros(ranks, np.int64)
        for nano_batch in self.plan.nano_batches:
            for plan in nano_batch.plans.values():
                loads += loads_of(plan)[:ranks]
        return [
            RankRows(range(count), load)
            for count, load in zip(rows.tolist(), loads.tolist(), strict=True)
        ]

    def batch(self, rank: int) -> RankBatch:
        """Return the part of a rank."""
        tokens: list[IntArray] = []
        positions: list[IntArray] = []
        for entry in on_rank(self.sequences.rank_rows, rank):
            start, stop, number = (int(entry[name]) for name in ("start", "stop", "sequence"))
            if number == NO_SEQUENCE:
                tokens.append(np.zeros(stop - start, np.int64))
            else:
                tokens.append(self.rollouts[number]["input_ids"][start:stop])
            positions.append(np.arange(start, stop))
        labels, rows, targets = self._targets(rank)
        counts = list(map(len, self._positions))
        old_log_probs = [
            np.asarray(rollout["old_log_probs"])[1:][positions_of_targets]
            for rollout, positions_of_targets in zip(self.rollouts, self._positions, strict=True)
        ]
        advantages = np.array([rollout["advantage"] for rollout in self.rollouts], np.float32)
        return RankBatch(
            plan=self.plan,
            input_ids=torch.from_numpy(np.concatenate(tokens, dtype=np.int64))[None],
            position_ids=torch.from_numpy(np.concatenate(positions))[None],
            labels=torch.from_numpy(labels)[None],
            target_rows=[torch.from_numpy(part) for part in rows],
            targets=torch.from_numpy(targets),
            old_log_probs=torch.from_numpy(np.concatenate(old_log_probs, dtype=np.float32)),
            advantages=torch.from_numpy(np.repeat(advantages, counts)),
            numbers=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
        )

    def _targets(self, rank: int) -> tuple[IntArray, list[IntArray], IntArray]:
        """Return the targets of a rank's rows, the rows in parts, and the targets' numbers.

        The targets of all ranks are numbered rollout after rollout.
        """
        positions = self._positions
        counts = np.array(list(map(len, positions)))
        first_numbers = np.cumsum(counts) - counts
        labels: list[IntArray] = []
        rows: list[IntArray] = []
        numbers: list[IntArray] = []
        for entry in on_rank(self.sequences.sequence_tokens, rank):
            start, stop, number, offset = (
                int(entry[name]) for name in ("start", "stop", "sequence", "offset")
            )
            first, last = np.searchsorted(positions[number], (start, stop))
            of_entry = positions[number][first:last]
            labels.append(self.rollouts[number]["input_ids"][of_entry + 1])
            rows.append(offset + of_entry - start)
            numbers.append(first_numbers[number] + np.arange(first, last))
        row = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        if not len(row):
            return np.array([IGNORED_TARGET]), [np.zeros(1, np.int64)], row
        rounds = rounds_of(row)
        order = np.concatenate(rounds)
        return (
            np.concatenate(labels, dtype=np.int64)[order],
            [row[entries] for entries in rounds],
            np.concatenate(numbers)[order],
        )

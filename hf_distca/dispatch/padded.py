"""Padded batches as planned micro-batches: where rows of sequences go, and how they travel.

A rank is given a padded batch of B sequences. The sequences of all ranks are the documents of one
or several planned micro-batches. Their tokens travel to the ranks that the plans name, and what the
model makes of them travels back.

Shape suffixes: B sequences of this rank, L columns of its padded batch, F = B · L rows of the
padded batch; N rows of all micro-batches that this rank holds; C integers of each token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from hf_distca.collator.limits import Limits
from hf_distca.collator.refusals import Data
from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.groups import Groups
from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.intervals import expand
from hf_distca.planner.bin_packing import largest_first, place_evenly
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings

PLANS_KEPT = 16
"""Plans of earlier batches that are kept: a reference model, or another pass over rollouts, has the
same lengths."""
NO_RANK = -1
"""Source of the rows that no rank was given: a filler's."""

SHARE = np.dtype(
    [
        ("rank", np.int64),  # the rank that holds these rows
        ("micro_batch", np.int64),
        ("source", np.int64),  # the rank that was given the sequence; NO_RANK for a filler
        ("sequence", np.int64),  # index of the sequence in the batch of its source
        ("start", np.int64),  # first token of the sequence
        ("stop", np.int64),  # one past its last token
    ]
)
"""Tokens [start, stop) of a sequence, held by one rank in one micro-batch."""


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """A padded batch of B sequences with at most L tokens."""

    columns: dict[str, Tensor]  # [B, L] `input_ids` and other integers of each token, by name
    mask: Tensor  # [B, L], 0 for padding


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a padded batch, on the host."""

    firsts: NDArray[np.int64]  # [B] column of each sequence's first token
    lengths: NDArray[np.int64]  # [B] number of tokens of each sequence


def read_sequences(batch: PaddedBatch, limits: Limits) -> Sequences:
    """Read where the tokens of a padded batch are; the only wait for the device.

    Raises:
        ValueError: A mask has holes, or a sequence is beyond the tables of the model.
    """
    input_ids_BL, mask_BL = batch.columns["input_ids"], batch.mask
    if mask_BL.numel() == 0:
        nothing = np.zeros(len(mask_BL), np.int64)
        return Sequences(nothing, nothing)
    is_token_BL = mask_BL != 0
    columns = is_token_BL.shape[1]
    lengths_B = is_token_BL.sum(1)
    firsts_B = is_token_BL.byte().argmax(1)
    lasts_B = columns - 1 - is_token_BL.flip(1).byte().argmax(1)
    lowest_B = input_ids_BL.masked_fill(~is_token_BL, 0).amin(1)
    highest_B = input_ids_BL.masked_fill(~is_token_BL, 0).amax(1)
    figures = torch.stack([lengths_B, firsts_B, lasts_B, lowest_B, highest_B]).cpu().numpy()
    lengths, firsts, lasts, lowest, highest = figures
    for sequence in np.flatnonzero((lengths > 0) & (lasts - firsts + 1 != lengths))[:1]:
        raise Data.HOLES.error(
            sequence=sequence,
            tokens=lengths[sequence],
            first=firsts[sequence],
            last=lasts[sequence],
        )
    if limits.vocabulary is not None:
        for sequence in np.flatnonzero((lowest < 0) | (highest >= limits.vocabulary))[:1]:
            token = lowest[sequence] if lowest[sequence] < 0 else highest[sequence]
            raise Data.PADDED_TOKEN_ID.error(
                sequence=sequence, token=token, last=limits.vocabulary - 1
            )
    longest = int(lengths.argmax())
    limits.check_length(int(lengths[longest]), f"sequence {longest} of a padded batch")
    return Sequences(firsts, lengths)


@dataclass(frozen=True, eq=False)
class PlannedSequences:
    """Plans of the micro-batches for the sequences of all ranks, the same on every rank.

    Attributes:
        shares: [shares] of dtype SHARE, by rank, micro-batch and row.
    """

    plans: tuple[MicroBatchPlan, ...]
    shares: NDArray[np.void]


def plan_sequences(
    lengths_of_ranks: Sequence[Sequence[int]], settings: PlanSettings
) -> PlannedSequences:
    """Plan the micro-batches for sequences of [ranks] lengths each.

    Sequences without tokens are left out.

    Raises:
        ValueError: A sequence has more tokens than all ranks, or one rank where documents stay
            whole, may hold.
    """
    owners = [
        (rank, sequence, length)
        for rank, lengths in enumerate(lengths_of_ranks)
        for sequence, length in enumerate(lengths)
        if length > 0
    ]
    sources, sequences, lengths = np.array(owners, np.int64).reshape(-1, 3).T
    plans, shares = [], []
    for micro_batch, documents in enumerate(_divided(lengths, settings)):
        # Every rank needs a row, as in `RankDocuments`.
        rows = (
            len(documents) if settings.document_layout == "whole" else int(lengths[documents].sum())
        )
        fillers = [1] * (settings.ranks - rows)
        plan = plan_micro_batch([*lengths[documents].tolist(), *fillers], settings)
        plans.append(replace(plan, fillers=len(fillers)))
        no_owner = np.full(len(fillers), NO_RANK)
        document_sources = np.concatenate([sources[documents], no_owner])
        document_sequences = np.concatenate([sequences[documents], no_owner])
        shares.append(_shares(plan, micro_batch, document_sources, document_sequences))
    table = np.concatenate(shares)
    return PlannedSequences(tuple(plans), table[np.argsort(table["rank"], kind="stable")])


def _divided(lengths: NDArray[np.int64], settings: PlanSettings) -> list[NDArray[np.int64]]:
    """Divide documents among as few micro-batches as possible, of about equally many tokens."""
    stay_whole = settings.document_layout == "whole"
    capacity = settings.tokens_per_rank * (1 if stay_whole else settings.ranks)
    bins_per_micro_batch = settings.ranks if stay_whole else 1
    if len(lengths) and lengths.max() > capacity:
        raise Data.LONG_SEQUENCE.error(
            length=lengths.max(),
            limit=capacity,
            where="one rank" if stay_whole else "all ranks together",
        )
    longest_first = largest_first(lengths)
    fewest = max(1, -(-int(lengths.sum()) // (settings.tokens_per_rank * settings.ranks)))
    for micro_batches in count(fewest):  # documents fit at the latest with a bin for each
        bin_of_documents = place_evenly(
            lengths, longest_first, micro_batches * bins_per_micro_batch, capacity
        )
        if bin_of_documents is not None:
            break
    bins = [
        np.flatnonzero(bin_of_documents == number)
        for number in range(micro_batches * bins_per_micro_batch)
    ]
    return [
        np.concatenate(bins[first : first + bins_per_micro_batch])
        for first in range(0, len(bins), bins_per_micro_batch)
    ]


def _shares(
    plan: MicroBatchPlan, micro_batch: int, sources: NDArray[np.int64], sequences: NDArray[np.int64]
) -> NDArray[np.void]:
    """Return the shares of one micro-batch in the order of nano-batches, ranks and rows.

    Args:
        sources, sequences: [documents] owner of each document of the micro-batch.
    """
    parts = []
    for nano in plan.nano_batches:
        segments = nano.layout.segments
        documents = nano.documents[segments["document"]]
        part = np.empty(len(segments), SHARE)
        for name in ("rank", "start", "stop"):
            part[name] = segments[name]
        part["micro_batch"] = micro_batch
        part["source"], part["sequence"] = sources[documents], sequences[documents]
        parts.append(part)
    return np.concatenate(parts)


class RowTravel:
    """Travel of rows between padded batches and the micro-batches that compute them.

    Each token's row is sent once. Rows of padding stay behind, and fillers come from nowhere: both
    are 0.

    Args:
        shares: [shares] of dtype SHARE, by rank, micro-batch and row.
        own: sequences of this rank's padded batch.
        shape: [B, L] of this rank's padded batch.
    """

    def __init__(
        self,
        shares: NDArray[np.void],
        own: Sequences,
        shape: torch.Size,
        groups: Groups,
        device: torch.device,
    ) -> None:
        self._groups, self.shape = groups, shape
        columns = shape[1]
        is_token = shares["source"] != NO_RANK
        # Whether any row travels to another rank: the same on every rank.
        self._crosses = bool(np.any(is_token & (shares["source"] != shares["rank"])))

        # 1. Rows of this rank's padded batch, by the rank that they go to.
        leaving = shares[shares["source"] == groups.rank]
        sequences, rows = leaving["sequence"], leaving["stop"] - leaving["start"]
        padded_rows = expand(sequences * columns + own.firsts[sequences] + leaving["start"], rows)
        self._sent = _counts(leaving["rank"], rows, groups.ranks)

        # 2. Rows that this rank holds. They arrive by the rank that they come from.
        held = shares[shares["rank"] == groups.rank]
        rows = held["stop"] - held["start"]
        offsets = np.cumsum(rows) - rows
        self.held_rows = int(rows.sum())
        source_order = np.argsort(held["source"], kind="stable")
        arriving = source_order[held["source"][source_order] != NO_RANK]
        held_rows = expand(offsets[arriving], rows[arriving])
        self._received = _counts(held["source"][arriving], rows[arriving], groups.ranks)
        self.rows_of_micro_batches = np.bincount(
            held["micro_batch"], weights=rows, minlength=int(shares["micro_batch"].max()) + 1
        ).astype(int)

        self._padded_index, self._held_index = (
            torch.from_numpy(index).to(device, non_blocking=True)
            for index in (padded_rows, held_rows)
        )

    def forth(self, padded_F: Tensor) -> Tensor:
        """Send rows [F, ...] of padded batches; return the rows [N, ...] that this rank holds."""
        arrived = self._exchanged(
            padded_F.index_select(0, self._padded_index), self._sent, self._received
        )
        return arrived.new_zeros((self.held_rows, *arrived.shape[1:])).index_copy_(
            0, self._held_index, arrived
        )

    def back(self, held_N: Tensor) -> Tensor:
        """Send rows [N, ...] that ranks hold; return the rows [F, ...] of the padded batch."""
        arrived = self._exchanged(
            held_N.index_select(0, self._held_index), self._received, self._sent
        )
        return arrived.new_zeros((self.shape.numel(), *arrived.shape[1:])).index_copy_(
            0, self._padded_index, arrived
        )

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Return the rows that arrive here, by the rank that they come from."""
        if not self._crosses:
            return rows
        self._groups.check_open()
        arriving = rows.new_empty((sum(received), *rows.shape[1:]))
        bytes_sent, bytes_received = (_as_bytes(x) for x in (rows, arriving))
        with self._groups.waits.of("rows of padded batches of other ranks"):
            dist.all_to_all_single(
                bytes_received, bytes_sent, received, sent, group=self._groups.exchange
            )
        return arriving


def _counts(ranks: NDArray[np.int64], rows: NDArray[np.int64], number_of_ranks: int) -> list[int]:
    counts: list[int] = (
        np.bincount(ranks, weights=rows, minlength=number_of_ranks).astype(int).tolist()
    )
    return counts


def _as_bytes(rows: Tensor) -> Tensor:
    """Return a view [rows, bytes of a row]: backends do not know every dtype."""
    return rows.reshape(len(rows), rows.shape[1:].numel()).view(torch.uint8)


class _Back(torch.autograd.Function):
    """`RowTravel.back` of several tensors; gradients travel forth.

    One node has all tensors of all micro-batches, so that every rank exchanges gradients, whatever
    its loss reads.
    """

    @staticmethod
    def forward(ctx: Any, travel: RowTravel, *held: Tensor) -> tuple[Tensor, ...]:
        ctx.travel = travel
        return tuple(travel.back(rows) for rows in held)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(ctx.travel.forth(gradient) for gradient in gradients))


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A rank's part in the planned micro-batches of padded batches.

    Attributes:
        micro_batches: of each, the inputs of the model by name, [1, rows] int64, and its bound
            plan.
    """

    micro_batches: list[tuple[dict[str, Tensor], BoundPlan]]
    travel: RowTravel

    def returned(self, outputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return outputs of the model as rows [F, ...] of the padded batch; rows of padding are 0.

        Args:
            outputs: of each micro-batch, the same number of tensors [rows, ...].
        """
        held = [
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*outputs, strict=True)
        ]
        back: Any = _Back.apply
        return list(back(self.travel, *held))


class OneMicroBatch(NamedTuple):
    """Why padded batches must be one micro-batch each, and what helps besides fewer tokens."""

    why: str
    remedy: str


class PaddedBatches:
    """Packs the padded batches of all ranks into planned micro-batches.

    Args:
        dispatcher: plans micro-batches, and binds and carries out their plans.
        count: is called with each batch that a model is about to train on.
        at_once: why a batch that a model trains on must be one micro-batch; None if it need not.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        count: Callable[[PackedBatch], None] | None = None,
        *,
        at_once: OneMicroBatch | None = None,
    ) -> None:
        self.dispatcher, self._count, self._at_once = dispatcher, count, at_once
        # By lengths, and by whether there will be a backward; the latest last.
        self._plans: dict[tuple[tuple[tuple[int, ...], ...], bool], PlannedSequences] = {}
        self._settings = dispatcher.settings  # of those plans

    def __deepcopy__(self, memo: dict[int, Any]) -> "PaddedBatches":
        return self  # the copy of a model runs on the same ranks

    def pack(self, read: Callable[[], PaddedBatch]) -> PackedBatch:
        """Pack the padded batches of all ranks. A collective call.

        Args:
            read: returns the batch of this rank, or raises ValueError.

        Raises:
            ValueError: A rank's batch cannot be packed; on every rank.
        """
        groups, limits = self.dispatcher.groups, self.dispatcher.limits
        given: list[tuple[PaddedBatch, Sequences]] = []

        def lengths() -> tuple[int, ...]:
            batch = read()
            given.append((batch, read_sequences(batch, limits)))
            return tuple(given[0][1].lengths.tolist())

        planned = self._planned(
            tuple(groups.all_gather_checked(lengths, of="lengths of sequences"))
        )
        ((batch, sequences),) = given
        travel = RowTravel(planned.shares, sequences, batch.mask.shape, groups, batch.mask.device)
        rows_NC = travel.forth(
            torch.stack([column_BL.flatten() for column_BL in batch.columns.values()], 1)
        )
        sizes = travel.rows_of_micro_batches.tolist()
        micro_batches = []
        for plan, part_NC in zip(planned.plans, rows_NC.split(sizes), strict=True):
            inputs = {
                name: part_NC[None, :, index].contiguous()
                for index, name in enumerate(batch.columns)
            }
            micro_batches.append((inputs, self.dispatcher.bind(plan)))
        return PackedBatch(micro_batches, travel)

    def see_trained(self, packed: PackedBatch) -> None:
        """See a batch that a model is about to train on.

        Raises:
            ValueError: It must be one micro-batch and is not; on every rank.
        """
        plans = [bound.plan for _, bound in packed.micro_batches]
        if self._at_once is not None and len(plans) > 1:
            settings = self.dispatcher.settings
            tokens = sum(int(plan.tokens.sum()) - plan.fillers for plan in plans)
            limit = settings.ranks * settings.tokens_per_rank
            raise Data.SEVERAL_MICRO_BATCHES.error(
                tokens=tokens, limit=limit, **self._at_once._asdict()
            )
        if self._count is not None:
            self._count(packed)

    def _planned(self, lengths_of_ranks: tuple[tuple[int, ...], ...]) -> PlannedSequences:
        if self._settings is not self.dispatcher.settings:
            self._plans.clear()
            self._settings = self.dispatcher.settings
        has_backward, settings = torch.is_grad_enabled(), self._settings
        if settings.choices is not None and not has_backward:
            settings = replace(settings, choices=settings.choices.forward_only())
        key = lengths_of_ranks, has_backward or settings.choices is None
        planned = self._plans.pop(key, None) or plan_sequences(lengths_of_ranks, settings)
        self._plans[key] = planned
        if len(self._plans) > PLANS_KEPT:
            del self._plans[next(iter(self._plans))]
        return planned

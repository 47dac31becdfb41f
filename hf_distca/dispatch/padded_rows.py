"""Padded batches as planned micro-batches: where rows of sequences go, and how they travel.

Each rank has a padded batch of B sequences. The sequences of all ranks are the documents of one or
several planned micro-batches. Thousands of ranks plan in pods: a sequence stays in the smallest pod
of its rank, and all pods run equally many micro-batches. Sequences with equal prefixes form a
prefix tree, whose branches are documents. Tokens travel to the ranks that the plans name. The
model's result of a row travels back to every sequence that has the row.

Shape suffixes: B sequences of this rank, L columns of its padded batch, F = B · L rows of the
padded batch; N rows of all micro-batches that this rank holds; C integers of each token.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_distca.batches.images import ImageModel
from hf_distca.batches.limits import Limits
from hf_distca.checks.batch_rules import Batch
from hf_distca.checks.capacity_rules import Capacity
from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.padded_images import PaddedImages
from hf_distca.dispatch.process_groups import Groups
from hf_distca.plan.arrays import IntArray, Table
from hf_distca.plan.intervals import expand, rounds_of, row_counts
from hf_distca.planner.given_images import GivenImages
from hf_distca.planner.padding import (
    ALL_RANKS,
    NO_RANK,
    PlannedPadding,
    PodNeeds,
    PodShare,
    plan_padded,
    pod_needs,
)
from hf_distca.planner.prefixes import Hashes, hashes_of
from hf_distca.planner.sequences import on_rank
from hf_distca.planner.settings import PlanSettings

PLANS_KEPT = 16
"""Least number of plans that are kept: a reference model, or another pass over rollouts, has the
same lengths."""


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """A padded batch of B sequences with at most L tokens."""

    columns: dict[str, Tensor]
    """[B, L] `input_ids` and other integers of each token, by name; positions: [axes, B, L]"""
    mask: Tensor  # [B, L], 0 for padding
    images: PaddedImages | None = None  # None for a model that takes no images

    def integers(self) -> Tensor:
        """Return [F, C] the integers of each token."""
        parts = [torch.atleast_2d(column.flatten(-2)) for column in self.columns.values()]
        return torch.cat(parts).T

    def inputs(self, rows_NC: Tensor) -> dict[str, Tensor]:
        """Return the inputs of the model by name, [1, N] or [axes, 1, N], given N tokens."""
        inputs = {}
        first = 0
        for name, column in self.columns.items():
            leading = column.shape[:-2]
            stop = first + leading.numel()
            inputs[name] = rows_NC[:, first:stop].T.reshape(*leading, 1, -1)
            first = stop
        return inputs


SequenceSummary = tuple[tuple[int, ...], tuple[Hashes, ...] | None, GivenImages | None]
"""Lengths of a rank's sequences, their hashes with prefix sharing, and their images if the model
takes any."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a padded batch, on the host."""

    firsts: IntArray  # [B] column of each sequence's first token
    lengths: IntArray  # [B] number of tokens of each sequence
    hashes: tuple[Hashes, ...] | None = None  # of each sequence, with prefix sharing
    images: GivenImages | None = None

    @property
    def summary(self) -> SequenceSummary:
        """Lengths, hashes and images, from which every rank makes the same plans."""
        return tuple(self.lengths.tolist()), self.hashes, self.images


def read_sequences(
    batch: PaddedBatch, limits: Limits, *, share_prefixes: bool = False
) -> Sequences:
    """Read where the tokens of a padded batch are; this waits for the device.

    Args:
        share_prefixes: read the tokens too, and hash them.

    Raises:
        ValueError: A mask has holes, or a sequence is beyond the tables of the model.
    """
    input_ids_BL = batch.columns["input_ids"]
    mask_BL = batch.mask
    images = None if batch.images is None else batch.images.summary
    if mask_BL.numel() == 0:
        nothing = np.zeros(len(mask_BL), np.int64)
        return Sequences(nothing, nothing, () if share_prefixes else None, images)
    # 1. Figures of each sequence, read from the device in one copy.
    is_token_BL = mask_BL != 0
    columns = is_token_BL.shape[1]
    lengths_B = is_token_BL.sum(1)
    firsts_B = is_token_BL.byte().argmax(1)
    lasts_B = columns - 1 - is_token_BL.flip(1).byte().argmax(1)
    lowest_B = input_ids_BL.masked_fill(~is_token_BL, 0).amin(1)
    highest_B = input_ids_BL.masked_fill(~is_token_BL, 0).amax(1)
    figures = torch.stack([lengths_B, firsts_B, lasts_B, lowest_B, highest_B]).cpu().numpy()
    lengths, firsts, lasts, lowest, highest = figures
    # 2. The first sequence that cannot be packed is named.
    for sequence in np.flatnonzero((lengths > 0) & (lasts - firsts + 1 != lengths))[:1]:
        raise Batch.HOLES.error(
            sequence=sequence,
            tokens=lengths[sequence],
            first=firsts[sequence],
            last=lasts[sequence],
        )
    if limits.vocabulary is not None:
        for sequence in np.flatnonzero((lowest < 0) | (highest >= limits.vocabulary))[:1]:
            name = f"sequence {sequence} of a padded batch"
            if lowest[sequence] < 0:
                raise Batch.NEGATIVE_TOKEN.error(name=name, token=lowest[sequence], at="")
            raise Batch.TOKEN_ID.error(
                name=name, token=highest[sequence], at="", last=limits.vocabulary - 1
            )
    longest = int(lengths.argmax())
    limits.check_length(int(lengths[longest]), f"sequence {longest} of a padded batch")
    hashes = _hashes(batch, firsts, lengths) if share_prefixes else None
    return Sequences(firsts, lengths, hashes, images)


def _hashes(batch: PaddedBatch, firsts: IntArray, lengths: IntArray) -> tuple[Hashes, ...]:
    """Return the hashes of each sequence, which depend on all integers and images of its tokens."""
    tokens_BLC = batch.integers().unflatten(0, batch.mask.shape).cpu().numpy()
    hashes = []
    for number, (first, length) in enumerate(zip(firsts.tolist(), lengths.tolist(), strict=True)):
        tokens_LC = tokens_BLC[number, first : first + length]
        if batch.images is not None:
            tokens_LC = np.column_stack([tokens_LC, batch.images.marks(number, length)])
        hashes.append(hashes_of(tokens_LC))
    return tuple(hashes)


@dataclass(frozen=True, eq=False)
class _Route:
    """Rows of a padded batch, and rows that the rank holds, in the order in which they travel."""

    padded_rows: Tensor  # rows of the padded batch, by the rank that they go to
    rank_rows: Tensor  # rows that this rank holds, by the rank that they come from
    sent: list[int]  # [ranks of the pod] padded rows that go to each rank
    received: list[int]  # [ranks of the pod] rows that come from each rank


class RowTravel:
    """Travel of rows between padded batches and the micro-batches that compute them.

    Each row that ranks hold comes from one sequence, and goes back to every sequence that has it.
    Rows of padding do not travel, and no row of a batch travels to a filler: both are 0.

    Args:
        planned: plans of the sequences of all ranks of the pod.
        sequences_of_rank: sequences of this rank's padded batch.
        shape: [B, L] of this rank's padded batch.
    """

    def __init__(
        self,
        planned: PlannedPadding,
        sequences_of_rank: Sequences,
        shape: torch.Size,
        groups: Groups,
        device: torch.device,
    ) -> None:
        self._groups = groups
        self.shape = shape
        self._sequences = sequences_of_rank
        self._device = device
        sequences = planned.sequences
        self._pod = sequences.plans[0].ranks
        rank_rows = planned.travelling(sequences.rank_rows)
        sequence_tokens = planned.travelling(sequences.sequence_tokens)
        # Whether any row travels to another rank: the same on every rank of the pod. Each row of
        # `rank_rows` is among `sequence_tokens`.
        self._crosses = bool(np.any(sequence_tokens["source"] != sequence_tokens["rank"]))
        entries = on_rank(rank_rows, groups.rank)
        rows = row_counts(entries)
        self.row_count = int(rows.sum())
        self.rows_of_micro_batches = np.bincount(
            entries["micro_batch"], weights=rows, minlength=len(sequences.plans)
        ).astype(int)
        self._route_to_rank = self._route(rank_rows)
        self._route_to_padded = self._route_to_rank
        self._rounds = None
        if sequences.shared_rows:
            self._route_to_padded = self._route(sequence_tokens)
            self._rounds = self._rounds_of(sequence_tokens)

    def _route(self, rows: Table) -> _Route:
        """Return the route of rows of dtype TRAVELLING: both ends number them in this order."""
        columns = self.shape[1]
        # 1. Rows that leave this rank's padded batch.
        leaving = rows.compress(rows["source"] == self._groups.rank)
        index = leaving["index"]
        first_rows = index * columns + self._sequences.firsts[index] + leaving["start"]
        sent = _counts(leaving["rank"], row_counts(leaving), self._pod)
        padded_rows = expand(first_rows, row_counts(leaving))

        # 2. Rows that arrive among the rows which this rank computes.
        arriving = self._arriving(rows)
        received = _counts(arriving["source"], row_counts(arriving), self._pod)
        rank_rows = expand(arriving["offset"], row_counts(arriving))
        return _Route(
            torch.from_numpy(padded_rows).to(self._device, non_blocking=True),
            torch.from_numpy(rank_rows).to(self._device, non_blocking=True),
            sent,
            received,
        )

    def _arriving(self, rows: Table) -> Table:
        """Return the entries of rows that this rank holds, by the rank that they come from."""
        on_this_rank = on_rank(rows, self._groups.rank)
        arriving = on_this_rank.compress(on_this_rank["source"] != NO_RANK)
        return arriving.take(np.argsort(arriving["source"], kind="stable"))

    def _rounds_of(self, sequence_tokens: Table) -> list[Tensor]:
        """Return the rounds in which the gradients of a row, one of each sequence, are added up."""
        arriving = self._arriving(sequence_tokens)
        rank_rows = expand(arriving["offset"], row_counts(arriving))
        return [
            torch.from_numpy(entries).to(self._device, non_blocking=True)
            for entries in rounds_of(rank_rows)
        ]

    def to_rank(self, padded_F: Tensor) -> Tensor:
        """Return the rows [N, ...] that this rank holds, from rows [F, ...] of padded batches."""
        route = self._route_to_rank
        arrived = self._exchanged(
            padded_F.index_select(0, route.padded_rows), route.sent, route.received
        )
        return arrived.new_zeros((self.row_count, *arrived.shape[1:])).index_copy_(
            0, route.rank_rows, arrived
        )

    def to_padded(self, rank_N: Tensor) -> Tensor:
        """Return the rows [F, ...] of the padded batch, from rows [N, ...] that ranks hold."""
        route = self._route_to_padded
        arrived = self._exchanged(
            rank_N.index_select(0, route.rank_rows), route.received, route.sent
        )
        return arrived.new_zeros((self.shape.numel(), *arrived.shape[1:])).index_copy_(
            0, route.padded_rows, arrived
        )

    def gradients(self, padded_F: Tensor) -> Tensor:
        """Return gradients [N, ...] of the rows that this rank holds.

        `padded_F` has the gradients of the rows that `to_padded` returned.
        Gradients of all sequences that read a row are added up, in a fixed order.
        """
        if self._rounds is None:
            return self.to_rank(padded_F)
        route = self._route_to_padded
        arrived = self._exchanged(
            padded_F.index_select(0, route.padded_rows), route.sent, route.received
        )
        sums = arrived.new_zeros(
            (self.row_count, *arrived.shape[1:]),
            dtype=torch.promote_types(arrived.dtype, torch.float32),
        )
        for entries in self._rounds:
            sums.index_add_(
                0, route.rank_rows[entries], arrived.index_select(0, entries).to(sums.dtype)
            )
        return sums.to(arrived.dtype)

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Return the rows that this rank receives, by the rank that they come from."""
        if not self._crosses:
            return rows
        name = "rows of padded batches of other ranks"
        return self._groups.exchange_rows(rows, sent, received, name)


def _counts(ranks: IntArray, rows: IntArray, pod: range) -> list[int]:
    """Return [ranks of the pod] the rows of each rank."""
    counts: list[int] = np.bincount(ranks - pod.start, rows, len(pod)).astype(int).tolist()
    return counts


class _ReturnToBatch(torch.autograd.Function):
    """`RowTravel.to_padded` of several tensors; gradients travel by `RowTravel.gradients`.

    One node has all tensors of all micro-batches, so that every rank exchanges gradients, whatever
    its loss reads.
    """

    @staticmethod
    def forward(ctx: Any, travel: RowTravel, *rows_of_rank: Tensor) -> tuple[Tensor, ...]:
        ctx.travel = travel
        return tuple(travel.to_padded(rows) for rows in rows_of_rank)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(ctx.travel.gradients(gradient) for gradient in gradients))


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A rank's part in the planned micro-batches of padded batches.

    Attributes:
        micro_batches: of each, the inputs of the model by name, [1, rows] int64 and those of
            encoders, and its bound plan.
        most_rows: rows of all micro-batches in the pod with the most rows.
    """

    micro_batches: list[tuple[dict[str, Tensor], BoundPlan]]
    travel: RowTravel
    most_rows: int

    def returned(self, outputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return outputs of the model as rows [F, ...] of the padded batch; rows of padding are 0.

        Args:
            outputs: of each micro-batch, the same number of tensors [rows, ...].
        """
        rows_of_rank = [
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*outputs, strict=True)
        ]
        return_to_batch: Any = _ReturnToBatch.apply
        return list(return_to_batch(self.travel, *rows_of_rank))


_Key = tuple[tuple[SequenceSummary, ...], PodShare, bool]
_Arguments = tuple[
    list[tuple[int, ...]], PlanSettings, list[tuple[Hashes, ...]] | None, list[GivenImages]
]


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
        share_prefixes: whether to compute an equal prefix of sequences once.
        image_model: how the model takes images; None if it takes none.
        always_encodes: whether ranks encode fillers in micro-batches without images. ZeRO-3 would
            take the last gradient of an encoder again that gets none.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        count: Callable[[PackedBatch], None] | None = None,
        *,
        at_once: OneMicroBatch | None = None,
        share_prefixes: bool = False,
        image_model: ImageModel | None = None,
        always_encodes: bool = False,
    ) -> None:
        self._share_prefixes = share_prefixes
        self.image_model = image_model
        self._always: tuple[str, ...] = ()
        if image_model is not None and always_encodes:
            self._always = (image_model.modalities[0].name,)
        self.dispatcher = dispatcher
        self._count = count
        self._at_once = at_once
        # By lengths and hashes, by what other pods need, and by whether there will be a backward;
        # the latest last.
        self._plans: dict[_Key, Future[PlannedPadding]] = {}
        self._plans_kept = PLANS_KEPT
        self._settings = dispatcher.settings  # of those plans
        self._planner = ThreadPoolExecutor(1, "planner of padded batches")

    def __deepcopy__(self, memo: dict[int, Any]) -> "PaddedBatches":
        return self  # the copy of a model runs on the same ranks

    def plan_ahead(self, read_batches: Callable[[], Sequence[PaddedBatch]]) -> None:
        """Begin to plan batches that are packed later, on a thread. A collective call.

        `pack` finds the plan of a batch by its lengths and hashes, and plans a batch that is new.

        Args:
            read_batches: returns the batches of this rank, as many as on every rank, or raises
                ValueError.

        Raises:
            ValueError: A rank's batch cannot be packed; on every rank.
        """
        batches = self._gathered(
            lambda: [self._sequences(batch).summary for batch in read_batches()],
            contents="lengths of sequences of later batches",
        )
        # The same sequences may be planned with and without a backward.
        self._plans_kept = max(self._plans_kept, 2 * len(batches))
        for sequences_of_ranks, share in batches:
            self._planned(sequences_of_ranks, share)

    def pack(self, read_batch: Callable[[], PaddedBatch]) -> PackedBatch:
        """Pack the padded batches of all ranks. A collective call.

        Args:
            read_batch: returns the batch of this rank, or raises ValueError.

        Raises:
            ValueError: A rank's batch cannot be packed; on every rank.
        """
        # 1. Plan the sequences of all ranks of the pod.
        groups = self.dispatcher.groups
        batch_of_rank: list[tuple[PaddedBatch, Sequences]] = []

        def lengths_and_hashes() -> list[SequenceSummary]:
            batch = read_batch()
            sequences = self._sequences(batch)
            batch_of_rank.append((batch, sequences))
            return [sequences.summary]

        (gathered,) = self._gathered(lengths_and_hashes, contents="lengths of sequences")
        planned = self._planned(*gathered).result()
        ((batch, sequences),) = batch_of_rank
        # 2. Send the columns of the padded batch to the ranks that compute their rows.
        travel = RowTravel(planned, sequences, batch.mask.shape, groups, batch.mask.device)
        rows_NC = travel.to_rank(batch.integers())
        # 3. Divide the rows that have arrived among the micro-batches, and bind their plans.
        sizes = travel.rows_of_micro_batches.tolist()
        micro_batches = []
        for number, part_NC in enumerate(rows_NC.split(sizes)):
            plan = planned.sequences.plans[number]
            inputs = batch.inputs(part_NC)
            if batch.images is not None and plan.images:
                encoded = planned.images[number]
                inputs |= batch.images.inputs(encoded, plan.images, batch.mask.device)
            micro_batches.append((inputs, self.dispatcher.bind(plan)))
        return PackedBatch(micro_batches, travel, planned.most_rows)

    def see_trained(self, packed: PackedBatch) -> None:
        """See a batch that a model is about to train on.

        Raises:
            ValueError: It must be one micro-batch and is not; on every rank.
        """
        if self._at_once is not None and len(packed.micro_batches) > 1:
            raise Capacity.SEVERAL_MICRO_BATCHES.error(
                tokens=packed.most_rows,
                limit=self.dispatcher.settings_of_pod.capacity,
                **self._at_once._asdict(),
            )
        if self._count is not None:
            self._count(packed)

    def _sequences(self, batch: PaddedBatch) -> Sequences:
        return read_sequences(batch, self.dispatcher.limits, share_prefixes=self._share_prefixes)

    def _gathered(
        self, make: Callable[[], list[SequenceSummary]], *, contents: str
    ) -> list[tuple[tuple[SequenceSummary, ...], PodShare]]:
        """Return the sequences of all ranks of the pod, and its share. A collective.

        Args:
            make: returns the sequences of this rank's batches, as many as on every rank.

        Returns:
            Both of each batch.
        """
        dispatcher = self.dispatcher
        pod = dispatcher.pod
        if len(pod) == dispatcher.settings.ranks:
            of_ranks = dispatcher.groups.all_gather_in_pod(
                pod, make, lambda _: None, contents=contents
            )
            return [(batch, ALL_RANKS) for batch in zip(*of_ranks.values, strict=True)]
        settings = dispatcher.settings_of_pod

        def needs(of_ranks: list[list[SequenceSummary]]) -> list[PodNeeds]:
            batches = zip(*of_ranks, strict=True)
            return [pod_needs(*self._arguments(batch, settings)) for batch in batches]

        gathered = dispatcher.groups.all_gather_in_pod(pod, make, needs, contents=contents)
        shares = (
            PodShare.of(pod.start, own, of_pods)
            for own, of_pods in zip(gathered.own, zip(*gathered.of_pods, strict=True), strict=True)
        )
        return list(zip(zip(*gathered.values, strict=True), shares, strict=True))

    def _planned(
        self, sequences_of_ranks: tuple[SequenceSummary, ...], share: PodShare
    ) -> Future[PlannedPadding]:
        """Return the plans for sequences, which a thread makes if they are new.

        Args:
            sequences_of_ranks: of each rank of the pod.
            share: of the pod.
        """
        # New costs make all plans old ones.
        if self._settings is not self.dispatcher.settings:
            self._plans.clear()
            self._settings = self.dispatcher.settings
        has_backward = torch.is_grad_enabled()
        settings = self.dispatcher.settings_of_pod
        if settings.costs is not None and not has_backward:
            settings = replace(settings, costs=settings.costs.forward_only())
        # A plan that is used again becomes the newest; the oldest is dropped.
        key = sequences_of_ranks, share, has_backward or settings.costs is None
        planned = self._plans.pop(key, None)
        if planned is None:
            planned = self._planner.submit(
                plan_padded, *self._arguments(sequences_of_ranks, settings), self._always, share
            )
        self._plans[key] = planned
        if len(self._plans) > self._plans_kept:
            del self._plans[next(iter(self._plans))]
        return planned

    def _arguments(
        self, sequences_of_ranks: tuple[SequenceSummary, ...], settings: PlanSettings
    ) -> _Arguments:
        """Return lengths, settings, hashes and images, as `plan_padded` takes them."""
        lengths = [lengths for lengths, _, _ in sequences_of_ranks]
        hashes = [hashes for _, hashes, _ in sequences_of_ranks if hashes is not None]
        images = [images for _, _, images in sequences_of_ranks if images is not None]
        return lengths, settings, hashes if self._share_prefixes else None, images

"""Plans with the layout, tolerance and nano-batches that the settings name."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from hf_distca.plan import (
    AttentionKind,
    Layout,
    MicroBatchPlan,
    NanoBatch,
    Plan,
    PlanChoice,
    PlanSummary,
)
from hf_distca.plan.arrays import IntArray
from hf_distca.plan.cost import pairs
from hf_distca.plan.figures import exchange_figures, loads_of
from hf_distca.plan.intervals import local_tasks, split_at
from hf_distca.plan.stages import usual_stages, with_stages
from hf_distca.planner.balance import balance
from hf_distca.planner.bin_packing import split_documents, whole_documents
from hf_distca.planner.division import Division
from hf_distca.planner.layout import (
    check_capacity,
    fixed_layout,
    layout_of_kind,
    layout_of_rows,
    mirrored,
)
from hf_distca.planner.prefix_trees import PrefixTrees, reach, with_branches
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.counts import CountedPlan, count_nano_batches

SMALLEST_SHARE = 0.25
"""Least share of a rank's tokens in a nano-batch of whole documents; fewer hide almost nothing, but
cost exchanges."""


def local_plan(layout: Layout, kind: AttentionKind) -> Plan:
    """Return the plan of a kind of attention without exchanges.

    Every rank computes the rows that it holds.
    """
    layout = layout_of_kind(layout, kind)
    return Plan(layout, local_tasks(layout.segments), layout.ranks, kind.window)


class LaidOut(NamedTuple):
    """Documents of a nano-batch, and where their rows lie."""

    documents: IntArray
    layout: Layout


def lay_out_as_set(
    lengths: IntArray, settings: PlanSettings, trees: PrefixTrees | None = None
) -> list[LaidOut]:
    """Lay out the documents of one global micro-batch, nano-batch after nano-batch.

    Args:
        trees: prefix trees, each laid out as one document; None without prefix sharing.
    """
    if settings.document_layout == "whole":
        documents_of_ranks = whole_documents(lengths, settings.ranks, settings.rows_per_rank)
        return _whole_on_ranks(lengths, documents_of_ranks, settings, trees)
    nano_documents = split_documents(lengths, settings.ranks) if settings.may_ping_pong else None
    if nano_documents is None:
        nano_documents = [np.arange(len(lengths))]
    if settings.document_layout == "fixed":
        layouts = [
            fixed_layout([lengths[documents].tolist()], settings.ranks)
            for documents in nano_documents
        ]
        # Each layout gives one row more to its first ranks. The second is mirrored, so that no rank
        # holds more than without nano-batches.
        layouts[1:] = map(mirrored, layouts[1:])
    else:
        layouts = _divided(lengths, nano_documents, settings, trees)
    return _in_branches(nano_documents, layouts, trees)


def _divided(
    lengths: IntArray,
    nano_documents: Sequence[IntArray],
    settings: PlanSettings,
    trees: PrefixTrees | None,
) -> list[Layout]:
    """Return the layout of each nano-batch, with documents divided by their query-key pairs."""
    check_capacity(lengths, settings.ranks, settings.rows_per_rank)
    attended = reach(settings.dominant_kind, trees)
    work = pairs(0, lengths, attended).astype(np.float64)
    node_sizes = settings.node_sizes or (1,) * settings.ranks
    layouts = []
    for number, documents in enumerate(nano_documents):
        division = Division(lengths, work, over_all=False)
        division.place(documents, node_sizes, is_second=number == 1)
        layouts.append(layout_of_rows(lengths, division.segments, settings.ranks)[1])
    return layouts


def lay_out_placed(rank_lengths: Sequence[Sequence[int]], settings: PlanSettings) -> list[LaidOut]:
    """Lay out documents that stay where they lie, nano-batch after nano-batch.

    Args:
        rank_lengths: [ranks] lengths of each rank's documents.
    """
    lengths = lengths_of(rank_lengths)
    stops = np.cumsum([len(document_lengths) for document_lengths in rank_lengths])
    documents_of_ranks = split_at(np.arange(len(lengths)), stops[:-1])
    return _whole_on_ranks(lengths, documents_of_ranks, settings)


def lengths_of(rank_lengths: Sequence[Sequence[int]]) -> IntArray:
    """Return [documents] tokens of all documents, from the lengths on each rank."""
    return np.array(list(chain(*rank_lengths)), np.int64)


def _whole_on_ranks(
    lengths: IntArray,
    documents_of_ranks: Sequence[IntArray],
    settings: PlanSettings,
    trees: PrefixTrees | None = None,
) -> list[LaidOut]:
    """Lay out each rank's whole documents, in the order of its rows.

    There are two nano-batches if the documents of every rank divide well enough: one has the first
    documents of each rank, the other the last.
    """
    rank_halves = []
    for documents in documents_of_ranks:
        halves = _halves(lengths, documents) if settings.may_ping_pong else None
        if halves is not None:
            rank_halves.append(halves)
    # A rank whose documents do not divide keeps all ranks at one nano-batch.
    nano_batches = [list(documents_of_ranks)]
    if len(rank_halves) == len(documents_of_ranks):
        nano_batches = [list(documents) for documents in zip(*rank_halves, strict=True)]
    layouts = []
    for nano_batch in nano_batches:
        lengths_of_ranks = [lengths[documents].tolist() for documents in nano_batch]
        layouts.append(fixed_layout(lengths_of_ranks))
    nano_documents = [np.concatenate(nano_batch) for nano_batch in nano_batches]
    return _in_branches(nano_documents, layouts, trees)


def _halves(lengths: IntArray, documents: IntArray) -> tuple[IntArray, IntArray] | None:
    """Divide a rank's documents between two of them, as evenly as possible in tokens.

    Returns:
        The first and the last documents; None if the smaller part would have less than
        `SMALLEST_SHARE` of the tokens.
    """
    if len(documents) < 2:
        return None
    tokens = np.cumsum(lengths[documents])
    smaller_part = np.minimum(tokens[:-1], tokens[-1] - tokens[:-1])
    cut = int(smaller_part.argmax())
    if smaller_part[cut] < SMALLEST_SHARE * tokens[-1]:
        return None
    return documents[: cut + 1], documents[cut + 1 :]


def _in_branches(
    nano_documents: Sequence[IntArray], layouts: Sequence[Layout], trees: PrefixTrees | None
) -> list[LaidOut]:
    """Return the layouts of nano-batches, with the branches of prefix trees as documents."""
    return [
        LaidOut(*with_branches(documents, layout, trees))
        for documents, layout in zip(nano_documents, layouts, strict=True)
    ]


def balanced(laid_out: Iterable[LaidOut], settings: PlanSettings) -> tuple[NanoBatch, ...]:
    """Balance the core attention of nano-batches, in one stage."""
    nano_batches = []
    for documents, layout in laid_out:
        plans = {kind: balance(layout, kind, settings) for kind in settings.kinds}
        nano_batches.append(NanoBatch(documents, layout, plans))
    return tuple(nano_batches)


def packed_in_order(
    lengths: IntArray, settings: PlanSettings, trees: PrefixTrees | None = None
) -> NanoBatch:
    """Return documents packed in order, with nothing moved for balance: what a plan is compared to.

    Each rank has whole documents, with tokens as equal as possible, be they more than
    rows_per_rank. Where a document is longer than that, documents are cut where a rank's share
    ends.
    """
    rank_lengths = [lengths.tolist()]
    if int(lengths.max()) <= settings.rows_per_rank:
        # A document is on the rank on whose share its middle lies.
        stops = np.cumsum(lengths)
        twice_middles = 2 * stops - lengths
        rank_of_document = twice_middles * settings.ranks // (2 * stops[-1])
        first_documents = np.searchsorted(rank_of_document, np.arange(1, settings.ranks))
        rank_lengths = [part.tolist() for part in split_at(lengths, first_documents)]
    return _left_on_ranks(fixed_layout(rank_lengths, settings.ranks), settings, trees)


def left_in_place(rank_lengths: Sequence[Sequence[int]], settings: PlanSettings) -> NanoBatch:
    """Return documents that stay where they lie, with nothing moved for balance.

    Args:
        rank_lengths: [ranks] lengths of each rank's documents.
    """
    return _left_on_ranks(fixed_layout(rank_lengths), settings, None)


def _left_on_ranks(
    whole_trees: Layout, settings: PlanSettings, trees: PrefixTrees | None
) -> NanoBatch:
    """Return the nano-batch in which every rank computes the rows that it holds."""
    numbers = np.arange(len(whole_trees.lengths))
    documents, layout = with_branches(numbers, whole_trees, trees)
    plans = {
        kind: replace(local_plan(layout, kind), nodes=settings.nodes) for kind in settings.kinds
    }
    return NanoBatch(documents, layout, plans)


def finished(
    nano_batches: Sequence[NanoBatch],
    packed: NanoBatch,
    settings: PlanSettings,
    stages: int | None = None,
    choice: PlanChoice | None = None,
    counts: Sequence[Mapping[AttentionKind, CountedPlan]] = (),
) -> MicroBatchPlan:
    """Divide K/V rows of balanced nano-batches into stages, and add figures for logs.

    Args:
        packed: the same documents, with nothing moved for balance.
        stages: approximate number of stages, which may take several buffers; None for the usual
            number.
        counts: for each nano-batch, the counts of its plans; none to count them.
    """
    nodes = settings.node_of_ranks
    if not counts:
        counts = count_nano_batches(nano_batches, settings.bytes_per_value, nodes)
    # 1. The stages of every plan.
    staged = []
    for nano_batch, counts_of_kinds in zip(nano_batches, counts, strict=True):
        plans = {
            kind: with_stages(
                plan,
                settings.buffer_rows(kind),
                stages=stages or usual_stages(len(nano_batches)),
                together=stages is not None,
                busiest_rows=counts_of_kinds[kind].most_rows,
            )
            for kind, plan in nano_batch.plans.items()
        }
        staged.append(replace(nano_batch, plans=plans))
    # 2. Figures of the costliest kind of attention, over all nano-batches.
    kind = settings.dominant_kind
    packed_loads = loads_of(packed.plans[kind])
    loads = np.sum([loads_of(nano_batch.plans[kind]) for nano_batch in nano_batches], axis=0)
    forward_bytes = np.sum(
        [counts_of_kinds[kind].forward_bytes for counts_of_kinds in counts], axis=0
    )
    summary = PlanSummary(
        packed_max_over_mean=float(packed_loads.max() / packed_loads.mean()),
        max_over_mean=float(loads.max() / loads.mean()),
        exchange=exchange_figures(forward_bytes, nodes),
    )
    return MicroBatchPlan(tuple(staged), summary, choice=choice)

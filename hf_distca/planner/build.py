"""Plans with the layout, tolerance and nano-batches that the settings name."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

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
from hf_distca.plan.cost import pairs
from hf_distca.plan.intervals import IntArray, local_tasks, row_counts
from hf_distca.plan.metrics import exchange_figures, loads_of
from hf_distca.plan.stages import usual_stages, with_stages
from hf_distca.planner.balance import balance
from hf_distca.planner.bin_packing import split_documents, whole_documents
from hf_distca.planner.branches import Forest, reach, with_branches
from hf_distca.planner.joint import joint_layout
from hf_distca.planner.layout import fixed_layout, layout_of_kind, mirrored
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.counts import CountedPlan, count_plan
from hf_distca.predict.seconds import DIAGONAL_ROWS, StepCosts, Tasks

SMALLEST_SHARE = 0.25
"""Least share of a rank's tokens in a nano-batch of whole documents; fewer hide almost nothing, but
cost exchanges."""


def local_plan(layout: Layout, kind: AttentionKind) -> Plan:
    """Return the plan of a kind of attention without exchanges.

    Every rank computes the rows that it holds.
    """
    layout = layout_of_kind(layout, kind)
    return Plan(layout, local_tasks(layout.segments), layout.ranks, kind.window)


def nano_batches_as_set(
    lengths: IntArray, settings: PlanSettings, forest: Forest | None = None
) -> tuple[NanoBatch, ...]:
    """Lay out the documents of one global micro-batch and balance their core attention.

    The plan has one stage.

    Args:
        forest: the documents are its trees; None if no document continues another.
    """
    if settings.document_layout == "whole":
        on_ranks = whole_documents(lengths, settings.ranks, settings.tokens_per_rank)
        return _on_ranks(lengths, on_ranks, settings, forest)
    groups = split_documents(lengths, settings.ranks) if settings.ping_pong else None
    groups = groups or [np.arange(len(lengths))]
    sizes, window = settings.node_sizes, reach(settings.dominant_kind, forest)
    layouts = []
    for number, group in enumerate(groups):
        # Each layout gives one row more to its first ranks. Mirroring the second, with its nodes,
        # gives its extra rows to the last ranks, so no rank holds more than without nano-batches.
        if settings.document_layout == "fixed":
            layout = fixed_layout([lengths[group].tolist()], settings.ranks)
        else:
            layout = joint_layout(
                lengths[group],
                settings.ranks,
                settings.tokens_per_rank,
                node_sizes=sizes[::-1] if sizes and number else sizes,
                window=window,
                balance_tolerance=settings.balance_tolerance,
                balance_block_size=settings.balance_block_size,
            )
        layouts.append(mirrored(layout) if number else layout)
    return _balanced(groups, layouts, settings, forest)


def nano_batches_placed(
    placed: Sequence[Sequence[int]], settings: PlanSettings
) -> tuple[NanoBatch, ...]:
    """Balance documents that stay where they lie, in one stage.

    They are given as the lengths of each rank's documents.
    """
    lengths = lengths_of(placed)
    stops = np.cumsum([len(row) for row in placed])
    return _on_ranks(lengths, np.split(np.arange(len(lengths)), stops[:-1]), settings)


def lengths_of(placed: Sequence[Sequence[int]]) -> IntArray:
    """Return [documents] tokens of documents that are placed, rank after rank."""
    return np.array([length for lengths in placed for length in lengths], np.int64)


def _on_ranks(
    lengths: IntArray,
    on_ranks: Sequence[IntArray],
    settings: PlanSettings,
    forest: Forest | None = None,
) -> tuple[NanoBatch, ...]:
    """Plan each rank's whole documents, in the order of its rows.

    A nano-batch has the first or the last of them.
    """
    divided, halves = [list(on_ranks)], []
    for documents in on_ranks if settings.ping_pong else ():
        *before, total = np.cumsum(lengths[documents]).tolist() or [0]
        smaller = [
            min(first, total - first) for first in before
        ]  # part, if the documents are cut between two of them
        if max(smaller, default=-1) < SMALLEST_SHARE * total:
            break
        halves.append(np.split(documents, [smaller.index(max(smaller)) + 1]))
    if len(halves) == len(on_ranks):
        divided = [[first for first, _ in halves], [second for _, second in halves]]
    layouts = [
        fixed_layout([lengths[documents].tolist() for documents in each]) for each in divided
    ]
    return _balanced([np.concatenate(each) for each in divided], layouts, settings, forest)


def _balanced(
    groups: Sequence[IntArray],
    layouts: Sequence[Layout],
    settings: PlanSettings,
    forest: Forest | None,
) -> tuple[NanoBatch, ...]:
    nano_batches = []
    for group, layout in zip(groups, layouts, strict=True):
        documents, laid_out = with_branches(group, layout, forest)
        plans = {kind: balance(laid_out, kind, settings) for kind in settings.kinds}
        nano_batches.append(NanoBatch(documents, laid_out, plans))
    return tuple(nano_batches)


def finished(
    lengths: IntArray,
    nano_batches: Sequence[NanoBatch],
    settings: PlanSettings,
    stages: int | None = None,
    choice: PlanChoice | None = None,
    counted: Sequence[Mapping[AttentionKind, CountedPlan]] = (),
    forest: Forest | None = None,
) -> MicroBatchPlan:
    """Divide K/V rows of balanced nano-batches into stages, and add figures for logs.

    Args:
        stages: approximate number of stages, which may take several buffers; None for the usual
            number.
        counted: for each nano-batch, the counts of its plans; none to count them.
    """
    count, together = stages or usual_stages(len(nano_batches)), stages is not None
    nodes, staged = settings.node_of_ranks, []
    counted = counted or [
        {
            kind: count_plan(plan, kind, settings.bytes_per_value, nodes)
            for kind, plan in nano.plans.items()
        }
        for nano in nano_batches
    ]
    for nano, counts in zip(nano_batches, counted, strict=True):
        plans = {}
        for kind, plan in nano.plans.items():
            most, buffer_rows = counts[kind].most_rows, settings.buffer_rows(kind)
            plans[kind] = with_stages(plan, buffer_rows, stages=count, together=together, most=most)
        staged.append(replace(nano, plans=plans))
    kind = settings.dominant_kind
    packed = loads_as_packed(lengths, settings, forest)
    planned = np.sum([loads_of(nano.plans[kind]) for nano in nano_batches], axis=0)
    summary = PlanSummary(
        packed_max_over_mean=float(packed.max() / packed.mean()),
        max_over_mean=float(planned.max() / planned.mean()),
        exchange=exchange_figures(
            np.sum([counts[kind].forward_bytes for counts in counted], axis=0), nodes
        ),
    )
    return MicroBatchPlan(tuple(staged), summary, choice=choice)


def packed_seconds(
    lengths: IntArray, settings: PlanSettings, costs: StepCosts, forest: Forest | None = None
) -> float:
    """Return the seconds of documents packed in order, without exchanges.

    Runs of mixing layers are left out, too.
    """
    packed = _packed(lengths, settings, forest)
    seconds = packed.tokens * costs.token + costs.depth * costs.launches * (
        1 + costs.backward_factor
    )
    for of_kind in costs.kinds:
        window, segments = of_kind.kind.window, layout_of_kind(packed, of_kind.kind).segments
        rows, stops, rank = row_counts(segments), segments["stop"], segments["rank"]
        keys = stops if window is None else np.minimum(stops, rows + window - 1)
        diagonal = rows * np.minimum(rows, DIAGONAL_ROWS)
        every = (rows, keys, pairs(segments["start"], stops, window), diagonal, np.ones_like(rows))
        of_rows, of_keys, of_pairs, of_diagonal, count = (
            np.bincount(rank, each, packed.ranks).astype(float) for each in every
        )
        tasks = Tasks(of_rows, of_keys, of_pairs, np.ones(packed.ranks), of_diagonal, count)
        seconds = seconds + of_kind.layers * (
            of_kind.forward.seconds(tasks) + of_kind.backward.seconds(tasks)
        )
    seconds = seconds * np.array(costs.slowness or 1.0)
    return costs.until_done(seconds, float(seconds.max()))


def loads_as_packed(
    lengths: IntArray, settings: PlanSettings, forest: Forest | None = None
) -> IntArray:
    """Return [ranks] int64: query-key pairs if documents are packed in order.

    The pairs are those of a layer of the dominant kind.
    """
    return loads_of(local_plan(_packed(lengths, settings, forest), settings.dominant_kind))


def _packed(lengths: IntArray, settings: PlanSettings, forest: Forest | None) -> Layout:
    """Return the layout of documents that are packed in order."""
    packed = fixed_layout([lengths.tolist()], settings.ranks)
    _, layout = with_branches(np.arange(len(lengths)), packed, forest)
    return layout

"""Plans with the layout, tolerance and nano-batches that the settings name."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, Layout, MicroBatchPlan, NanoBatch, Plan, PlanSummary
from hf_distca.planner.balance import balance
from hf_distca.planner.bin_packing import whole_documents
from hf_distca.planner.cost import Workers, pairs
from hf_distca.planner.layout import (
    fixed_layout,
    joint_layout,
    layout_of_kind,
    mirrored,
    split_documents,
    split_placed,
)
from hf_distca.planner.metrics import exchange_figures, loads_of
from hf_distca.planner.nodes import node_sizes, nodes_of
from hf_distca.planner.seconds import FloatArray, StepCosts
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.shifted import local_tasks
from hf_distca.planner.stages import usual_stages, with_stages


def local_plan(layout: Layout, window: int | None) -> Plan:
    """Return the plan in which every rank computes the rows that it holds."""
    return Plan(layout, local_tasks(layout.segments), layout.ranks, window)


def plan_tasks(
    layout: Layout,
    kind: AttentionKind,
    settings: PlanSettings,
    workers: Workers | None = None,
    nodes: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    tolerance: FloatArray | None = None,
) -> Plan:
    """Balance the core attention of one kind of layer on a layout, in one stage.

    Args:
        workers: as in `balance`; None for the ranks alone, at the speeds of the settings.
        nodes: as in `balance`; None for the nodes of the ranks alone.
        tolerance: as in `balance`; None for the tolerance of the settings.
    """
    return balance(
        layout_of_kind(layout, kind),
        workers=workers or settings.workers(layout.tokens),
        nodes=settings.nodes if nodes is None else nodes,
        groups=groups,
        window=kind.window,
        balance_tolerance=settings.balance_tolerance if tolerance is None else tolerance,
        balance_block_size=settings.balance_block_size,
        row_bytes=settings.row_bytes(kind),
        row_overhead=settings.row_overhead,
        gather_cost=settings.gather_cost,
    )


def plan_as_set(lengths: Sequence[int] | NDArray[np.int64], settings: PlanSettings) -> MicroBatchPlan:
    """Lay out the documents of one global micro-batch and balance their core attention.

    Args:
        lengths: tokens of each document, at most ranks · tokens_per_rank in all.

    Raises:
        ValueError: the ranks cannot hold the documents, or document_layout="whole" would have to cut one.
    """
    array = np.asarray(lengths, np.int64)
    if settings.document_layout == "whole":
        return _plan_ranks(array, whole_documents(array, settings.ranks, settings.tokens_per_rank), settings)
    groups = split_documents(array, settings.ranks) if settings.ping_pong else None
    groups = groups or [np.arange(len(array))]
    sizes = settings.node_sizes
    layouts = [_layout(array[groups[0]], settings, sizes)]
    if len(groups) == 2:
        # Each layout gives one row more to its first ranks. Mirroring the second gives its extra rows to the last
        # ranks, so no rank holds more than without nano-batches. The nodes are reversed first, as mirroring reverses
        # them back.
        layouts.append(mirrored(_layout(array[groups[1]], settings, sizes and sizes[::-1])))
    return _plan(array, groups, layouts, settings)


def plan_placed(placed: Sequence[Sequence[int]], settings: PlanSettings) -> MicroBatchPlan:
    """Balance the core attention of documents that stay on the ranks where they lie.

    Args:
        placed: for each rank, lengths of its documents in the order of its rows.
    """
    every = np.array([length for lengths in placed for length in lengths], np.int64)
    # Documents are numbered rank after rank.
    return _plan_ranks(every, np.split(np.arange(len(every)), np.cumsum([len(row) for row in placed])[:-1]), settings)


def _plan_ranks(
    lengths: NDArray[np.int64], on_ranks: Sequence[NDArray[np.int64]], settings: PlanSettings
) -> MicroBatchPlan:
    """Plan whole documents on their ranks; a nano-batch has the first or the last ones of each rank.

    Args:
        on_ranks: for each rank, its documents in the order of its rows.
    """
    cuts = split_placed([lengths[documents].tolist() for documents in on_ranks]) if settings.ping_pong else None
    divided = [list(on_ranks)]
    if cuts is not None:
        divided = [
            [documents[:cut] for documents, cut in zip(on_ranks, cuts, strict=True)],
            [documents[cut:] for documents, cut in zip(on_ranks, cuts, strict=True)],
        ]
    layouts = [fixed_layout([lengths[documents].tolist() for documents in each]) for each in divided]
    return _plan(lengths, [np.concatenate(each) for each in divided], layouts, settings)


def _layout(lengths: NDArray[np.int64], settings: PlanSettings, node_sizes: tuple[int, ...] | None) -> Layout:
    if settings.document_layout == "fixed":
        return fixed_layout([lengths.tolist()], settings.ranks)
    return joint_layout(
        lengths,
        settings.ranks,
        settings.tokens_per_rank,
        node_sizes=node_sizes,
        window=settings.dominant_kind.window or settings.dominant_kind.chunk,
        balance_tolerance=settings.balance_tolerance,
        balance_block_size=settings.balance_block_size,
    )


def _plan(
    lengths: NDArray[np.int64],
    groups: Sequence[NDArray[np.int64]],
    layouts: Sequence[Layout],
    settings: PlanSettings,
) -> MicroBatchPlan:
    nano_batches = []
    stages = usual_stages(len(layouts))
    for group, layout in zip(groups, layouts, strict=True):
        plans = {kind: plan_tasks(layout, kind, settings) for kind in settings.kinds}
        staged = {kind: with_stages(each, settings.buffer_rows(kind), stages=stages) for kind, each in plans.items()}
        nano_batches.append(NanoBatch(group, layout, staged))
    return MicroBatchPlan(tuple(nano_batches), summary_of(lengths, nano_batches, settings))


def packed_seconds(lengths: NDArray[np.int64], settings: PlanSettings, costs: StepCosts) -> float:
    """Return the seconds of a micro-batch of documents packed in order and computed without exchange.

    Calls of the kernel are left out.
    """
    packed = fixed_layout([lengths.tolist()], settings.ranks)
    seconds: FloatArray = np.multiply(costs.token, packed.tokens)
    for of_kind in costs.kinds:
        seconds = seconds + of_kind.layers * costs.launches * (1 + costs.backward_factor)
        segments = layout_of_kind(packed, of_kind.kind).segments
        amount = pairs(segments["start"], segments["stop"], of_kind.kind.window)
        each = of_kind.layers * (of_kind.forward.pair + of_kind.backward.pair)
        seconds = seconds + each * np.bincount(segments["rank"], weights=amount, minlength=settings.ranks)
    return costs.until_done(seconds, float(seconds.max()))


def loads_as_packed(lengths: NDArray[np.int64], settings: PlanSettings) -> NDArray[np.int64]:
    """Return [ranks] int64: query-key pairs in a layer of the dominant kind if documents are packed in order."""
    kind = settings.dominant_kind
    packed = layout_of_kind(fixed_layout([lengths.tolist()], settings.ranks), kind)
    cost = pairs(packed.segments["start"], packed.segments["stop"], kind.window)
    return np.bincount(packed.segments["rank"], weights=cost, minlength=packed.ranks).astype(np.int64)


def summary_of(lengths: NDArray[np.int64], nano_batches: Sequence[NanoBatch], settings: PlanSettings) -> PlanSummary:
    """Return figures of a micro-batch's plans for logs."""
    kind = settings.dominant_kind
    as_packed = loads_as_packed(lengths, settings)
    plans = [nano.plans[kind] for nano in nano_batches]
    planned = np.sum([loads_of(plan) for plan in plans], axis=0)
    nodes = nodes_of(node_sizes(settings.ranks, settings.ranks_per_node))
    return PlanSummary(
        packed_max_over_mean=float(as_packed.max() / as_packed.mean()),
        max_over_mean=float(planned.max() / planned.mean()),
        exchange=exchange_figures(plans, settings.row_bytes(kind), nodes),
    )

"""From the document lengths of a global micro-batch to its plan: the planner's front door."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, Layout, MicroBatchPlan, NanoBatch, Plan, PlanSummary
from hf_distca.planner.balance import balance
from hf_distca.planner.chunks import layout_of_kind
from hf_distca.planner.cost import BALANCE_TOLERANCE, RowBytes, Workers, pairs
from hf_distca.planner.layout import fixed_layout, joint_layout
from hf_distca.planner.metrics import exchange_figures, loads_of
from hf_distca.planner.nano_batches import mirrored, split_documents, split_placed
from hf_distca.planner.nodes import node_sizes, nodes_of
from hf_distca.planner.stages import EXCHANGE_BUFFER_BYTES, with_stages
from hf_distca.planner.whole import whole_documents


@dataclass(frozen=True)
class PlanSettings:
    """Everything besides the lengths that a plan depends on; the same on every rank.

    Attributes:
        ranks: ranks that hold tokens.
        tokens_per_rank: the most rows that a rank holds.
        kinds: the kinds of attention of the model's layers.
        bytes_per_value: of the dtype that core attention is computed in.
        document_layout: "joint" places tokens and attention together; "fixed" packs documents in order, with
            equal tokens per rank; "whole" leaves every document on one rank, with tokens as equal as that allows.
        balance_tolerance: how far above the mean a worker's attention may lie, as a fraction of the mean.
        balance_block_size: rows; tasks are cut at multiples of it.
        row_overhead: what the kernel spends on a query row besides its pairs, in pairs (`Kernel.row_overhead`).
        gather_cost: what gathering a byte of K and V on a rank costs, in bytes sent (`Kernel.gather_cost`).
        ping_pong: make two nano-batches of every micro-batch that can be divided.
        exchange_buffer_bytes: the most bytes of K/V rows that a rank sends, and receives, at a time.
        kernel: name of the attention kernel, whose costs these are; "auto" for the one of the device that suits most
            models.
        ranks_per_node: how many consecutive ranks share a node: one number, or one for each node. With 1, or with all
            ranks on one node, all links are alike.

    Raises:
        ValueError: nodes have another number of ranks together.
    """

    ranks: int
    tokens_per_rank: int
    kinds: tuple[AttentionKind, ...] = (AttentionKind(),)
    bytes_per_value: int = 2
    document_layout: str = "joint"
    balance_tolerance: float = BALANCE_TOLERANCE
    balance_block_size: int = 128
    row_overhead: int = 0
    gather_cost: float = 0.0
    ping_pong: bool = False
    exchange_buffer_bytes: int = EXCHANGE_BUFFER_BYTES
    kernel: str = "auto"
    ranks_per_node: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        node_sizes(self.ranks, self.ranks_per_node)

    @property
    def node_sizes(self) -> tuple[int, ...] | None:
        """[nodes] how many ranks each node has; None where all links are alike."""
        sizes = node_sizes(self.ranks, self.ranks_per_node)
        return None if len(sizes) in (1, self.ranks) else sizes

    @property
    def nodes(self) -> tuple[int, ...] | None:
        """[ranks] the node of each rank; None where all links are alike."""
        sizes = self.node_sizes
        return None if sizes is None else nodes_of(sizes)

    @property
    def dominant_kind(self) -> AttentionKind:
        """The kind of the layers that cost the most, for which the joint layout is made."""
        return max(
            self.kinds,
            key=lambda kind: (_reach(kind), kind.q_heads * (kind.dim_qk + kind.dim_v)),
        )

    def row_bytes(self, kind: AttentionKind) -> RowBytes:
        """Size of a row of Q, of K and V, and of O, in one layer of a kind."""
        return RowBytes.of_kind(kind, self.bytes_per_value)


def _reach(kind: AttentionKind) -> float:
    """The most rows that a row attends to."""
    return min(inf if most is None else most for most in (kind.window, kind.chunk))


def plan_micro_batch(lengths: Sequence[int], settings: PlanSettings) -> MicroBatchPlan:
    """Lay out the documents of one global micro-batch and balance their core attention.

    Args:
        lengths: tokens of each document, at most ranks · tokens_per_rank in all.
        settings: see PlanSettings.

    Raises:
        ValueError: the ranks cannot hold the documents, or with document_layout="whole" not without cutting one.
    """
    array = np.asarray(lengths, np.int64)
    if settings.document_layout == "whole":
        return _plan_ranks(array, whole_documents(array, settings.ranks, settings.tokens_per_rank), settings)
    groups = split_documents(array, settings.ranks) if settings.ping_pong else None
    groups = groups or [np.arange(len(array))]
    sizes = settings.node_sizes
    layouts = [_layout(array[groups[0]], settings, sizes)]
    if len(groups) == 2:
        # Each gives one row more to some ranks, the first ones. Mirrored, they meet on one rank only where all ranks
        # hold so many tokens, so that no rank holds more than it would without nano-batches. What is to be mirrored
        # has the nodes in the reverse order too.
        layouts.append(mirrored(_layout(array[groups[1]], settings, sizes and sizes[::-1])))
    return _plan(array, groups, layouts, settings)


def plan_placed(placed: Sequence[Sequence[int]], settings: PlanSettings) -> MicroBatchPlan:
    """Balance the core attention of documents that already lie on ranks and stay there.

    Args:
        placed: lengths of the documents of each rank, in the order of its rows.
        settings: see PlanSettings.
    """
    every = np.array([length for lengths in placed for length in lengths], np.int64)
    # Documents are counted rank after rank.
    return _plan_ranks(every, np.split(np.arange(len(every)), np.cumsum([len(row) for row in placed])[:-1]), settings)


def _plan_ranks(
    lengths: NDArray[np.int64], on_ranks: Sequence[NDArray[np.int64]], settings: PlanSettings
) -> MicroBatchPlan:
    """Plan documents that are whole on their ranks; each nano-batch has the first or the last ones of each rank.

    Args:
        lengths: [documents] tokens of each document.
        on_ranks: for each rank, its documents in the order of its rows.
        settings: see PlanSettings.
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


def plan_tasks(
    layout: Layout,
    kind: AttentionKind,
    settings: PlanSettings,
    workers: Workers | None = None,
    nodes: Sequence[int] | None = None,
) -> Plan:
    """Balance the core attention of one kind of layer on a layout, in one stage.

    Args:
        layout: where the rows of documents are.
        kind: of the layer.
        settings: see PlanSettings.
        workers: as in `balance`.
        nodes: as in `balance`; None for those of the ranks alone.
    """
    return balance(
        layout_of_kind(layout, kind),
        workers=workers,
        nodes=settings.nodes if nodes is None else nodes,
        window=kind.window,
        balance_tolerance=settings.balance_tolerance,
        balance_block_size=settings.balance_block_size,
        row_bytes=settings.row_bytes(kind),
        row_overhead=settings.row_overhead,
        gather_cost=settings.gather_cost,
    )


def plan_stages(plan: Plan, kind: AttentionKind, settings: PlanSettings, *, alone: bool) -> Plan:
    """The plan with its K/V rows divided into stages.

    Args:
        plan: of one kind of layer, in one stage.
        kind: of the layer.
        settings: see PlanSettings.
        alone: whether its nano-batch is the only one of the micro-batch.
    """
    buffer_rows = max(settings.exchange_buffer_bytes // settings.row_bytes(kind).kv, 1)
    return with_stages(plan, buffer_rows, alone=alone)


def _plan(
    lengths: NDArray[np.int64],
    groups: Sequence[NDArray[np.int64]],
    layouts: Sequence[Layout],
    settings: PlanSettings,
) -> MicroBatchPlan:
    nano_batches = []
    for group, layout in zip(groups, layouts, strict=True):
        plans = {
            kind: plan_stages(plan_tasks(layout, kind, settings), kind, settings, alone=len(layouts) == 1)
            for kind in settings.kinds
        }
        nano_batches.append(NanoBatch(group, layout, plans))
    return MicroBatchPlan(tuple(nano_batches), _summary(lengths, nano_batches, settings))


def loads_as_packed(lengths: NDArray[np.int64], settings: PlanSettings) -> NDArray[np.int64]:
    """[ranks] int64: query-key pairs of each rank in a layer of the dominant kind, if each computed its share of the
    documents packed in order."""
    kind = settings.dominant_kind
    packed = layout_of_kind(fixed_layout([lengths.tolist()], settings.ranks), kind)
    cost = pairs(packed.segments["start"], packed.segments["stop"], kind.window)
    return np.bincount(packed.segments["rank"], weights=cost, minlength=packed.ranks).astype(np.int64)


def _summary(lengths: NDArray[np.int64], nano_batches: list[NanoBatch], settings: PlanSettings) -> PlanSummary:
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

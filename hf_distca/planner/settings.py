"""Settings of plans: everything besides document lengths that a plan depends on."""

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import numpy as np

from hf_distca.plan import AttentionKind
from hf_distca.plan.arrays import IntArray
from hf_distca.plan.cost import BALANCE_TOLERANCE, RowBytes, Workers
from hf_distca.plan.nodes import node_sizes, nodes_of
from hf_distca.plan.stages import EXCHANGE_BUFFER_BYTES
from hf_distca.predict.seconds import StepCosts
from hf_distca.units import AUTO

COARSER_TOLERANCE = 0.1
"""Second tolerance that the planner may choose, beside the fine one. Plans with it send fewer rows,
which is faster where links between nodes are slow. 0.3 was hardly ever faster."""
POD_RANKS = 64
"""Least ranks of a pod. Smaller pods hold too few documents to compute as evenly as all ranks."""
POD_RANKS_OF_PADDED = 512
"""Least ranks of a pod that plans padded batches. They are not dealt to pods, so that pods have
unequal work. With 4096 ranks and eight sequences on each, the pod with the most work has 1 to 3 %
more than the mean; with 64 ranks a pod 11 to 21 %."""
ROOM_OF_PODS = 512
"""Tokens of a micro-batch for each token that is left free where ranks plan in pods. Without room
in every pod the last documents would need larger pods."""
UNBALANCED = 1e9
"""Tolerance of plans that move nothing for balance: rows travel only where documents are cut."""


@dataclass(frozen=True)
class PlanSettings:
    """Everything besides document lengths that a plan depends on; the same on every rank.

    With `costs` the planner chooses what is "auto" anew for every micro-batch.

    Attributes:
        ranks: Number of ranks that hold tokens.
        rows_per_rank: Maximum number of rows that a rank holds.
        kinds: Kinds of attention of the model's layers.
        bytes_per_value: Size of a value in the dtype of core attention.
        document_layout: "auto" lets the planner place documents. "fixed" packs documents in order
            with equal tokens per rank. "whole" keeps every document on one rank.
        balance_tolerance: How far a worker's core attention may exceed the mean, as a fraction of
            the mean. "auto" without costs is the fine tolerance.
        balance_block_size: Tasks are cut at multiples of this many rows.
        row_overhead: Cost of a query row besides its pairs, in query-key pairs.
        gather_cost: Cost of gathering a byte of K and V on a rank, in bytes sent.
        ping_pong: Whether to divide micro-batches into two nano-batches where possible. "auto"
            without costs is yes.
        exchange_buffer_bytes: Size of an exchange buffer for K and V rows; a rank has several.
        kernel: Name of the attention kernel; "auto" takes the device's kernel that suits most
            models.
        ranks_per_node: Number of consecutive ranks that share a node: one number, or one for each
            node. With 1, or with all ranks on one node, all links are alike.
        costs: Costs of a step, by which the planner predicts seconds; None if it chooses nothing.
        pod_ranks: Number of ranks that plan together at least, if there are twice as many. "auto"
            is 64.

    Raises:
        ValueError: The nodes do not add up to the number of ranks.
    """

    ranks: int
    rows_per_rank: int
    kinds: tuple[AttentionKind, ...] = (AttentionKind(),)
    bytes_per_value: int = 2
    document_layout: str = "auto"
    balance_tolerance: float | Literal["auto"] = AUTO
    balance_block_size: int = 128
    row_overhead: int = 0
    gather_cost: float = 0.0
    ping_pong: bool | Literal["auto"] = False
    exchange_buffer_bytes: int = EXCHANGE_BUFFER_BYTES
    kernel: str = "auto"
    ranks_per_node: int | tuple[int, ...] = 1
    costs: StepCosts | None = None
    pod_ranks: int | Literal["auto"] = AUTO

    def __post_init__(self) -> None:
        node_sizes(self.ranks, self.ranks_per_node)

    @property
    def capacity(self) -> int:
        """Maximum number of rows that all ranks together hold."""
        return self.ranks * self.rows_per_rank

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """[blocks] ranks of the smallest pods that there may be; one block if there are no pods.

        Blocks have equally many nodes, or one more. Plans have no pods without costs.
        """
        sizes = node_sizes(self.ranks, self.ranks_per_node)
        pod_ranks = POD_RANKS if self.pod_ranks == AUTO else self.pod_ranks
        blocks = min(self.ranks // pod_ranks, len(sizes))
        if blocks < 2 or self.document_layout != AUTO:
            return (self.ranks,)
        return tuple(int(nodes.sum()) for nodes in np.array_split(sizes, blocks))

    def of_pod(self, ranks: range) -> "PlanSettings":
        """Return the settings of some ranks of whole nodes that plan together."""
        nodes = np.asarray(self.node_of_ranks)[ranks.start : ranks.stop]
        sizes: list[int] = np.unique(nodes, return_counts=True)[1].tolist()
        costs = self.costs
        if costs is not None and costs.slowness:
            costs = replace(costs, slowness=costs.slowness[ranks.start : ranks.stop])
        return replace(
            self,
            ranks=len(ranks),
            ranks_per_node=sizes[0] if len(set(sizes)) == 1 else tuple(sizes),
            costs=costs,
            pod_ranks=len(ranks),
        )

    @property
    def micro_batch_tokens(self) -> int:
        """Maximum number of tokens of a micro-batch that is drawn; the rest is room in pods."""
        if len(self.block_sizes) == 1:
            return self.capacity
        return self.capacity - self.capacity // ROOM_OF_PODS

    @property
    def document_capacity(self) -> int:
        """Maximum number of rows of a document: a rank's where documents stay whole, else all."""
        return self.rows_per_rank if self.document_layout == "whole" else self.capacity

    @property
    def tolerances(self) -> tuple[float, ...]:
        """Tolerances of balance that the planner chooses among, the finest first."""
        if self.balance_tolerance != AUTO:
            return (self.balance_tolerance,)
        return (
            (BALANCE_TOLERANCE,) if self.costs is None else (BALANCE_TOLERANCE, COARSER_TOLERANCE)
        )

    @property
    def finest_tolerance(self) -> float:
        """The least of the tolerances."""
        return self.tolerances[0]

    @property
    def nano_batches(self) -> tuple[int, ...]:
        """Numbers of nano-batches that the planner chooses among, the fewest first."""
        if self.ping_pong != AUTO:
            return (2,) if self.ping_pong else (1,)
        return (2,) if self.costs is None else (1, 2)

    @property
    def may_ping_pong(self) -> bool:
        """Whether a micro-batch may have two nano-batches."""
        return self.ping_pong is not False

    @property
    def node_sizes(self) -> tuple[int, ...] | None:
        """[nodes] ranks of each node; None if all links are alike."""
        sizes = node_sizes(self.ranks, self.ranks_per_node)
        return None if len(sizes) in (1, self.ranks) else sizes

    @property
    def nodes(self) -> tuple[int, ...] | None:
        """[ranks] node of each rank; None if all links are alike."""
        return None if self.node_sizes is None else self.node_of_ranks

    @property
    def node_of_ranks(self) -> tuple[int, ...]:
        """[ranks] node of each rank, also if all links are alike."""
        return nodes_of(node_sizes(self.ranks, self.ranks_per_node))

    @property
    def dominant_kind(self) -> AttentionKind:
        """Kind of the costliest layers: rows reach farthest."""
        reach = {kind: min(kind.window or inf, kind.chunk or inf) for kind in self.kinds}
        return max(
            self.kinds, key=lambda kind: (reach[kind], kind.q_heads * (kind.dim_qk + kind.dim_v))
        )

    def row_bytes(self, kind: AttentionKind) -> RowBytes:
        """Return the size of a row of Q, of K and V, and of O in one layer."""
        return RowBytes.of_kind(kind, self.bytes_per_value)

    def workers(self, rows: IntArray) -> Workers | None:
        """Return the speeds of ranks that hold [ranks] rows besides.

        None if all ranks are alike.
        """
        if self.costs is None or not self.costs.slowness:
            return None
        besides = np.array(self.costs.slowness) * rows * self.costs.row_work(self.dominant_kind)
        speeds = tuple(1 / slowness for slowness in self.costs.slowness)
        return Workers(speeds, tuple((besides - besides.min()).tolist()))

    def buffer_rows(self, kind: AttentionKind) -> int:
        """Return how many K/V rows of a layer of a kind an exchange buffer holds."""
        return max(self.exchange_buffer_bytes // self.row_bytes(kind).kv, 1)

"""Settings of plans: everything besides document lengths that a plan depends on."""

from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind
from hf_distca.plan.cost import BALANCE_TOLERANCE, RowBytes, Workers
from hf_distca.plan.nodes import node_sizes, nodes_of
from hf_distca.plan.stages import EXCHANGE_BUFFER_BYTES
from hf_distca.predict.seconds import StepCosts

COARSER_TOLERANCE = 0.1
"""Second tolerance that the planner may choose, beside the one that the settings name. Plans with
it send fewer rows, which is faster where links between nodes are slow. 0.3 was hardly ever
faster."""
UNBALANCED = 1e9
"""Tolerance of plans that move nothing for balance: rows travel only where documents are cut."""


@dataclass(frozen=True)
class Choices:
    """Choices of the planner for every micro-batch, made by predicted seconds."""

    costs: StepCosts
    # Tolerances of balance, the finest first.
    tolerances: tuple[float, ...] = (BALANCE_TOLERANCE, COARSER_TOLERANCE)
    nano_batches: tuple[int, ...] = (1, 2)

    def forward_only(self) -> "Choices":
        """Return the choices for micro-batches without a backward."""
        return replace(self, costs=self.costs.forward_only())

    @classmethod
    def beside(
        cls,
        settings: "PlanSettings",
        costs: StepCosts,
        *,
        coarser: bool = True,
        nano_batches: tuple[int, ...] = (1, 2),
    ) -> "Choices":
        """Return the choices that the settings allow, with their tolerance as the finest."""
        tolerances: tuple[float, ...] = (settings.balance_tolerance,)
        if coarser and settings.balance_tolerance < COARSER_TOLERANCE:
            tolerances = (settings.balance_tolerance, COARSER_TOLERANCE)
        return cls(costs, tolerances, nano_batches if settings.ping_pong else (1,))


@dataclass(frozen=True)
class PlanSettings:
    """Everything besides document lengths that a plan depends on; the same on every rank.

    Attributes:
        ranks: Number of ranks that hold tokens.
        tokens_per_rank: Maximum number of rows that a rank holds.
        kinds: Kinds of attention of the model's layers.
        bytes_per_value: Size of a value in the dtype of core attention.
        document_layout: "auto" lets the planner place documents. "fixed" packs documents in order
            with equal tokens per rank. "whole" keeps every document on one rank.
        balance_tolerance: How far a worker's core attention may exceed the mean, as a fraction of
            the mean.
        balance_block_size: Tasks are cut at multiples of this many rows.
        row_overhead: Cost of a query row besides its pairs, in query-key pairs.
        gather_cost: Cost of gathering a byte of K and V on a rank, in bytes sent.
        ping_pong: Whether to divide micro-batches into two nano-batches where possible.
        exchange_buffer_bytes: Size of an exchange buffer for K and V rows; a rank has several.
        kernel: Name of the attention kernel; "auto" takes the device's kernel that suits most
            models.
        ranks_per_node: Number of consecutive ranks that share a node: one number, or one for each
            node. With 1, or with all ranks on one node, all links are alike.
        choices: Choices that the planner makes for every micro-batch, instead of the settings
            above; None for none.
        slowness: [ranks] time of each rank for the same work, as a multiple of a usual rank; empty
            if all are alike.
        row_work: Cost of a row besides core attention, in query-key pairs. It matters where ranks
            differ in speed.

    Raises:
        ValueError: The nodes do not add up to the number of ranks.
    """

    ranks: int
    tokens_per_rank: int
    kinds: tuple[AttentionKind, ...] = (AttentionKind(),)
    bytes_per_value: int = 2
    document_layout: str = "auto"
    balance_tolerance: float = BALANCE_TOLERANCE
    balance_block_size: int = 128
    row_overhead: int = 0
    gather_cost: float = 0.0
    ping_pong: bool = False
    exchange_buffer_bytes: int = EXCHANGE_BUFFER_BYTES
    kernel: str = "auto"
    ranks_per_node: int | tuple[int, ...] = 1
    choices: Choices | None = None
    slowness: tuple[float, ...] = ()
    row_work: float = 0.0

    def __post_init__(self) -> None:
        node_sizes(self.ranks, self.ranks_per_node)

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

    def workers(self, rows: NDArray[np.int64]) -> Workers | None:
        """Return the speeds of ranks that hold [ranks] rows besides.

        None if all ranks are alike.
        """
        if not self.slowness:
            return None
        besides = np.array(self.slowness) * rows * self.row_work
        speeds = tuple(1 / slowness for slowness in self.slowness)
        return Workers(speeds, tuple((besides - besides.min()).tolist()))

    def buffer_rows(self, kind: AttentionKind) -> int:
        """Return how many K/V rows of a layer of a kind an exchange buffer holds."""
        return max(self.exchange_buffer_bytes // self.row_bytes(kind).kv, 1)

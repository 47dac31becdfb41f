"""The data of a plan: which rank holds which rows, and which worker computes which core attention.

Pure data, the same on every rank: a deterministic function of document lengths and settings.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

PLAN_KEY = "distca_plan"
"""Under this key a batch carries its plan, and under this keyword a model hands it to its attention layers."""

SEGMENT = np.dtype(
    [
        ("document", np.int64),  # index into Layout.lengths
        ("start", np.int64),  # first row of the document in this segment
        ("stop", np.int64),  # one past its last row
        ("rank", np.int64),  # the rank that holds these rows outside core attention
        ("offset", np.int64),  # where row `start` lies among the rank's own rows
    ]
)
"""Rows [start, stop) of a document, held by one rank from `offset` on."""

TASK = np.dtype(
    [
        ("document", np.int64),  # index into Layout.lengths
        ("start", np.int64),  # first query row
        ("stop", np.int64),  # one past the last query row
        ("worker", np.int64),  # who computes it: ranks first, then dedicated servers
    ]
)
"""Core attention of query rows [start, stop) of a document, computed by one worker."""

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class AttentionKind:
    """What sets the core attention of one layer apart from that of another: each kind has plans of its own.

    The default is a layer of Llama-3-8B.

    Attributes:
        window: row p attends to rows max(0, p - window + 1) to p; None for full causal attention.
        q_heads: query heads.
        kv_heads: key-value heads, which divide the query heads.
        dim_qk: numbers of a head of queries and keys.
        dim_v: numbers of a head of values.
        chunk: row p attends to rows from p - p % chunk on at most; None for no chunks.

    Raises:
        ValueError: a number is not positive, or kv_heads does not divide q_heads.
    """

    window: int | None = None
    q_heads: int = 32
    kv_heads: int = 8
    dim_qk: int = 128
    dim_v: int = 128
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide q_heads, got q_heads={self.q_heads} and kv_heads={self.kv_heads}; "
                "each key-value head serves the same number of query heads"
            )

    def __str__(self) -> str:
        reach = "full attention" if self.window is None else f"a window of {self.window}"
        reach += "" if self.chunk is None else f" in chunks of {self.chunk}"
        return (
            f"{reach} with {self.q_heads} query and {self.kv_heads} key-value heads of {self.dim_qk} "
            f"(values of {self.dim_v})"
        )


@dataclass(frozen=True, eq=False)
class Layout:
    """All segments of one micro-batch.

    Attributes:
        lengths: [documents] int64, tokens of each document; a document attends causally to itself only.
        segments: [segments] of dtype SEGMENT, sorted by (rank, offset). They cover every row of every
            document once, and each rank's rows [0, n) without a gap.
        ranks: number of ranks; a rank may hold no rows.
    """

    lengths: NDArray[np.int64]
    segments: NDArray[np.void]
    ranks: int

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[ranks] int64: rows that each rank holds."""
        rows = self.segments["stop"] - self.segments["start"]
        return np.bincount(self.segments["rank"], weights=rows, minlength=self.ranks).astype(np.int64)

    @property
    def has_cuts(self) -> bool:
        """Whether any document lies in several segments."""
        rows = self.segments["stop"] - self.segments["start"]
        return bool(np.any(rows < self.lengths[self.segments["document"]]))

    def of_rank(self, rank: int) -> NDArray[np.void]:
        """The segments of one rank in the order of its rows."""
        mine: NDArray[np.void] = self.segments[self.segments["rank"] == rank]
        return mine


@dataclass(frozen=True, eq=False)
class Plan:
    """A layout and the tasks of one kind of attention layer on it.

    Attributes:
        layout: where the rows are; with chunked attention its documents are the chunks.
        tasks: [tasks] of dtype TASK, sorted by (worker, document, start). They cover every row of every
            document once. A task needs K/V rows [first, stop): first = 0, or the window's edge.
        workers: number of workers; workers 0 to ranks-1 are the ranks themselves (in-place servers),
            any further ones are dedicated servers, which hold no rows.
        window: row p attends to rows max(0, p - window + 1) to p; None for full causal attention.
        stage_rows: K/V rows travel between ranks in stages, one after another, in each of which a rank sends and
            receives at most so many; with a window, receives so many or two windows. None: all at once.
        nodes: [workers] the node of each worker. A K/V row that several ranks of another node read goes to one of
            them, which passes it on to the others. None: it goes to each of them from where it is held.
    """

    layout: Layout
    tasks: NDArray[np.void]
    workers: int
    window: int | None = None
    stage_rows: int | None = None
    nodes: tuple[int, ...] | None = None

    def first_key(self) -> NDArray[np.int64]:
        """[tasks] int64: first K/V row that each task needs."""
        if self.window is None:
            return np.zeros(len(self.tasks), np.int64)
        first: NDArray[np.int64] = np.maximum(self.tasks["start"] - self.window + 1, 0)
        return first


@dataclass(frozen=True, eq=False)
class NanoBatch:
    """One layout and the plans of every kind of attention layer on it.

    Attributes:
        documents: [documents] int64: which of the micro-batch's documents the layout's documents are. A
            document lies in one nano-batch only.
        layout: where the rows are.
        plans: for each kind of attention of the model, its plan.
    """

    documents: NDArray[np.int64]
    layout: Layout
    plans: dict[AttentionKind, Plan]


@dataclass(frozen=True)
class ExchangeFigures:
    """What exchanges carry in one layer's forward, all nano-batches together.

    A worker's, or a node's, bytes are those it sends or those it receives, whichever are more. Where plans know of no
    nodes, each rank is one.

    Attributes:
        bytes_total: bytes that cross between workers, those within nodes and those between nodes.
        bytes_bottleneck: of them, those of the busiest worker.
        bytes_within_nodes: bytes that cross between workers of the same node.
        bytes_within_nodes_bottleneck: of them, those of the busiest worker.
        bytes_within_nodes_busiest_node: of them, those of the busiest node, all of its workers together.
        bytes_between_nodes: bytes that cross between workers of different nodes.
        bytes_between_nodes_bottleneck: of them, those of the busiest worker.
        bytes_between_nodes_busiest_node: of them, those of the busiest node, all of its workers together.
        link_seconds: the time that the busiest link of a worker takes for its bytes.
    """

    bytes_total: int
    bytes_bottleneck: int
    bytes_within_nodes: int
    bytes_within_nodes_bottleneck: int
    bytes_within_nodes_busiest_node: int
    bytes_between_nodes: int
    bytes_between_nodes_bottleneck: int
    bytes_between_nodes_busiest_node: int
    link_seconds: float


@dataclass(frozen=True)
class PlanSummary:
    """What a micro-batch's plan achieves for the layers of the model that cost the most.

    Attributes:
        packed_max_over_mean: query-key pairs of the most loaded rank over the mean, if each rank computed
            its share of the same documents packed in order.
        max_over_mean: the same for the plan.
        exchange: what exchanges carry.
    """

    packed_max_over_mean: float
    max_over_mean: float
    exchange: ExchangeFigures


@dataclass(frozen=True)
class Choice:
    """How a micro-batch is carried out, where the planner could choose.

    Attributes:
        group: ranks of a group that share documents; 1 where every document lies on one rank.
        nano_batches: how many there are.
        tolerance: of balance.
        seconds: that its forward and backward are predicted to take.
        attention: [ranks] seconds of them in core attention.
        packed_seconds: the same if each rank computed its share of the documents packed in order.
    """

    group: int
    nano_batches: int
    tolerance: float
    seconds: float
    attention: tuple[float, ...]
    packed_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class MicroBatchPlan:
    """What one global micro-batch carries with it: the same object on every rank.

    Attributes:
        nano_batches: one, or two (ping and pong) whose exchanges hide behind each other's computation.
            A rank's rows are those of the first nano-batch followed by those of the second.
        summary: figures for logs.
        fillers: how many of the documents, of one token each, only keep ranks without rows in the exchanges.
        choice: how it is carried out; None where the settings left no choice.
    """

    nano_batches: tuple[NanoBatch, ...]
    summary: PlanSummary
    fillers: int = 0
    choice: Choice | None = None

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[ranks] int64: rows that each rank holds."""
        total: NDArray[np.int64] = np.sum([nano.layout.tokens for nano in self.nano_batches], axis=0)
        return total

    def held_by(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """(document of the micro-batch, start, stop) of the rows that a rank holds, in the order of its rows."""
        for nano in self.nano_batches:
            for document, start, stop, *_ in nano.layout.of_rank(rank).tolist():
                yield int(nano.documents[document]), start, stop

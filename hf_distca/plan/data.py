"""Data of a plan: which rank holds which rows, and which worker computes which core attention.

A plan is a deterministic function of document lengths and settings, the same on every rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from hf_distca.plan.arrays import IntArray, Table

PLAN_KEY = "distca_plan"
"""Key of the plan in a batch, and keyword that passes the plan from a model to its attention
layers."""

ATTENTION_NAME = "distca"
"""Value of attn_implementation under which transformers calls planned attention."""

SEGMENT = np.dtype(
    [
        ("document", np.int64),  # index into Layout.lengths
        ("start", np.int64),  # first row of the document in this segment
        ("stop", np.int64),  # one past its last row
        ("rank", np.int64),  # the rank that holds these rows outside core attention
        ("offset", np.int64),  # position of row `start` among the rank's own rows
    ]
)
"""Rows [start, stop) of a document, held by one rank from `offset` on."""

TASK = np.dtype(
    [
        ("document", np.int64),  # index into Layout.lengths
        ("start", np.int64),  # first query row
        ("stop", np.int64),  # one past the last query row
        ("worker", np.int64),  # worker that computes the rows: ranks first, then remote workers
    ]
)
"""Core attention of query rows [start, stop) of a document, computed by one worker."""

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class AttentionKind:
    """Properties of a layer's core attention; layers that differ in them have separate plans.

    The default is a layer of Llama-3-8B.

    Attributes:
        window: row p attends to rows max(0, p - window + 1) to p; None for full causal attention.
        kv_heads: key-value heads, which divide the query heads.
        chunk: row p attends to rows from p - p % chunk on at most; None for no chunks.
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
                f"kv_heads must divide q_heads, got q_heads={self.q_heads} and "
                f"kv_heads={self.kv_heads}; each key-value head serves the same number of query "
                "heads"
            )

    def __str__(self) -> str:
        reach = "full attention" if self.window is None else f"a window of {self.window}"
        reach += "" if self.chunk is None else f" in chunks of {self.chunk}"
        heads = (
            f"{self.q_heads} query and {self.kv_heads} key-value heads of {self.dim_qk} (values of "
            f"{self.dim_v})"
        )
        return f"{reach} with {heads}"


@dataclass(frozen=True, eq=False)
class Branches:
    """Branches of prefix trees: each document has its own rows after a prefix, its parent's path.

    The path of a document is all rows that it attends to: rows [0, start) of its parent's path, and
    then its own rows. Rows are numbered along the path, so that the first own row is `start`.
    """

    parents: IntArray  # [documents] document whose path each one continues; -1 for a root
    starts: IntArray  # [documents] first own row; 0 without a parent


@dataclass(frozen=True, eq=False)
class Layout:
    """Placement of documents on ranks: which rank holds which rows of a nano-batch."""

    lengths: IntArray
    """[documents] one past the last row of each document. A document attends causally to its own
    rows and to the rows of its path before them only."""
    segments: Table
    """[segments] of dtype SEGMENT by (rank, offset): all rows of all documents, and of each rank
    [0, n), once."""
    ranks: int
    branches: Branches | None = None  # None without prefix sharing

    @property
    def tokens(self) -> IntArray:
        """[ranks] int64: rows that each rank holds."""
        rows = self.segments["stop"] - self.segments["start"]
        return np.bincount(self.segments["rank"], weights=rows, minlength=self.ranks).astype(
            np.int64
        )

    @cached_property
    def has_cuts(self) -> bool:
        """Whether any document lies in several segments."""
        rows = self.segments["stop"] - self.segments["start"]
        return bool(np.any(rows < self.own_lengths[self.segments["document"]]))

    @property
    def own_lengths(self) -> IntArray:
        """[documents] int64: rows of each document, without the rows of its path before it."""
        return self.lengths - self.own_starts

    @property
    def own_starts(self) -> IntArray:
        """[documents] int64: first row of each document; 0 for a root."""
        return np.zeros_like(self.lengths) if self.branches is None else self.branches.starts

    def of_rank(self, rank: int) -> Table:
        """Return the segments of one rank in the order of its rows."""
        return self.segments.compress(self.segments["rank"] == rank)


@dataclass(frozen=True, eq=False)
class Plan:
    """Layout and tasks of one kind of attention layer.

    Attributes:
        layout: with chunked attention its documents are the chunks.
        tasks: [tasks] of dtype TASK, sorted by (worker, document, start). They cover every row of
            every document once. A task needs K/V rows [first, stop): first = 0, or the window's
            edge.
        workers: number of workers: the ranks themselves, which hold all rows, then remote workers,
            which hold none.
        window: of `AttentionKind`.
        stage_rows: the most K/V rows that a rank sends, or receives, in one stage, give or take an
            eighth. With a
            window a rank may receive two windows. None: all rows travel at once.
        nodes: [workers] node of each worker. A K/V row that several ranks of another node read goes
            to one of them,
            the gateway, which forwards it to the others. None: rows go to each of them directly.
    """

    layout: Layout
    tasks: Table
    workers: int
    window: int | None = None
    stage_rows: int | None = None
    nodes: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class NanoBatch:
    """One layout and the plans of every kind of attention layer on it."""

    # [documents] of the layout: index in the micro-batch; each is in one nano-batch only.
    documents: IntArray
    layout: Layout
    plans: dict[AttentionKind, Plan]


@dataclass(frozen=True)
class ExchangeFigures:
    """Bytes of the exchanges in one layer's forward, all nano-batches together.

    A bottleneck is the busiest worker. A busiest node counts all its workers together. Their bytes
    are the larger of bytes sent and bytes received. Without nodes in the plan, each rank is a node.
    `link_seconds` is the time that the busiest link of a worker takes.
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
    """Figures of a micro-batch's plan for the costliest layers of the model.

    Max is the pairs of the busiest rank.
    """

    packed_max_over_mean: float  # of the same documents packed in order
    max_over_mean: float
    exchange: ExchangeFigures


@dataclass(frozen=True)
class PlanChoice:
    """Choices of the planner for a micro-batch, and their predicted seconds."""

    group: int  # ranks that share documents; 1 if every document lies on one rank
    nano_batches: int
    tolerance: float
    seconds: float  # of the forward and backward
    attention: tuple[float, ...]  # [ranks] seconds of core attention
    packed_seconds: float = 0.0  # of the same documents packed in order, with their exchanges


FEATURES = np.dtype([(name, np.int64) for name in ("image", "start", "stop", "rank", "offset")])
"""Rows [start, stop) of an image's features, whose placeholders a rank holds. `offset` is the first
of these placeholders among all that the rank holds."""


@dataclass(frozen=True, eq=False)
class PlannedImages:
    """Images of one modality in a micro-batch: which rank encodes each, and where features go.

    An encoder makes features of an image, one row for each of its placeholders among the tokens.
    The rank that encodes an image need not hold its placeholders. A rank encodes its images in the
    order of their numbers.
    """

    rows: IntArray  # [images] rows of features of each
    encoders: IntArray  # [images] rank that encodes each
    features: Table  # of dtype FEATURES, by (rank, offset)

    def encoded_by(self, rank: int) -> IntArray:
        """Return the images that a rank encodes."""
        return np.flatnonzero(self.encoders == rank)


@dataclass(frozen=True, eq=False)
class MicroBatchPlan:
    """Plan of one global micro-batch, the same on every rank of a pod.

    Ranks of a plan are numbered from the first rank of the pod on. Without pods the plan is of all
    ranks. There are one or two nano-batches; the exchanges of two hide behind each other's
    computation. A rank's rows are its rows of the first nano-batch, then its rows of the second.
    """

    nano_batches: tuple[NanoBatch, ...]
    summary: PlanSummary
    fillers: int = 0  # documents of one token that only keep ranks without rows in the exchanges
    choice: PlanChoice | None = None  # None if the settings left no choice
    shared_rows: int = 0  # tokens that prefix sharing does not compute again
    # By modality, such as "image": what ranks encode; None if the micro-batch has text alone.
    images: Mapping[str, PlannedImages] | None = None
    first_rank: int = 0  # of the pod
    rows_of_other_pods: int = 0

    @property
    def ranks(self) -> range:
        """Ranks of the pod, among all ranks that train together."""
        return range(self.first_rank, self.first_rank + self.nano_batches[0].layout.ranks)

    @property
    def tokens(self) -> IntArray:
        """[ranks] int64: rows that each rank holds."""
        total: IntArray = np.sum([nano.layout.tokens for nano in self.nano_batches], axis=0)
        return total

    @property
    def document_tokens(self) -> int:
        """Tokens of all documents on all ranks, shared ones included, without fillers."""
        rows = int(self.tokens.sum()) + self.rows_of_other_pods
        return rows - self.fillers + self.shared_rows

    def held_by(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield (document of the micro-batch, start, stop) of the rows that a rank holds.

        They come in the order of the rank's rows. The rank is one of all ranks.
        """
        for nano in self.nano_batches:
            for document, start, stop, *_ in nano.layout.of_rank(rank - self.first_rank).tolist():
                yield int(nano.documents[document]), start, stop

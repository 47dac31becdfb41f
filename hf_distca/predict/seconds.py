"""Seconds of core attention, of the rest of a layer and of exchanges on a device."""

from dataclasses import dataclass, replace
from itertools import combinations
from operator import add

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, Direction

FloatArray = NDArray[np.float64]

DIAGONAL_ROWS = 512
"""Keys in a block of the CPU kernel, the largest block of any kernel."""


@dataclass(frozen=True)
class Tasks:
    """[workers] counts of the core attention that each worker computes."""

    rows: FloatArray  # query rows
    keys: FloatArray  # K/V rows that are read
    pairs: FloatArray  # query-key pairs
    calls: FloatArray  # calls of the kernel
    # Rows, each times its task's rows, at most DIAGONAL_ROWS; 0 for keys that all rows see.
    diagonal: FloatArray
    tasks: FloatArray  # tasks in these calls; a document that is cut has more of them


@dataclass(frozen=True)
class KernelCost:
    """Costs of a kernel, in seconds.

    A call takes call + row · query rows + key · K/V rows + pair · query-key pairs + diagonal ·
    diagonal rows + task · tasks. Kernels compute whole blocks of keys on the causal diagonal, so a
    pair of a short document takes longer. Kernels compute whole blocks of query rows of each task,
    so a cut document takes longer than a whole one.
    """

    call: float
    row: float
    key: float
    pair: float
    diagonal: float = 0.0
    task: float = 0.0  # 0 in profiles that were measured without short tasks

    def seconds(self, tasks: Tasks) -> FloatArray:
        """Return [workers] seconds of each worker's tasks."""
        total: FloatArray = self.call * tasks.calls + self.row * tasks.rows + self.key * tasks.keys
        return (
            total
            + self.pair * tasks.pairs
            + self.diagonal * tasks.diagonal
            + self.task * tasks.tasks
        )

    def for_kind(self, measured: AttentionKind, kind: AttentionKind) -> "KernelCost":
        """Return the cost of another kind: K/V rows scale with key-value heads, all but calls with query heads."""
        dims = (kind.dim_qk + kind.dim_v) / (measured.dim_qk + measured.dim_v)
        queries, keys = (
            dims * kind.q_heads / measured.q_heads,
            dims * kind.kv_heads / measured.kv_heads,
        )
        return KernelCost(
            call=self.call,
            row=self.row * queries,
            key=self.key * keys,
            pair=self.pair * queries,
            diagonal=self.diagonal * queries,
            task=self.task * queries,
        )

    def scaled(self, by: float) -> "KernelCost":
        """Return the cost of calls that take `by` times as long."""
        return KernelCost(*(cost * by for cost in vars(self).values()))

    def plus(self, other: "KernelCost") -> "KernelCost":
        """Return the cost of this call and another one on the same rows."""
        return KernelCost(*map(add, vars(self).values(), vars(other).values()))

    @classmethod
    def fitted(
        cls, tasks: Tasks, seconds: FloatArray, weights: FloatArray | None = None
    ) -> "KernelCost":
        """Fit costs to measured times, with the least error relative to each time and no negative cost.

        Args:
            tasks: [n] measured calls.
            seconds: [n] time of each call.
            weights: [n] weight of each squared error; None for equal weights.
        """
        counts = np.sqrt(np.ones_like(seconds) if weights is None else weights)
        amounts = [tasks.calls, tasks.rows, tasks.keys, tasks.pairs, tasks.diagonal, tasks.tasks]
        columns = np.stack(amounts, axis=1) * (counts / seconds)[:, None]
        best, least = np.zeros(len(amounts)), np.inf
        for count in range(
            1, len(amounts) + 1
        ):  # of every subset of the costs, the least-squares solution
            for chosen in combinations(range(len(amounts)), count):
                part = columns[:, chosen]
                found, *_ = np.linalg.lstsq(part, counts, rcond=None)
                error = float(np.square(part @ found - counts).sum())
                if found.min() >= 0 and error < least:
                    best, least = np.zeros(len(amounts)), error
                    best[list(chosen)] = found
        return cls(*best.tolist())


@dataclass(frozen=True)
class LinkCost:
    """Seconds of an exchange: latency + bytes / bandwidth."""

    latency: float
    bandwidth: float  # bytes per second that a rank sends, and receives at the same time

    def seconds(self, size: FloatArray) -> FloatArray:
        """Return [ranks] seconds of an exchange of [ranks] bytes; 0 where there are no bytes."""
        taken: FloatArray = np.where(size > 0, self.latency + size / self.bandwidth, 0.0)
        return taken

    @classmethod
    def fitted(
        cls, size: FloatArray, seconds: FloatArray, weights: FloatArray | None = None
    ) -> "LinkCost":
        """Fit a link to [n] bytes and [n] seconds, with the least error relative to each time."""
        none = np.zeros_like(size)
        fit = KernelCost.fitted(
            Tasks(size, none, none, np.ones_like(size), none, none), seconds, weights
        )
        return cls(fit.call, 1 / fit.row if fit.row else np.inf)


@dataclass(frozen=True)
class Links:
    """Seconds of exchanges between ranks, inside nodes and between them."""

    within: LinkCost
    between: LinkCost
    start: float = 0.0  # seconds of a rank's own time to start an exchange
    # Seconds of a rank's own time per byte exchanged while it computes; CPUs' transport takes it.
    busy: float = 0.0


@dataclass(frozen=True)
class KindCosts:
    """Costs of a kernel call and of its backward, in the layers of one kind."""

    kind: AttentionKind
    layers: int
    forward: KernelCost
    backward: KernelCost

    def kernel(self, direction: Direction) -> KernelCost:
        """Return the costs of a kernel call in a direction."""
        return self.forward if direction == "forward" else self.backward


@dataclass(frozen=True)
class MixingCosts:
    """Costs of a layer that mixes rows in order, in seconds of its forward and in bytes."""

    layers: int  # number of mixing modules
    before: float  # seconds per token before its convolution
    mix: float  # seconds per token in its convolution and recurrence
    continued: float  # further seconds per token of a segment with earlier segments, for r and A
    after: float  # seconds per token after its recurrence
    run: float  # seconds of a run of the recurrence's kernel, whatever its size
    halo: float  # bytes of the rows before a segment
    state: float  # bytes of A and B of a segment

    @property
    def token(self) -> float:
        """Seconds per token of a whole document."""
        return self.before + self.mix + self.after

    def scaled(self, by: float) -> "MixingCosts":
        """Return the costs of computation that takes `by` times as long."""
        seconds = {
            name: getattr(self, name) * by
            for name in ("before", "mix", "continued", "after", "run")
        }
        return replace(self, **seconds)


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a micro-batch on every rank; plans are chosen by them.

    Attributes:
        before: seconds per token before core attention, in one layer's forward.
        after: seconds per token after core attention, in one layer's forward.
        backward_factor: backward over forward of `before` and `after`; with checkpointing it
            includes the recomputation.
        head: seconds per token in the output head and the loss, forward and backward.
        launches: seconds of a layer's forward per nano-batch, whatever its size; 0 if the host runs
            ahead.
        slowness: [ranks] factor by which a rank is slower than these costs; empty if all ranks are
            alike.
        ranks_per_core: CPU ranks that share a core, all of them busy while these costs were
            measured. A core that one rank leaves idle makes the others faster. 1 if every rank has
            its own cores or GPU.
        mixing: costs of layers that mix rows in order; None for a model without.
        directions: passes that a micro-batch takes.
    """

    kinds: tuple[KindCosts, ...]
    before: float
    after: float
    backward_factor: float
    head: float
    exchange: Links
    launches: float = 0.0
    slowness: tuple[float, ...] = ()
    ranks_per_core: float = 1.0
    mixing: MixingCosts | None = None
    directions: tuple[Direction, ...] = ("forward", "backward")

    def forward_only(self) -> "StepCosts":
        """Return the costs of a forward without gradients.

        A head takes a third of the time of both passes.
        """
        kinds = tuple(
            replace(of_kind, backward=of_kind.backward.scaled(0.0)) for of_kind in self.kinds
        )
        return replace(
            self, kinds=kinds, backward_factor=0.0, head=self.head / 3, directions=("forward",)
        )

    def until_done(self, work: FloatArray | float, longest: float) -> float:
        """Return the seconds until all ranks are done.

        Ranks that share cores take turns. A rank that is done leaves its core to the others, until
        every rank that still computes has a core of its own.

        Args:
            work: [ranks] seconds that each rank computes while all share their cores; one number if
                all are alike.
            longest: seconds of the rank that is done last, if no rank shared its cores.
        """
        if self.ranks_per_core == 1:
            return longest
        in_order = np.sort(np.atleast_1d(work))
        active = np.arange(len(in_order), 0, -1) / len(in_order)
        in_turns = np.sum(
            np.diff(in_order, prepend=0.0) * np.maximum(active, 1 / self.ranks_per_core)
        )
        return max(float(in_turns), longest / self.ranks_per_core)

    def row_work(self, kind: AttentionKind) -> float:
        """Return the cost of a row besides core attention, in query-key pairs of layers of a kind."""
        (of_kind,) = (each for each in self.kinds if each.kind == kind)
        pair = of_kind.layers * (of_kind.forward.pair + of_kind.backward.pair)
        return self.token / pair if pair else 0.0

    @property
    def depth(self) -> int:
        """Number of layers with attention."""
        return sum(of_kind.layers for of_kind in self.kinds)

    @property
    def between(self) -> float:
        """Seconds of a token from one core attention to the next, in the forward."""
        mixing = self.mixing.layers * self.mixing.token / self.depth if self.mixing else 0.0
        return self.before + self.after + mixing

    @property
    def token(self) -> float:
        """Seconds of a token in everything but core attention, forward and backward."""
        return self.depth * self.between * (1 + self.backward_factor) + self.head

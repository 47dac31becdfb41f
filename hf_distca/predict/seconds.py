"""Seconds of core attention, of the rest of a layer and of exchanges on a device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from hf_distca.plan import AttentionKind, Direction
from hf_distca.plan.arrays import FloatArray

DIAGONAL_ROWS = 512
"""Keys in a block of the CPU kernel, the largest block of any kernel.

Kernels compute whole blocks on the diagonal, also the keys that no row of the block sees.
"""


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
        """Return the cost for another kind of attention, which has other heads and head dims.

        The cost of K/V rows scales with key-value heads. All other costs scale with query heads,
        but the cost of a call stays the same.
        """
        dims = (kind.dim_qk + kind.dim_v) / (measured.dim_qk + measured.dim_v)
        queries = dims * kind.q_heads / measured.q_heads
        keys = dims * kind.kv_heads / measured.kv_heads
        return KernelCost(
            call=self.call,
            row=self.row * queries,
            key=self.key * keys,
            pair=self.pair * queries,
            diagonal=self.diagonal * queries,
            task=self.task * queries,
        )

    def scaled(self, factor: float) -> "KernelCost":
        """Return the cost of calls that take `factor` times as long."""
        return KernelCost(**{name: cost * factor for name, cost in vars(self).items()})

    def plus(self, further: "KernelCost") -> "KernelCost":
        """Return the cost of this call and a further one on the same rows."""
        sums = {name: cost + getattr(further, name) for name, cost in vars(self).items()}
        return KernelCost(**sums)

    @classmethod
    def fitted(
        cls, tasks: Tasks, seconds: FloatArray, weights: FloatArray | None = None
    ) -> "KernelCost":
        """Fit costs to measured times, with the least relative error and no negative cost.

        Some costs may have to be zero for that. Every subset of the costs is tried, and of each
        subset the least-squares solution.

        Args:
            tasks: [n] measured calls.
            seconds: [n] time of each call.
            weights: [n] weight of each squared error; None for equal weights.
        """
        amounts = [tasks.calls, tasks.rows, tasks.keys, tasks.pairs, tasks.diagonal, tasks.tasks]
        # A predicted time over the measured one should be 1; both sides carry the weight's root.
        targets = np.sqrt(np.ones_like(seconds) if weights is None else weights)
        columns = np.stack(amounts, axis=1) * (targets / seconds)[:, None]
        costs = np.zeros(len(amounts))
        least_error = np.inf
        for subset in _subsets(len(amounts)):
            columns_of_subset = columns[:, subset]
            solution, *_ = np.linalg.lstsq(columns_of_subset, targets, rcond=None)
            error = float(np.square(columns_of_subset @ solution - targets).sum())
            if solution.min() >= 0 and error < least_error:
                least_error = error
                costs = np.zeros(len(amounts))
                costs[subset] = solution
        call, row, key, pair, diagonal, task = costs.tolist()
        return cls(call, row, key, pair, diagonal, task)


def _subsets(count: int) -> Iterator[list[int]]:
    """Yield all subsets of the numbers below `count` but the empty one, small ones first."""
    for size in range(1, count + 1):
        for subset in combinations(range(count), size):
            yield list(subset)


@dataclass(frozen=True)
class LinkCost:
    """Seconds of an exchange: latency + bytes / bandwidth."""

    latency: float
    bandwidth: float  # bytes per second that a rank sends, and receives at the same time

    def seconds(self, size: FloatArray) -> FloatArray:
        """Return [ranks] seconds of an exchange of [ranks] bytes; 0 where there are no bytes."""
        seconds: FloatArray = np.where(size > 0, self.latency + size / self.bandwidth, 0.0)
        return seconds

    @classmethod
    def fitted(
        cls, size: FloatArray, seconds: FloatArray, weights: FloatArray | None = None
    ) -> "LinkCost":
        """Fit a link to [n] bytes and [n] seconds, with the least error relative to each time.

        An exchange is fitted like a kernel call of as many rows as it has bytes.
        """
        zeros = np.zeros_like(size)
        exchanges = Tasks(
            rows=size,
            keys=zeros,
            pairs=zeros,
            calls=np.ones_like(size),
            diagonal=zeros,
            tasks=zeros,
        )
        fit = KernelCost.fitted(exchanges, seconds, weights)
        return cls(latency=fit.call, bandwidth=1 / fit.row if fit.row else np.inf)


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
    before_mixing: float  # seconds per token before its convolution
    mix: float  # seconds per token in its convolution and recurrence
    continued: float  # further seconds per token of a segment with earlier segments, for r and A
    after_mixing: float  # seconds per token after its recurrence
    run: float  # seconds of a run of the recurrence's kernel, whatever its size
    halo: float  # bytes of the rows before a segment
    state: float  # bytes of A and B of a segment

    @property
    def token(self) -> float:
        """Seconds per token of a whole document."""
        return self.before_mixing + self.mix + self.after_mixing

    def scaled(self, factor: float) -> "MixingCosts":
        """Return the costs of computation that takes `factor` times as long."""
        return replace(
            self,
            before_mixing=self.before_mixing * factor,
            mix=self.mix * factor,
            continued=self.continued * factor,
            after_mixing=self.after_mixing * factor,
            run=self.run * factor,
        )


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a micro-batch on every rank; plans are chosen by them.

    Attributes:
        kinds: of core attention, for each kind of attention.
        before_attention: seconds per token before core attention, in one layer's forward.
        after_attention: seconds per token after core attention, in one layer's forward.
        backward_factor: backward over forward of `before_attention` and `after_attention`; with
            checkpointing it includes the recomputation.
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
    before_attention: float
    after_attention: float
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
        kinds = tuple(replace(kind, backward=kind.backward.scaled(0.0)) for kind in self.kinds)
        return replace(
            self, kinds=kinds, backward_factor=0.0, head=self.head / 3, directions=("forward",)
        )

    def calls(self, kernel_calls: int) -> float:
        """Return the seconds of a step that its documents do not change.

        Args:
            kernel_calls: of each layer in each direction.
        """
        seconds = self.depth * self.launches * (1 + self.backward_factor)
        for kind in self.kinds:
            for direction in self.directions:
                seconds += kind.layers * kernel_calls * kind.kernel(direction).call
        return seconds

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
        # From one rank's end to the next one's, the ranks that still compute speed up alike.
        ascending = np.sort(np.atleast_1d(work))
        intervals = np.diff(ascending, prepend=0.0)
        computing = np.arange(len(ascending), 0, -1) / len(ascending)  # share of the ranks
        busiest = np.sum(intervals * np.maximum(computing, 1 / self.ranks_per_core))
        return max(float(busiest), longest / self.ranks_per_core)

    def row_work(self, kind: AttentionKind) -> float:
        """Return the cost of a row besides core attention, in query-key pairs.

        A pair costs what it costs in layers of a kind.
        """
        (costs,) = (costs for costs in self.kinds if costs.kind == kind)
        pair = costs.layers * (costs.forward.pair + costs.backward.pair)
        return self.token / pair if pair else 0.0

    @property
    def depth(self) -> int:
        """Number of layers with attention."""
        return sum(kind.layers for kind in self.kinds)

    @property
    def between(self) -> float:
        """Seconds of a token from one core attention to the next, in the forward."""
        mixing = self.mixing.layers * self.mixing.token / self.depth if self.mixing else 0.0
        return self.before_attention + self.after_attention + mixing

    @property
    def token(self) -> float:
        """Seconds of a token in everything but core attention, forward and backward."""
        return self.depth * self.between * (1 + self.backward_factor) + self.head

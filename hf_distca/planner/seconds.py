"""What core attention, the rest of a layer and exchanges take of a device, in seconds."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, Direction

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Tasks:
    """Core attention that workers compute, counted.

    Attributes:
        rows: [workers] query rows.
        keys: [workers] K/V rows that are read.
        pairs: [workers] query-key pairs.
        calls: [workers] calls of the kernel.
    """

    rows: FloatArray
    keys: FloatArray
    pairs: FloatArray
    calls: FloatArray


@dataclass(frozen=True)
class KernelCost:
    """Seconds of a kernel call: call + row · query rows + key · K/V rows + pair · query-key pairs.

    Attributes:
        call: of each call, whatever it computes.
        row: of a query row.
        key: of a K/V row.
        pair: of a query-key pair.
    """

    call: float
    row: float
    key: float
    pair: float

    def seconds(self, tasks: Tasks) -> FloatArray:
        """[workers] what the tasks of each worker take."""
        amount: FloatArray = (
            self.call * tasks.calls + self.row * tasks.rows + self.key * tasks.keys + self.pair * tasks.pairs
        )
        return amount

    def for_kind(self, measured: AttentionKind, kind: AttentionKind) -> "KernelCost":
        """The cost of another kind of attention: pairs and query rows by the numbers of their query heads, K/V rows
        by those of their key-value heads."""
        queries = kind.q_heads * (kind.dim_qk + kind.dim_v) / (measured.q_heads * (measured.dim_qk + measured.dim_v))
        keys = kind.kv_heads * (kind.dim_qk + kind.dim_v) / (measured.kv_heads * (measured.dim_qk + measured.dim_v))
        return KernelCost(self.call, self.row * queries, self.key * keys, self.pair * queries)

    def scaled(self, by: float) -> "KernelCost":
        """The costs of calls that take `by` times as long."""
        return KernelCost(self.call * by, self.row * by, self.key * by, self.pair * by)

    def plus(self, other: "KernelCost") -> "KernelCost":
        """The costs of this call and another one on the same rows."""
        return KernelCost(self.call + other.call, self.row + other.row, self.key + other.key, self.pair + other.pair)

    @classmethod
    def fitted(cls, tasks: Tasks, seconds: FloatArray, weights: FloatArray | None = None) -> "KernelCost":
        """The costs, none of them negative, that miss measured times by the least, in relation to each time.

        Of each subset of the four the least-squares solution is taken, if it has no negative number, and of these the
        one with the least error.

        Args:
            tasks: [n] calls that were measured.
            seconds: [n] what each took.
            weights: [n] how much the squared error of each counts; None for all alike.
        """
        counts = np.sqrt(np.ones_like(seconds) if weights is None else weights)
        columns = np.stack([tasks.calls, tasks.rows, tasks.keys, tasks.pairs], axis=1) * (counts / seconds)[:, None]
        best, least = np.zeros(4), np.inf
        for count in range(1, 5):
            for chosen in combinations(range(4), count):
                part = columns[:, chosen]
                found, *_ = np.linalg.lstsq(part, counts, rcond=None)
                error = float(np.square(part @ found - counts).sum())
                if found.min() >= 0 and error < least:
                    best, least = np.zeros(4), error
                    best[list(chosen)] = found
        return cls(*best.tolist())


@dataclass(frozen=True)
class LinkCost:
    """Seconds of an exchange: latency + bytes / bandwidth.

    Attributes:
        latency: of an exchange, in seconds.
        bandwidth: bytes per second that a rank sends, and receives at the same time.
    """

    latency: float
    bandwidth: float

    def seconds(self, size: FloatArray) -> FloatArray:
        """[ranks] what an exchange of so many bytes takes; none where there is nothing."""
        taken: FloatArray = np.where(size > 0, self.latency + size / self.bandwidth, 0.0)
        return taken

    @classmethod
    def fitted(cls, size: FloatArray, seconds: FloatArray) -> "LinkCost":
        """The link that misses measured times by the least, in relation to each time; [n] bytes, [n] seconds."""
        fit = KernelCost.fitted(Tasks(size, size * 0, size * 0, np.ones_like(size)), seconds)
        return cls(fit.call, 1 / fit.row if fit.row else np.inf)


@dataclass(frozen=True)
class Links:
    """Seconds between ranks.

    Attributes:
        within: inside a node.
        between: between nodes.
        start: of a rank's own time, to start an exchange.
        busy: of a rank's own time per byte that it exchanges while it computes; on CPUs the transport takes it.
    """

    within: LinkCost
    between: LinkCost
    start: float = 0.0
    busy: float = 0.0


@dataclass(frozen=True)
class KindCosts:
    """What core attention takes in the layers of one kind.

    Attributes:
        kind: of the layers.
        layers: how many there are.
        forward: of a kernel call.
        backward: of a kernel call's backward.
    """

    kind: AttentionKind
    layers: int
    forward: KernelCost
    backward: KernelCost

    def kernel(self, direction: Direction) -> KernelCost:
        """Costs of a kernel call in a direction."""
        return self.forward if direction == "forward" else self.backward


@dataclass(frozen=True)
class StepCosts:
    """What a micro-batch takes of every rank, in seconds: what plans are chosen by.

    Attributes:
        kinds: the kinds of attention of the model's layers.
        before: seconds of a token before core attention, in one layer's forward.
        after: seconds of a token behind core attention, in one layer's forward.
        backward_factor: backward over forward of these two; with checkpointing the forward is run again in it.
        head: seconds of a token in the output head and the loss, forward and backward.
        exchange: of rows between ranks.
        launches: seconds of a layer's forward for each nano-batch, whatever it has; 0 where the host runs ahead.
        slowness: [ranks] how many times as long a rank takes as these costs say; empty where all are alike.
        ranks_per_core: CPU ranks that share a core, all of them busy while these costs were measured. A core that one
            rank leaves idle then makes the others faster. 1 where every rank has cores, or a GPU, of its own.
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

    def until_done(self, work: FloatArray | float, longest: float) -> float:
        """Return the seconds until all ranks are done.

        Args:
            work: [ranks] seconds that each rank computes.
            longest: seconds of the rank that is done last, if no rank shared its cores.
        """
        if self.ranks_per_core == 1:
            return longest
        return max(float(np.mean(work)), longest / self.ranks_per_core)

    def row_work(self, kind: AttentionKind) -> float:
        """What a row takes besides core attention, in query-key pairs of layers of a kind."""
        (of_kind,) = (each for each in self.kinds if each.kind == kind)
        pair = of_kind.layers * (of_kind.forward.pair + of_kind.backward.pair)
        return self.token / pair if pair else 0.0

    @property
    def token(self) -> float:
        """Seconds of a token in everything but core attention, forward and backward."""
        depth = sum(of_kind.layers for of_kind in self.kinds)
        return depth * (self.before + self.after) * (1 + self.backward_factor) + self.head

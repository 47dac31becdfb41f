"""One layer of a planned step on all ranks at once: the schedule that the executor runs, walked with measured costs.

Arrays are [ranks] seconds unless they say otherwise. The log-sum-exp that travels with O is left out: 4 bytes of a
head whose O has some 256.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_distca.dispatch.schedule import KernelCall, Phase, Transfer, Turn, make_schedule
from hf_distca.plan import Direction
from hf_distca.sim.costs import FloatArray, KernelCost, Links, Tasks
from hf_distca.sim.counted import CountedPlan

SETTLED = 3
"""A layer begins while exchanges of the one before still end, so several are walked and the last one is taken."""


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """What the parts of one layer take.

    Attributes:
        forward: of the kernel.
        backward: of its backward.
        before: for each nano-batch, what comes before core attention, forward.
        after: for each nano-batch, what comes behind it, forward.
        backward_factor: backward of these over their forward; recomputation included.
        exchange: of rows between ranks.
    """

    forward: KernelCost
    backward: KernelCost
    before: Sequence[FloatArray]
    after: Sequence[FloatArray]
    backward_factor: float
    exchange: Links

    def kernel(self, direction: Direction) -> KernelCost:
        """Of a direction."""
        return self.forward if direction == "forward" else self.backward


@dataclass(frozen=True, eq=False)
class WalkedLayer:
    """What one layer came to, forward or backward.

    Attributes:
        seconds: until the last rank is done.
        attention: [ranks] in kernel calls.
        other: [ranks] in everything else that is computed.
        waited: [ranks] for exchanges.
    """

    seconds: float
    attention: FloatArray
    other: FloatArray
    waited: FloatArray


def walk_layer(nano_batches: Sequence[CountedPlan], costs: LayerCosts, direction: Direction) -> WalkedLayer:
    """Walk one layer in the middle of a model.

    Args:
        nano_batches: one or two, in the order of their rows.
        costs: of the layer.
        direction: forward or backward.
    """
    walk = _Walk(nano_batches, costs, direction)
    before = 0.0
    for _ in range(SETTLED):
        before = float(walk.clock.max())
        walk.attention, walk.other, walk.waited = (np.zeros_like(walk.clock) for _ in range(3))
        walk.layer()
    return WalkedLayer(float(walk.clock.max()) - before, walk.attention, walk.other, walk.waited)


@dataclass(eq=False)
class _Walk:
    """The clocks of all ranks, and of the links and servers they use."""

    nano_batches: Sequence[CountedPlan]
    costs: LayerCosts
    direction: Direction
    clock: FloatArray = field(init=False)
    attention: FloatArray = field(init=False)
    other: FloatArray = field(init=False)
    waited: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        ranks = self.nano_batches[0].ranks
        self.clock, self.attention, self.other, self.waited = (np.zeros(ranks) for _ in range(4))
        self._links = np.zeros((2, ranks))
        self._arrives: dict[tuple[int, str], FloatArray] = {}
        self._servers = np.zeros(self.nano_batches[0].servers)

    def layer(self) -> None:
        """Run the layer's nano-batches in turns, from pause to pause, as greenlets do."""
        order = range(len(self.nano_batches))
        left = [self._nano_batch(index) for index in (order if self.direction == "forward" else reversed(order))]
        while left:
            left = [run for run in left if next(run, None) is not None]

    def _nano_batch(self, index: int) -> Iterator[Phase]:
        """What a nano-batch does in the layer; yields at each pause."""
        counted, forward = self.nano_batches[index], self.direction == "forward"
        before, after = self.costs.before[index], self.costs.after[index]
        self._compute(before if forward else after * self.costs.backward_factor)
        for phase in self._schedule(index):
            for transfer in phase.wait:
                self._wait(index, transfer)
            for call in phase.run:
                seconds = self.costs.kernel(self.direction).seconds(_tasks(counted, call))[: counted.ranks]
                self.attention += seconds
                self.clock += seconds
            for transfer in phase.send:
                self._send(index, counted, transfer)
            if phase.pause:
                yield phase
        self._compute(after if forward else before * self.costs.backward_factor)

    def _schedule(self, index: int) -> tuple[Phase, ...]:
        counted = self.nano_batches[index]
        turn: Turn = "alone" if len(self.nano_batches) == 1 else ("first", "second")[index]
        return make_schedule(
            self.direction,
            turn,
            groups=frozenset(
                [("own", 0), ("own 1/2", 0), ("own 2/2", 0)]
                + [(tasks, stage) for tasks in ("prefix", "visiting") for stage in range(counted.stages)]
            ),
            windowed=counted.windowed,
            stages=counted.stages,
            passes_on=counted.passes_on,
            servers=counted.servers > 0,
        )

    def _compute(self, seconds: FloatArray) -> None:
        self.other += seconds
        self.clock += seconds

    def _wait(self, index: int, transfer: Transfer) -> None:
        arrives = self._arrives.pop((index, transfer.name))
        self.waited += np.maximum(arrives - self.clock, 0.0)
        self.clock = np.maximum(self.clock, arrives)

    def _send(self, index: int, counted: CountedPlan, transfer: Transfer) -> None:
        size = _bytes(counted, transfer)
        if transfer.rows == "servers":
            self._arrives[index, transfer.name] = np.zeros_like(self.clock)
            back = next(t for phase in self._schedule(index) for t in phase.wait if t.rows == "servers")
            self._serve(index, counted, size, back)
            return
        # Nobody's rows arrive before those who send them have come so far.
        takes_part = size.max(axis=0) > 0
        ready = float(self.clock[takes_part].max(initial=0.0))
        arrives = self.clock.copy()
        for link, cost in enumerate((self.costs.exchange.within, self.costs.exchange.between)):
            seconds = cost.seconds(size[link])
            begins = np.maximum(self._links[link], ready)
            self._links[link] = np.where(seconds > 0, begins + seconds, self._links[link])
            arrives = np.where(seconds > 0, np.maximum(arrives, begins + seconds), arrives)
        self._arrives[index, transfer.name] = arrives

    def _serve(self, index: int, counted: CountedPlan, size: FloatArray, back: Transfer) -> None:
        """Servers compute once their rows are there, and send the results."""
        ranks, link = counted.ranks, self.costs.exchange.between
        there = self.clock + link.seconds(size[:, :ranks].max(axis=0))
        begins = np.maximum(self._servers, there.max() + 0.0 * self._servers)
        begins = np.maximum(begins, self.clock.min() + link.seconds(size[:, ranks:].max(axis=0)))
        computed = self.costs.kernel(self.direction).seconds(counted.visiting)[ranks:]
        self._servers = begins + computed
        done = float((self._servers + link.seconds(_bytes(counted, back)[:, ranks:].max(axis=0))).max(initial=0.0))
        self._arrives[index, back.name] = np.where(size[:, :ranks].max(axis=0) > 0, done, 0.0)


def _tasks(counted: CountedPlan, call: KernelCall) -> Tasks:
    """The tasks of a kernel call; those of stages are shares of equal size."""
    if call.tasks == "own":
        return counted.own
    if call.tasks in ("own 1/2", "own 2/2"):
        return Tasks(counted.own.rows / 2, counted.own.keys / 2, counted.own.pairs / 2, counted.own.calls)
    tasks = counted.prefix if call.tasks == "prefix" else counted.visiting
    # Each stage reads all queries again, and keys of its own.
    return Tasks(tasks.rows, tasks.keys / counted.stages, tasks.pairs / counted.stages, tasks.calls)


def _bytes(counted: CountedPlan, transfer: Transfer) -> FloatArray:
    """[2, workers] by link, the larger of what each worker sends and receives of a transfer.

    Where rows are passed on, the first hop takes what crosses between nodes. Of what stays within nodes one hop takes
    what ranks of a node hold, the other what is passed on; they are not told apart, and half is given to each.
    """
    row = counted.row_bytes
    of_queries = sum({"q": row.q, "dq": row.q, "o": row.o, "do": row.o}.get(column, 0) for column in transfer.columns)
    of_keys = row.kv / 2 * sum(column in ("k", "v", "dk", "dv") for column in transfer.columns)
    if transfer.rows == "servers":
        moved = counted.with_servers.queries * of_queries + counted.with_servers.keys * of_keys
        return _larger(moved)
    if transfer.rows == "queries":
        return _larger(counted.among_ranks.queries * of_queries)[:, : counted.ranks]
    keys = _larger(counted.among_ranks.keys * (of_keys / counted.stages))[:, : counted.ranks]
    if not counted.passes_on:
        return keys
    hop = np.array([0.5, 1.0 if transfer.rows == "keys" else 0.0])
    in_hop: FloatArray = keys * hop[:, None]
    return in_hop


def _larger(moved: NDArray[Any]) -> FloatArray:
    """[2, workers] the larger of [2, 2, workers] sent and received."""
    larger: FloatArray = moved.max(axis=1).astype(np.float64)
    return larger

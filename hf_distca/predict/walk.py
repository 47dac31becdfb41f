"""Prediction of a micro-batch: the executor's schedules, walked with measured costs for all ranks at once.

Arrays are [ranks] seconds unless they say otherwise. The log-sum-exp that travels with O is left
out: it has 4 bytes a head, O some 256.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, Direction, Layout, MicroBatchPlan
from hf_distca.plan.cost import pairs
from hf_distca.plan.schedule import CallKey, Transfer, Turn, make_schedule
from hf_distca.plan.stages import stage_rows
from hf_distca.predict.counts import CountedPlan, count_plan
from hf_distca.predict.mixing import CountedCuts, MixingLayers, count_cuts
from hf_distca.predict.seconds import DIAGONAL_ROWS, FloatArray, KernelCost, Links, StepCosts, Tasks

IntArray = NDArray[np.int64]

SETTLED = 2
"""Number of layers to walk; the last is taken, since a layer begins while exchanges of the one
before still end."""
MOMENT = 1e-12
"""Least seconds of a transfer, to avoid a division by zero."""


@dataclass(frozen=True, eq=False)
class Walked:
    """Predicted seconds of a layer, forward or backward, or of a whole micro-batch."""

    seconds: float
    attention: FloatArray  # [ranks] in kernel calls
    other: FloatArray  # [ranks] in all other computation, and in a CPU's transport of rows
    waited: FloatArray  # [ranks] waiting for exchanges
    mixing: FloatArray  # [ranks] the part of `other` in layers that mix rows in order


Key = tuple[int, str]
"""A transfer by its nano-batch and name."""


class LayerClocks:
    """Clocks of all ranks in one layer in the middle of a model.

    Args:
        nano_batches: one or two, in the order of their rows.
        before: for each nano-batch, seconds that come before core attention in this direction.
        after: for each nano-batch, seconds that follow core attention in this direction.
        slowness: factor by which each rank's kernel calls are slower, or one number for all.
        mixing: mixing layers before the layer, which count as part of it.
    """

    def __init__(
        self,
        nano_batches: Sequence[CountedPlan],
        kernel: KernelCost,
        before: Sequence[FloatArray],
        after: Sequence[FloatArray],
        links: Links,
        direction: Direction,
        slowness: FloatArray | float = 1.0,
        mixing: MixingLayers | None = None,
    ) -> None:
        ranks = nano_batches[0].ranks
        self._nano_batches, self._kernel, self._links = nano_batches, kernel, links
        self._before, self._after, self._slowness, self._direction = (
            before,
            after,
            slowness,
            direction,
        )
        self._mixing = mixing
        self._clock = np.zeros(ranks)
        self._links_free = np.zeros((2, ranks))
        self._servers_free = np.zeros(nano_batches[0].servers)
        self._arrives: dict[Key, FloatArray] = {}
        self._departed: dict[
            Key, tuple[FloatArray, FloatArray]
        ] = {}  # when, and seconds of the rank's own time
        self._kernel_seconds = cache(self._kernel_seconds_of)
        self._sizes = cache(self._sizes_of)

    def walked(self) -> Walked:
        """Walk the layer until its time is settled."""
        for _ in range(SETTLED):
            walked = self._walk()
        return walked

    def _walk(self) -> Walked:
        """Walk the mixing layers, then let the nano-batches take turns, from pause to pause."""
        begun, mixing = float(self._clock.max()), self._mixing
        if mixing is not None:
            self._clock = mixing.walk(self._clock)
        self._attention, self._other, self._waited = (np.zeros_like(self._clock) for _ in range(3))
        order = range(len(self._nano_batches))
        for _ in zip_longest(
            *map(self._carried_out, order if self._direction == "forward" else reversed(order))
        ):
            pass
        seconds, mixed = float(self._clock.max()) - begun, np.zeros_like(self._clock)
        if mixing is not None:
            mixed, self._waited = mixing.computed, self._waited + mixing.waited
        return Walked(seconds, self._attention, self._other + mixed, self._waited, mixed)

    def _carried_out(self, index: int) -> Iterator[None]:
        """Carry out a nano-batch, and yield at each pause."""
        counted = self._nano_batches[index]
        turn: Turn = "alone" if len(self._nano_batches) == 1 else ("first", "second")[index]
        schedule = make_schedule(
            self._direction,
            turn,
            calls=_calls(counted.stages),
            windowed=counted.windowed,
            stages=counted.stages,
            forwards=counted.forwards,
            servers=counted.servers > 0,
        )
        self._other += self._before[index] + self._after[index]
        self._clock = self._clock + self._before[index]
        for phase in schedule:
            for transfer in phase.wait:
                self._wait((index, transfer.name))
            for call in phase.run:
                seconds = self._kernel_seconds(index, call.tasks)
                self._attention += seconds
                self._clock = self._clock + seconds
            for transfer in phase.send:
                if transfer.rows == "servers":
                    back = next(each for each in schedule[-1].wait if each.rows == "servers")
                    self._serve((index, back.name), transfer, back)
                else:
                    self._send(
                        (index, transfer.name), self._sizes(index, transfer.rows, transfer.columns)
                    )
            if phase.pause:
                yield
        self._clock = self._clock + self._after[index]

    def _kernel_seconds_of(self, index: int, tasks: str) -> FloatArray:
        counted = self._nano_batches[index]
        return self._kernel.seconds(_tasks(counted, tasks))[: counted.ranks] * self._slowness

    def _sizes_of(self, index: int, rows: str, columns: tuple[str, ...]) -> "_Sizes | None":
        """Return what a transfer takes; None if nothing travels."""
        size = _bytes(self._nano_batches[index], rows, columns)
        if not size.any():
            return None
        links = (self._links.within, self._links.between)
        used = [
            (link, size[link] > 0, cost.seconds(size[link]))
            for link, cost in enumerate(links)
            if size[link].any()
        ]
        return size.max(axis=0), used

    def _send(self, key: Key, sizes: "_Sizes | None") -> None:
        if sizes is None:
            return
        largest, links = sizes
        self._clock = self._clock + self._links.start
        ready = self._all_there(key[0], largest > 0)
        arrives = self._clock
        for link, used, seconds in links:
            done = np.maximum(self._links_free[link], ready) + seconds
            np.copyto(self._links_free[link], done, where=used)
            arrives = np.where(used, np.maximum(arrives, done), arrives)
        self._arrives[key] = arrives
        if self._links.busy:
            self._departed[key] = self._clock, largest * self._links.busy

    def _all_there(self, index: int, takes_part: NDArray[np.bool_]) -> FloatArray | float:
        """Return when all senders have reached an exchange: rows arrive only then.

        Ranks that exchange nothing do not wait for each other, except where the transport takes a
        rank's own time: it exchanges empty messages too.
        """
        connected = self._nano_batches[index].connected
        if self._links.busy or not connected.any():
            return float(self._clock[takes_part].max())
        latest = np.zeros(len(connected))
        np.maximum.at(latest, connected, np.where(takes_part, self._clock, 0.0))
        return np.asarray(latest[connected])

    def _wait(self, key: Key) -> None:
        if key not in self._arrives:
            return
        arrives = self._arrives.pop(key)
        if key in self._departed:
            # The exchange took some of the rank's own time while the rank computed.
            departed, busy = self._departed.pop(key)
            travelled = np.maximum(arrives - departed, MOMENT)
            self._clock = self._clock + busy * np.minimum((self._clock - departed) / travelled, 1.0)
            self._other += busy  # all of it is taken from ranks that share the core
        later = np.maximum(self._clock, arrives)
        self._waited += later - self._clock
        self._clock = later

    def _serve(self, key: Key, there: Transfer, back: Transfer) -> None:
        """Let servers compute once their rows have arrived, and send the results."""
        counted, link = self._nano_batches[key[0]], self._links.between
        ranks = counted.ranks
        sent, returned = (
            _bytes(counted, each.rows, each.columns).max(axis=0) for each in (there, back)
        )
        begins = np.maximum(self._servers_free, (self._clock + link.seconds(sent[:ranks])).max())
        begins = np.maximum(begins, self._clock.min() + link.seconds(sent[ranks:]))
        self._servers_free = begins + self._kernel.seconds(counted.remote_query)[ranks:]
        done = float((self._servers_free + link.seconds(returned[ranks:])).max(initial=0.0))
        # Only the servers wait for the rows that go there.
        self._arrives[key] = np.where(sent[:ranks] > 0, done, 0.0)


_Sizes = tuple[FloatArray, list[tuple[int, NDArray[np.bool_], FloatArray]]]
"""[ranks] the most bytes of a rank on a link; and for each link in use its index, who uses it, and
their seconds."""


@cache
def _calls(stages: int) -> frozenset[CallKey]:
    """Return the keys of all kernel calls that a rank may make."""
    calls: list[CallKey] = [("local", 0), ("local 1/2", 0), ("local 2/2", 0)]
    for stage in range(stages):
        calls += [("remote-KV", stage), ("remote-query", stage)]
    return frozenset(calls)


def _tasks(counted: CountedPlan, name: str) -> Tasks:
    """Return the tasks of a kernel call; a stage has an equal share of them."""
    if name == "local":
        return counted.local
    if name in ("local 1/2", "local 2/2"):
        tasks = counted.local
        return Tasks(
            rows=tasks.rows / 2,
            keys=tasks.keys / 2,
            pairs=tasks.pairs / 2,
            calls=tasks.calls,
            diagonal=tasks.diagonal / 2,
            tasks=tasks.tasks / 2,
        )
    tasks, stages = (
        counted.remote_kv if name == "remote-KV" else counted.remote_query,
        counted.stages,
    )
    # Each stage reads all queries of all tasks again, and only its own keys.
    return replace(
        tasks,
        keys=tasks.keys / stages,
        pairs=tasks.pairs / stages,
        diagonal=tasks.diagonal / stages,
    )


def _bytes(counted: CountedPlan, rows: str, columns: tuple[str, ...]) -> FloatArray:
    """Return [2, workers] by link: the larger of the bytes that each worker sends and receives in a transfer.

    If rows are forwarded, the first hop takes all bytes between nodes. Inside nodes the bytes of
    the two hops are not counted apart, so each hop takes half.
    """
    row = counted.row_bytes
    of_queries = sum(
        {"q": row.q, "dq": row.q, "o": row.o, "do": row.o}.get(column, 0) for column in columns
    )
    of_keys = row.kv / 2 * sum(column in ("k", "v", "dk", "dv") for column in columns)
    if rows == "servers":
        moved = counted.with_servers.queries * of_queries + counted.with_servers.keys * of_keys
        return np.asarray(moved.max(axis=1), np.float64)
    most_queries, most_keys = counted.most_of_ranks
    if rows == "queries":
        return np.asarray(most_queries * of_queries, np.float64)
    keys = np.asarray(most_keys * (of_keys / counted.stages), np.float64)
    if not counted.forwards:
        return keys
    hop = np.array([0.5, 1.0 if rows == "keys" else 0.0])
    in_hop: FloatArray = keys * hop[:, None]
    return in_hop


def predict_step(
    nano_batches: Sequence[Mapping[AttentionKind, CountedPlan]],
    layouts: Sequence[Layout],
    costs: StepCosts,
    nodes: Sequence[int],
) -> Walked:
    """Predict the seconds of a micro-batch.

    Args:
        nano_batches: for each nano-batch, its counted plans by kind of attention.
        layouts: of each nano-batch.
        nodes: [ranks] node of each rank.
    """
    slowness: FloatArray = np.array(costs.slowness or (1.0,) * layouts[0].ranks)
    rows: list[FloatArray] = [layout.tokens * slowness for layout in layouts]
    cuts = [count_cuts(layout, nodes) for layout in layouts] if costs.mixing else []
    launches = slowness * (costs.launches / 2)
    head: FloatArray = np.multiply(costs.head, np.sum(rows, axis=0))
    before, after = (
        [seconds * each + launches for each in rows] for seconds in (costs.before, costs.after)
    )
    in_backward = [[each * costs.backward_factor for each in part] for part in (after, before)]
    attention, waited, mixed = (np.zeros_like(head) for _ in range(3))
    other, seconds = head.copy(), 0.0
    for of_kind in costs.kinds:
        counted = [nano[of_kind.kind] for nano in nano_batches]
        for direction in costs.directions:
            begin, end = (before, after) if direction == "forward" else in_backward
            kernel = of_kind.kernel(direction)
            mixing = _mixing_layers(cuts, costs, direction, slowness)
            clocks = LayerClocks(
                counted, kernel, begin, end, costs.exchange, direction, slowness, mixing
            )
            walked = clocks.walked()
            attention += of_kind.layers * walked.attention
            other += of_kind.layers * walked.other
            waited += of_kind.layers * walked.waited
            mixed += of_kind.layers * walked.mixing
            seconds += of_kind.layers * walked.seconds
    total = costs.until_done(attention + other, seconds + float(head.max()))
    return Walked(total, attention, other, waited, mixed)


def _mixing_layers(
    cuts: Sequence[CountedCuts], costs: StepCosts, direction: Direction, slowness: FloatArray
) -> MixingLayers | None:
    """Return the mixing layers before each layer with attention; None for a model without."""
    if costs.mixing is None:
        return None
    factor = slowness * (1.0 if direction == "forward" else costs.backward_factor)
    layers = costs.mixing.layers / costs.depth
    return MixingLayers(
        cuts, costs.mixing, layers, costs.launches, costs.exchange, direction, factor
    )


def predict_plan(
    plan: MicroBatchPlan, costs: StepCosts, nodes: Sequence[int], bytes_per_value: int
) -> Walked:
    """Predict the seconds of a planned micro-batch.

    Args:
        nodes: [ranks] node of each rank.
        bytes_per_value: size of a value in the dtype of core attention.
    """
    counted = [
        {
            kind: count_plan(of_kind, kind, bytes_per_value, nodes)
            for kind, of_kind in nano.plans.items()
        }
        for nano in plan.nano_batches
    ]
    return predict_step(counted, [nano.layout for nano in plan.nano_batches], costs, nodes)


def document_seconds(lengths: IntArray, costs: StepCosts) -> FloatArray:
    """Return [documents] seconds of computing each document, forward and backward, without calls of the kernel."""
    total, diagonal = (
        costs.token * lengths.astype(np.float64),
        lengths * np.minimum(lengths, DIAGONAL_ROWS),
    )
    for of_kind in costs.kinds:
        kind = of_kind.kind
        each, tasks = pairs(0, lengths, kind.window), np.ones_like(lengths)
        if kind.chunk is not None:
            chunks, rest = np.divmod(lengths, kind.chunk)
            each = chunks * pairs(0, kind.chunk, kind.window) + pairs(0, rest, kind.window)
            tasks = chunks + (rest > 0)
        for cost in (of_kind.forward, of_kind.backward):
            of_rows = (cost.row + cost.key) * lengths + cost.diagonal * diagonal
            total += of_kind.layers * (cost.pair * each + of_rows + cost.task * tasks)
    return total


def in_stages(
    counted: CountedPlan, buffer_rows: int, *, stages: int, together: bool = False
) -> CountedPlan:
    """Return the counts of a plan without stages, with as many stages as it will have.

    See `stage_rows`.
    """
    most = counted.among_ranks.most_keys
    rows = stage_rows(most, buffer_rows, stages=stages, in_hops=counted.forwards, together=together)
    return counted if rows is None else replace(counted, stages=-(-most // rows))

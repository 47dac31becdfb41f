"""Prediction of a micro-batch: the executor's schedules, walked with measured costs for all ranks at once.

Arrays are [ranks] seconds unless they say otherwise. The log-sum-exp that travels with O is left out: it has 4 bytes a
head, O some 256.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, Direction, Layout, MicroBatchPlan
from hf_distca.planner.cost import pairs
from hf_distca.planner.metrics import CountedPlan, count_plan
from hf_distca.planner.mixing import CountedCuts, MixingLayers, count_cuts
from hf_distca.planner.nodes import node_sizes, nodes_of
from hf_distca.planner.schedule import Group, Transfer, Turn, make_schedule
from hf_distca.planner.seconds import FloatArray, KernelCost, Links, StepCosts, Tasks
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.stages import stage_rows

SETTLED = 2
"""Number of layers to walk; the last is taken, since a layer begins while exchanges of the one before still end."""


MOMENT = 1e-12
"""Least seconds of a transfer, to avoid a division by zero."""


@dataclass(frozen=True, eq=False)
class Walked:
    """Predicted seconds of a layer, forward or backward, or of a whole micro-batch.

    Attributes:
        attention: [ranks] in kernel calls.
        other: [ranks] in all other computation.
        waited: [ranks] waiting for exchanges.
        mixing: [ranks] the part of `other` in layers that mix rows in order.
    """

    seconds: float
    attention: FloatArray
    other: FloatArray
    waited: FloatArray
    mixing: FloatArray


def walk_layer(
    nano_batches: Sequence[CountedPlan],
    kernel: KernelCost,
    before: Sequence[FloatArray],
    after: Sequence[FloatArray],
    links: Links,
    direction: Direction,
    slowness: FloatArray | float = 1.0,
    mixing: MixingLayers | None = None,
) -> Walked:
    """Walk one layer in the middle of a model.

    Args:
        nano_batches: one or two, in the order of their rows.
        before: for each nano-batch, seconds that come before core attention in this direction.
        after: for each nano-batch, seconds that follow core attention in this direction.
        slowness: factor by which each rank's kernel calls are slower, or one number for all.
        mixing: mixing layers before the layer, which count as part of it.
    """
    layer = _Layer(nano_batches, kernel, before, after, links, direction, slowness)
    begun = 0.0
    for _ in range(SETTLED):
        begun = float(layer.clock.max())
        layer.waited = np.zeros_like(layer.clock)
        if mixing is not None:
            layer.clock = mixing.walk(layer.clock)
        for act in layer.acts:
            act()
    seconds, mixed = float(layer.clock.max()) - begun, np.zeros_like(layer.clock)
    if mixing is not None:
        mixed, layer.waited = mixing.computed, layer.waited + mixing.waited
    return Walked(seconds, layer.attention, layer.other + mixed, layer.waited, mixed)


@dataclass(frozen=True, eq=False)
class _TransferCost:
    """Costs of a transfer.

    Attributes:
        takes_part: [ranks] whether a rank sends or receives.
        links: for each link in use, its index, [ranks] whether a rank uses it, and [ranks] seconds.
        busy: [ranks] seconds that the rank's computation loses during the whole transfer; None if it loses none.
    """

    takes_part: NDArray[np.bool_]
    links: tuple[tuple[int, NDArray[np.bool_], FloatArray], ...]
    busy: FloatArray | None


Key = tuple[int, str]
"""A transfer by its nano-batch and name."""


class _Layer:
    """Clocks of all ranks, and what ranks do in a layer: the nano-batches in turn, from pause to pause.

    Attributes:
        acts: the actions, in order.
        attention: [ranks] seconds in kernel calls.
        other: [ranks] seconds in all other computation.
        clock: [ranks] present time of each rank.
        waited: [ranks] time spent waiting for exchanges.
    """

    def __init__(
        self,
        nano_batches: Sequence[CountedPlan],
        kernel: KernelCost,
        before: Sequence[FloatArray],
        after: Sequence[FloatArray],
        links: Links,
        direction: Direction,
        slowness: FloatArray | float,
    ) -> None:
        ranks = nano_batches[0].ranks
        self._nano_batches, self._kernel_cost, self._links = nano_batches, kernel, links
        self._before, self._after, self._slowness, self._direction = before, after, slowness, direction
        self._sent: set[Key] = set()
        self.attention, self.other, self.clock, self.waited = (np.zeros(ranks) for _ in range(4))
        self._servers_free = np.zeros(nano_batches[0].servers)
        self._links_free = np.zeros((2, ranks))
        self._arrives: dict[Key, FloatArray] = {}  # [ranks] when the rows arrive
        self._departed: dict[Key, tuple[FloatArray, FloatArray]] = {}  # [ranks] when they left, `_TransferCost.busy`
        order = range(len(nano_batches))
        parts = [list(self._parts(index)) for index in (order if direction == "forward" else reversed(order))]
        self.acts = [act for turn in zip_longest(*parts, fillvalue=()) for part in turn for act in part]

    def _parts(self, index: int) -> Iterator[list[Callable[[], None]]]:
        """Yield the actions of a nano-batch up to each pause."""
        counted = self._nano_batches[index]
        turn: Turn = "alone" if len(self._nano_batches) == 1 else ("first", "second")[index]
        schedule = make_schedule(
            self._direction,
            turn,
            groups=_groups(counted.stages),
            windowed=counted.windowed,
            stages=counted.stages,
            forwards=counted.forwards,
            servers=counted.servers > 0,
        )
        self.other += self._before[index] + self._after[index]
        acts: list[Callable[[], None]] = [partial(self._compute, self._before[index])]
        kernel_seconds = cache(partial(self._kernel_seconds, counted))
        transfer_cost = cache(partial(self._transfer_cost, counted))
        for phase in schedule:
            acts += [
                partial(self._wait, (index, transfer.name))
                for transfer in phase.wait
                if (index, transfer.name) in self._sent
            ]
            for call in phase.run:
                self.attention += kernel_seconds(call.tasks)
                acts.append(partial(self._compute, kernel_seconds(call.tasks)))
            for transfer in phase.send:
                if transfer.rows == "servers":
                    back = next(t for phase in schedule for t in phase.wait if t.rows == "servers")
                    self._sent.add((index, back.name))
                    acts.append(partial(self._serve, (index, back.name), counted, transfer, back))
                elif (cost := transfer_cost(transfer.rows, transfer.columns)) is not None:
                    self._sent.add((index, transfer.name))
                    acts.append(partial(self._send, (index, transfer.name), cost))
            if phase.pause:
                yield acts
                acts = []
        yield [*acts, partial(self._compute, self._after[index])]

    def _kernel_seconds(self, counted: CountedPlan, tasks: str) -> FloatArray:
        """Return [ranks] seconds of a kernel call."""
        return self._kernel_cost.seconds(_tasks(counted, tasks))[: counted.ranks] * self._slowness

    def _transfer_cost(self, counted: CountedPlan, rows: str, columns: tuple[str, ...]) -> _TransferCost | None:
        """Return the costs of a transfer; None if nothing travels."""
        size = _bytes(counted, rows, columns)
        used = tuple(
            (link, size[link] > 0, cost.seconds(size[link]))
            for link, cost in enumerate((self._links.within, self._links.between))
            if size[link].any()
        )
        if not used:
            return None
        largest = size.max(axis=0)
        return _TransferCost(largest > 0, used, largest * self._links.busy if self._links.busy else None)

    def _compute(self, seconds: FloatArray) -> None:
        self.clock = self.clock + seconds

    def _wait(self, key: Key) -> None:
        arrives = self._arrives.pop(key)
        if key in self._departed:
            # The exchange took some of the rank's own time while the rank computed.
            departed, busy = self._departed.pop(key)
            travelled = np.maximum(arrives - departed, MOMENT)
            self.clock = self.clock + busy * np.minimum((self.clock - departed) / travelled, 1.0)
        later = np.maximum(self.clock, arrives)
        self.waited += later - self.clock
        self.clock = later

    def _send(self, key: Key, cost: _TransferCost) -> None:
        self.clock = self.clock + self._links.start
        # Rows arrive only after every sender has reached this point.
        ready = float(self.clock[cost.takes_part].max())
        arrives = self.clock
        for link, used, seconds in cost.links:
            done = np.maximum(self._links_free[link], ready) + seconds
            np.copyto(self._links_free[link], done, where=used)
            arrives = np.where(used, np.maximum(arrives, done), arrives)
        self._arrives[key] = arrives
        if cost.busy is not None:
            self._departed[key] = self.clock, cost.busy

    def _serve(self, key: Key, counted: CountedPlan, there: Transfer, back: Transfer) -> None:
        """Let servers compute once their rows have arrived, and send the results."""
        ranks, link = counted.ranks, self._links.between
        sent, returned = (_bytes(counted, each.rows, each.columns).max(axis=0) for each in (there, back))
        begins = np.maximum(self._servers_free, (self.clock + link.seconds(sent[:ranks])).max())
        begins = np.maximum(begins, self.clock.min() + link.seconds(sent[ranks:]))
        self._servers_free = begins + self._kernel_cost.seconds(counted.remote_query)[ranks:]
        done = float((self._servers_free + link.seconds(returned[ranks:])).max(initial=0.0))
        # Only the servers wait for the rows that go there.
        self._arrives[key] = np.where(sent[:ranks] > 0, done, 0.0)


@cache
def _groups(stages: int) -> frozenset[Group]:
    """Return all groups of tasks that a rank may have."""
    groups: list[Group] = [("local", 0), ("local 1/2", 0), ("local 2/2", 0)]
    for stage in range(stages):
        groups += [("remote-KV", stage), ("remote-query", stage)]
    return frozenset(groups)


def _tasks(counted: CountedPlan, name: str) -> Tasks:
    """Return the tasks of a kernel call; a stage has an equal share of them."""
    if name == "local":
        return counted.local
    if name in ("local 1/2", "local 2/2"):
        return Tasks(counted.local.rows / 2, counted.local.keys / 2, counted.local.pairs / 2, counted.local.calls)
    tasks = counted.remote_kv if name == "remote-KV" else counted.remote_query
    # Each stage reads all queries again, and only its own keys.
    return Tasks(tasks.rows, tasks.keys / counted.stages, tasks.pairs / counted.stages, tasks.calls)


def _bytes(counted: CountedPlan, rows: str, columns: tuple[str, ...]) -> FloatArray:
    """Return [2, workers] by link: the larger of the bytes that each worker sends and receives in a transfer.

    If rows are forwarded, the first hop takes all bytes between nodes. Inside nodes the bytes of the two hops are not
    counted apart, so each hop takes half.
    """
    row = counted.row_bytes
    of_queries = sum({"q": row.q, "dq": row.q, "o": row.o, "do": row.o}.get(column, 0) for column in columns)
    of_keys = row.kv / 2 * sum(column in ("k", "v", "dk", "dv") for column in columns)
    if rows == "servers":
        moved = counted.with_servers.queries * of_queries + counted.with_servers.keys * of_keys
        return _larger(moved)
    if rows == "queries":
        return _larger(counted.among_ranks.queries * of_queries)[:, : counted.ranks]
    keys = _larger(counted.among_ranks.keys * (of_keys / counted.stages))[:, : counted.ranks]
    if not counted.forwards:
        return keys
    hop = np.array([0.5, 1.0 if rows == "keys" else 0.0])
    in_hop: FloatArray = keys * hop[:, None]
    return in_hop


def _larger(moved: NDArray[Any]) -> FloatArray:
    """Return [2, workers] the larger of [2, 2, workers] sent and received."""
    larger: FloatArray = moved.max(axis=1).astype(np.float64)
    return larger


IntArray = NDArray[np.int64]


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
    before, after = ([seconds * each + launches for each in rows] for seconds in (costs.before, costs.after))
    in_backward = [[each * costs.backward_factor for each in part] for part in (after, before)]
    attention, waited, mixed = (np.zeros_like(head) for _ in range(3))
    other, seconds = head.copy(), 0.0
    for of_kind in costs.kinds:
        counted = [nano[of_kind.kind] for nano in nano_batches]
        for direction in ("forward", "backward"):
            begin, end = (before, after) if direction == "forward" else in_backward
            kernel = of_kind.kernel(direction)
            mixing = _mixing_layers(cuts, costs, direction, slowness)
            walked = walk_layer(counted, kernel, begin, end, costs.exchange, direction, slowness, mixing)
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
    return MixingLayers(cuts, costs.mixing, layers, costs.launches, costs.exchange, direction, factor)


def predict_plan(plan: MicroBatchPlan, settings: PlanSettings, costs: StepCosts) -> Walked:
    """Predict the seconds of a planned micro-batch."""
    nodes = nodes_of(node_sizes(settings.ranks, settings.ranks_per_node))
    counted = [
        {kind: count_plan(of_kind, kind, settings.bytes_per_value, nodes) for kind, of_kind in nano.plans.items()}
        for nano in plan.nano_batches
    ]
    return predict_step(counted, [nano.layout for nano in plan.nano_batches], costs, nodes)


def document_seconds(lengths: IntArray, costs: StepCosts) -> FloatArray:
    """Return [documents] seconds of computing each document, forward and backward, without calls of the kernel."""
    total = costs.token * lengths.astype(np.float64)
    for of_kind in costs.kinds:
        kind = of_kind.kind
        each = pairs(0, lengths, kind.window)
        if kind.chunk is not None:
            chunks, rest = np.divmod(lengths, kind.chunk)
            each = chunks * pairs(0, kind.chunk, kind.window) + pairs(0, rest, kind.window)
        for cost in (of_kind.forward, of_kind.backward):
            total += of_kind.layers * (cost.pair * each + (cost.row + cost.key) * lengths)
    return total


def in_stages(counted: CountedPlan, kind: AttentionKind, settings: PlanSettings, *, stages: int) -> CountedPlan:
    """Return the counts of a plan without stages, with as many stages as it will have."""
    most = counted.among_ranks.most_keys
    rows = stage_rows(most, settings.buffer_rows(kind), stages=stages, in_hops=counted.forwards)
    return counted if rows is None else replace(counted, stages=-(-most // rows))

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

from hf_distca.plan import AttentionKind, Direction, MicroBatchPlan
from hf_distca.planner.cost import pairs
from hf_distca.planner.metrics import CountedPlan, count_plan
from hf_distca.planner.nodes import node_sizes, nodes_of
from hf_distca.planner.schedule import Group, Phase, Transfer, Turn, make_schedule
from hf_distca.planner.seconds import FloatArray, KernelCost, Links, StepCosts, Tasks
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.stages import stage_rows

SETTLED = 2
"""Number of layers to walk; the last is taken, since a layer begins while exchanges of the one before still end."""


MOMENT = 1e-12
"""Least seconds of a transfer, to avoid a division by zero."""


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """Costs of the parts of one layer.

    Attributes:
        before: for each nano-batch, seconds before core attention, forward.
        after: for each nano-batch, seconds after core attention, forward.
        backward_factor: backward over forward of `before` and `after`, recomputation included.
        slowness: [ranks] factor by which each rank's kernel calls are slower, or one number for all.
    """

    forward: KernelCost
    backward: KernelCost
    before: Sequence[FloatArray]
    after: Sequence[FloatArray]
    backward_factor: float
    exchange: Links
    slowness: FloatArray | float = 1.0

    def kernel(self, direction: Direction) -> KernelCost:
        """Return the costs of a kernel call in a direction."""
        return self.forward if direction == "forward" else self.backward


@dataclass(frozen=True, eq=False)
class Walked:
    """Predicted seconds of a layer, forward or backward, or of a whole micro-batch.

    Attributes:
        attention: [ranks] in kernel calls.
        other: [ranks] in all other computation.
        waited: [ranks] waiting for exchanges.
    """

    seconds: float
    attention: FloatArray
    other: FloatArray
    waited: FloatArray


def walk_layer(nano_batches: Sequence[CountedPlan], costs: LayerCosts, direction: Direction) -> Walked:
    """Walk one layer in the middle of a model.

    Args:
        nano_batches: one or two, in the order of their rows.
    """
    walk = _Walk(nano_batches[0].ranks, nano_batches[0].servers)
    layer = _Layer(nano_batches, costs, direction)
    before = 0.0
    for _ in range(SETTLED):
        before = float(walk.clock.max())
        walk.waited = np.zeros_like(walk.clock)
        for act in layer.acts:
            act(walk)
    return Walked(float(walk.clock.max()) - before, layer.attention, layer.other, walk.waited)


class _Walk:
    """Clocks of all ranks, and of the links and servers that they use.

    Attributes:
        clock: [ranks] present time of each rank.
        waited: [ranks] time spent waiting for exchanges.
        links: [2, ranks] until when each rank's links are busy, inside the node and between nodes.
        arrives: by nano-batch and transfer, [ranks] when the rows arrive.
        departed: by nano-batch and transfer, [ranks] when the rows left, and `_Travels.busy`.
        servers: [servers] until when each server is busy.
    """

    def __init__(self, ranks: int, servers: int) -> None:
        self.clock, self.waited, self.servers = np.zeros(ranks), np.zeros(ranks), np.zeros(servers)
        self.links = np.zeros((2, ranks))
        self.arrives: dict[tuple[int, str], FloatArray] = {}
        self.departed: dict[tuple[int, str], tuple[FloatArray, FloatArray]] = {}


Act = Callable[[_Walk], None]


@dataclass(frozen=True, eq=False)
class _Travels:
    """Costs of a transfer.

    Attributes:
        takes_part: [ranks] whether a rank sends or receives.
        links: for each link in use, its index, [ranks] whether a rank uses it, and [ranks] seconds.
        start: seconds of each rank's own time.
        busy: [ranks] seconds that the rank's computation loses during the whole transfer.
    """

    takes_part: NDArray[np.bool_]
    links: tuple[tuple[int, NDArray[np.bool_], FloatArray], ...]
    start: float
    busy: FloatArray


class _Layer:
    """Actions of ranks in a layer, in order: the nano-batches in turn, from pause to pause.

    Attributes:
        attention: [ranks] seconds in kernel calls.
        other: [ranks] seconds in all other computation.
    """

    def __init__(self, nano_batches: Sequence[CountedPlan], costs: LayerCosts, direction: Direction) -> None:
        self._nano_batches, self._costs, self._direction = nano_batches, costs, direction
        self._sent: set[tuple[int, str]] = set()
        self.attention, self.other = np.zeros(nano_batches[0].ranks), np.zeros(nano_batches[0].ranks)
        order = range(len(nano_batches))
        parts = [list(self._parts(index)) for index in (order if direction == "forward" else reversed(order))]
        self.acts = [act for turn in zip_longest(*parts, fillvalue=()) for part in turn for act in part]

    def _parts(self, index: int) -> Iterator[list[Act]]:
        """Yield the actions of a nano-batch up to each pause."""
        forward = self._direction == "forward"
        before, after = self._costs.before[index], self._costs.after[index]
        acts = [self._other(before if forward else after * self._costs.backward_factor)]
        kernel = cache(partial(self._kernel, index))
        exchange = cache(partial(self._exchange, index))
        for phase in self._schedule(index):
            acts += [
                partial(_wait, (index, transfer.name))
                for transfer in phase.wait
                if (index, transfer.name) in self._sent
            ]
            for call in phase.run:
                self.attention += kernel(call.tasks)
                acts.append(partial(_compute, kernel(call.tasks)))
            for transfer in phase.send:
                if transfer.rows == "servers":
                    acts.append(self._to_servers(index, transfer))
                elif (travels := exchange(transfer.rows, transfer.columns)) is not None:
                    self._sent.add((index, transfer.name))
                    acts.append(partial(_send, (index, transfer.name), travels))
            if phase.pause:
                yield acts
                acts = []
        yield [*acts, self._other(after if forward else before * self._costs.backward_factor)]

    def _schedule(self, index: int) -> tuple[Phase, ...]:
        counted = self._nano_batches[index]
        turn: Turn = "alone" if len(self._nano_batches) == 1 else ("first", "second")[index]
        return make_schedule(
            self._direction,
            turn,
            groups=_groups(counted.stages),
            windowed=counted.windowed,
            stages=counted.stages,
            forwards=counted.forwards,
            servers=counted.servers > 0,
        )

    def _other(self, seconds: FloatArray) -> Act:
        self.other += seconds
        return partial(_compute, seconds)

    def _kernel(self, index: int, tasks: str) -> FloatArray:
        """Return [ranks] seconds of a kernel call."""
        counted = self._nano_batches[index]
        of_workers = self._costs.kernel(self._direction).seconds(_tasks(counted, tasks))
        return of_workers[: counted.ranks] * self._costs.slowness

    def _exchange(self, index: int, rows: str, columns: tuple[str, ...]) -> "_Travels | None":
        """Return the costs of a transfer; None if nothing travels."""
        size, links = _bytes(self._nano_batches[index], rows, columns), self._costs.exchange
        used = tuple(
            (link, size[link] > 0, cost.seconds(size[link]))
            for link, cost in enumerate((links.within, links.between))
            if size[link].any()
        )
        largest = size.max(axis=0)
        return _Travels(largest > 0, used, links.start, links.busy * largest) if used else None

    def _to_servers(self, index: int, transfer: Transfer) -> Act:
        back = next(t for phase in self._schedule(index) for t in phase.wait if t.rows == "servers")
        self._sent.add((index, back.name))
        counted = self._nano_batches[index]
        return partial(self._serve, index, counted, _bytes(counted, transfer.rows, transfer.columns), back)

    def _serve(self, index: int, counted: CountedPlan, size: FloatArray, back: Transfer, walk: _Walk) -> None:
        """Let servers compute once their rows have arrived, and send the results."""
        ranks, link = counted.ranks, self._costs.exchange.between
        there = walk.clock + link.seconds(size[:, :ranks].max(axis=0))
        begins = np.maximum(walk.servers, there.max())
        begins = np.maximum(begins, walk.clock.min() + link.seconds(size[:, ranks:].max(axis=0)))
        computed = self._costs.kernel(self._direction).seconds(counted.remote_query)[ranks:]
        walk.servers = begins + computed
        done = float(
            (walk.servers + link.seconds(_bytes(counted, back.rows, back.columns)[:, ranks:].max(axis=0))).max(
                initial=0.0
            )
        )
        # Only the servers wait for the rows that go there.
        walk.arrives[index, back.name] = np.where(size[:, :ranks].max(axis=0) > 0, done, 0.0)


def _compute(seconds: FloatArray, walk: _Walk) -> None:
    walk.clock = walk.clock + seconds


def _wait(transfer: tuple[int, str], walk: _Walk) -> None:
    arrives = walk.arrives.pop(transfer)
    if transfer in walk.departed:
        # The exchange took some of the rank's own time while the rank computed.
        departed, busy = walk.departed.pop(transfer)
        travelled = np.maximum(arrives - departed, MOMENT)
        walk.clock = walk.clock + busy * np.minimum((walk.clock - departed) / travelled, 1.0)
    walk.waited += np.maximum(arrives - walk.clock, 0.0)
    walk.clock = np.maximum(walk.clock, arrives)


def _send(transfer: tuple[int, str], travels: _Travels, walk: _Walk) -> None:
    walk.clock = walk.clock + travels.start
    # Rows arrive only after every sender has reached this point.
    ready = float(walk.clock[travels.takes_part].max())
    arrives = walk.clock
    for link, used, seconds in travels.links:
        done = np.maximum(walk.links[link], ready) + seconds
        walk.links[link] = np.where(used, done, walk.links[link])
        arrives = np.where(used, np.maximum(arrives, done), arrives)
    walk.arrives[transfer] = arrives
    if travels.busy.any():
        walk.departed[transfer] = walk.clock, travels.busy


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
    nano_batches: Sequence[Mapping[AttentionKind, CountedPlan]], tokens: Sequence[IntArray], costs: StepCosts
) -> Walked:
    """Predict the seconds of a micro-batch.

    Args:
        nano_batches: for each nano-batch, its counted plans by kind of attention.
        tokens: for each nano-batch, [ranks] rows that each rank holds.
    """
    slowness: FloatArray = np.array(costs.slowness or (1.0,) * len(tokens[0]))
    rows: list[FloatArray] = [each * slowness for each in tokens]
    launches = slowness * (costs.launches / 2)
    head: FloatArray = np.multiply(costs.head, np.sum(rows, axis=0))
    before, after = ([seconds * each + launches for each in rows] for seconds in (costs.before, costs.after))
    attention: FloatArray = np.zeros_like(head)
    other = head.copy()
    waited: FloatArray = np.zeros_like(head)
    seconds = 0.0
    for of_kind in costs.kinds:
        counted = [nano[of_kind.kind] for nano in nano_batches]
        layer = LayerCosts(
            of_kind.forward, of_kind.backward, before, after, costs.backward_factor, costs.exchange, slowness
        )
        for direction in ("forward", "backward"):
            walked = walk_layer(counted, layer, direction)
            attention += of_kind.layers * walked.attention
            other += of_kind.layers * walked.other
            waited += of_kind.layers * walked.waited
            seconds += of_kind.layers * walked.seconds
    total = costs.until_done(attention + other, seconds + float(head.max()))
    return Walked(total, attention, other, waited)


def predict_plan(plan: MicroBatchPlan, settings: PlanSettings, costs: StepCosts) -> Walked:
    """Predict the seconds of a planned micro-batch."""
    nodes = nodes_of(node_sizes(settings.ranks, settings.ranks_per_node))
    counted = [
        {kind: count_plan(of_kind, kind, settings.bytes_per_value, nodes) for kind, of_kind in nano.plans.items()}
        for nano in plan.nano_batches
    ]
    return predict_step(counted, [nano.layout.tokens for nano in plan.nano_batches], costs)


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

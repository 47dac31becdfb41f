"""Prediction of a micro-batch: the executor's schedules, walked with measured costs.

All ranks are walked at once. Arrays are [ranks] seconds unless they say otherwise. The log-sum-exp
that travels with O is left out: it has 4 bytes for each head of a row, where O has about 256.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from math import ceil
from typing import NamedTuple

import numpy as np

from hf_distca.plan import AttentionKind, Direction, Layout, MicroBatchPlan
from hf_distca.plan.arrays import FloatArray, IntArray
from hf_distca.plan.cost import pairs
from hf_distca.plan.schedule import (
    CallKey,
    Schedule,
    Transfer,
    Turn,
    has_local_tasks_between_stages,
    local_shares,
    make_schedule,
)
from hf_distca.plan.stages import stage_rows
from hf_distca.predict.counts import CountedPlan, count_nano_batches
from hf_distca.predict.mixing_layers import CountedCuts, MixingLayers, count_cuts
from hf_distca.predict.seconds import DIAGONAL_ROWS, KernelCost, Links, StepCosts, Tasks

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

    @property
    def computed(self) -> float:
        """Seconds that the slowest rank computes."""
        return float((self.attention + self.other).max())

    @property
    def waits(self) -> float:
        """Seconds besides those that the slowest rank computes, as a share of these."""
        return self.seconds / self.computed - 1


Key = tuple[int, str]
"""A transfer by its nano-batch and name."""


class _LinkUse(NamedTuple):
    link: int  # 0 inside nodes, 1 between nodes
    seconds: FloatArray  # -inf for ranks that send and receive nothing over the link


class _TransferSize(NamedTuple):
    largest: FloatArray  # [ranks] the most bytes of a rank on a link
    links: list[_LinkUse]  # links in use
    takes_part: FloatArray  # [ranks] 0 for ranks that send or receive, -inf for others


class LayerClocks:
    """Clocks of all ranks in one layer in the middle of a model.

    Args:
        nano_batches: one or two, in the order of their rows.
        kernel: cost of a kernel call in this direction.
        before: for each nano-batch, seconds that come before core attention in this direction.
        after: for each nano-batch, seconds that follow core attention in this direction.
        links: costs of exchanges.
        direction: forward or backward.
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
        self._nano_batches = nano_batches
        self._mixing = mixing
        self._kernel = kernel
        self._slowness = slowness
        self._links = links
        self._direction = direction
        self._before = before
        self._after = after

        ranks = nano_batches[0].ranks
        self._clock = np.zeros(ranks)
        # When each rank's links are free, inside nodes and between them.
        self._links_free: list[FloatArray] = [np.zeros(ranks), np.zeros(ranks)]
        self._remote_free = np.zeros(nano_batches[0].remote_workers)
        self._arrivals: dict[Key, FloatArray] = {}  # of transfers that are under way
        # When they departed, and the seconds of the rank's own time that they take.
        self._departures: dict[Key, tuple[FloatArray, FloatArray]] = {}
        self._local_shares = cache(self._count_local_shares)
        self._kernel_seconds = cache(self._count_kernel_seconds)
        self._transfer_size = cache(self._count_transfer_size)

    def walked(self) -> Walked:
        """Walk two layers, and return the second one.

        It begins while exchanges of the first one still end, as every layer in the middle of a
        model does.
        """
        walked = self._walk()
        exchanges = any(counts.forward_bytes.any() for counts in self._nano_batches)
        # Without exchanges all layers take equally long.
        if exchanges or self._mixing is not None:
            walked = self._walk()
        return walked

    def _walk(self) -> Walked:
        """Walk the mixing layers, then let the nano-batches take turns, from pause to pause."""
        start = float(self._clock.max())
        if self._mixing is not None:
            self._clock = self._mixing.walk(self._clock)
        self._attention = np.zeros_like(self._clock)
        self._other = np.zeros_like(self._clock)
        self._waited = np.zeros_like(self._clock)
        order = list(range(len(self._nano_batches)))
        if self._direction == "backward":
            order.reverse()
        # Each generator runs to its next pause in turn, as in a step.
        turns = [self._carry_out(index) for index in order]
        for _ in zip_longest(*turns):
            pass
        seconds = float(self._clock.max()) - start
        mixed = np.zeros_like(self._clock)
        if self._mixing is not None:
            mixed = self._mixing.computed
            self._waited = self._waited + self._mixing.waited
        return Walked(seconds, self._attention, self._other + mixed, self._waited, mixed)

    def _carry_out(self, index: int) -> Iterator[None]:
        """Carry out the core attention of a nano-batch, and yield at each pause."""
        schedule = self._schedule(index)
        self._other += self._before[index] + self._after[index]
        self._clock = self._clock + self._before[index]
        for phase in schedule:
            for transfer in phase.wait:
                self._wait((index, transfer.name))
            for call in phase.run:
                part = call.stage if call.tasks == "local part" else 0
                seconds = self._kernel_seconds(index, call.tasks, part)
                self._attention += seconds
                self._clock = self._clock + seconds
            for transfer in phase.send:
                if transfer.rows == "remote":
                    self._compute_remotely(index, transfer, _remote_results(schedule))
                else:
                    self._send(index, transfer)
            if phase.pause:
                yield
        self._clock = self._clock + self._after[index]

    def _schedule(self, index: int) -> Schedule:
        """Return the schedule of a nano-batch for a rank with tasks in every kernel call."""
        counts = self._nano_batches[index]
        return make_schedule(
            self._direction,
            self._turn(index),
            calls=_calls(counts.stages, len(self._local_shares(index))),
            windowed=counts.windowed,
            stages=counts.stages,
            forwards=counts.forwards,
            remote_workers=counts.remote_workers > 0,
        )

    def _turn(self, index: int) -> Turn:
        return "alone" if len(self._nano_batches) == 1 else ("first", "second")[index]

    def _count_local_shares(self, index: int) -> dict[int, FloatArray]:
        """Return the shares of the parts of a nano-batch's local tasks, by the part's number."""
        counts = self._nano_batches[index]
        local_pairs = counts.local.pairs
        least_pairs = float(local_pairs[: counts.ranks].min())
        turn = self._turn(index)
        return local_shares(turn, counts.stages, local_pairs, least_pairs, windowed=counts.windowed)

    def _count_kernel_seconds(self, index: int, name: str, part: int) -> FloatArray:
        """Return the seconds of a nano-batch's kernel call.

        Args:
            part: number of the part of the local tasks; stages have equal tasks.
        """
        counts = self._nano_batches[index]
        tasks = (
            _part_of_local(counts, self._local_shares(index)[part])
            if name == "local part"
            else _tasks(counts, name)
        )
        return self._kernel.seconds(tasks)[: counts.ranks] * self._slowness

    def _count_transfer_size(
        self, index: int, rows: str, columns: tuple[str, ...]
    ) -> _TransferSize | None:
        """Return the size of a nano-batch's transfer; None if nothing travels."""
        size = _bytes(self._nano_batches[index], rows, columns)
        if not size.any():
            return None
        costs = (self._links.within, self._links.between)
        links = [
            _LinkUse(link, np.where(size[link] > 0, cost.seconds(size[link]), -np.inf))
            for link, cost in enumerate(costs)
            if size[link].any()
        ]
        largest = size.max(axis=0)
        return _TransferSize(largest, links, np.where(largest > 0, 0.0, -np.inf))

    def _send(self, index: int, transfer: Transfer) -> None:
        size = self._transfer_size(index, transfer.rows, transfer.columns)
        if size is None:
            return
        # The rows of a transfer arrive when both ends have started it and each link has brought
        # them; a link carries one transfer after another.
        if self._links.start:
            self._clock = self._clock + self._links.start
        all_started = self._when_all_start(index, size)
        arrival = self._clock
        for use in size.links:
            link_free = np.maximum(self._links_free[use.link], all_started)
            link_free += use.seconds
            self._links_free[use.link] = np.maximum(self._links_free[use.link], link_free)
            arrival = np.maximum(arrival, link_free)
        self._arrivals[index, transfer.name] = arrival
        if self._links.busy:
            busy = size.largest * self._links.busy
            self._departures[index, transfer.name] = self._clock, busy

    def _when_all_start(self, index: int, size: _TransferSize) -> FloatArray | float:
        """Return when all senders have reached an exchange: rows arrive only then.

        Ranks that exchange nothing do not wait for each other, except where the transport takes a
        rank's own time: it exchanges empty messages too.
        """
        reached = self._clock + size.takes_part
        connected = self._nano_batches[index].connected
        if self._links.busy or connected.are_one:
            return float(reached.max())
        return connected.latest(reached)

    def _wait(self, key: Key) -> None:
        """Wait for a transfer, if its rows travel at all."""
        if key not in self._arrivals:
            return
        arrival = self._arrivals.pop(key)
        if key in self._departures:
            # The exchange took some of the rank's own time while the rank computed.
            departure, busy = self._departures.pop(key)
            travel = np.maximum(arrival - departure, MOMENT)
            self._clock = self._clock + busy * np.minimum((self._clock - departure) / travel, 1.0)
            self._other += busy  # all of it is taken from ranks that share the core
        end = np.maximum(self._clock, arrival)
        self._waited += end - self._clock
        self._clock = end

    def _compute_remotely(self, index: int, calls: Transfer, results: Transfer) -> None:
        """Let remote workers compute once their rows are there, and send the results.

        Args:
            index: of the nano-batch.
            calls: transfer of rows to remote workers.
            results: transfer of what they return.
        """
        counts = self._nano_batches[index]
        link = self._links.between
        ranks = counts.ranks
        call_bytes = _bytes(counts, calls.rows, calls.columns).max(axis=0)
        result_bytes = _bytes(counts, results.rows, results.columns).max(axis=0)
        # 1. A worker begins when every rank has sent its rows, and when its own link, which is busy
        #    from the first rank's call on, has brought all of them.
        all_sent = (self._clock + link.seconds(call_bytes[:ranks])).max()
        all_received = self._clock.min() + link.seconds(call_bytes[ranks:])
        start = np.maximum(np.maximum(self._remote_free, all_sent), all_received)
        # 2. It computes, and sends the results.
        self._remote_free = start + self._kernel.seconds(counts.remote_query)[ranks:]
        returned_at = self._remote_free + link.seconds(result_bytes[ranks:])
        arrival = float(returned_at.max(initial=0.0))
        # 3. Only remote workers wait for the rows that go there; ranks wait for results.
        self._arrivals[index, results.name] = np.where(call_bytes[:ranks] > 0, arrival, 0.0)


def _remote_results(schedule: Schedule) -> Transfer:
    """Return the transfer of remote workers' results, for which the last phase waits."""
    return next(transfer for transfer in schedule[-1].wait if transfer.rows == "remote")


@cache
def _calls(stages: int, local_parts: int) -> frozenset[CallKey]:
    """Return the keys of all kernel calls that a rank may make."""
    calls: list[CallKey] = [("local", 0)]
    calls += [("local part", part) for part in range(local_parts)]
    for stage in range(stages):
        calls += [("remote-KV", stage), ("remote-query", stage)]
    return frozenset(calls)


def _part_of_local(counts: CountedPlan, share: FloatArray) -> Tasks:
    """Return a part of the local tasks.

    Args:
        share: [workers] of the part.
    """
    tasks = counts.local
    # A rank without remote tasks makes one call, which counts in each part, if none of its local
    # tasks come between stages.
    one_call = counts.remote_kv.tasks + counts.remote_query.tasks == 0
    one_call &= not has_local_tasks_between_stages(counts.stages, windowed=counts.windowed)
    return Tasks(
        rows=tasks.rows * share,
        keys=tasks.keys * share,
        pairs=tasks.pairs * share,
        calls=np.where(one_call, tasks.calls * share, tasks.calls * (share > 0)),
        diagonal=tasks.diagonal * share,
        tasks=tasks.tasks * share,
    )


def _tasks(counts: CountedPlan, name: str) -> Tasks:
    """Return the tasks of a kernel call; a stage has an equal share of them."""
    if name == "local":
        return counts.local
    tasks = counts.remote_kv if name == "remote-KV" else counts.remote_query
    # Each stage reads all queries of all tasks again, and only its own keys.
    return replace(
        tasks,
        keys=tasks.keys / counts.stages,
        pairs=tasks.pairs / counts.stages,
        diagonal=tasks.diagonal / counts.stages,
    )


def _bytes(counts: CountedPlan, rows: str, columns: tuple[str, ...]) -> FloatArray:
    """Return [2, workers] bytes of a transfer by link.

    Of the bytes that a worker sends and of those that it receives the larger number counts. If rows
    are forwarded, the first hop takes all bytes between nodes. Inside nodes the bytes of the two
    hops are not counted apart, so each hop takes half.

    Args:
        rows: as in `Transfer`.
        columns: as in `Transfer`.
    """
    row = counts.row_bytes
    column_bytes = {"q": row.q, "dq": row.q, "o": row.o, "do": row.o}  # the LSE is left out
    query_bytes = sum(column_bytes.get(column, 0) for column in columns)
    key_bytes = row.kv / 2 * sum(column in ("k", "v", "dk", "dv") for column in columns)
    if rows == "remote":
        remote_rows = counts.with_remote
        remote_bytes = remote_rows.queries * query_bytes + remote_rows.keys * key_bytes
        return np.asarray(remote_bytes.max(axis=1), np.float64)
    most_queries, most_keys = (most[:, : counts.ranks] for most in counts.among_ranks.most)
    if rows == "queries":
        return np.asarray(most_queries * query_bytes, np.float64)
    stage_bytes = np.asarray(most_keys * (key_bytes / counts.stages), np.float64)
    if not counts.forwards:
        return stage_bytes
    hop_share = np.array([0.5, 1.0 if rows == "keys" else 0.0])  # within and between nodes
    hop_bytes: FloatArray = stage_bytes * hop_share[:, None]
    return hop_bytes


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
    # 1. Computation besides core attention, of each nano-batch in one layer.
    slowness: FloatArray = np.array(costs.slowness or (1.0,) * layouts[0].ranks)
    rows: list[FloatArray] = [layout.tokens * slowness for layout in layouts]
    launches = slowness * (costs.launches / 2)
    before = [costs.before_attention * tokens + launches for tokens in rows]
    after = [costs.after_attention * tokens + launches for tokens in rows]
    backward_before = [seconds * costs.backward_factor for seconds in after]
    backward_after = [seconds * costs.backward_factor for seconds in before]
    head: FloatArray = np.multiply(costs.head, np.sum(rows, axis=0))
    cuts = [count_cuts(layout, nodes) for layout in layouts] if costs.mixing else []

    # 2. One layer of each kind is walked in each direction, and counts for all layers of the kind.
    attention = np.zeros_like(head)
    waited = np.zeros_like(head)
    mixed = np.zeros_like(head)
    other = head.copy()
    seconds = 0.0
    for kind in costs.kinds:
        counts = [counts_of_kinds[kind.kind] for counts_of_kinds in nano_batches]
        for direction in costs.directions:
            forward = direction == "forward"
            walked = LayerClocks(
                counts,
                kind.kernel(direction),
                before if forward else backward_before,
                after if forward else backward_after,
                costs.exchange,
                direction,
                slowness,
                _mixing_layers(cuts, costs, direction, slowness),
            ).walked()
            attention += kind.layers * walked.attention
            other += kind.layers * walked.other
            waited += kind.layers * walked.waited
            mixed += kind.layers * walked.mixing
            seconds += kind.layers * walked.seconds

    # 3. Ranks that share cores take turns.
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
    """Predict the seconds of a planned micro-batch, on the ranks of its pod.

    Args:
        nodes: [ranks] node of each rank, of all ranks.
        bytes_per_value: size of a value in the dtype of core attention.
    """
    ranks = plan.ranks
    nodes = nodes[ranks.start : ranks.stop]
    if costs.slowness:
        costs = replace(costs, slowness=costs.slowness[ranks.start : ranks.stop])
    counts = count_nano_batches(plan.nano_batches, bytes_per_value, nodes)
    return predict_step(counts, [nano.layout for nano in plan.nano_batches], costs, nodes)


def document_seconds(lengths: IntArray, costs: StepCosts) -> FloatArray:
    """Return [documents] seconds of computing each document, forward and backward.

    Calls of the kernel are left out: documents share them.
    """
    total = costs.token * lengths.astype(np.float64)
    # Pairs in the blocks on the diagonal, which kernels compute in full.
    diagonal = lengths * np.minimum(lengths, DIAGONAL_ROWS)
    for costs_of_kind in costs.kinds:
        document_pairs, tasks = _pairs_and_tasks(lengths, costs_of_kind.kind)
        for kernel in (costs_of_kind.forward, costs_of_kind.backward):
            rows_s = (kernel.row + kernel.key) * lengths + kernel.diagonal * diagonal
            total += costs_of_kind.layers * (
                kernel.pair * document_pairs + rows_s + kernel.task * tasks
            )
    return total


def _pairs_and_tasks(lengths: IntArray, kind: AttentionKind) -> tuple[IntArray, IntArray]:
    """Return [documents] query-key pairs, and tasks: one, or one for each chunk of attention."""
    if kind.chunk is None:
        return pairs(0, lengths, kind.window), np.ones_like(lengths)
    chunks, rest = np.divmod(lengths, kind.chunk)
    document_pairs = chunks * pairs(0, kind.chunk, kind.window) + pairs(0, rest, kind.window)
    return document_pairs, chunks + (rest > 0)


def in_stages(
    counts: CountedPlan, buffer_rows: int, *, stages: int, together: bool = False
) -> CountedPlan:
    """Return the counts of a plan without stages, with as many stages as it will have.

    Args:
        buffer_rows: K/V rows of an exchange buffer.
        stages: approximate number of stages, as in `stage_rows`.
        together: as in `stage_rows`.
    """
    most_keys = counts.among_ranks.most_keys
    rows = stage_rows(
        most_keys, buffer_rows, stages=stages, in_hops=counts.forwards, together=together
    )
    return counts if rows is None else replace(counts, stages=ceil(most_keys / rows))

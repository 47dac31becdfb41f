"""Ways to train on the documents of one global micro-batch, and what a step of each takes.

All compute the same tokens on the same ranks. Ways that leave documents where they are cost what their slowest rank
does; planned ones are walked through the schedule that runs.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, MicroBatchPlan
from hf_distca.planner.cost import RowBytes, Workers, pairs
from hf_distca.planner.counted import count_plan
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.nodes import node_sizes, nodes_of
from hf_distca.planner.seconds import KindCosts, StepCosts, Tasks
from hf_distca.planner.settings import Choices, PlanSettings
from hf_distca.planner.step import document_seconds, predict_step
from hf_distca.planner.with_servers import plan_with_servers
from hf_distca.sim.costs import DeviceProfile
from hf_distca.sim.model import ModelShape

IntArray = NDArray[np.int64]

TOUCHED_BEFORE, TOUCHED_AFTER = 4, 10
"""How often norms, rotations, activations and sums read or write the hidden state of a token, before core attention
and behind it; an activation of the MLP, some three times as wide, counts with its own width."""
BACKWARD = 2.0
"""Backward of matrices over their forward; with checkpointing the forward is run again besides."""


@dataclass(frozen=True)
class Setup:
    """Who trains what.

    Attributes:
        model: its shape.
        profile: what the device takes.
        ranks: how many train.
        tokens_per_rank: the most rows of a rank.
        ranks_per_node: as in PlanSettings.
        tensor_parallel: GPUs that share each layer and count as one rank.
        checkpointing: whether layers are run again in the backward; core attention is not.
    """

    model: ModelShape
    profile: DeviceProfile
    ranks: int
    tokens_per_rank: int
    ranks_per_node: int | tuple[int, ...] = 1
    tensor_parallel: int = 1
    checkpointing: bool = True

    @property
    def nodes(self) -> tuple[int, ...]:
        """[ranks] the node of each."""
        return nodes_of(node_sizes(self.ranks, self.ranks_per_node))

    @property
    def backward_factor(self) -> float:
        """Backward over forward of what is not core attention."""
        return BACKWARD + self.checkpointing

    def on_a_gpu(self, kind: AttentionKind) -> AttentionKind:
        """The heads of a kind that each of the GPUs of a rank has."""
        parts = self.tensor_parallel
        return replace(kind, q_heads=kind.q_heads // parts, kv_heads=max(kind.kv_heads // parts, 1))

    @property
    def costs(self) -> StepCosts:
        """What a micro-batch takes of a GPU."""
        model, profile = self.model, self.profile
        kinds = tuple(
            KindCosts(gpu, layers, profile.kernel(gpu, "forward"), profile.kernel(gpu, "backward"))
            for kind, layers in model.layers.items()
            for gpu in [self.on_a_gpu(kind)]
        )
        return StepCosts(
            kinds,
            before=self._matrices(model.before, TOUCHED_BEFORE),
            after=self._matrices(model.after, TOUCHED_AFTER),
            backward_factor=self.backward_factor,
            head=self._matrices(model.head, 0) * (1 + BACKWARD),  # chunks are computed once
            exchange=profile.exchange,
            launches=profile.launches,
            ranks_per_core=profile.ranks_per_core,
        )

    def _matrices(self, weights: int, touched: int) -> float:
        """Seconds of a token in matrices and in what reads and writes the hidden state."""
        flops = 2.0 * weights / self.tensor_parallel / self.profile.flops_per_second
        return flops + touched * self.model.hidden * self.profile.bytes_per_value / self.profile.bytes_per_second


@dataclass(frozen=True)
class StepTime:
    """What a step of one global micro-batch takes.

    Attributes:
        seconds: of the step.
        attention: core attention of the busiest rank, in seconds.
        attention_mean: the mean over ranks.
        other: everything else that is computed, of the busiest rank.
        other_mean: the mean over ranks.
        waited: for exchanges, of the rank that waits the longest.
        waited_mean: the mean over ranks.
        idle: share of the ranks' time in which they compute nothing.
        bytes_bottleneck: bytes that the busiest rank sends or receives in one layer's forward.
        tokens_most: rows of the rank that holds the most.
        attention_by_rank: [ranks] core attention of each, in seconds.
        documents_cut: documents that lose context, because no rank or group of ranks can hold them.
    """

    seconds: float
    attention: float
    attention_mean: float
    other: float
    other_mean: float
    waited: float
    waited_mean: float
    idle: float
    bytes_bottleneck: int
    tokens_most: int
    attention_by_rank: tuple[float, ...]
    documents_cut: int = 0


@dataclass(frozen=True, eq=False)
class Way:
    """A way to train.

    Attributes:
        name: for people.
        step: what the documents of a micro-batch take, and their plan, if there is one.
        context: ranks that share each document.
        document_layout: that plans have; None where nothing is planned.
        servers: dedicated attention servers besides the ranks.
    """

    name: str
    step: Callable[[IntArray], tuple[StepTime, MicroBatchPlan | None]]
    context: int = 1
    document_layout: str | None = None
    servers: int = 0


PLAIN = "plain packing"
CHOSEN = "hf_distca, chosen"
"""The fastest plan for each micro-batch, as training chooses it by default."""


def ways_to_train(setup: Setup, settings: PlanSettings, servers: int) -> tuple[Way, ...]:
    """All ways that are compared.

    Args:
        setup: who trains what.
        settings: of plans; the layout is taken from each way.
        servers: dedicated attention servers; above 0 a further way is tried with them.
    """

    def by_plans(name: str, layout: str, servers: int = 0) -> Way:
        of_way = replace(settings, document_layout=layout)
        step = partial(planned, setup=setup, settings=of_way, servers=servers)
        return Way(name, step, document_layout=layout, servers=servers)

    def in_groups(name: str, context: int) -> Way:
        return Way(name, lambda lengths: (data_and_context_parallel(lengths, setup, context), None), context)

    ways = [Way(PLAIN, lambda lengths: (plain(lengths, setup), None)), in_groups("whole documents balanced", 1)]
    context = 2
    while setup.ranks % context == 0:
        ways.append(in_groups(f"context parallel, {setup.ranks // context} × {context}", context))
        context *= 2
    chosen = replace(settings, choices=Choices.beside(settings, setup.costs))
    ways += [
        by_plans("hf_distca, fixed", "fixed"),
        by_plans("hf_distca, joint", "joint"),
        Way(CHOSEN, partial(planned, setup=setup, settings=chosen), document_layout="auto"),
    ]
    if servers:
        ways.append(by_plans(f"hf_distca, joint, {servers} servers", "joint", servers))
    return tuple(ways)


def plain(lengths: IntArray, setup: Setup) -> StepTime:
    """Predict a step of documents packed into rows of equally many tokens, one for each rank, by DDP or FSDP."""
    rows, cut = packed_rows(lengths, setup)
    return _on_groups(rows, 1, setup, cut)


def packed_rows(lengths: IntArray, setup: Setup) -> tuple[list[list[int]], int]:
    """Pack documents into rows of equally many tokens.

    What a rank cannot hold is cut: the pieces are documents of their own then, and lose context.

    Returns:
        [ranks] lengths of the pieces in each row, and how many documents are cut.
    """
    pieces, cut = _cut(lengths, setup.tokens_per_rank)
    heap = [(0, rank) for rank in range(setup.ranks)]
    rows: list[list[int]] = [[] for _ in heap]
    for length in sorted(pieces, reverse=True):  # each to the rank with the fewest tokens
        tokens, rank = heap[0]
        rows[rank].append(length)
        heapq.heapreplace(heap, (tokens + length, rank))
    return rows, cut


def data_and_context_parallel(lengths: IntArray, setup: Setup, context: int) -> StepTime:
    """Whole documents balanced over groups of ranks, longest first, each document divided evenly inside its group.

    The first and the last of 2 · context equal parts of a document go to the first rank of a group, and so on, so that
    ranks of a group compute alike; K and V of the group are gathered by each of its ranks in every layer. With groups
    of one rank whole documents are balanced and nothing is exchanged. This is how WLB-LLM and the paper's baseline
    divide documents.

    Args:
        lengths: of the micro-batch's documents.
        setup: who trains what.
        context: ranks of a group.
    """
    pieces, cut = _cut(lengths, setup.tokens_per_rank * context)
    cost = document_seconds(np.array(pieces, np.int64), setup.costs)
    groups: list[list[int]] = [[] for _ in range(setup.ranks // context)]
    heap = [(0.0, 0, group) for group in range(len(groups))]
    most = setup.tokens_per_rank * context
    for index in np.argsort(-cost, kind="stable").tolist():
        full = []
        load, tokens, group = heapq.heappop(heap)
        while heap and tokens + pieces[index] > most:
            full.append((load, tokens, group))
            load, tokens, group = heapq.heappop(heap)
        if tokens + pieces[index] > most:  # nowhere within the rows: where the fewest are
            full.append((load, tokens, group))
            load, tokens, group = min(full, key=lambda entry: entry[1])
            full.remove((load, tokens, group))
        groups[group].append(pieces[index])
        heapq.heappush(heap, (load + float(cost[index]), tokens + pieces[index], group))
        for entry in full:
            heapq.heappush(heap, entry)
    return _on_groups(groups, context, setup, cut)


def on_ranks(rows: Sequence[Sequence[int]], setup: Setup) -> StepTime:
    """Whole documents that lie on ranks already; [ranks] lengths of those of each."""
    return _on_groups(rows, 1, setup, 0)


def planned(
    lengths: IntArray, setup: Setup, settings: PlanSettings, servers: int = 0
) -> tuple[StepTime, MicroBatchPlan]:
    """Core attention disaggregated.

    Args:
        lengths: of the micro-batch's documents.
        setup: who trains what; `settings.ranks` train.
        settings: of the plan, whose kinds are those on a GPU.
        servers: dedicated attention servers besides the ranks, of the same speed.

    Returns:
        The step and its plan.
    """
    plan = plan_micro_batch(lengths.tolist(), settings)
    if servers:
        workers = Workers.uniform(settings.ranks + servers)
        plan = plan_with_servers(plan, workers, settings, ranks_serve=True)
    nodes = list(nodes_of(node_sizes(settings.ranks, settings.ranks_per_node)))
    nodes += [max(nodes) + 1 + index for index in range(servers)]
    counted = [
        {kind: count_plan(of_kind, kind, settings.bytes_per_value, nodes) for kind, of_kind in nano.plans.items()}
        for nano in plan.nano_batches
    ]
    tokens = [nano.layout.tokens for nano in plan.nano_batches]
    step = predict_step(counted, tokens, setup.costs)
    moved = max(int(np.sum([each[kind].bytes_moved for each in counted], axis=0).max()) for kind in settings.kinds)
    busy = step.attention + step.other
    return (
        StepTime(
            step.seconds,
            float(step.attention.max()),
            float(step.attention.mean()),
            float(step.other.max()),
            float(step.other.mean()),
            float(step.waited.max()),
            float(step.waited.mean()),
            1.0 - float(busy.mean()) / step.seconds,
            moved,
            int(np.sum(tokens, axis=0).max()),
            tuple(step.attention.tolist()),
        ),
        plan,
    )


def _cut(lengths: IntArray, most: int) -> tuple[list[int], int]:
    """Documents of at most so many tokens, and how many had to be cut."""
    pieces: list[int] = []
    for length in lengths.tolist():
        pieces += [most] * (length // most) + ([length % most] if length % most else [])
    return pieces, int((lengths > most).sum())


def _keys_read(length: int, parts: int) -> float:
    """K/V rows that a document's parts of equal length read, each those up to its own end."""
    return length * (min(parts, length) + 1) / 2


def _on_groups(groups: Sequence[Sequence[int]], context: int, setup: Setup, cut: int) -> StepTime:
    """A step in which groups of ranks share their own documents evenly.

    Args:
        groups: lengths of each group's documents.
        context: ranks of a group.
        setup: who trains what.
        cut: documents that were cut.
    """
    parts = 2 * context if context > 1 else 1
    tokens = np.array([sum(group) for group in groups], float) / context
    attention, gathered, moved = np.zeros(len(groups)), np.zeros(len(groups)), 0.0
    for of_kind in setup.costs.kinds:
        gpu = of_kind.kind
        tasks = Tasks(
            tokens,
            np.array([sum(_keys_read(length, parts) for length in group) for group in groups]) / context,
            np.array([sum(pairs(0, length, gpu.window) for length in group) for group in groups], float) / context,
            np.ones(len(groups)),
        )
        attention += of_kind.layers * (of_kind.forward.seconds(tasks) + of_kind.backward.seconds(tasks))
        if context > 1:
            size = tokens * (context - 1) * RowBytes.of_kind(gpu, setup.profile.bytes_per_value).kv
            inside = context <= max(node_sizes(setup.ranks, setup.ranks_per_node))
            link = setup.profile.links.within if inside else setup.profile.links.between
            # Forward; in the backward again, and dK and dV are summed to where they belong.
            gathered += 3 * of_kind.layers * link.seconds(size)
            moved = max(moved, float(size.max()))
    other = setup.costs.token * tokens
    total = attention + other + gathered
    seconds = float(total.max())
    return StepTime(
        seconds,
        float(attention.max()),
        float(attention.mean()),
        float(other.max()),
        float(other.mean()),
        float(gathered.max()),
        float(gathered.mean()),
        1.0 - float((attention + other).mean()) / seconds,
        int(moved),
        int(np.ceil(tokens.max())),
        tuple(np.repeat(attention, context).tolist()),
        cut,
    )

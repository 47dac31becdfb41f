"""Training strategies that are compared, and the predicted seconds of a step under each.

All compute the same tokens on the same ranks. Strategies that leave documents in place take as long
as their slowest rank. Planned strategies walk the schedule that training runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.cost import RowBytes, Workers, pairs
from hf_distca.plan.nodes import node_sizes
from hf_distca.planner.bin_packing import Bins, largest_first
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.servers import plan_with_servers
from hf_distca.planner.settings import Choices, PlanSettings
from hf_distca.predict.counts import count_nano_batches
from hf_distca.predict.mixing import count_cuts
from hf_distca.predict.seconds import DIAGONAL_ROWS, FloatArray, Tasks
from hf_distca.predict.setup import Setup
from hf_distca.predict.walk import Walked, document_seconds, predict_step
from hf_distca.sim.lengths import IntArray
from hf_distca.units import counted


@dataclass(frozen=True, eq=False)
class StepTime(Walked):
    """Predicted step of one global micro-batch."""

    bytes_bottleneck: int  # that the busiest rank sends or receives in one layer's forward
    tokens_most: int  # rows of the rank that holds the most
    # Documents that lose context, because no rank or group of ranks can hold them.
    documents_cut: int = 0
    # Runs of a recurrence's kernel in a mixing layer's forward, on the rank with the most.
    mixing_runs: int = 0
    mixing_bytes: float = 0.0  # that the busiest rank sends or receives in a mixing layer's forward


@dataclass(frozen=True, eq=False)
class Strategy:
    """Way to divide documents over ranks that the simulator compares.

    `step` predicts a micro-batch from document lengths, and returns its plan if there is one.
    """

    name: str
    step: Callable[[IntArray], tuple[StepTime, MicroBatchPlan | None]]
    context: int = 1  # ranks that share each document
    document_layout: str | None = None  # None if nothing is planned
    servers: int = 0


PLAIN = "plain packing"
CHOSEN = "hf_distca, chosen"
"""Strategy that takes the fastest plan for each micro-batch, as training does by default."""


def all_strategies(setup: Setup, settings: PlanSettings, servers: int) -> tuple[Strategy, ...]:
    """Return all strategies that are compared.

    Each planned strategy sets its own layout. One uses the servers, if there are any.
    """

    def context_parallel_step(context: int) -> Callable[[IntArray], tuple[StepTime, None]]:
        return lambda lengths: (data_and_context_parallel(lengths, setup, context), None)

    # 1. Strategies without plans: packing, and groups of 1, 2, 4, … ranks that share documents.
    strategies = [Strategy(PLAIN, lambda lengths: (plain(lengths, setup), None))]
    context = 1
    while setup.ranks % context == 0:
        name = (
            f"context parallel, {setup.ranks // context} × {context}"
            if context > 1
            else "whole documents balanced"
        )
        strategies.append(Strategy(name, context_parallel_step(context), context))
        context *= 2

    def add_planned(name: str, layout: str, plan_settings: PlanSettings, servers: int = 0) -> None:
        step = partial(planned, setup=setup, settings=plan_settings, servers=servers)
        strategies.append(Strategy(name, step, document_layout=layout, servers=servers))

    # 2. Plans with each layout, and the plan that training would choose.
    layouts = ("whole",) if settings.document_layout == "whole" else ("fixed", "joint")
    for layout in layouts:
        add_planned(f"hf_distca, {layout}", layout, replace(settings, document_layout=layout))
    choices = Choices.beside(settings, setup.costs)
    add_planned(CHOSEN, "auto", replace(settings, choices=choices))
    if servers:
        layout = layouts[-1]
        name = f"hf_distca, {layout}, {counted(servers, 'server')}"
        add_planned(name, layout, replace(settings, document_layout=layout), servers)
    return tuple(strategies)


def plain(lengths: IntArray, setup: Setup) -> StepTime:
    """Predict a step of DDP or FSDP with packed documents.

    Each rank has one row, and rows have about equally many tokens.
    """
    rows, cut = packed_rows(lengths, setup)
    return on_ranks(rows, setup, cut=cut)


def packed_rows(lengths: IntArray, setup: Setup) -> tuple[list[list[int]], int]:
    """Pack documents into rows of equally many tokens.

    A document that is too long for a rank is cut into pieces, which become separate documents and
    lose context.

    Returns:
        [ranks] lengths of the pieces in each row, and the number of cut documents.
    """
    piece_lengths, cut_documents = _cut(lengths, setup.tokens_per_rank)
    pieces = np.array(piece_lengths, np.int64)
    order = largest_first(pieces)
    # Each piece goes to the rank with the fewest tokens, whether that rank has room or not.
    ranks = Bins([int(pieces.sum())] * setup.ranks)
    rank_of_piece = ranks.pack(pieces, pieces, order, ranks.most_room)
    return _by_bin(pieces, order, rank_of_piece, setup.ranks), cut_documents


def _by_bin(
    pieces: IntArray, order: IntArray, bin_of_piece: IntArray, bins: int
) -> list[list[int]]:
    """Return the lengths of the pieces in each bin, in the order in which they were packed."""
    lengths_of_bin: list[list[int]] = [[] for _ in range(bins)]
    for piece in order.tolist():
        lengths_of_bin[bin_of_piece[piece]].append(int(pieces[piece]))
    return lengths_of_bin


def data_and_context_parallel(lengths: IntArray, setup: Setup, context: int) -> StepTime:
    """Predict a step of whole documents balanced over groups of ranks.

    Documents are divided evenly inside their group: each is cut into 2 · context equal parts. The
    first rank of a group gets the first and the last part, and so on. So ranks of a group compute
    alike, as in WLB-LLM and the paper's baseline. Each rank gathers K and V of its group in every
    layer.
    """
    most_tokens = setup.tokens_per_rank * context
    piece_lengths, cut_documents = _cut(lengths, most_tokens)
    pieces = np.array(piece_lengths, np.int64)
    costs = document_seconds(pieces, setup.costs)
    order = largest_first(costs)
    count = setup.ranks // context
    groups = Bins([most_tokens] * count)
    group_of_piece = groups.pack(
        pieces, costs, order, groups.least_work, when_full=groups.most_room
    )
    lengths_of_group = _by_bin(pieces, order, group_of_piece, count)
    return on_ranks(lengths_of_group, setup, context, cut_documents)


def planned(
    lengths: IntArray, setup: Setup, settings: PlanSettings, servers: int = 0
) -> tuple[StepTime, MicroBatchPlan]:
    """Predict a step with planned core attention, and return its plan too.

    Settings have the kinds on a GPU.
    """
    plan = plan_micro_batch(lengths.tolist(), settings)
    if servers:
        plan = plan_with_servers(
            plan, Workers.uniform(settings.ranks + servers), settings, ranks_serve=True
        )
    return step_of_plan(plan, setup, settings, servers), plan


def step_of_plan(
    plan: MicroBatchPlan, setup: Setup, settings: PlanSettings, servers: int = 0
) -> StepTime:
    """Predict a step of a plan."""
    costs = setup.costs
    nodes = list(settings.node_of_ranks)
    nodes += [max(nodes) + 1 + server for server in range(servers)]
    layouts = [nano_batch.layout for nano_batch in plan.nano_batches]
    counts = count_nano_batches(plan.nano_batches, settings.bytes_per_value, nodes)

    # 1. The seconds, and the bytes of a layer of the kind of attention that moves the most.
    walked = predict_step(counts, layouts, costs, nodes)
    bytes_bottleneck = 0
    for kind in settings.kinds:
        # [2, workers] bytes sent and received over all links, all nano-batches together
        forward_bytes = np.sum(
            [counts_of_kinds[kind].forward_bytes.sum(axis=0) for counts_of_kinds in counts], axis=0
        )
        bytes_bottleneck = max(bytes_bottleneck, int(forward_bytes.max()))
    tokens_most = int(plan.tokens.max())
    step = StepTime(**vars(walked), bytes_bottleneck=bytes_bottleneck, tokens_most=tokens_most)
    if costs.mixing is None:
        return step

    # 2. What layers that mix the rows of a document run and move.
    mixing_bytes = 0.0
    runs = np.zeros(settings.ranks, np.int64)
    for layout in layouts:
        cuts = count_cuts(layout, nodes)
        mixing_bytes += cuts.bytes_moved(costs.mixing.halo, costs.mixing.state)
        runs += cuts.runs
    return replace(step, mixing_runs=int(runs.max()), mixing_bytes=mixing_bytes)


def _cut(lengths: IntArray, piece_tokens: int) -> tuple[list[int], int]:
    """Cut documents into pieces of at most `piece_tokens` tokens.

    Return the pieces and the number of cut documents.
    """
    pieces: list[int] = []
    for length in lengths.tolist():
        full_pieces, remaining_tokens = divmod(length, piece_tokens)
        pieces += [piece_tokens] * full_pieces
        if remaining_tokens:
            pieces.append(remaining_tokens)
    return pieces, int((lengths > piece_tokens).sum())


def on_ranks(
    groups: Sequence[Sequence[int]], setup: Setup, context: int = 1, cut: int = 0
) -> StepTime:
    """Predict a step of documents that already lie on ranks, or on groups of ranks.

    Args:
        groups: lengths of each rank's documents, or of those that each group of `context` ranks
            shares evenly.
        cut: number of documents that were cut.
    """
    costs = setup.costs
    # 1. What each rank of a group computes: its share of the group's documents.
    tokens = np.array([sum(documents) for documents in groups], float) / context
    attention = np.zeros(len(groups))
    for kind_costs in costs.kinds:
        tasks = _tasks_of_groups(groups, context, kind_costs.kind.window)
        kernel_s = kind_costs.forward.seconds(tasks) + kind_costs.backward.seconds(tasks)
        attention += kind_costs.layers * kernel_s
    other = costs.token * tokens
    mixing_token = 0.0
    if costs.mixing is not None:
        mixing_token = costs.mixing.layers * costs.mixing.token * (1 + costs.backward_factor)

    # 2. K and V that it gathers from its group.
    gathered = np.zeros(len(groups))
    bytes_bottleneck = 0.0
    if context > 1:
        fits_in_node = context <= max(node_sizes(setup.ranks, setup.ranks_per_node))
        link = setup.profile.links.within if fits_in_node else setup.profile.links.between
        for kind_costs in costs.kinds:
            row_bytes = RowBytes.of_kind(kind_costs.kind, setup.profile.bytes_per_value)
            received = tokens * (context - 1) * row_bytes.kv
            # K and V are gathered in the forward and in the backward, and dK and dV are reduced.
            gathered += 3 * kind_costs.layers * link.seconds(received)
            bytes_bottleneck = max(bytes_bottleneck, float(received.max()))

    # 3. The slowest group, and the figures of every rank.
    return StepTime(
        seconds=float((attention + other + gathered).max()),
        attention=np.repeat(attention, context),
        other=np.repeat(other, context),
        waited=np.repeat(gathered, context),
        mixing=np.repeat(mixing_token * tokens, context),
        bytes_bottleneck=int(bytes_bottleneck),
        tokens_most=int(np.ceil(tokens.max())),
        documents_cut=cut,
        mixing_runs=int(costs.mixing is not None),
    )


def _tasks_of_groups(groups: Sequence[Sequence[int]], context: int, window: int | None) -> Tasks:
    """Return [groups] the tasks of a rank of each group, whose documents its ranks share evenly.

    Args:
        groups, context: as in `on_ranks`.
    """
    parts = 2 * context if context > 1 else 1

    def share(amount: Callable[[int], float]) -> FloatArray:
        """Return [groups] a rank's share of an amount, which is given for a document's length."""
        return np.array([sum(map(amount, documents)) for documents in groups]) / context

    return Tasks(
        share(float),
        # Each of a document's equal parts reads the K/V rows up to its own end.
        share(lambda length: length * (min(parts, length) + 1) / 2),
        share(lambda length: float(pairs(0, length, window))),
        np.ones(len(groups)),
        share(lambda length: length * min(length / parts, DIAGONAL_ROWS)),
        share(lambda length: min(parts, length)),
    )

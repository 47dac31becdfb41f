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
from hf_distca.predict.counts import count_plan
from hf_distca.predict.mixing import count_cuts
from hf_distca.predict.seconds import DIAGONAL_ROWS, Tasks
from hf_distca.predict.setup import Setup
from hf_distca.predict.walk import Walked, document_seconds, predict_step
from hf_distca.sim.lengths import IntArray


@dataclass(frozen=True, eq=False)
class StepTime(Walked):
    """Predicted step of one global micro-batch."""

    bytes_bottleneck: int  # that the busiest rank sends or receives in one layer's forward
    tokens_most: int  # rows of the rank that holds the most
    documents_cut: int = (
        0  # documents that lose context, because no rank or group of ranks can hold them
    )
    mixing_runs: int = (
        0  # runs of a recurrence's kernel in a mixing layer's forward, on the rank with the most
    )
    mixing_bytes: float = 0.0  # that the busiest rank sends or receives in a mixing layer's forward


@dataclass(frozen=True, eq=False)
class Strategy:
    """Training strategy.

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

    Each that plans sets its own layout, and one uses servers if any.
    """

    def in_groups(context: int) -> Callable[[IntArray], tuple[StepTime, None]]:
        return lambda lengths: (data_and_context_parallel(lengths, setup, context), None)

    found, context = [Strategy(PLAIN, lambda lengths: (plain(lengths, setup), None))], 1
    while setup.ranks % context == 0:
        name = (
            f"context parallel, {setup.ranks // context} × {context}"
            if context > 1
            else "whole documents balanced"
        )
        found.append(Strategy(name, in_groups(context), context))
        context *= 2

    layouts = ("whole",) if settings.document_layout == "whole" else ("fixed", "joint")
    of_layouts = [(layout, replace(settings, document_layout=layout)) for layout in layouts]
    plans = [(f"hf_distca, {layout}", layout, given, 0) for layout, given in of_layouts]
    plans.append(
        (CHOSEN, "auto", replace(settings, choices=Choices.beside(settings, setup.costs)), 0)
    )
    if servers:
        plans.append((f"hf_distca, {layouts[-1]}, {servers} servers", *of_layouts[-1], servers))
    for name, layout, given, helpers in plans:
        step = partial(planned, setup=setup, settings=given, servers=helpers)
        found.append(Strategy(name, step, document_layout=layout, servers=helpers))
    return tuple(found)


def plain(lengths: IntArray, setup: Setup) -> StepTime:
    """Predict a step of DDP or FSDP with packed documents.

    Each rank has one row of about equal tokens.
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

    A group divides its documents evenly among its ranks.

    Each document is cut into 2 · context equal parts. The first rank of a group gets the first and
    the last part, and so on, so that ranks of a group compute alike, as in WLB-LLM and the paper's
    baseline. Each rank gathers K and V of its group in every layer.
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
    nodes = list(settings.node_of_ranks)
    nodes += [max(nodes) + 1 + index for index in range(servers)]
    counted = [
        {
            kind: count_plan(of_kind, kind, settings.bytes_per_value, nodes)
            for kind, of_kind in nano.plans.items()
        }
        for nano in plan.nano_batches
    ]
    layouts, costs = [nano.layout for nano in plan.nano_batches], setup.costs
    most = int(np.sum([layout.tokens for layout in layouts], axis=0).max())
    moved = np.sum(
        [[each[kind].forward_bytes for kind in settings.kinds] for each in counted], axis=(0, 2)
    )
    walked = predict_step(counted, layouts, costs, nodes)
    step = StepTime(**vars(walked), bytes_bottleneck=int(np.max(moved)), tokens_most=most)
    if costs.mixing is not None:
        cuts = [count_cuts(layout, nodes) for layout in layouts]
        in_mixing = sum(each.bytes_moved(costs.mixing.halo, costs.mixing.state) for each in cuts)
        runs = int(np.sum([each.runs for each in cuts], axis=0).max())
        step = replace(step, mixing_runs=runs, mixing_bytes=in_mixing)
    return step


def _cut(lengths: IntArray, most: int) -> tuple[list[int], int]:
    """Cut documents into pieces of at most `most` tokens.

    Return the pieces and the number of cut documents.
    """
    pieces: list[int] = []
    for length in lengths.tolist():
        pieces += [most] * (length // most) + ([length % most] if length % most else [])
    return pieces, int((lengths > most).sum())


def on_ranks(
    groups: Sequence[Sequence[int]], setup: Setup, context: int = 1, cut: int = 0
) -> StepTime:
    """Predict a step of documents that already lie on ranks, or on groups of ranks.

    Args:
        groups: lengths of each rank's documents, or of those that each group of `context` ranks
            shares evenly.
        cut: number of documents that were cut.
    """
    costs, parts = setup.costs, 2 * context if context > 1 else 1
    tokens = np.array([sum(group) for group in groups], float) / context
    # Each of a document's equal parts reads the K/V rows up to its own end.
    keys = np.array([sum(n * (min(parts, n) + 1) / 2 for n in group) for group in groups]) / context
    diagonal = (
        np.array([sum(n * min(n / parts, DIAGONAL_ROWS) for n in group) for group in groups])
        / context
    )
    count = np.array([sum(min(parts, n) for n in group) for group in groups]) / context
    attention, gathered, moved = np.zeros(len(groups)), np.zeros(len(groups)), 0.0
    for of_kind in costs.kinds:
        gpu = of_kind.kind
        in_pairs = (
            np.array([sum(pairs(0, n, gpu.window) for n in group) for group in groups], float)
            / context
        )
        tasks = Tasks(tokens, keys, in_pairs, np.ones(len(groups)), diagonal, count)
        attention += of_kind.layers * (
            of_kind.forward.seconds(tasks) + of_kind.backward.seconds(tasks)
        )
        if context > 1:
            size = tokens * (context - 1) * RowBytes.of_kind(gpu, setup.profile.bytes_per_value).kv
            inside = context <= max(node_sizes(setup.ranks, setup.ranks_per_node))
            link = setup.profile.links.within if inside else setup.profile.links.between
            # K and V are gathered in the forward and in the backward, and dK and dV are reduced.
            gathered += 3 * of_kind.layers * link.seconds(size)
            moved = max(moved, float(size.max()))
    other = costs.token * tokens
    in_mixing = (
        costs.mixing.layers * costs.mixing.token * (1 + costs.backward_factor)
        if costs.mixing
        else 0.0
    )
    seconds = float((attention + other + gathered).max())
    attention, other, gathered, mixing = (
        np.repeat(of_groups, context)
        for of_groups in (attention, other, gathered, in_mixing * tokens)
    )
    most, runs = int(np.ceil(tokens.max())), int(costs.mixing is not None)
    return StepTime(seconds, attention, other, gathered, mixing, int(moved), most, cut, runs)

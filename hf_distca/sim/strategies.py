"""Training strategies that are compared, and the predicted seconds of a step under each.

All compute the same tokens on the same ranks. Strategies that leave documents in place take as long
as their slowest rank. Planned strategies walk the schedule that training runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.arrays import FloatArray, IntArray, Table
from hf_distca.planner.bin_packing import Bins, largest_first
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.counts import count_nano_batches
from hf_distca.predict.mixing_layers import count_cuts
from hf_distca.predict.walk import Walked, document_seconds, predict_step
from hf_distca.run import RunSpec
from hf_distca.sim.context_parallel import ONE_RANK, Documents, Group

HELD = np.dtype([(name, np.int64) for name in ("document", "group", "tokens")])
"""Tokens of a document that the ranks of a group hold."""


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
    # Of dtype HELD; None where a plan says it.
    held: Table | None = None
    group_ranks: int = 1  # ranks of a group
    encoder: FloatArray | None = None  # [ranks] seconds in encoders of images; None without images
    encoder_patches: int = 0  # of the rank that encodes the most


@dataclass(frozen=True, eq=False)
class Strategy:
    """Way to divide documents over ranks that the simulator compares.

    `step` predicts a micro-batch from document lengths, and returns its plan if there is one.
    """

    name: str
    step: Callable[[IntArray], tuple[StepTime, MicroBatchPlan | None]]
    group: Group = ONE_RANK
    document_layout: str | None = None  # None if nothing is planned
    extra_gpus: int = 0  # besides those of the ranks
    # Whether transformers, accelerate or TRL run it on packed documents.
    in_transformers: bool = False


PLAIN = "plain packing"
"""What TRL does with packing=True."""
WHOLE = "whole documents balanced"
CHOSEN = "hf_distca, chosen"
"""Strategy that takes the fastest plan for each micro-batch, as training does by default."""


def all_strategies(run: RunSpec) -> tuple[Strategy, ...]:
    """Return all strategies that are compared.

    Each planned strategy sets its own layout.
    """
    # 1. Strategies without plans.
    strategies = [
        Strategy(PLAIN, lambda lengths: (plain(lengths, run), None), in_transformers=True),
        *_of_whole_documents(run),
    ]

    def add_planned(name: str, layout: str, plans: PlanSettings) -> None:
        step = partial(planned, run=replace(run, plans=plans))
        strategies.append(Strategy(name, step, document_layout=layout))

    # 2. Plans with a set layout, and the plan that training would choose.
    as_set = replace(run.plans, costs=None)
    layout = "whole" if as_set.document_layout == "whole" else "fixed"
    add_planned(f"hf_distca, {layout}", layout, replace(as_set, document_layout=layout))
    add_planned(CHOSEN, "auto", replace(as_set, costs=run.costs))
    return tuple(strategies)


def _of_whole_documents(run: RunSpec) -> Iterator[Strategy]:
    """Yield strategies without plans that keep documents whole.

    Documents are balanced over groups of 1, 2, 4, … ranks. The trainers of transformers balance
    whole documents (batch_rebalance), and divide heads by DeepSpeed's Ulysses. Neither knows tensor
    parallelism, and heads of layers that mix rows in order cannot be divided.
    """

    def strategy(name: str, group: Group, *, in_transformers: bool) -> Strategy:
        def step(lengths: IntArray) -> tuple[StepTime, None]:
            return whole_documents(lengths, run, group), None

        return Strategy(name, step, group, in_transformers=in_transformers)

    alone = run.tensor_parallel == 1
    yield strategy(WHOLE, ONE_RANK, in_transformers=alone)
    sizes = []
    size = 2
    while run.plans.ranks % size == 0:
        sizes.append(size)
        size *= 2
    for size in sizes:
        group = Group(size, "heads")
        if run.model.mixing is None and all(map(group.can_share, run.plans.kinds)):
            name = f"Ulysses, {run.plans.ranks // size} × {size}"
            yield strategy(name, group, in_transformers=alone)
    for size in sizes:
        name = f"context parallel, {run.plans.ranks // size} × {size}"
        yield strategy(name, Group(size), in_transformers=False)


def plain(lengths: IntArray, run: RunSpec) -> StepTime:
    """Predict a step of DDP or FSDP with packed documents.

    Each rank has one row, and rows have about equally many tokens.
    """
    spans, rank_of_span = _packed(lengths, run)
    rows = _by_bin(spans, rank_of_span, run.plans.ranks)
    return replace(on_ranks(rows, run, cut=_cut_documents(spans)), held=_held(spans, rank_of_span))


def packed_rows(lengths: IntArray, run: RunSpec) -> tuple[list[list[int]], int]:
    """Pack documents into rows of equally many tokens.

    A document that is too long for a rank is cut into spans, which become separate documents and
    lose context.

    Returns:
        [ranks] lengths of the spans in each row, and the number of cut documents.
    """
    spans, rank_of_span = _packed(lengths, run)
    return _by_bin(spans, rank_of_span, run.plans.ranks), _cut_documents(spans)


def _packed(lengths: IntArray, run: RunSpec) -> tuple[Table, IntArray]:
    """Return the spans of documents, and the rank of each, with about equally many tokens each."""
    spans = _cut(lengths, run.plans.rows_per_rank)
    # Each span goes to the rank with the fewest tokens, whether that rank has room or not.
    ranks = Bins([int(lengths.sum())] * run.plans.ranks)
    order = largest_first(spans["tokens"])
    return spans, ranks.pack(spans["tokens"], spans["tokens"], order, ranks.most_room)


def _by_bin(
    spans: Table, bin_of_span: IntArray, bins: int, order: IntArray | None = None
) -> list[list[int]]:
    """Return the lengths of the spans in each bin, in the order in which they were packed.

    Args:
        order: of packing; None for the longest first.
    """
    lengths_of_bin: list[list[int]] = [[] for _ in range(bins)]
    for span in (largest_first(spans["tokens"]) if order is None else order).tolist():
        lengths_of_bin[bin_of_span[span]].append(int(spans["tokens"][span]))
    return lengths_of_bin


def whole_documents(lengths: IntArray, run: RunSpec, group: Group = ONE_RANK) -> StepTime:
    """Predict a step of whole documents balanced over groups of ranks by their seconds.

    With rows divided it is the baseline of WLB-LLM and of the paper.
    """
    most_tokens = run.plans.rows_per_rank * group.ranks
    spans = _cut(lengths, most_tokens)
    costs = document_seconds(spans["tokens"], run.costs)
    order = largest_first(costs)
    count = run.plans.ranks // group.ranks
    groups = Bins([most_tokens] * count)
    group_of_span = groups.pack(
        spans["tokens"], costs, order, groups.least_work, when_full=groups.most_room
    )
    documents = _by_bin(spans, group_of_span, count, order)
    step = on_ranks(documents, run, group, _cut_documents(spans))
    return replace(step, held=_held(spans, group_of_span), group_ranks=group.ranks)


def planned(lengths: IntArray, run: RunSpec) -> tuple[StepTime, MicroBatchPlan]:
    """Predict a step with planned core attention, and return its plan too."""
    plan = plan_micro_batch(lengths.tolist(), run.plans)
    return step_of_plan(plan, run), plan


def step_of_plan(plan: MicroBatchPlan, run: RunSpec) -> StepTime:
    """Predict a step of a plan, whose remote workers are each on a node of its own."""
    costs, settings = run.costs, run.plans
    nodes = list(settings.node_of_ranks)
    (workers,) = {
        kind_plan.workers for nano in plan.nano_batches for kind_plan in nano.plans.values()
    }
    first_node = max(nodes) + 1
    nodes += [first_node + index for index in range(workers - settings.ranks)]
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


def _cut(lengths: IntArray, span_tokens: int) -> Table:
    """Cut documents into spans of at most `span_tokens` tokens.

    Return [spans] of dtype HELD, by document, without their groups.
    """
    counts = -(-lengths // span_tokens)
    spans = np.zeros(int(counts.sum()), HELD)
    spans["document"] = np.repeat(np.arange(len(lengths)), counts)
    spans["tokens"] = span_tokens
    spans["tokens"][np.cumsum(counts) - 1] = lengths - (counts - 1) * span_tokens
    return spans


def _cut_documents(spans: Table) -> int:
    """Return the number of documents with several spans."""
    return int((np.bincount(spans["document"]) > 1).sum())


def _held(spans: Table, group_of_span: IntArray) -> Table:
    """Return spans with their groups."""
    held = spans.copy()
    held["group"] = group_of_span
    return held


def on_ranks(documents: Documents, run: RunSpec, group: Group = ONE_RANK, cut: int = 0) -> StepTime:
    """Predict a step of documents that already lie on ranks, or on groups of ranks.

    Args:
        documents: lengths of each rank's documents, or of those that each group shares evenly.
        cut: number of documents that were cut.
    """
    costs = run.costs
    # 1. What each rank of a group computes: its share of the group's documents.
    tokens = np.array([sum(lengths) for lengths in documents], float) / group.ranks
    attention = np.zeros(len(documents))
    for kind_costs in costs.kinds:
        attention += group.attention_seconds(documents, kind_costs)
    other = costs.token * tokens
    mixing_token = 0.0
    if costs.mixing is not None:
        mixing_token = costs.mixing.layers * costs.mixing.token * (1 + costs.backward_factor)

    # 2. What it exchanges with its group.
    exchanged = np.zeros(len(documents))
    bytes_bottleneck = 0.0
    if group.ranks > 1:
        for kind_costs in costs.kinds:
            kind = kind_costs.kind
            received = tokens * group.received_values(kind) * run.device.bytes_per_value
            exchanged += kind_costs.layers * group.exchange_seconds(received, kind, run)
            bytes_bottleneck = max(bytes_bottleneck, float(received.max()))

    # 3. The slowest group, and the figures of every rank.
    return StepTime(
        seconds=float((attention + other + exchanged).max()),
        attention=np.repeat(attention, group.ranks),
        other=np.repeat(other, group.ranks),
        waited=np.repeat(exchanged, group.ranks),
        mixing=np.repeat(mixing_token * tokens, group.ranks),
        bytes_bottleneck=int(bytes_bottleneck),
        tokens_most=int(np.ceil(tokens.max())),
        documents_cut=cut,
        mixing_runs=int(costs.mixing is not None),
    )

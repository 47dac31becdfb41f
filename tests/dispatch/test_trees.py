"""Core attention of prefix trees on three ranks, in float64, against sequences by themselves.

A row is known by all tokens up to it: equal prefixes have equal rows. Queries, keys and values of
a row follow from that, whichever rank computes the row and for whichever sequence.

Shape suffixes: N rows of this rank, P different rows of all sequences, S rows of a sequence,
H query heads, G key/value heads, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_distca.dispatch.core_attention import disaggregated_attention
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.kernels import AttentionParams
from hf_distca.plan import TASK, AttentionKind, MicroBatchPlan, Plan
from hf_distca.plan.intervals import row_counts
from hf_distca.planner import prefixes
from hf_distca.planner.padding import NO_RANK, PlannedPadding, plan_padded
from hf_distca.planner.prefixes import hashes_of
from hf_distca.planner.sequences import on_rank
from hf_distca.planner.settings import PlanSettings
from tests.dispatch.test_planned_step import Servers
from tests.models_and_batches import changed, in_nodes, in_stages

RANKS = 3
HEADS, KV_HEADS, DIM = 2, 1, 4
SCALE = 0.7
KIND = AttentionKind(q_heads=HEADS, kv_heads=KV_HEADS, dim_qk=DIM, dim_v=DIM)
KINDS = (
    KIND,
    replace(KIND, window=1),
    replace(KIND, window=3),
    replace(KIND, window=9),
    replace(KIND, chunk=4),
    replace(KIND, chunk=7),
    replace(KIND, chunk=7, window=3),
)
EXACT = 1e-12
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Trees:
    """Sequences, by turns of the three ranks, and how they are computed."""

    sequences: tuple[Tokens, ...]
    block: int  # rows at whose multiples branches begin
    kind: AttentionKind
    layout: str
    ping_pong: bool
    stage_rows: int | None
    in_nodes: bool  # whether K/V rows are forwarded inside nodes
    has_sinks: bool
    tasks_seed: int | None  # tasks cut anywhere, for any workers; None for those of the planner
    has_servers: bool  # whether two servers take part
    lost: tuple[int, int] | None  # a server, and at which collection it is found lost

    def of_ranks(self) -> list[list[Tokens]]:
        return [list(self.sequences[rank::RANKS]) for rank in range(RANKS)]


@st.composite
def drawn_sequences(draw: st.DrawFn) -> tuple[Tokens, ...]:
    """Sequences that begin as earlier ones do, over up to seven levels; some are equal, and some
    are prefixes of others.
    """
    tokens = st.lists(st.integers(0, 2), max_size=9)
    sequences = [[1, *draw(tokens)]]
    for _ in range(draw(st.integers(2, 7))):
        earlier = draw(st.sampled_from(sequences))
        sequence = earlier[: draw(st.integers(0, len(earlier)))] + draw(tokens)
        sequences.append(sequence or [2])
    return tuple(map(tuple, sequences))


@cache
def dispatcher() -> Dispatcher:
    """A dispatcher of this rank, with two nodes: of one rank, and of two."""
    plan_settings = PlanSettings(RANKS, 4096, (KIND,), kernel="reference", ranks_per_node=(1, 2))
    return Dispatcher(plan_settings, torch.device("cpu"))


def with_random_tasks(plan: MicroBatchPlan, seed: int) -> MicroBatchPlan:
    """The same layouts, with each document in up to four tasks of random workers."""
    random = np.random.default_rng(seed)

    def tasks(of_kind: Plan) -> Plan:
        cut = []
        layout = of_kind.layout
        for document, length in enumerate(layout.lengths.tolist()):
            first = int(layout.own_starts[document])
            inner = random.integers(first, length, 3).tolist()
            for start, stop in pairwise(sorted({first, length, *inner})):
                cut.append((document, start, stop, random.integers(of_kind.workers)))
        table = np.array(cut, TASK)
        order = np.lexsort((table["start"], table["document"], table["worker"]))
        return replace(of_kind, tasks=table[order])

    return changed(plan, tasks)


def as_drawn(plan: MicroBatchPlan, trees: Trees, nodes: tuple[int, ...] | None) -> MicroBatchPlan:
    """The plan with the tasks, the stages and the nodes that were drawn."""
    if trees.tasks_seed is not None:
        plan = with_random_tasks(plan, trees.tasks_seed)
    return in_nodes(in_stages(plan, trees.stage_rows), nodes if trees.in_nodes else None)


class TreeServers(Servers):
    """Two servers that compute trees."""

    def __init__(self, rank_dispatcher: Dispatcher, trees: Trees) -> None:
        super().__init__(rank_dispatcher, trees.lost, kernel=rank_dispatcher.kernel)
        self.trees = trees

    def bind(self, plan: MicroBatchPlan, given: PlanSettings) -> tuple[MicroBatchPlan, Any]:
        """Bind the plan as it was drawn."""
        settings_of_trees = replace(given, kinds=(self.trees.kind,), balance_block_size=1)
        bound, _ = super().bind(plan, settings_of_trees)
        (plan_of_kind,) = bound.nano_batches[0].plans.values()
        self.plan = as_drawn(bound, self.trees, plan_of_kind.nodes)
        return self.plan, self


class Rows:
    """All different rows of some sequences, with random queries, keys and values."""

    def __init__(self, sequences: Sequence[Tokens]) -> None:
        self.sequences = sequences
        self._number: dict[Tokens, int] = {}
        for tokens in sequences:
            for stop in range(1, len(tokens) + 1):
                self._number.setdefault(tokens[:stop], len(self._number))
        random = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, dtype=torch.float64)

        self.count = len(self._number)
        self.qkv_P = [drawn(self.count, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        self.sinks_H = drawn(HEADS)
        self.do_of_sequences = [drawn(len(tokens), HEADS, DIM) for tokens in sequences]

    def numbers(self, tokens: Tokens) -> Tensor:
        """The row of each token of a sequence."""
        return torch.tensor([self._number[tokens[:stop]] for stop in range(1, len(tokens) + 1)])

    def without_sharing(
        self, kind: AttentionKind, has_sinks: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Attention of each sequence by itself, and the gradients of all rows and of the sinks."""
        inputs = [x.clone().requires_grad_() for x in (*self.qkv_P, self.sinks_H)]
        *qkv_P, sinks_H = inputs
        outputs = []
        for tokens, do_SHD in zip(self.sequences, self.do_of_sequences, strict=True):
            numbers = self.numbers(tokens)
            q_SHD, k_SHD, v_SHD = (
                x_P[numbers].expand(-1, HEADS, -1) if len(x_P) else x_P for x_P in qkv_P
            )
            row = torch.arange(len(tokens))
            ahead = row[:, None] - row  # of each query, by how many rows it lies after each key
            is_seen = ahead >= 0
            if kind.window is not None:
                is_seen &= ahead < kind.window
            if kind.chunk is not None:
                is_seen &= (row // kind.chunk)[:, None] == row // kind.chunk
            scores_HSS = torch.einsum("qhd,khd->hqk", q_SHD, k_SHD) * SCALE
            scores_HSS = scores_HSS.masked_fill(~is_seen, -torch.inf)
            if has_sinks:
                of_sink = sinks_H[:, None, None].expand(-1, len(tokens), 1)
                shares_HSS = torch.cat([scores_HSS, of_sink], -1).softmax(-1)[..., :-1]
            else:
                shares_HSS = scores_HSS.softmax(-1)
            o_SHD = torch.einsum("hqk,khd->qhd", shares_HSS, v_SHD)
            (o_SHD * do_SHD).sum().backward()
            outputs.append(o_SHD.detach())
        zero = torch.zeros(HEADS, dtype=torch.float64)
        return outputs, [zero if x.grad is None else x.grad for x in inputs]


def planned(trees: Trees) -> PlannedPadding:
    """The sequences of all ranks, planned with prefix sharing."""
    plan_settings = PlanSettings(
        RANKS,
        4096,
        (trees.kind,),
        document_layout=trees.layout,
        ping_pong=trees.ping_pong,
        balance_block_size=1,
        balance_tolerance=0.01,
    )
    of_ranks = trees.of_ranks()
    lengths = [[len(tokens) for tokens in of_rank] for of_rank in of_ranks]
    with patch.multiple(prefixes, BLOCK=trees.block, LEAST_SAVED=0.0):
        hashes = [
            [hashes_of(np.array(tokens)[:, None]) for tokens in of_rank] for of_rank in of_ranks
        ]
        return plan_padded(lengths, plan_settings, hashes)


def rows_held(trees: Trees, plans: PlannedPadding, rows: Rows, count: int) -> Tensor:
    """[N] which row each row of this rank is; -1 for a filler."""
    of_ranks = trees.of_ranks()
    numbers_N = torch.full((count,), -1)
    for entry in on_rank(plans.travelling(plans.sequences.rank_rows), dist.get_rank()):
        if entry["source"] != NO_RANK:
            numbers = rows.numbers(of_ranks[entry["source"]][entry["index"]])
            held_rows = slice(entry["offset"], entry["offset"] + row_counts(entry))
            numbers_N[held_rows] = numbers[entry["start"] : entry["stop"]]
    return numbers_N


def compare_with_no_sharing(trees: Trees) -> int:
    """Compare outputs and gradients; return the number of rows that were not computed."""
    rank, of_ranks, plans = dist.get_rank(), trees.of_ranks(), planned(trees)
    (plan,) = plans.sequences.plans
    tree_dispatcher = dispatcher()
    tree_dispatcher.remote = TreeServers(tree_dispatcher, trees) if trees.has_servers else None
    bound = tree_dispatcher.bind(as_drawn(plan, trees, tree_dispatcher.settings.nodes))
    rows = Rows([tokens for of_rank in of_ranks for tokens in of_rank])
    numbers_N = rows_held(trees, plans, rows, bound.rows)
    is_token_N = numbers_N >= 0
    qkv_N = []
    for x_P in rows.qkv_P:
        x_N = torch.zeros(bound.rows, *x_P.shape[1:], dtype=torch.float64)
        x_N[is_token_N] = x_P[numbers_N[is_token_N]]
        qkv_N.append(x_N.requires_grad_())
    sinks_H = rows.sinks_H.clone().requires_grad_() if trees.has_sinks else None

    # 1. Outputs of this rank's rows, and gradients of all readers of them.
    params = AttentionParams(SCALE, window=trees.kind.window)
    o_NHD = disaggregated_attention(*qkv_N, sinks_H, bound, params, chunk=trees.kind.chunk)
    outputs, expected_grads = rows.without_sharing(trees.kind, trees.has_sinks)
    first_of_rank = np.cumsum([0, *map(len, of_ranks)])
    do_NHD = torch.zeros_like(o_NHD)
    for reader in on_rank(plans.travelling(plans.sequences.sequence_tokens), rank):
        sequence = first_of_rank[reader["source"]] + reader["index"]
        held_rows = slice(reader["offset"], reader["offset"] + row_counts(reader))
        read = slice(reader["start"], reader["stop"])
        torch.testing.assert_close(o_NHD[held_rows], outputs[sequence][read], rtol=0, atol=EXACT)
        do_NHD[held_rows] += rows.do_of_sequences[sequence][read]
    o_NHD.backward(do_NHD)

    # 2. Gradients of every row, which several ranks may hold where it is not shared.
    for x_N, expected_P in zip(qkv_N, expected_grads[:3], strict=True):
        found_P = torch.zeros_like(expected_P)
        found_P.index_add_(0, numbers_N[is_token_N], x_N.grad[is_token_N])
        dist.all_reduce(found_P)
        torch.testing.assert_close(found_P, expected_P, rtol=0, atol=10 * EXACT)
    if sinks_H is not None:
        found_H = sinks_H.grad.clone()
        dist.all_reduce(found_H)
        # The gradient of sinks is added up in float32.
        torch.testing.assert_close(found_H, expected_grads[3], rtol=1e-5, atol=1e-5)
    return plans.sequences.shared_rows


DRAWN = st.builds(
    Trees,
    sequences=drawn_sequences(),
    block=st.integers(1, 3),
    kind=st.sampled_from(KINDS),
    layout=st.sampled_from(["auto", "fixed"]),
    ping_pong=st.booleans(),
    stage_rows=st.sampled_from([None, 1, 4]),
    in_nodes=st.booleans(),
    has_sinks=st.booleans(),
    tasks_seed=st.none() | st.integers(0, 99),
    has_servers=st.booleans(),
    lost=st.none() | st.tuples(st.integers(0, 1), st.integers(0, 3)),
)


@settings(max_examples=60, phases=[Phase.reuse, Phase.generate])  # a failure ends the ranks
@given(trees=DRAWN)
def test_every_sequence_is_as_without_sharing(rank_pools, trees):
    shared = rank_pools[RANKS].run(compare_with_no_sharing, trees, keeps_groups=True)
    event(f"{shared[0] // 10 * 10} or more rows are shared")

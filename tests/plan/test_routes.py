"""Rows that travel: which, between which ranks, in which stages, and how many bytes they are."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.plan import TASK, AttentionKind, ExchangeFigures, Plan
from hf_distca.plan.cost import RowBytes
from hf_distca.plan.figures import (
    BETWEEN,
    WITHIN,
    bytes_by_link,
    exchange_figures,
    link_seconds,
    loads_of,
)
from hf_distca.plan.intervals import table_of
from hf_distca.plan.moves import MOVE, forward_inside_nodes, rows_to_move
from hf_distca.plan.routes import CallTasks, make_routes, nothing_moves
from hf_distca.plan.stages import SMALLEST_STAGE, STAGES_ALONE, rows_by_stage, with_stages
from hf_distca.planner.layout import fixed_layout
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.counts import count_plan
from tests.planner.carried_out import (
    check,
    messages_of,
    plans_of_all_kinds,
    routes_of,
)
from tests.planner.plan_checks import loads_by_row

BYTES = RowBytes(q=100, kv=10, o=1000)
NODES = (0, 0, 1, 1)


def quarters(length, ranks=4):
    """One document, an equal part on each rank, which computes its own rows."""
    part = length // ranks
    tasks = np.array([(0, part * rank, part * (rank + 1), rank) for rank in range(ranks)], TASK)
    return Plan(fixed_layout([[length]], ranks), tasks, ranks)


def divided(plan, buffer_rows, **options):
    """Return the plan in stages, for the rows that the busiest rank sends or receives."""
    most = int(rows_by_stage(plan).max(initial=0))
    return with_stages(plan, buffer_rows, busiest_rows=most, **options)


@settings(max_examples=500)
@given(plans_of_all_kinds(), st.none() | st.integers(1, 12))
def test_every_query_sees_its_keys_once_and_results_go_home(plan, stage_rows):
    check(replace(plan, stage_rows=stage_rows))


def parts(q_lens, k_lens, count=2, window=None):
    """[(query rows and keys of each task, rows of its queries, of its keys, pairs)] of each part of
    a group.
    """
    q, k = np.array(q_lens, np.int64), np.array(k_lens, np.int64)
    group = CallTasks(
        q, k, np.arange(q.sum()), np.arange(k.sum()), q if window else q * (2 * k - q + 1) // 2
    )
    return [
        (list(zip(*(tensor.tolist() for tensor in (part.q_lens, part.k_lens)), strict=True)),
         *(tensor.tolist() for tensor in (part.q_rows, part.k_rows, part.task_pairs)))
        for part in group.parts([1 / count] * count, window)
    ]  # fmt: skip


def test_parts_of_about_equal_pairs():
    nothing = ([], [], [], [])
    assert parts([], []) == [nothing] * 2
    assert parts([1], [1]) == [([(1, 1)], [0], [0], [1]), nothing]
    assert parts([2, 2], [2, 2]) == [
        ([(2, 2)], [0, 1], [0, 1], [3]),
        ([(2, 2)], [2, 3], [2, 3], [3]),
    ]
    # A task in the middle is cut into its first queries with their keys, and the others. 1 + 2 + 3
    # pairs and 4: the first three queries see three keys, the last one all.
    assert parts([4], [4]) == [
        ([(3, 3)], [0, 1, 2], [0, 1, 2], [6]),
        ([(1, 4)], [3], [0, 1, 2, 3], [4]),
    ]
    # 3, then 6 + 7 + 8 of a task that has five keys before its own rows, then 1: cut where 9 of 25
    # are done.
    first, second = parts([2, 3, 1], [2, 8, 1])
    assert first == ([(2, 2), (1, 6)], [0, 1, 2], [*range(8)], [3, 6])
    assert second == ([(2, 8), (1, 1)], [3, 4, 5], [*range(2, 11)], [15, 1])
    # A cut leaves a row on either side: of 10 + 11 and 11 pairs, 16 lie nearer to the end of the
    # task.
    first, second = parts([2, 1], [11, 11])
    assert first == ([(1, 10)], [0], [*range(10)], [10])
    assert second == ([(1, 11), (1, 11)], [1, 2], [*range(22)], [11, 11])
    # Each row sees one key.
    assert [part[0] for part in parts([4], [4], window=1)] == [[(2, 2)], [(2, 4)]]
    # 1 + 2 and 3 and 4 pairs of 10, then no more parts than rows.
    assert [part[0] for part in parts([4], [4], 3)] == [[(2, 2)], [(1, 3)], [(1, 4)]]
    assert [part[0] for part in parts([2], [2], 3)] == [[(1, 1)], [(1, 2)], []]
    assert [len(part[0]) for part in parts([1] * 8, [1] * 8, 4)] == [2, 2, 2, 2]
    # Whole tasks where they are even enough: 10 and 9 of 19 pairs, and 9 + 9 of 27 are too many.
    assert [part[0] for part in parts([4, 1], [4, 9])] == [[(4, 4)], [(1, 9)]]


@pytest.mark.parametrize(
    ("rank_lengths", "tasks", "workers", "expected"),
    [
        pytest.param(
            [[2, 3], [4]],
            [(0, 0, 2, 0), (1, 0, 1, 0), (1, 1, 3, 0), (2, 0, 4, 1)],
            3,
            True,
            id="local-tasks-of-which-one-is-cut",
        ),
        pytest.param(
            [[2, 3], [4]],
            [(0, 0, 2, 0), (1, 0, 3, 1), (2, 0, 4, 1)],
            2,
            False,
            id="a-document-elsewhere",
        ),
        pytest.param(
            [[2, 3], [4]],
            [(0, 0, 2, 0), (1, 0, 3, 0), (2, 0, 2, 1), (2, 2, 4, 2)],
            3,
            False,
            id="rows-at-a-server",
        ),
        pytest.param([[2], []], [(0, 0, 2, 0)], 2, False, id="a-rank-without-rows"),
        pytest.param(
            [[2, 4]],
            [(0, 0, 2, 0), (1, 0, 1, 0), (1, 1, 4, 1)],
            2,
            False,
            id="a-document-on-two-ranks",
        ),
    ],
)
def test_nothing_moves(rank_lengths, tasks, workers, expected):
    plan = Plan(fixed_layout(rank_lengths, 2), np.array(tasks, TASK), workers)
    assert nothing_moves(plan) == expected


@settings(max_examples=150)
@given(plans_of_all_kinds(), st.none() | st.integers(1, 12))
def test_routes_carry_the_bytes_that_are_counted(plan, stage_rows):
    if plan.window is None:  # else rows that windows of two stages reach travel twice
        plan = replace(plan, stage_rows=stage_rows)
    routes = routes_of(plan)
    ranks = range(plan.layout.ranks)
    counts = []
    for stage, hop in (("queries", 1), *itertools.product(range(len(routes[0].stages)), (1, 2))):
        messages = messages_of(routes, stage, hop)
        sent = np.array([mine.send_counts for mine in messages])
        crosses = any(sent[one, other] for one, other in itertools.permutations(ranks, 2))
        assert [mine.crossing for mine in messages] == [crosses] * plan.workers
        counts.append(sent)
    queries, *keys = counts
    hops = (
        np.array(keys)[:, : len(ranks), : len(ranks)].reshape(-1, 2, len(ranks), len(ranks)).sum(1)
    )
    assert rows_by_stage(plan).tolist() == np.stack([hops.sum(2), hops.sum(1)], 1).tolist()
    for sent in counts:
        np.fill_diagonal(sent, 0)  # a rank's keys that it gathers for itself
    moved = queries * BYTES.q + queries.T * BYTES.o + sum(keys) * BYTES.kv
    node = np.array(plan.nodes or (0,) * plan.workers)
    within = node[:, None] == node
    by_link = [
        [of_link.sum(1).tolist(), of_link.sum(0).tolist()]
        for of_link in (moved * within, moved * ~within)
    ]
    assert by_link == bytes_by_link(plan, BYTES, node).tolist()
    counted = count_plan(plan, AttentionKind(plan.window), 2)
    assert counted.most_rows == rows_by_stage(replace(plan, stage_rows=None)).max()
    among = np.arange(plan.workers) < plan.layout.ranks  # servers get their rows in exchanges apart
    for number, sent in ((counted.among_ranks, among), (counted.with_remote, ~among)):
        assert number.queries[:, 0].sum(0).tolist() == (queries * sent).sum(1).tolist()
        assert number.keys[:, 1].sum(0).tolist() == (sum(keys) * sent).sum(0).tolist()
    for worker, mine in enumerate(routes):
        remote_pairs = [
            group.pairs
            for stage in mine.stages
            for group in (stage.remote_query, stage.remote_query_prefix)
        ]
        local_pairs = [mine.local.pairs, *(stage.remote_kv.pairs for stage in mine.stages)]
        if plan.window is None:
            assert counted.local.pairs[worker] == mine.local.pairs
        assert counted.local.pairs[worker] + counted.remote_kv.pairs[worker] == sum(local_pairs)
        assert counted.remote_query.pairs[worker] == sum(remote_pairs)
    assert loads_of(plan).tolist() == loads_by_row(plan)
    assert (loads_of(plan, 3) - loads_of(plan)).sum() == 3 * plan.layout.own_lengths.sum()


def test_bytes_within_and_between_nodes():
    def plan_of(rows, tasks):
        return Plan(fixed_layout(rows), np.array(tasks, TASK), 4)

    # Ranks 0 and 1 are one node, 2 and 3 the other. Rank 0 holds 4 rows; ranks 2 and 3 compute the
    # last two.
    plan = plan_of([[4], [], [], []], [(0, 0, 2, 0), (0, 2, 3, 2), (0, 3, 4, 3)])
    # Rows 0 to 2 are read by both: they go to rank 2 once, which forwards them.
    forwarded = bytes_by_link(replace(plan, nodes=NODES), BYTES, NODES)
    assert forwarded[WITHIN].tolist() == [[0, 0, 30, 0], [0, 0, 0, 30]]
    assert forwarded[BETWEEN].tolist() == [[200 + 40, 0, 1000, 1000], [2000, 0, 100 + 30, 100 + 10]]
    # 30 bytes at 1e-9 GB/s, 2000 at 100 times as much.
    assert link_seconds(forwarded, (1e-9, 1e-7)) == pytest.approx(30)
    assert link_seconds(forwarded, (1e-9, 1e-9)) == pytest.approx(2000)
    # With two other nano-batches, workers send 240, 2000, 30, 0 within nodes and receive 2000, 240,
    # 0, 30; between them they send 240, 240, 1000, 3000 and receive 2000, 2000, 130, 350.
    others = (
        ([[4], [], [], []], [(0, 0, 2, 0), (0, 2, 4, 1)]),
        ([[], [4], [], []], [(0, 0, 2, 1), (0, 2, 4, 3)]),
    )
    within, between = (bytes_by_link(plan_of(*tasks), BYTES, NODES) for tasks in others)
    added = forwarded + within + between
    assert exchange_figures(added, NODES) == ExchangeFigures(
        bytes_total=6750,
        bytes_bottleneck=4000,
        bytes_within_nodes=2270,
        bytes_within_nodes_bottleneck=2000,
        bytes_within_nodes_busiest_node=2240,
        bytes_between_nodes=4480,
        bytes_between_nodes_bottleneck=3000,
        bytes_between_nodes_busiest_node=4000,
        link_seconds=pytest.approx(3000 / 50e9),
    )
    assert exchange_figures(within, NODES, (0.5, 50)).link_seconds == pytest.approx(2000 / 0.5e9)


def test_rows_on_one_path_are_divided_evenly_over_the_stages():
    # A quarter of a document of 4 · 8 rows on each rank, which computes its own rows.
    first, *_, last = routes_of(replace(quarters(32, 4), stage_rows=12))
    assert [stage.keys.send_counts.tolist() for stage in first.stages] == [
        [0, 4, 4, 4],
        [0, 4, 4, 4],
    ]
    assert [stage.keys.recv_counts.tolist() for stage in last.stages] == [
        [4, 4, 4, 0],
        [4, 4, 4, 0],
    ]
    # Rows that do not divide evenly are more in another stage on each path.
    first, *_ = routes_of(replace(quarters(32, 4), stage_rows=8))
    assert [stage.keys.send_counts.sum() for stage in first.stages] == [8, 8, 8]
    # Each of two nodes of four ranks reads all that comes before its rows. Rows 64 to 111 come to
    # the last rank from its own node; a quarter of the others cross to it, and the rest to its
    # peers.
    plan = replace(quarters(128, 8), nodes=(0, 0, 0, 0, 1, 1, 1, 1))
    *_, last = routes_of(plan)
    assert last.stages[0].keys.recv_counts.tolist() == [0, 0, 0, 16, 16, 16, 16, 0]
    assert last.stages[0].forwarded.recv_counts.tolist() == [0, 0, 0, 0, 16, 16, 16, 0]
    *_, last = routes_of(replace(plan, stage_rows=30))
    assert [
        int(stage.keys.recv_counts.sum() + stage.forwarded.recv_counts.sum())
        for stage in last.stages
    ] == [28] * 4


@pytest.mark.parametrize(("ranks", "rows", "stages"), [(256, 384, 8), (128, 700, 5), (48, 500, 3)])
def test_stages_of_a_document_over_many_ranks_are_even_without_small_parts(ranks, rows, stages):
    nodes = tuple(rank // 8 for rank in range(ranks))
    plan = replace(quarters(rows * ranks, ranks), nodes=nodes)
    most = int(rows_by_stage(plan).max())
    staged = replace(plan, stage_rows=-(-most // stages))
    by_stage = rows_by_stage(staged)
    assert by_stage.shape == (stages, 2, ranks)
    assert by_stage.max() <= staged.stage_rows * 9 / 8
    # Of the parts that a path is divided into, none has less than a kernel block.
    _, first_hop, _ = rows_to_move(staged)
    _, moves_at_once, _ = rows_to_move(plan)
    rows = moves_at_once["stop"] - moves_at_once["start"]
    assert len(first_hop) <= len(moves_at_once) + (rows // 128).sum()


def hops_of(rows, targets, nodes, document=0):
    """[(source, target, first row, row behind the last)] of both hops of rows on rank 0 that other
    ranks read.
    """
    moves = table_of(
        MOVE, document=np.full(len(targets), document), stop=rows, target=np.array(targets)
    )
    first_hop, forwards = forward_inside_nodes(moves, nodes, max(targets) + 1)
    first = [tuple(move) for move in first_hop[["source", "target", "start", "stop"]].tolist()]
    of_gateways = [first[move][1:] for move in forwards.move]
    second = [
        (gateway, reader, *rows)
        for (gateway, *rows), reader in zip(of_gateways, forwards.reader.tolist(), strict=True)
    ]
    return [first, second]


def test_rows_that_two_ranks_read_cross_to_both_of_them():
    # Half and half: both readers receive and send as much. Less than two blocks stay together.
    first, second = hops_of(257, [1, 2], (0, 1, 1))
    assert (first, second) == (
        [(0, 1, 0, 129), (0, 2, 129, 257)],
        [(1, 2, 0, 129), (2, 1, 129, 257)],
    )
    assert hops_of(255, [1, 2], (0, 1, 1)) == [[(0, 1, 0, 255)], [(1, 2, 0, 255)]]
    # Many documents, times nodes, and behind them rows: more than 63 bits.
    nodes, targets = [rank // 8 for rank in range(4096)], [8, 9, 4088, 4089]
    few, many = (hops_of(100, targets, nodes, document) for document in (0, 50_000))
    assert few == many
    assert sum(stop - start for *_, start, stop in few[0]) == 2 * 100


@pytest.mark.parametrize(
    ("nodes", "together", "stage_rows_by_buffer"),
    [
        pytest.param(None, False, {24: None, 23: 23, 8: 8, 1: 1}, id="one-buffer"),
        pytest.param(None, True, {8: None, 7: 7}, id="three-buffers"),
        pytest.param(NODES, True, {5: None, 4: 4}, id="five-buffers"),
    ],
)
def test_rows_that_fit_into_the_buffers_travel_at_once(nodes, together, stage_rows_by_buffer):
    """Of 24 rows that the busiest rank sends or receives."""
    plan = replace(quarters(32), nodes=nodes)
    stage_rows = {
        buffer_rows: divided(plan, buffer_rows, stages=1, together=together).stage_rows
        for buffer_rows in stage_rows_by_buffer
    }
    assert stage_rows == stage_rows_by_buffer


def test_a_nano_batch_alone_has_stages_that_hide_its_exchange():
    plan = divided(quarters(32768), 2**20, stages=4)
    assert plan.stage_rows == 24576 // STAGES_ALONE
    assert len(rows_by_stage(plan)) == STAGES_ALONE
    assert divided(quarters(32768), 1000, stages=4).stage_rows == 1000
    in_nodes = divided(replace(quarters(32768), nodes=NODES), 2**20, stages=4)
    assert len(rows_by_stage(in_nodes)) == STAGES_ALONE
    # Small ones have none that are not worth it.
    assert divided(quarters(4096), 2**20, stages=4).stage_rows == SMALLEST_STAGE
    assert divided(quarters(1024), 2**20, stages=4).stage_rows is None


def test_settings_say_how_many_bytes_travel_at_a_time():
    """One document on both ranks, and rows of K and V of 4096 bytes."""

    def planned(**settings):
        (nano,) = plan_micro_batch([8192], PlanSettings(2, 4096, **settings)).nano_batches
        (plan,) = nano.plans.values()
        return plan

    most = int(rows_by_stage(replace(planned(), stage_rows=None)).max())
    assert planned().stage_rows == max(-(-most // STAGES_ALONE), SMALLEST_STAGE)
    assert planned(exchange_buffer_bytes=512 * 4096).stage_rows == 512
    assert planned(exchange_buffer_bytes=1).stage_rows == 1


def test_stages_of_windows_hold_the_rows_that_windows_reach_back_for():
    # Rank 1 computes rows 40 to 80 of rank 0; each stage begins with the keys of its first query's
    # window.
    tasks = np.array([(0, 0, 40, 0), (0, 40, 80, 1), (1, 0, 80, 1)], TASK)
    plan = Plan(fixed_layout([[80], [80]], 2), tasks, 2, window=5, stage_rows=20)
    sent = rows_by_stage(plan)[:, 0, 0]
    assert sent.tolist() == [16, 20, 16]  # 44 rows, and 4 rows once more in each further stage


@given(plans_of_all_kinds(), st.integers(1, 12))
def test_stages_hold_so_many_rows_and_servers_have_one(plan, buffer_rows):
    staged, ranks = divided(plan, buffer_rows, stages=1), plan.layout.ranks
    rows, whole = rows_by_stage(staged), rows_by_stage(plan)
    assert (staged.stage_rows is None) == (whole.max(initial=0) <= buffer_rows)
    if plan.window is None:
        assert rows.sum(axis=0).tolist() == whole.sum(axis=0).tolist()
        # On each path rows are rounded up.
        _, first_hop, forwards = rows_to_move(plan)
        gateways = first_hop["target"][forwards.move]
        paths = [
            np.bincount(np.append(first_hop[end], forwarding), minlength=plan.workers)[:ranks]
            for end, forwarding in (("source", gateways), ("target", forwards.reader))
        ]
        assert (rows <= buffer_rows + np.array(paths)).all()
    else:
        assert rows[:, 1].max(initial=0) <= max(buffer_rows, 2 * plan.window - 1)
    for server in range(ranks, plan.workers):
        assert not any(
            stage.keys.recv_counts.any() for stage in make_routes(staged, server).stages[1:]
        )

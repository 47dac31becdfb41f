"""Layouts, and plans of micro-batches."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.plan import AttentionKind
from hf_distca.plan.cost import RowBytes, Workers
from hf_distca.plan.figures import bytes_moved, loads_of
from hf_distca.planner.layout import fixed_layout, layout_of_kind, mirrored
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.planning import plan_with_servers
from tests.planner.carried_out import check
from tests.planner.plan_checks import check_layout, check_plan, loads_by_row, rows_of

SOME_LENGTHS = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 700)), max_size=25)


@settings(max_examples=60)
@given(st.lists(SOME_LENGTHS, min_size=1, max_size=4), st.integers(1, 4))
def test_fixed_layouts_hold_every_row_once_and_mirror(rows, span):
    layout = fixed_layout(rows, len(rows) * span)
    check_layout(layout)
    shares = [divmod(sum(row), span) for row in rows]
    assert layout.tokens.tolist() == [
        share + (rank < extra) for share, extra in shares for rank in range(span)
    ]
    # Row after row, documents lie in their order.
    assert rows_of(layout.segments) == sorted(rows_of(layout.segments))
    check_layout(mirrored(layout))
    assert mirrored(layout).tokens.tolist() == layout.tokens.tolist()[::-1]
    assert mirrored(mirrored(layout)).segments.tolist() == layout.segments.tolist()


def planned(lengths, ranks, tokens_per_rank, **settings):
    return plan_micro_batch(lengths, PlanSettings(ranks, tokens_per_rank, **settings))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fixed_layout([]), "got 0 rows of documents"),
        (lambda: fixed_layout([[1], [1]], 3), "got 2 rows of documents for 3 ranks"),
        (lambda: fixed_layout([[1, 0]]), "document 1 has length 0"),
        (
            lambda: planned([9], 2, 4),
            "has 1 document of 9 tokens, but 2 ranks of 4 rows hold 8",
        ),
        (lambda: planned([1, 0], 2, 4), "document 1 has length 0"),
        (
            lambda: planned([1], 4, 4, ranks_per_node=(2, 1)),
            "2,1 adds up to 3 ranks, but 4 ranks train",
        ),
    ],
)
def test_layouts_and_plans_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 70))
def test_chunks_are_documents_whose_rows_stay_where_they_are(lengths, ranks, chunk):
    layout = fixed_layout([lengths], ranks)
    chunked = layout_of_kind(layout, AttentionKind(chunk=chunk))
    check_layout(chunked)
    numbers = {}  # of each chunk, in the order of its document and of its rows
    for document, length in enumerate(lengths):
        for row in range(length):
            numbers.setdefault((document, row // chunk), len(numbers))
    assert len(chunked.lengths) == len(numbers)
    for rank in range(ranks):
        rows = rows_of(layout.of_rank(rank))
        in_chunks = [(numbers[document, row // chunk], row % chunk) for document, row in rows]
        assert rows_of(chunked.of_rank(rank)) == in_chunks


@pytest.mark.parametrize("chunk", [16, 96])
def test_chunks_are_planned_beside_whole_documents(chunk):
    chunked = AttentionKind(chunk=chunk)
    full = AttentionKind()
    settings = PlanSettings(2, 200, (chunked, full), balance_block_size=8, ping_pong=True)
    assert settings.dominant_kind == full
    for nano in plan_micro_batch([150, 100, 90, 7, 1], settings).nano_batches:
        check_plan(nano.plans[chunked])
        check_plan(nano.plans[full])
        assert np.array_equal(nano.plans[chunked].layout.tokens, nano.layout.tokens)
        longest_chunk = nano.plans[chunked].layout.lengths.max()
        assert longest_chunk == min(chunk, nano.layout.lengths.max())
        assert nano.plans[full].layout is nano.layout


@pytest.mark.parametrize("chunk", [16, 96])
def test_chunks_alone_are_balanced(chunk):
    settings = PlanSettings(2, 300, (AttentionKind(chunk=chunk),), balance_block_size=8)
    assert plan_micro_batch([400, 5, 80, 15], settings).summary.max_over_mean < 1.06


LAYOUTS = ["auto", "fixed"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_nano_batches(layout):
    # 5 rows on 3 ranks are 2, 2, 1, and 4 rows are 2, 1, 1: mirrored, every rank is full.
    settings = PlanSettings(3, 3, document_layout=layout, ping_pong=True)
    plan = plan_micro_batch([3, 2, 2, 2], settings)
    first, second = plan.nano_batches
    assert first.documents.tolist() == [0, 3]
    assert first.layout.tokens.tolist() == [2, 2, 1]
    assert second.documents.tolist() == [1, 2]
    assert second.layout.tokens.tolist() == [1, 1, 2]
    # Packed in order, ranks have documents of 3 | 2 | 2 and 2 rows: 6, 3 and 6 pairs.
    assert plan.summary.packed_max_over_mean == pytest.approx(6 / 5)


def test_documents_are_not_divided_where_a_rank_would_have_no_rows():
    assert len(plan_micro_batch([1, 1], PlanSettings(2, 1, ping_pong=True)).nano_batches) == 1


def test_the_summary_counts_both_nano_batches():
    settings = PlanSettings(2, 2500, document_layout="fixed", ping_pong=True)
    plan = plan_micro_batch([1500, 1200, 900, 700, 400, 300], settings)
    assert len(plan.nano_batches) == 2
    plans = [nano.plans[settings.dominant_kind] for nano in plan.nano_batches]
    loads = np.sum([loads_by_row(nano_plan) for nano_plan in plans], axis=0)
    worker_bytes = np.sum([bytes_moved(nano_plan, RowBytes()) for nano_plan in plans], axis=0)
    assert plan.summary.max_over_mean == pytest.approx(loads.max() / loads.mean())
    assert worker_bytes.max() > 0
    assert plan.summary.exchange.bytes_bottleneck == worker_bytes.max()


BLOCK, TOLERANCE = 4, 0.1


@settings(max_examples=120)
@given(
    layout=st.sampled_from(LAYOUTS),
    window=st.sampled_from([None, 16]),
    lengths=st.lists(st.integers(1, 24) | st.sampled_from([60, 110]), min_size=1, max_size=12),
    nodes=st.integers(1, 9).map(lambda ranks: (1,) * ranks)
    | st.sampled_from([(2, 2), (1, 3), (3, 2, 1), (8, 8, 4)]),
    server_nodes=st.lists(st.sampled_from([None, 0, -1]), max_size=2),
    ping_pong=st.booleans(),
    stage_rows=st.sampled_from([None, 12]),
)
def test_plans(layout, window, lengths, nodes, server_nodes, ping_pong, stage_rows):
    ranks, kind = sum(nodes), AttentionKind(window)
    tokens_per_rank = -(-sum(lengths) // ranks)  # the least that takes the documents
    options = {
        "document_layout": layout,
        "balance_tolerance": TOLERANCE,
        "balance_block_size": BLOCK,
    }
    settings = PlanSettings(
        ranks, tokens_per_rank, (kind,), ping_pong=ping_pong, ranks_per_node=nodes, **options
    )
    micro_batch = plan_micro_batch(lengths, settings)
    assert micro_batch.tokens.max() == tokens_per_rank
    assert micro_batch.tokens.min() == sum(lengths) // ranks
    numbers, tokens = zip(
        *((nano.documents, nano.layout.tokens) for nano in micro_batch.nano_batches), strict=True
    )
    assert sorted(np.concatenate(numbers).tolist()) == list(range(len(lengths)))
    total = sum(lengths)
    if len(tokens) == 2:  # every rank has rows of each, and each has a quarter of all rows or more
        assert np.min(tokens) > 0
        assert min(map(sum, tokens)) >= total / 4
    elif ping_pong:
        assert len(lengths) == 1 or 2 * max(lengths) > total or total < 4 * ranks
    of_servers = [node and len(nodes) - 1 for node in server_nodes]
    if server_nodes:
        workers = Workers.uniform(ranks + len(server_nodes))
        micro_batch = plan_with_servers(
            micro_batch, workers, settings, ranks_serve=True, server_nodes=of_servers
        )
    for nano in micro_batch.nano_batches:
        assert nano.layout.lengths.tolist() == [lengths[document] for document in nano.documents]
        plan = nano.plans[kind]
        own = itertools.count(len(nodes))  # a server without a node is on one of its own
        of_ranks = np.repeat(range(len(nodes)), nodes).tolist()
        expected = (*of_ranks, *(next(own) if node is None else node for node in of_servers))
        assert plan.nodes == (None if len(nodes) in (1, ranks) else expected)
        check_plan(plan)
        loads = loads_of(plan)
        most_of_a_row = min(int(nano.layout.lengths.max()), window or 10**9)
        assert loads.max() <= loads.mean() * (1 + TOLERANCE) + 2 * most_of_a_row
        # Every row sees its keys once, and a key crosses to a node once: with a window, once in a
        # stage.
        check(replace(plan, stage_rows=stage_rows))


def test_rows_of_every_rank_are_divided():
    plan = plan_placed([[4, 4], [2, 6], [1, 1, 1]], PlanSettings(3, 8, ping_pong=True))
    assert [nano.documents.tolist() for nano in plan.nano_batches] == [[0, 2, 4], [1, 3, 5, 6]]
    assert [nano.layout.segments.tolist() for nano in plan.nano_batches] == [
        [(0, 0, 4, 0, 0), (1, 0, 2, 1, 0), (2, 0, 1, 2, 0)],
        [(0, 0, 4, 0, 0), (1, 0, 6, 1, 0), (2, 0, 1, 2, 0), (3, 0, 1, 2, 1)],
    ]
    assert list(plan.held_by(1)) == [(2, 0, 2), (3, 0, 6)]
    assert list(plan.held_by(2)) == [(4, 0, 1), (5, 0, 1), (6, 0, 1)]


def test_rows_of_a_rank_are_divided_where_the_smaller_part_is_largest():
    plan = plan_placed([[1, 5, 6], [4, 4]], PlanSettings(2, 12, ping_pong=True))
    assert [nano.documents.tolist() for nano in plan.nano_batches] == [[0, 1, 3], [2, 4]]


@pytest.mark.parametrize(
    ("rank_lengths", "ping_pong"),
    [
        pytest.param([[4, 4], [8]], True, id="a-rank-has-one-document"),
        pytest.param([[4, 4], [7, 1]], True, id="a-rank-has-hardly-more-than-one-document"),
        pytest.param([[4, 4], [2, 6]], False, id="one-nano-batch"),
    ],
)
def test_rows_of_ranks_stay_in_one_part(rank_lengths, ping_pong):
    (nano,) = plan_placed(rank_lengths, PlanSettings(2, 8, ping_pong=ping_pong)).nano_batches
    lengths = [*rank_lengths[0], *rank_lengths[1]]
    assert nano.documents.tolist() == list(range(len(lengths)))
    assert nano.layout.lengths.tolist() == lengths
    assert nano.layout.tokens.tolist() == [8, 8]

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.plan import AttentionKind
from hf_distca.planner.cost import RowBytes, Workers
from hf_distca.planner.metrics import bytes_moved, loads_of
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed
from hf_distca.planner.servers import plan_with_servers
from hf_distca.planner.settings import PlanSettings
from tests.planner.carried_out import check
from tests.planner.plan_checks import check_plan, loads_by_row

LAYOUTS = ["joint", "fixed"]


def test_two_nano_batches():
    for layout in LAYOUTS:
        # 5 rows on 3 ranks are 2, 2, 1, and 4 rows are 2, 1, 1: mirrored, every rank is full.
        plan = plan_micro_batch([3, 2, 2, 2], PlanSettings(3, 3, document_layout=layout, ping_pong=True))
        assert [nano.documents.tolist() for nano in plan.nano_batches] == [[0, 3], [1, 2]]
        assert [nano.layout.tokens.tolist() for nano in plan.nano_batches] == [[2, 2, 1], [1, 1, 2]]
        # Packed in order, ranks have rows of 3 | 2 and 1 | 1 and 2: 6, 3 + 1 and 2 + 3 pairs.
        assert plan.summary.packed_max_over_mean == pytest.approx(6 / 5)
    # Two documents of a token are not divided: in each nano-batch every rank has to have rows.
    assert len(plan_micro_batch([1, 1], PlanSettings(2, 1, ping_pong=True)).nano_batches) == 1
    # The summary counts both.
    settings = PlanSettings(2, 2500, document_layout="fixed", ping_pong=True)
    plan = plan_micro_batch([1500, 1200, 900, 700, 400, 300], settings)
    plans = [only for nano in plan.nano_batches for only in nano.plans.values()]
    loads = np.sum([loads_by_row(each) for each in plans], axis=0)
    moved = np.sum([bytes_moved(each, RowBytes()) for each in plans], axis=0)
    assert plan.summary.max_over_mean == pytest.approx(loads.max() / loads.mean())
    assert plan.summary.exchange.bytes_bottleneck == moved.max() > 0


def test_what_is_mirrored_has_its_nodes_in_the_reverse_order():
    # With a window of 1 rows cost the same wherever they are, so that the longer document of each nano-batch fits the
    # node of three ranks. Were the nodes not turned round first, the second one's would lie on ranks of both nodes.
    kind = AttentionKind(window=1)
    settings = PlanSettings(4, 128, (kind,), balance_block_size=16, ping_pong=True, ranks_per_node=(1, 3))
    for nano in plan_micro_batch([192, 192, 64, 64], settings).nano_batches:
        of_rank = [set(nano.layout.of_rank(rank)["document"].tolist()) for rank in range(4)]
        assert of_rank[0].isdisjoint(of_rank[1] | of_rank[2] | of_rank[3])


BLOCK, TOLERANCE = 4, 0.1


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 24) | st.sampled_from([60, 110]), min_size=1, max_size=12),
    nodes=st.integers(1, 9).map(lambda ranks: (1,) * ranks) | st.sampled_from([(2, 2), (1, 3), (3, 2, 1), (8, 8, 4)]),
    server_nodes=st.lists(st.sampled_from([None, 0, -1]), max_size=2),
    ping_pong=st.booleans(),
    stage_rows=st.sampled_from([None, 12]),
)
def test_plans(layout, window, lengths, nodes, server_nodes, ping_pong, stage_rows):
    ranks, kind = sum(nodes), AttentionKind(window)
    tokens_per_rank = -(-sum(lengths) // ranks)  # the least that takes the documents
    settings = PlanSettings(
        ranks,
        tokens_per_rank,
        (kind,),
        document_layout=layout,
        balance_tolerance=TOLERANCE,
        balance_block_size=BLOCK,
        ping_pong=ping_pong,
        ranks_per_node=nodes,
    )
    micro_batch = plan_micro_batch(lengths, settings)
    assert micro_batch.tokens.max() == tokens_per_rank
    assert micro_batch.tokens.min() == sum(lengths) // ranks
    numbers = np.concatenate([nano.documents for nano in micro_batch.nano_batches])
    assert sorted(numbers.tolist()) == list(range(len(lengths)))
    tokens, total = [nano.layout.tokens for nano in micro_batch.nano_batches], sum(lengths)
    if len(tokens) == 2:  # every rank has rows of each, and each has a quarter of all rows or more
        assert np.min(tokens) > 0
        assert min(map(sum, tokens)) >= total / 4
    elif ping_pong:
        assert len(lengths) == 1 or 2 * max(lengths) > total or total < 4 * ranks
    known = len(nodes) not in (1, ranks)
    of_servers = [node and len(nodes) - 1 for node in server_nodes]
    if server_nodes:
        workers = Workers.uniform(ranks + len(server_nodes))
        micro_batch = plan_with_servers(micro_batch, workers, settings, ranks_serve=True, server_nodes=of_servers)
    for nano in micro_batch.nano_batches:
        assert nano.layout.lengths.tolist() == [lengths[document] for document in nano.documents]
        plan = nano.plans[kind]
        if known:
            own = itertools.count(len(nodes))  # a server without a node is on one of its own
            expected = [node for node, size in enumerate(nodes) for _ in range(size)]
            assert list(plan.nodes) == expected + [next(own) if node is None else node for node in of_servers]
        else:
            assert plan.nodes is None
        check_plan(plan)
        loads = loads_of(plan)
        most_of_a_row = min(int(nano.layout.lengths.max()), window or 10**9)
        assert loads.max() <= loads.mean() * (1 + TOLERANCE) + 2 * most_of_a_row
        # Every row sees its keys once, and a key crosses to a node once: with a window, once in a stage.
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
    # Rows stay in one part where a rank has one document, or hardly any rows beside it, or with one nano-batch.
    for rows, ping_pong in (([[4, 4], [8]], True), ([[4, 4], [7, 1]], True), ([[4, 4], [2, 6]], False)):
        (nano,) = plan_placed(rows, PlanSettings(2, 8, ping_pong=ping_pong)).nano_batches
        lengths = [length for row in rows for length in row]
        assert nano.documents.tolist() == list(range(len(lengths)))
        assert nano.layout.lengths.tolist() == lengths
        assert nano.layout.tokens.tolist() == [8, 8]

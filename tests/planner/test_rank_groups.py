from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.plan import AttentionKind, Branches
from hf_distca.plan.figures import loads_of
from hf_distca.planner.prefix_trees import PrefixTrees
from hf_distca.planner.rank_groups import (
    balance_in_groups,
    joined_nodes,
    lay_out_in_groups,
    partitions,
    place_in_groups,
    slack_of_groups,
)
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.seconds import KernelCost, KindCosts, LinkCost, Links, StepCosts
from hf_distca.predict.walk import document_seconds
from tests.planner.plan_checks import check_plan

KIND = AttentionKind(None, 4, 2, 8, 8)
LINK = LinkCost(1e-6, 1e9)


def costs(token: float = 0.0, pair: float = 1.0) -> StepCosts:
    """One layer without a backward factor: a token takes `token` seconds in all, a pair `pair`."""
    kernel = KernelCost(0.0, 0.0, 0.0, pair / 2)
    return StepCosts(
        (KindCosts(KIND, 1, kernel, kernel),), token / 2, 0.0, 1.0, 0.0, Links(LINK, LINK)
    )


def test_neighbours_are_joined_inside_nodes_first():
    assert partitions((4,)) == partitions((1, 1, 1, 1)) == [(1, 1, 1, 1), (2, 2), (4,)]
    assert partitions((3,)) == partitions((2, 1)) == [(1, 1, 1), (2, 1), (3,)]
    assert partitions((4, 2)) == [(1,) * 6, (2, 2, 2), (4, 2), (6,)]
    assert partitions((1,)) == [(1,)]


def placed(lengths, sizes, tokens, seconds=None, slowness=None, fill_to=0.0):
    lengths = np.array(lengths)
    seconds = lengths.astype(float) if seconds is None else np.array(seconds)
    speeds = 1 / np.array(slowness or [1.0] * sum(sizes))
    return place_in_groups(lengths, seconds, sizes, tokens, speeds, fill_to=fill_to)


def in_groups(lengths, placing, tokens, count=1, *, over_all=False, **settings):
    of_plans = PlanSettings(sum(placing.sizes), tokens, (KIND,), **settings)
    return planned_in_groups(np.array(lengths), placing, of_plans, count, over_all)


def planned_in_groups(lengths, placing, of_plans, count, over_all):
    seconds = document_seconds(lengths, costs())
    laid_out = lay_out_in_groups(lengths, seconds, placing, of_plans, count, over_all=over_all)
    if laid_out is None:
        return None
    slack = slack_of_groups(lengths, placing, of_plans.finest_tolerance, costs())
    return [balance_in_groups(nano, placing, of_plans, slack) for nano in laid_out]


def ranks_of(nano, document):
    segments = nano.layout.segments
    return sorted(segments["rank"][segments["document"] == document].tolist())


@pytest.mark.parametrize(
    ("lengths", "sizes", "tokens", "options", "documents", "seconds"),
    [
        ([3, 9, 4, 5], (1, 1), 12, {}, [[0, 1], [2, 3]], [12, 9]),  # the costliest first
        # Documents of one second each: the rank that takes three times as long gets one of four.
        (
            [4] * 4,
            (1, 1),
            16,
            {"seconds": [1.0] * 4, "slowness": [1.0, 3.0]},
            [[0, 2, 3], [1]],
            [3, 3],
        ),
        ([6] * 3, (1, 2), 6, {}, [[0], [1, 2]], [6, 6]),
        # Filled up to 6 seconds: 2 goes beside 4, which has more work than 3.
        ([4, 3, 2], (1, 1), 9, {"fill_to": 6.0}, [[0, 2], [1]], [6, 3]),
    ],
)
def test_a_document_goes_to_the_group_with_the_least_work(
    lengths, sizes, tokens, options, documents, seconds
):
    placing = placed(lengths, sizes, tokens, **options)
    assert [group_documents.tolist() for group_documents in placing.documents] == documents
    assert placing.seconds.tolist() == seconds
    assert placing.slowest == max(seconds)
    assert placing.unplaced == ()


def test_what_no_group_has_room_for_is_cut_wherever_there_is_room():
    placing = placed([7, 7, 4], (1, 1), 9)
    assert placing.unplaced == (2,)
    (nano,) = in_groups([7, 7, 4], placing, 9)
    segments = nano.layout.segments[["document", "start", "stop", "rank"]].tolist()
    assert segments == [(0, 0, 7, 0), (2, 2, 4, 0), (1, 0, 7, 1), (2, 0, 2, 1)]


@pytest.mark.parametrize(
    "lengths",
    [
        [10, 3],  # longer than any group takes
        [8],  # a group would hold nothing
    ],
)
def test_no_placing(lengths):
    assert placed(lengths, (1, 1), 9) is None


@pytest.mark.parametrize(
    ("seconds", "nodes", "sizes"),
    [
        ([8.0] * 4, (2,) * 4, (2, 2, 2, 2)),
        ([24.0, 4, 4], (2,) * 4, (6, 2)),  # three nodes for the first document, one for the others
        # Nodes with work for 8, 7, 9 and 8: those with the most and the least are joined.
        ([8.0, 7, 6, 5, 3, 3], (2,) * 4, (4, 2, 2)),
        ([8.0] * 4, (2, 2, 1), None),
        ([24.0, 24, 24], (2,) * 4, None),  # two nodes for each of them
    ],
)
def test_nodes_are_joined_as_far_as_documents_need(seconds, nodes, sizes):
    lengths = np.array(seconds).astype(int)
    assert joined_nodes(lengths, np.array(seconds), nodes, 40, np.ones(sum(nodes))) == sizes


def test_no_rank_is_left_without_a_row():
    lengths = [20, 3]  # apart in two nano-batches, the second one too short for six parts
    nano_batches = in_groups(lengths, placed(lengths, (3,), 16), 16, 2, over_all=True)
    assert [nano.layout.tokens.tolist() for nano in nano_batches] == [[7, 7, 6], [1, 1, 1]]
    # A nano-batch of two tokens would leave a rank without a row.
    assert in_groups([20, 2], placed([20, 2], (3,), 16), 16, 2) is None


def test_attention_is_balanced_inside_every_group():
    lengths = [4] * 18  # a group has nine documents, and a rank half of the ninth
    (nano,) = in_groups(
        lengths, placed(lengths, (2, 2), 20), 20, over_all=True, balance_block_size=1
    )
    assert nano.layout.tokens.tolist() == [18, 18, 18, 18]
    assert loads_of(nano.plans[KIND]).tolist() == [45, 45, 45, 45]


@pytest.mark.parametrize(
    ("sizes", "nodes"), [((4, 4), (0, 0, 1, 1, 2, 2, 3, 3)), ((2, 2, 2, 2), None)]
)
def test_rows_are_forwarded_where_groups_have_ranks_of_several_nodes(sizes, nodes):
    placing = placed([8] * 4, sizes, 8)
    (nano,) = in_groups([8] * 4, placing, 8, balance_block_size=1, ranks_per_node=2)
    assert nano.plans[KIND].nodes == nodes


@pytest.mark.parametrize(
    ("kind", "pairs", "tasks"),
    [
        (KIND, 55, 1),
        (replace(KIND, window=4), 4 * 5 // 2 + 6 * 4, 1),
        (replace(KIND, chunk=4), 10 + 10 + 3, 3),
        (replace(KIND, chunk=5), 15 + 15, 2),
    ],
    ids=["full", "window", "uneven-chunks", "even-chunks"],
)
def test_seconds_of_a_document(kind, pairs, tasks):
    kernel = KernelCost(9.0, 0.25, 0.125, 0.5, task=2.0)
    kind_costs = KindCosts(kind, 2, kernel, kernel)
    step_costs = StepCosts((kind_costs,), 1.0, 2.0, 3.0, 5.0, Links(LINK, LINK))
    expected = 10 * (2 * 3 * 4 + 5) + 4 * (0.5 * pairs + 0.375 * 10 + 2.0 * tasks)
    assert document_seconds(np.array([10]), step_costs).tolist() == [expected]


def test_a_short_document_costs_more_a_pair():
    kernel = KernelCost(0, 0, 0, 0, diagonal=1.0)
    kind_costs = KindCosts(KIND, 1, kernel, KernelCost(0, 0, 0, 0))
    step_costs = StepCosts((kind_costs,), 0.0, 0.0, 0.0, 0.0, Links(LINK, LINK))
    seconds = document_seconds(np.array([10, 600]), step_costs)
    assert seconds.tolist() == [10 * 10, 600 * 512]


def test_rows_that_branches_share_cost_once():
    # Two branches continue a root of 4 rows, of which rows 0 to 3 have 10 pairs. The branches have
    # rows 4 and 5, with 11 pairs, and rows 4 to 6, with 18. A third document stays alone.
    branches = Branches(np.array([-1, 0, 0, -1]), np.array([0, 4, 4, 0]))
    trees = PrefixTrees.of(np.array([4, 6, 7, 2]), branches)
    seconds = trees.tree_seconds(costs(token=100.0))
    assert seconds.tolist() == [100 * (4 + 2 + 3) + 10 + 11 + 18, 100 * 2 + 3]
    # The document alone is a task, in the forward and in the backward.
    kernel = KernelCost(0.0, 0.0, 0.0, 0.0, task=1.0)
    of_tasks = replace(costs(), kinds=(KindCosts(KIND, 1, kernel, kernel),))
    assert trees.tree_seconds(of_tasks)[1] == 2


@st.composite
def micro_batches(draw):
    ranks = draw(st.integers(2, 6))
    tokens = draw(st.integers(24, 64))
    lengths, left = [ranks], (ranks - 1) * tokens  # at least as many tokens as ranks
    for length in draw(st.lists(st.integers(1, 2 * tokens), min_size=1, max_size=24)):
        if length <= left:
            lengths.append(length)
            left -= length
    nodes = draw(
        st.sampled_from([(1,) * ranks, (ranks,), (2, ranks - 2) if ranks > 2 else (ranks,)])
    )
    return np.array(lengths), ranks, tokens, nodes


def test_the_first_nano_batch_leaves_room_for_long_documents_of_the_second():
    # The second nano-batch needs 9 rows of each rank. If the 6 tokens of the first one lay whole on
    # a rank, beside 9 rows of its long document, the rank would have 7 of 22 rows left.
    placing = placed([18, 18, 6], (2,), 22)
    nano_batches = in_groups([18, 18, 6], placing, 22, count=2, over_all=True)
    assert [nano.documents.tolist() for nano in nano_batches] == [[0, 2], [1]]
    assert [nano.layout.tokens.tolist() for nano in nano_batches] == [[12, 12], [9, 9]]


def test_the_second_nano_batch_gives_its_extra_row_to_the_last_rank():
    # Each document has one row more than two ranks can share evenly, and a rank holds 101 rows.
    nano_batches = in_groups([101, 101], placed([101, 101], (2,), 101), 101, count=2)
    tokens = [nano_batch.layout.tokens.tolist() for nano_batch in nano_batches]
    assert tokens == [[51, 50], [50, 51]]


def test_documents_of_both_nano_batches_stay_on_their_nodes():
    # A node has rank 0, another one ranks 1 and 2. A document of 12 tokens takes two ranks.
    lengths = [12, 12, 10, 10, 8, 8]
    nano_batches = in_groups(lengths, placed(lengths, (3,), 20), 20, 2, ranks_per_node=(1, 2))
    ranks = [
        {int(nano.documents[document]): set(ranks_of(nano, document)) for document in range(3)}
        for nano in nano_batches
    ]
    assert ranks == [{0: {1, 2}, 2: {0}, 4: {1, 2}}, {1: {1, 2}, 3: {0}, 5: {1, 2}}]


@settings(max_examples=60, deadline=None)
@given(micro_batches(), st.sampled_from([1, 2]), st.booleans(), st.sampled_from([None, 20]))
def test_every_arrangement_is_a_plan_within_its_groups(drawn, nano_batches, over_all, window):
    lengths, ranks, tokens, nodes = drawn
    kind = AttentionKind(window, 4, 2, 8, 8)
    of_plans = PlanSettings(ranks, tokens, (kind,), balance_block_size=4, ranks_per_node=nodes)
    for sizes in partitions(nodes):
        placing = placed(lengths, sizes, tokens, lengths.astype(float) ** 2)
        arrangement = placing and planned_in_groups(
            lengths, placing, of_plans, nano_batches, over_all
        )
        if arrangement is None:
            continue
        assert len(arrangement) == nano_batches
        assert sorted(np.concatenate([nano.documents for nano in arrangement]).tolist()) == list(
            range(len(lengths))
        )
        assert np.sum([nano.layout.tokens for nano in arrangement], axis=0).max() <= tokens
        assert min(nano.layout.tokens.min() for nano in arrangement) > 0
        group_of = np.repeat(np.arange(len(sizes)), sizes)
        for nano in arrangement:
            plan = nano.plans[kind]
            check_plan(plan)
            assert nano.layout.lengths.tolist() == lengths[nano.documents].tolist()
            if not placing.unplaced:
                for table, place in ((plan.tasks, "worker"), (nano.layout.segments, "rank")):
                    groups = {
                        (document, group_of[rank])
                        for document, rank in table[["document", place]].tolist()
                    }
                    assert len(groups) == len(set(table["document"].tolist()))

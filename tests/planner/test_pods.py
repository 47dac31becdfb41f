"""Pods: what is dealt to them, and plans of each pod by itself."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.checks.capacity_rules import Capacity
from hf_distca.plan import AttentionKind, Branches
from hf_distca.planner.given_images import GivenImages
from hf_distca.planner.images import IMAGE, PLACEHOLDERS
from hf_distca.planner.micro_batch import plan_micro_batch, plan_pod, plan_pods
from hf_distca.planner.padding import A_POD, NO_RANK, PodShare, plan_padded, pod_needs
from hf_distca.planner.pods import UNEVEN, deal, pods_around
from hf_distca.planner.prefix_trees import PrefixTrees
from hf_distca.planner.prefixes import SequencePaths
from hf_distca.planner.sequences import on_rank, plan_sequences
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.seconds import KernelCost, KindCosts, LinkCost, Links, StepCosts
from hf_distca.predict.walk import document_seconds
from tests.planner.plan_checks import check_plan, rows_of
from tests.refused import refused

KIND = AttentionKind(None, 4, 2, 8, 8)
LINK = LinkCost(1e-6, 1e9)
KERNEL = KernelCost(0.0, 0.0, 0.0, 0.5)
COSTS = StepCosts((KindCosts(KIND, 1, KERNEL, KERNEL),), 0.5, 0.0, 1.0, 0.0, Links(LINK, LINK))
"""A token takes one second in all, and so does a pair."""
THOUSANDS = PlanSettings(
    4096,
    32768,
    ranks_per_node=8,
    ping_pong="auto",
    costs=replace(
        COSTS,
        kinds=(
            KindCosts(
                AttentionKind(),
                1,
                KernelCost(0.0, 0.0, 0.0, 4e-11),
                KernelCost(0.0, 0.0, 0.0, 8e-11),
            ),
        ),
        before_attention=1e-6,
    ),
)


TREE_LENGTHS = np.array([8, 12, 10, 11, 7, 6])
TREES = Branches(np.array([-1, 0, 0, -1, -1, 4]), np.array([0, 8, 6, 0, 0, 3]))
"""Trees of 16, 11 and 10 rows."""


def settings_of(ranks, tokens, pod_ranks=1, slowness=(), **others):
    costs = replace(COSTS, slowness=slowness)
    return PlanSettings(ranks, tokens, (KIND,), costs=costs, pod_ranks=pod_ranks, **others)


def dealt(lengths, of_plans, seconds=None):
    seconds = lengths if seconds is None else seconds
    placing = deal(np.array(lengths), np.array(seconds, float), of_plans)
    assert sum(placing.sizes) == of_plans.ranks
    documents = [of_pod.tolist() for of_pod in placing.documents]
    assert sorted(chain(*documents)) == list(range(len(lengths)))
    return placing.sizes, documents


def test_blocks_are_whole_nodes_and_about_alike():
    def blocks(ranks, **others):
        return PlanSettings(ranks, 1, **others).block_sizes

    assert blocks(127, ranks_per_node=1) == (127,)
    assert blocks(128, ranks_per_node=8) == (64, 64)
    assert blocks(136, ranks_per_node=8) == (72, 64)
    assert blocks(1024, ranks_per_node=8, pod_ranks=512) == (512, 512)
    assert blocks(8, ranks_per_node=(3, 1, 2, 2), pod_ranks=3) == (4, 4)
    assert blocks(8, ranks_per_node=8, pod_ranks=2) == (8,)
    assert blocks(8, pod_ranks=2, document_layout="fixed") == (8,)


def test_larger_pods_are_neighbouring_blocks_in_pairs():
    of_plans = settings_of(6, 8, pod_ranks=1)
    assert pods_around(of_plans, 1) == [range(1, 2), range(2), range(4), range(6)]
    assert pods_around(of_plans, 5) == [range(5, 6), range(4, 6), range(4, 6), range(6)]
    assert pods_around(settings_of(3, 8, pod_ranks=2), 2) == [range(3)]


def test_settings_of_a_pod_are_those_of_its_ranks():
    of_plans = settings_of(
        6, 8, slowness=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), ranks_per_node=(2, 2, 1, 1)
    )
    pod = of_plans.of_pod(range(2, 6))
    assert (pod.ranks, pod.ranks_per_node, pod.block_sizes) == (4, (2, 1, 1), (4,))
    assert pod.costs.slowness == (3.0, 4.0, 5.0, 6.0)
    assert of_plans.of_pod(range(4)).ranks_per_node == 2


def test_micro_batches_leave_room_in_pods():
    assert settings_of(4, 1024).micro_batch_tokens == 4096 - 8
    assert settings_of(4, 1024, pod_ranks=4).micro_batch_tokens == 4096


@pytest.mark.parametrize(
    ("lengths", "seconds", "expected"),
    [
        # The costliest document first, each to the block with the least work.
        ([40, 50, 30, 20], None, [[0, 2], [1, 3]]),
        # The second block has the least work, but no room for 30 more rows.
        ([30, 60, 30, 20], [60, 57, 5, 5], [[0, 2], [1, 3]]),
    ],
)
def test_documents_go_to_the_least_work_with_room(lengths, seconds, expected):
    sizes, documents = dealt(lengths, settings_of(2, 80), seconds)
    assert sizes == (1, 1)
    assert sorted(documents) == expected


def test_a_slow_block_gets_less_work():
    slow = settings_of(2, 16, slowness=(1.0, 3.0))
    assert dealt([2] * 8, slow) == ((1, 1), [[0, 2, 3, 4, 6, 7], [1, 5]])


def test_a_document_beyond_a_block_gets_a_larger_pod():
    # By rows: 12 of at most 8 of a block. By work: 40 of a mean of 16.
    lengths = [12, 4, 4, 4, 4, 2, 2]
    sizes, documents = dealt(lengths, settings_of(4, 8), [5, 5, 5, 5, 5, 4, 4])
    assert (sizes, 0 in documents[0]) == ((2, 1, 1), True)
    sizes, documents = dealt(lengths, settings_of(4, 8), [40, 4, 4, 4, 4, 4, 4])
    assert (sizes[0] > 1, 0 in documents[0]) == (True, True)
    assert dealt([25, 1, 1, 1], settings_of(4, 8))[0] == (4,)
    # Two documents need two of three blocks each.
    assert dealt([9, 9, 1, 1, 1, 1, 1, 1], settings_of(6, 4, 2))[0] == (6,)


def test_pods_with_room_together_are_joined_for_a_document():
    # After 6, 6, 6 and 6 each of four blocks has room for 2 rows, and no block for 3.
    assert dealt([6, 6, 6, 6, 3], settings_of(4, 8))[0] == (2, 1, 1)


def test_a_pod_without_a_row_for_each_rank_is_not_planned_alone():
    assert dealt([1, 1, 1, 1], settings_of(4, 8, pod_ranks=2))[0] == (2, 2)
    assert dealt([1, 3], settings_of(4, 8, pod_ranks=2))[0] == (4,)


def check_pods(lengths, plans, of_plans, branches=None):
    """Each rank once, each row of each document in one pod once, and no rank over capacity."""
    assert [rank for plan in plans for rank in plan.ranks] == list(range(of_plans.ranks))
    starts = np.zeros_like(lengths) if branches is None else branches.starts
    rows = []
    for plan in plans:
        assert (plan.tokens <= of_plans.rows_per_rank).all()
        for nano in plan.nano_batches:
            for kind_plan in nano.plans.values():
                check_plan(kind_plan)
            rows += [
                (int(nano.documents[document]), row)
                for document, row in rows_of(nano.layout.segments)
            ]
        assert plan.document_tokens == sum(lengths) - sum(starts)
    assert sorted(rows) == [
        (document, row)
        for document, (start, stop) in enumerate(zip(starts, lengths, strict=True))
        for row in range(start, stop)
    ]


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=24),
    st.sampled_from([(4, 1, 1), (6, 1, 2), (8, 2, 2), (7, (2, 2, 1, 2), 2)]),
    st.integers(0, 20),
)
def test_every_row_lies_in_one_pod(lengths, launch, more):
    ranks, ranks_per_node, pod_ranks = launch
    lengths = [*lengths, *[1] * ranks]
    tokens = -(-sum(lengths) // ranks) + more
    of_plans = settings_of(
        ranks,
        tokens,
        pod_ranks,
        ranks_per_node=ranks_per_node,
        ping_pong="auto",
        balance_block_size=4,
    )
    plans = plan_pods(lengths, of_plans)
    check_pods(lengths, plans, of_plans)
    for plan in plans:
        assert plan.ranks in pods_around(of_plans, plan.ranks.start)
        assert plan_pod(lengths, of_plans, plan.ranks.stop - 1).ranks == plan.ranks


def test_a_prefix_tree_lies_in_one_pod():
    of_plans = settings_of(4, 12, 2, balance_block_size=2)
    plans = plan_pods(TREE_LENGTHS.tolist(), of_plans, TREES)
    assert len(plans) == 2
    check_pods(TREE_LENGTHS, plans, of_plans, TREES)
    pod_of_document = {
        int(document): number
        for number, plan in enumerate(plans)
        for nano in plan.nano_batches
        for document in nano.documents
    }
    assert pod_of_document[0] == pod_of_document[1] == pod_of_document[2]
    assert pod_of_document[4] == pod_of_document[5]


def test_a_rank_knows_the_rows_of_its_pod():
    trees = PrefixTrees.of(TREE_LENGTHS, TREES)
    # Four sequences end in the documents 1, 2, 3 and 5.
    ends = np.array([1, 2, 3, 5])
    paths = SequencePaths(trees, np.array([0, 0, 1, 2, 3, 3]), ends)
    lengths = TREE_LENGTHS[ends]
    of_plans = settings_of(4, 12, 2, balance_block_size=2)
    rows, tokens = 0, []
    for rank in range(4):
        planned = plan_sequences(paths, lengths, of_plans, rank=rank)
        assert planned.plans[0].document_tokens == lengths.sum()
        own = on_rank(planned.rank_rows, rank)
        rows += int((own["stop"] - own["start"]).sum())
        for entry in on_rank(planned.sequence_tokens, rank).tolist():
            _, _, sequence, start, stop, _ = entry
            tokens += [(sequence, token) for token in range(start, stop)]
    assert rows == trees.rows
    assert sorted(tokens) == [
        (sequence, token) for sequence, length in enumerate(lengths) for token in range(length)
    ]


def planned_in_pods(lengths_of_ranks, of_plans, images_of_ranks=()):
    """The plans of the padded batches of each block of ranks, which tell each other their needs."""
    blocks = sorted({pods_around(of_plans, rank)[0] for rank in range(of_plans.ranks)}, key=min)
    given = [
        (
            *(lengths_of_ranks[block.start : block.stop], of_plans.of_pod(block), None),
            list(images_of_ranks[block.start : block.stop]),
        )
        for block in blocks
    ]
    needs = [pod_needs(*of_block) for of_block in given]
    return blocks, [
        plan_padded(*of_block, share=PodShare.of(block.start, own, needs))
        for block, of_block, own in zip(blocks, given, needs, strict=True)
    ]


def check_padded(lengths_of_ranks, of_plans):
    """Each token of each sequence has one row in its pod; pods run equally many micro-batches."""
    blocks, pods = planned_in_pods(lengths_of_ranks, of_plans)
    tokens = sum(map(sum, lengths_of_ranks))
    assert len({len(planned.sequences.plans) for planned in pods}) == 1
    for block, planned in zip(blocks, pods, strict=True):
        plans = planned.sequences.plans
        assert {plan.ranks for plan in plans} == {block}
        assert all((plan.tokens <= of_plans.rows_per_rank).all() for plan in plans)
        assert sum(plan.document_tokens for plan in plans) == tokens
        rows = planned.travelling(planned.sequences.rank_rows)
        rows = rows[rows["source"] != NO_RANK]
        assert np.isin(rows["rank"], block).all()
        held = sorted(
            (source, index, token)
            for source, index, start, stop in rows[["source", "index", "start", "stop"]].tolist()
            for token in range(start, stop)
        )
        assert held == [
            (rank, index, token)
            for rank in block
            for index, length in enumerate(lengths_of_ranks[rank])
            for token in range(length)
        ]
    return pods


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.lists(st.integers(0, 16), max_size=4), min_size=7, max_size=7),
    st.sampled_from([(2, 2), ((2, 2, 1, 2), 2), (1, 7)]),
)
def test_padded_batches_stay_in_their_pods(lengths_of_ranks, launch):
    ranks_per_node, pod_ranks = launch
    ranks_per_node = (2, 2, 2, 1) if ranks_per_node == 2 else ranks_per_node
    of_plans = settings_of(
        7, 16, pod_ranks, ranks_per_node=ranks_per_node, ping_pong="auto", balance_block_size=4
    )
    check_padded(lengths_of_ranks, of_plans)


def test_a_sequence_beyond_its_pod_is_refused():
    with refused(Capacity.LONG_SEQUENCE, length=17, limit=16, where=A_POD):
        pod_needs([[17], [3]], settings_of(2, 8))


def test_a_pod_runs_as_many_micro_batches_as_the_one_that_needs_the_most():
    of_plans = settings_of(4, 8, 2, balance_block_size=4)
    pods = check_padded([[8, 8], [8, 8], [3], []], of_plans)
    assert [len(planned.sequences.plans) for planned in pods] == [2, 2]
    assert [planned.most_rows for planned in pods] == [32, 32]
    # An image of one pod lets all ranks encode.
    images = np.array([(0, 0, 0, 1, 4, 16, 1.0)], IMAGE)
    placeholders = np.array([(0, 1, 2, 0)], PLACEHOLDERS)
    none = GivenImages(("image",), images[:0].tobytes(), placeholders[:0].tobytes())
    one = GivenImages(("image",), images.tobytes(), placeholders.tobytes())
    _, pods = planned_in_pods([[4], [5], [3], [6]], of_plans, [none, none, none, one])
    planned_images = [planned.sequences.plans[0].images["image"] for planned in pods]
    assert [images.encoders.tolist() for images in planned_images] == [[], [3]]


def test_few_ranks_are_one_pod():
    lengths = [30, 12, 9, 7, 5, 3]
    of_plans = settings_of(4, 18, pod_ranks=3)
    alone, together = plan_pod(lengths, of_plans, 3), plan_micro_batch(lengths, of_plans)
    assert alone.ranks == together.ranks == range(4)
    for pod, whole in zip(alone.nano_batches, together.nano_batches, strict=True):
        assert (pod.layout.segments == whole.layout.segments).all()
        assert (pod.plans[KIND].tasks == whole.plans[KIND].tasks).all()


def test_thousands_of_ranks_plan_pods_of_their_own():
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(7.5, 1.3, 60_000)).astype(np.int64).clip(1, 65536)
    lengths = lengths[np.cumsum(lengths) < THOUSANDS.micro_batch_tokens - 500_000]
    lengths = np.append(lengths, 450_000)
    placing = deal(lengths, document_seconds(lengths, THOUSANDS.costs), THOUSANDS)
    # 1. The pods: each document in one of them, within its capacity, and about equal work.
    assert sorted(np.concatenate(placing.documents)) == list(range(len(lengths)))
    tokens = np.array([lengths[documents].sum() for documents in placing.documents])
    assert (tokens <= np.array(placing.sizes) * THOUSANDS.rows_per_rank).all()
    mean = (placing.seconds @ placing.sizes) / 4096
    assert placing.slowest <= mean * (1 + UNEVEN)
    assert placing.sizes[0] > 64
    assert placing.sizes.count(64) > 32
    # 2. The plan of a pod: the same on its first and its last rank, and of its documents alone.
    pod = len(placing.sizes) - 1
    first, last = (plan_pod(lengths.tolist(), THOUSANDS, rank) for rank in (4096 - 64, 4095))
    assert first.ranks == last.ranks == range(4096 - 64, 4096)
    assert first.document_tokens == lengths.sum()
    documents = np.sort(np.concatenate([nano.documents for nano in first.nano_batches]))
    assert documents.tolist() == placing.documents[pod].tolist()
    for one, other in zip(first.nano_batches, last.nano_batches, strict=True):
        assert (one.layout.segments == other.layout.segments).all()
        assert one.layout.ranks == 64
        for kind, plan in one.plans.items():
            assert (plan.tasks == other.plans[kind].tasks).all()
            assert plan.stage_rows == other.plans[kind].stage_rows
    assert (first.tokens <= THOUSANDS.rows_per_rank).all()
    assert first.choice.attention == last.choice.attention


def test_thousands_of_ranks_plan_padded_batches_of_their_pods():
    random = np.random.default_rng(1)
    lengths = random.integers(1, 20_000, (4096, 3))
    blocks = [pods_around(THOUSANDS, rank)[0] for rank in range(0, 4096, 64)]
    of_blocks = [lengths[block.start : block.stop].tolist() for block in blocks]
    needs = [pod_needs(rows, THOUSANDS.of_pod(blocks[0])) for rows in of_blocks]
    share = PodShare.of(4032, needs[-1], needs)
    planned = plan_padded(of_blocks[-1], THOUSANDS.of_pod(blocks[-1]), share=share)
    plans = planned.sequences.plans
    assert [plan.ranks for plan in plans] == [range(4032, 4096)] * share.micro_batches
    assert sum(plan.document_tokens for plan in plans) == lengths.sum()
    assert all((plan.tokens <= THOUSANDS.rows_per_rank).all() for plan in plans)
    rows = planned.travelling(planned.sequences.rank_rows)
    rows = rows[rows["source"] != NO_RANK]
    of_batches = np.zeros((4096, 3), np.int64)
    np.add.at(of_batches, (rows["source"], rows["index"]), rows["stop"] - rows["start"])
    assert (of_batches[4032:] == lengths[4032:]).all()
    assert not of_batches[:4032].any()

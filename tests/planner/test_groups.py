from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.plan import AttentionKind
from hf_distca.planner.groups import arrange, divide_evenly, partitions, place_in_groups
from hf_distca.planner.metrics import loads_of
from hf_distca.planner.seconds import KernelCost, KindCosts, LinkCost, Links, StepCosts
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.walk import document_seconds
from tests.planner.plan_checks import check_plan

KIND = AttentionKind(None, 4, 2, 8, 8)
LINK = LinkCost(1e-6, 1e9)


def costs(token: float = 0.0, pair: float = 1.0) -> StepCosts:
    """One layer without a backward factor: a token takes `token` seconds in all, a pair `pair`."""
    kernel = KernelCost(0.0, 0.0, 0.0, pair / 2)
    return StepCosts((KindCosts(KIND, 1, kernel, kernel),), token / 2, 0.0, 1.0, 0.0, Links(LINK, LINK))


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ((4,), [(1, 1, 1, 1), (2, 2), (4,)]),
        ((3,), [(1, 1, 1), (2, 1), (3,)]),
        ((2, 1), [(1, 1, 1), (2, 1), (3,)]),
        ((1, 1, 1, 1), [(1, 1, 1, 1), (2, 2), (4,)]),
        ((4, 2), [(1,) * 6, (2, 2, 2), (4, 2), (6,)]),
        ((1,), [(1,)]),
    ],
)
def test_neighbours_are_joined_inside_nodes_first(nodes, expected):
    assert partitions(nodes) == expected


def test_the_costliest_document_goes_to_who_has_the_least():
    lengths = np.array([3, 9, 4, 5])
    placing = place_in_groups(lengths, lengths.astype(float), (1, 1), 12, np.ones(sum((1, 1))))
    assert [documents.tolist() for documents in placing.documents] == [[0, 1], [2, 3]]
    assert placing.seconds.tolist() == [12.0, 9.0]
    assert placing.slowest == 12.0
    assert placing.left == ()


def test_slower_ranks_get_less():
    """Documents of one second each: the rank that takes three times as long gets one of four."""
    lengths = np.array([4, 4, 4, 4])
    placing = place_in_groups(lengths, np.ones(4), (1, 1), 16, 1 / np.array([1.0, 3.0]))
    assert [len(documents) for documents in placing.documents] == [3, 1]
    assert placing.seconds.tolist() == [3.0, 3.0]


def test_a_group_of_more_ranks_takes_more():
    lengths = np.array([6, 6, 6])
    placing = place_in_groups(lengths, lengths.astype(float), (1, 2), 6, np.ones(sum((1, 2))))
    assert [len(documents) for documents in placing.documents] == [1, 2]
    assert placing.seconds.tolist() == [6.0, 6.0]


def test_what_no_group_has_room_for_is_left_and_cut_wherever_there_is_room():
    lengths = np.array([7, 7, 4])
    placing = place_in_groups(lengths, lengths.astype(float), (1, 1), 9, np.ones(sum((1, 1))))
    assert placing.left == (2,)
    found = arrange(lengths, placing, PlanSettings(2, 9, (KIND,)), costs(), 1, evenly=False)
    (layout,) = found.layouts
    assert [tuple(segment)[:4] for segment in layout.segments.tolist()] == [
        (0, 0, 7, 0),
        (2, 0, 2, 0),
        (1, 0, 7, 1),
        (2, 2, 4, 1),
    ]


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([10, 3], (1, 1)),  # longer than any group takes
        ([8], (1, 1)),  # a group would hold nothing
    ],
)
def test_documents_that_groups_cannot_hold(lengths, sizes):
    lengths = np.array(lengths)
    assert place_in_groups(lengths, lengths.astype(float), sizes, 9, np.ones(sum(sizes))) is None


def evenly(lengths, room):
    return divide_evenly(np.array(lengths), document_seconds(np.array(lengths), costs()), np.array(room))


def test_a_long_document_is_divided_so_that_ranks_compute_alike():
    segments = evenly([16, 2, 2], [10, 10])
    assert segments.tolist() == [
        [0, 0, 4, 0],
        [0, 4, 8, 1],
        [0, 8, 12, 1],
        [0, 12, 16, 0],
        [1, 0, 2, 0],
        [2, 0, 2, 1],
    ]


def test_dividing_evenly_keeps_to_the_room_of_every_rank():
    segments = evenly([17], [8, 9])
    held = np.bincount(segments[:, 3], weights=segments[:, 2] - segments[:, 1])
    assert held.tolist() == [8, 9]
    assert evenly([18], [8, 9]) is None


def test_no_rank_is_left_without_a_row():
    lengths = np.array([20, 3])  # apart in two nano-batches, the second too short for two ranks to share
    placing = place_in_groups(lengths, lengths.astype(float), (2,), 16, np.ones(sum((2,))))
    evenly, joint = (
        arrange(lengths, placing, PlanSettings(2, 16, (KIND,)), costs(), 2, evenly=e) for e in (True, False)
    )
    assert evenly is None
    assert [layout.tokens.min() for layout in joint.layouts] == [10, 1]


def test_attention_is_balanced_inside_every_group():
    lengths = np.full(18, 4)  # five of a group's nine documents on one rank, four on the other
    of_plans = PlanSettings(4, 20, (KIND,), balance_block_size=1)
    placing = place_in_groups(lengths, lengths.astype(float), (2, 2), 20, np.ones(sum((2, 2))))
    found = arrange(lengths, placing, of_plans, costs(), 1, evenly=True)
    assert found.layouts[0].tokens.tolist() == [20, 16, 20, 16]
    assert loads_of(found.tasks(found.layouts[0], KIND, of_plans)).tolist() == [45, 45, 45, 45]


@pytest.mark.parametrize(("sizes", "nodes"), [((4, 4), (0, 0, 1, 1, 2, 2, 3, 3)), ((2, 2, 2, 2), None)])
def test_rows_are_forwarded_where_groups_have_ranks_of_several_nodes(sizes, nodes):
    lengths = np.array([8, 8, 8, 8])
    of_plans = PlanSettings(8, 8, (KIND,), balance_block_size=1, ranks_per_node=2)
    found = arrange(
        lengths,
        place_in_groups(lengths, lengths.astype(float), sizes, 8, np.ones(sum(sizes))),
        of_plans,
        costs(),
        1,
        evenly=False,
    )
    assert found.tasks(found.layouts[0], KIND, of_plans).nodes == nodes


@pytest.mark.parametrize(
    ("kind", "pairs"),
    [(KIND, 55), (replace(KIND, window=4), 4 * 5 // 2 + 6 * 4), (replace(KIND, chunk=4), 10 + 10 + 3)],
)
def test_seconds_of_a_document(kind, pairs):
    kernel = KernelCost(9.0, 0.25, 0.125, 0.5)
    of_kind = StepCosts((KindCosts(kind, 2, kernel, kernel),), 1.0, 2.0, 3.0, 5.0, Links(LINK, LINK))
    assert document_seconds(np.array([10]), of_kind).tolist() == [
        10 * (2 * 3 * 4 + 5) + 4 * (0.5 * pairs + 0.375 * 10)
    ]


@st.composite
def micro_batches(draw):
    ranks = draw(st.integers(2, 6))
    tokens = draw(st.integers(24, 64))
    lengths, left = [], ranks * tokens
    for length in draw(st.lists(st.integers(1, 2 * tokens), min_size=1, max_size=24)):
        if length <= left:
            lengths.append(length)
            left -= length
    nodes = draw(st.sampled_from([(1,) * ranks, (ranks,), (2, ranks - 2) if ranks > 2 else (ranks,)]))
    return np.array(lengths), ranks, tokens, nodes


@settings(max_examples=60, deadline=None)
@given(micro_batches(), st.sampled_from([1, 2]), st.booleans(), st.sampled_from([None, 20]))
def test_every_arrangement_is_a_plan_within_its_groups(drawn, nano_batches, evenly, window):
    lengths, ranks, tokens, nodes = drawn
    kind = AttentionKind(window, 4, 2, 8, 8)
    of_plans = PlanSettings(ranks, tokens, (kind,), balance_block_size=4, ranks_per_node=nodes)
    for sizes in partitions(nodes):
        placing = place_in_groups(lengths, lengths.astype(float) ** 2, sizes, tokens, np.ones(sum(sizes)))
        if placing is None:
            continue
        found = arrange(lengths, placing, of_plans, costs(), nano_batches, evenly=evenly)
        if found is None:
            continue
        assert len(found.layouts) == nano_batches
        assert sorted(np.concatenate(found.documents).tolist()) == list(range(len(lengths)))
        assert np.sum([layout.tokens for layout in found.layouts], axis=0).max() <= tokens
        assert min(layout.tokens.min() for layout in found.layouts) > 0
        group_of = np.repeat(np.arange(len(sizes)), sizes)
        for documents, layout in zip(found.documents, found.layouts, strict=True):
            plan = found.tasks(layout, kind, of_plans)
            check_plan(plan)
            assert layout.lengths.tolist() == lengths[documents].tolist()
            if not placing.left:
                for table, place in ((plan.tasks, "worker"), (layout.segments, "rank")):
                    groups = {(document, group_of[rank]) for document, rank in table[["document", place]].tolist()}
                    assert len(groups) == len(set(table["document"].tolist()))

"""Documents divided over ranks, with pairs as their work."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.plan.cost import pairs
from hf_distca.planner.division import Division
from hf_distca.planner.layout import layout_of_rows
from tests.planner.plan_checks import check_layout


def divided(lengths, nodes, *, over_all=False):
    """[segments] of (document, start, stop, rank) of one nano-batch, by document and row."""
    lengths = np.array(lengths)
    division = Division(lengths, pairs(0, lengths).astype(float), over_all=over_all)
    division.place(np.arange(len(lengths)), nodes)
    return sorted(division.segments[["document", "start", "stop", "rank"]].tolist())


def ranks_of(segments):
    """Ranks of each document."""
    ranks = {}
    for document, _, _, rank in segments:
        ranks.setdefault(document, set()).add(rank)
    return [ranks[document] for document in sorted(ranks)]


def test_a_long_document_is_divided_so_that_ranks_compute_alike():
    assert divided([16, 2, 2], (1, 1), over_all=True) == [
        (0, 0, 4, 0),
        (0, 4, 8, 1),
        (0, 8, 12, 1),
        (0, 12, 16, 0),
        (1, 0, 2, 0),
        (2, 0, 2, 1),
    ]


def test_long_documents_lie_on_all_ranks_or_on_as_few_as_they_need():
    # Eight ranks have 16 tokens and some 240 pairs each. The long documents have 820 pairs.
    lengths = [40, 40, 12, 12, 12, 12]
    assert ranks_of(divided(lengths, (1,) * 8, over_all=True))[:2] == [set(range(8))] * 2
    over_few = ranks_of(divided(lengths, (1,) * 8))
    # Five ranks share one, and the other has those with the least work.
    assert over_few[:2] == [{0, 1, 2, 3, 4}, {0, 1, 5, 6, 7}]


@pytest.mark.parametrize(("length", "count", "of_each"), [(16, 8, 1), (32, 4, 2), (8, 16, 1)])
def test_equal_documents_fill_ranks(length, count, of_each):
    assert [len(ranks) for ranks in ranks_of(divided([length] * count, (1,) * 8))] == [
        of_each
    ] * count


def test_a_document_gets_more_ranks_where_few_have_too_little_room():
    # Their pairs ask for three ranks of four, for both documents: of 12 tokens on each rank the
    # first document leaves 5 on two ranks and 6 on one, and the second one needs 6 on three.
    over_few = divided([20, 20, *[1] * 8], (1,) * 4)
    assert ranks_of(over_few)[:2] == [{0, 1, 2}, {0, 1, 2, 3}]
    assert [rank for document, *_, rank in over_few if document == 1] == [0, 1, 2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize(("tokens", "parts"), [(7, 4), (8, 8)])
def test_a_document_is_divided_evenly_only_if_every_part_has_a_row(tokens, parts):
    assert len(divided([tokens], (1,) * 4, over_all=True)) == parts


def test_the_end_of_a_document_that_fits_nowhere_lies_where_most_room_is():
    lengths = np.array([9, 1, 2])
    first, second = (Division(lengths, lengths.astype(float), over_all=False) for _ in range(2))
    first.place(np.array([2]), (1,), first_rank=2)
    second.place(np.array([1]), (1,), first_rank=0)
    first.cut_over_all(np.array([0]), np.array([3, 6, 6]), [second])
    assert first.segments[["start", "stop", "rank"]].tolist() == [(3, 9, 1), (0, 3, 2), (0, 2, 2)]


@pytest.mark.parametrize("over_all", [True, False])
def test_over_nodes_only_the_longest_documents_are_divided(over_all):
    longest, second, third, shortest = ranks_of(divided([32, 10, 10, 2], (2, 2), over_all=over_all))
    assert longest == {0, 1, 2, 3}
    assert sorted([second, third], key=min) == [{0, 1}, {2, 3}]
    assert shortest in ({0, 1}, {2, 3})


def test_a_document_lies_on_as_few_nodes_as_it_needs():
    # Three nodes with some 260 pairs each: the first document needs two of them.
    first, *_ = ranks_of(divided([24, 16, 16, 16], (2, 2, 2)))
    assert first == {0, 1, 2, 3}


def test_tokens_that_do_not_divide_evenly_are_on_other_ranks_in_the_second_nano_batch():
    lengths = np.array([11, 11])
    tables = []
    for number in range(2):
        division = Division(lengths, lengths.astype(float), over_all=False)
        division.place(np.array([number]), (2,), is_second=number == 1)
        tables.append(division.segments)
    tokens = [
        np.bincount(table["rank"], table["stop"] - table["start"]).tolist() for table in tables
    ]
    assert tokens == [[6, 5], [5, 6]]
    assert [set(table["document"].tolist()) for table in tables] == [{0}, {1}]


@given(
    st.lists(st.integers(1, 9) | st.integers(1, 700), min_size=1, max_size=25),
    st.integers(1, 9).map(lambda ranks: (1,) * ranks)
    | st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sampled_from([None, 1, 50]),
    st.booleans(),
)
def test_every_row_is_on_one_rank_and_ranks_have_equal_tokens(lengths, nodes, window, over_all):
    lengths = np.array(lengths)
    work = pairs(0, lengths, window).astype(float)
    division = Division(lengths, work, over_all=over_all)
    division.place(np.arange(len(lengths)), nodes)
    documents, layout = layout_of_rows(lengths, division.segments, sum(nodes))
    assert documents.tolist() == list(range(len(lengths)))
    check_layout(layout)
    share, more = divmod(int(lengths.sum()), sum(nodes))
    assert layout.tokens.tolist() == [share + (rank < more) for rank in range(sum(nodes))]

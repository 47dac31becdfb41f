import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.planner.layout import SMALLEST_SHARE, fixed_layout, mirrored, split_documents, split_placed
from tests.planner.plan_checks import check_layout


def documents_split(lengths, ranks=1):
    groups = split_documents(np.array(lengths, np.int64), ranks)
    return groups and [group.tolist() for group in groups]


def test_documents_go_to_the_smaller_group_longest_first():
    assert documents_split([5, 4, 3, 2]) == [[0, 3], [1, 2]]
    assert documents_split([2, 3, 4, 5]) == [[0, 3], [1, 2]]
    assert documents_split([1, 1, 1]) == [[0, 2], [1]]


def test_a_document_of_half_of_the_tokens_is_a_group():
    assert documents_split([2, 5, 3]) == [[1], [0, 2]]


@pytest.mark.parametrize("lengths", [[], [4], [6, 2, 3]])
def test_documents_that_make_no_two_groups(lengths):
    assert documents_split(lengths) is None


def test_every_rank_needs_a_row_of_each_group():
    assert documents_split([3, 2], ranks=2) is None  # 3 is more than half
    assert documents_split([2, 2], ranks=2) == [[0], [1]]
    assert documents_split([2, 2], ranks=3) is None


def test_rows_are_cut_next_to_the_middle_of_every_rank():
    assert split_placed([[4, 4], [2, 6], [1, 1, 1, 1, 1], [3, 1, 3]]) == [1, 1, 2, 1]


@pytest.mark.parametrize("row", [[], [5], [1, 6, 1], [1, 4], [4, 1]])
def test_rows_of_a_rank_that_cannot_be_cut(row):
    assert split_placed([[4, 4], row]) is None


def test_mirrored_reverses_the_ranks():
    layout = mirrored(fixed_layout([[3, 2], [], [4]]))
    assert layout.ranks == 3
    assert layout.lengths.tolist() == [3, 2, 4]
    assert layout.segments.tolist() == [(2, 0, 4, 0, 0), (0, 0, 3, 2, 0), (1, 0, 2, 2, 3)]


LENGTHS = st.lists(st.one_of(st.integers(1, 5), st.integers(1, 300)), max_size=12)


@given(LENGTHS, st.integers(1, 9))
def test_every_document_is_in_one_group_of_a_quarter_or_more(lengths, ranks):
    groups = documents_split(lengths, ranks)
    total = sum(lengths)
    if groups is None:
        # Groups of at least a quarter would have sufficed.
        assert len(lengths) < 2 or 2 * max(lengths) > total or total < 4 * ranks
        return
    assert sorted(groups[0] + groups[1]) == list(range(len(lengths)))
    assert all(group == sorted(group) for group in groups)
    assert all(sum(lengths[document] for document in group) >= max(ranks, total / 4) for group in groups)


@given(st.lists(LENGTHS, max_size=4))
def test_rows_are_cut_where_both_parts_have_their_share(rows):
    def parts(row, cut):
        return sum(row[:cut]), sum(row[cut:])

    cuts = split_placed(rows)
    if cuts is None:
        assert any(all(min(parts(row, cut)) < SMALLEST_SHARE * sum(row) for cut in range(1, len(row))) for row in rows)
        return
    for row, cut in zip(rows, cuts, strict=True):
        assert min(parts(row, cut)) == max(min(parts(row, other)) for other in range(1, len(row)))
        assert min(parts(row, cut)) >= SMALLEST_SHARE * sum(row)


@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(1, 3))
def test_mirrored_twice_is_the_layout(rows, span):
    layout = fixed_layout(rows, len(rows) * span)
    check_layout(mirrored(layout))
    assert mirrored(layout).tokens.tolist() == layout.tokens.tolist()[::-1]
    assert mirrored(mirrored(layout)).segments.tolist() == layout.segments.tolist()

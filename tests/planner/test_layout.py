import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.planner.layout import fixed_layout, joint_layout
from tests.planner.plan_checks import check_layout


def segments(layout):
    return [tuple(segment) for segment in layout.segments.tolist()]


def test_fixed_layout_keeps_every_row_on_its_rank():
    layout = fixed_layout([[3, 2], [], [4]])
    assert layout.ranks == 3
    assert layout.lengths.tolist() == [3, 2, 4]
    assert segments(layout) == [(0, 0, 3, 0, 0), (1, 0, 2, 0, 3), (2, 0, 4, 2, 0)]


def test_fixed_layout_divides_a_row_evenly():
    layout = fixed_layout([[], [1], [8]], 9)
    assert layout.tokens.tolist() == [0, 0, 0, 1, 0, 0, 3, 3, 2]
    assert segments(layout) == [(0, 0, 1, 3, 0), (1, 0, 3, 6, 0), (1, 3, 6, 7, 0), (1, 6, 8, 8, 0)]


def test_joint_layout_of_equal_documents_cuts_nothing():
    layout = joint_layout([5] * 6, 3, 10)
    assert sorted(row[1:3] for row in segments(layout)) == [(0, 5)] * 6
    assert layout.tokens.tolist() == [10, 10, 10]


def test_joint_layout_cuts_the_end_of_one_long_document():
    # Each rank ends up with half of the rows; the long document is cut once, at a block's boundary.
    layout = joint_layout([4096, 2048, 1024, 1024], 2, 4096)
    assert layout.tokens.tolist() == [4096, 4096]
    cut = [row for row in segments(layout) if row[0] == 0]
    assert len(cut) == 2
    assert all(row[1] % 128 == 0 for row in cut)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fixed_layout([]), "got 0 rows of documents"),
        (lambda: fixed_layout([[1], [1]], 3), "got 2 rows of documents for 3 ranks"),
        (lambda: fixed_layout([[1, 0]]), "document 1 has length 0"),
        (lambda: joint_layout([9], 2, 4), "1 documents hold 9 tokens, but 2 ranks of 4 take 8"),
        (lambda: joint_layout([1], 0, 4), "must be positive"),
        (lambda: joint_layout([1], 1, 4, balance_tolerance=-0.1), "balance_tolerance must be 0 or more"),
        (lambda: joint_layout([1], 1, 4, window=0), "window must be at least 1"),
        (lambda: joint_layout([1], 1, 4, balance_block_size=0), "balance_block_size must be at least 1"),
        (lambda: joint_layout([1], 4, 4, node_sizes=(2, 1)), "2,1 adds up to 3 ranks, but 4 ranks train"),
    ],
)
def test_layouts_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()


LENGTHS = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 700)), max_size=25)


@settings(max_examples=150)
@given(
    LENGTHS,
    st.integers(1, 9),
    st.sampled_from([None, 1, 50, 256]),
    st.sampled_from([1, 16, 128]),
    st.integers(0, 5),
)
def test_joint_layouts_hold_every_row_once_with_tokens_equal(lengths, ranks, window, block, extra):
    tokens_per_rank = -(-sum(lengths) // ranks) + extra or 1
    layout = joint_layout(lengths, ranks, tokens_per_rank, window=window, balance_block_size=block)
    check_layout(layout)
    assert layout.tokens.max(initial=0) - layout.tokens.min(initial=10**9) <= 1
    again = joint_layout(lengths, ranks, tokens_per_rank, window=window, balance_block_size=block)
    assert segments(again) == segments(layout)


def test_joint_layout_cuts_no_document_between_nodes_that_fits_into_one():
    # Each long document is more than a rank takes, but not more than a node.
    layout = joint_layout([96, 96, 32, 32], 4, 64, node_sizes=(2, 2), balance_block_size=16)
    assert layout.tokens.tolist() == [64] * 4
    nodes = [{rank // 2 for document, *_, rank, _ in segments(layout) if document == which} for which in range(4)]
    assert nodes in ([{0}, {1}, {0}, {1}], [{0}, {1}, {1}, {0}])


def test_joint_layout_gives_larger_nodes_more():
    # Three ranks with as many rows and pairs each: the long documents go to the node of two.
    layout = joint_layout([64] * 3, 3, 64, node_sizes=(1, 2))
    assert segments(layout) == [(2, 0, 64, 0, 0), (0, 0, 64, 1, 0), (1, 0, 64, 2, 0)]


@settings(max_examples=200)
@given(
    LENGTHS,
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sampled_from([None, 1, 50, 256]),
    st.sampled_from([1, 16, 128]),
    st.sampled_from([0.0, 0.01, 0.3]),
)
def test_joint_layouts_on_nodes_hold_every_row_once_with_tokens_equal(lengths, sizes, window, block, tolerance):
    ranks = sum(sizes)
    settings = {"window": window, "balance_block_size": block, "balance_tolerance": tolerance}
    most = -(-sum(lengths) // ranks) or 1
    layout = joint_layout(lengths, ranks, most, node_sizes=sizes, **settings)
    check_layout(layout)
    flat = joint_layout(lengths, ranks, most, **settings)
    assert layout.tokens.tolist() == flat.tokens.tolist()
    assert segments(joint_layout(lengths, ranks, most, node_sizes=sizes, **settings)) == segments(layout)
    if len(sizes) in (1, ranks):
        assert segments(layout) == segments(flat)


@settings(max_examples=60)
@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(1, 4))
def test_fixed_layouts_hold_every_row_once(rows, span):
    layout = fixed_layout(rows, len(rows) * span)
    check_layout(layout)
    shares = [divmod(sum(row), span) for row in rows]
    assert layout.tokens.tolist() == [share + (rank < extra) for share, extra in shares for rank in range(span)]
    # Row after row, documents lie in their order.
    placed = [(document, start) for document, start, *_ in segments(layout)]
    assert placed == sorted(placed)


def test_joint_layout_of_documents_cut_at_both_ends():
    # Found by a search: one rank held the last segment of a document and its head.
    layout = joint_layout([1, 1, 1, 3, 7, 41, 56, 56], 8, 21, balance_block_size=16)
    check_layout(layout)
    assert layout.tokens.tolist() == [21] * 6 + [20] * 2

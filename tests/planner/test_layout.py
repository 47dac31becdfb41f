import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.plan import AttentionKind
from hf_distca.planner.joint import joint_layout
from hf_distca.planner.layout import fixed_layout, layout_of_kind, mirrored
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from tests.planner.plan_checks import check_layout, check_plan, rows_of

LENGTHS = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 700)), max_size=25)


def segments(layout):
    return [tuple(segment) for segment in layout.segments.tolist()]


@settings(max_examples=60)
@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(1, 4))
def test_fixed_layouts_hold_every_row_once_and_mirror(rows, span):
    layout = fixed_layout(rows, len(rows) * span)
    check_layout(layout)
    shares = [divmod(sum(row), span) for row in rows]
    assert layout.tokens.tolist() == [share + (rank < extra) for share, extra in shares for rank in range(span)]
    # Row after row, documents lie in their order.
    assert rows_of(layout.segments) == sorted(rows_of(layout.segments))
    check_layout(mirrored(layout))
    assert mirrored(layout).tokens.tolist() == layout.tokens.tolist()[::-1]
    assert segments(mirrored(mirrored(layout))) == segments(layout)


def test_joint_layouts_written_out():
    # Each rank ends up with half of the rows; the long document is cut once, at a block's boundary.
    layout = joint_layout([4096, 2048, 1024, 1024], 2, 4096)
    cuts = [row[1:3] for row in segments(layout) if row[0] == 0]
    assert len(cuts) == 2
    assert all(start % 128 == 0 for start, _ in cuts)
    assert sorted(row[1:3] for row in segments(joint_layout([5] * 6, 3, 10))) == [(0, 5)] * 6  # nothing to cut
    # No document is cut between nodes that fits into one: each long one is more than a rank takes, but not a node.
    layout = joint_layout([96, 96, 32, 32], 4, 64, node_sizes=(2, 2), balance_block_size=16)
    assert layout.tokens.tolist() == [64] * 4
    nodes = [{rank // 2 for document, *_, rank, _ in segments(layout) if document == which} for which in range(4)]
    assert nodes in ([{0}, {1}, {0}, {1}], [{0}, {1}, {1}, {0}])
    # Three ranks with as many rows and pairs each: the long documents go to the node of two.
    layout = joint_layout([64] * 3, 3, 64, node_sizes=(1, 2))
    assert segments(layout) == [(2, 0, 64, 0, 0), (0, 0, 64, 1, 0), (1, 0, 64, 2, 0)]
    # Found by a search: one rank held the last segment of a document and its head.
    layout = joint_layout([1, 1, 1, 3, 7, 41, 56, 56], 8, 21, balance_block_size=16)
    check_layout(layout)
    assert layout.tokens.tolist() == [21] * 6 + [20] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fixed_layout([]), "got 0 rows of documents"),
        (lambda: fixed_layout([[1], [1]], 3), "got 2 rows of documents for 3 ranks"),
        (lambda: fixed_layout([[1, 0]]), "document 1 has length 0"),
        (lambda: joint_layout([9], 2, 4), "1 documents hold 9 tokens, but 2 ranks of 4 take 8"),
        (lambda: joint_layout([1], 0, 4), "must be positive"),
        (lambda: joint_layout([1], 1, 4, balance_tolerance=-0.1), "balance_tolerance must be 0 or more"),
        (lambda: joint_layout([1], 1, 4, balance_block_size=0), "balance_block_size must be at least 1"),
        (lambda: joint_layout([1], 4, 4, node_sizes=(2, 1)), "2,1 adds up to 3 ranks, but 4 ranks train"),
    ],
)
def test_layouts_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@settings(max_examples=250)
@given(
    LENGTHS,
    st.integers(1, 9).map(lambda ranks: (1,) * ranks) | st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sampled_from([None, 1, 50, 256]),
    st.sampled_from([1, 16, 128]),
    st.sampled_from([0.0, 0.01, 0.3]),
)
def test_joint_layouts_hold_every_row_once_with_tokens_equal(lengths, sizes, window, block, tolerance):
    ranks = sum(sizes)
    settings = {"window": window, "balance_block_size": block, "balance_tolerance": tolerance}
    most = -(-sum(lengths) // ranks) or 1
    layout = joint_layout(lengths, ranks, most, node_sizes=sizes, **settings)
    check_layout(layout)
    share, more = divmod(sum(lengths), ranks)
    assert layout.tokens.tolist() == [share + (rank < more) for rank in range(ranks)]
    assert segments(joint_layout(lengths, ranks, most, node_sizes=sizes, **settings)) == segments(layout)
    if len(sizes) in (1, ranks):
        assert segments(layout) == segments(joint_layout(lengths, ranks, most, **settings))


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
    kinds = (AttentionKind(chunk=chunk), AttentionKind())
    settings = PlanSettings(2, 200, kinds, balance_block_size=8, ping_pong=True)
    assert settings.dominant_kind == AttentionKind()
    plan = plan_micro_batch([150, 100, 90, 7, 1], settings)
    alone = PlanSettings(2, 300, kinds[:1], balance_block_size=8)
    assert plan_micro_batch([400, 5, 80, 15], alone).summary.max_over_mean < 1.06
    for nano in plan.nano_batches:
        for kind in kinds:
            check_plan(nano.plans[kind])
            assert np.array_equal(nano.plans[kind].layout.tokens, nano.layout.tokens)
        assert nano.plans[kinds[0]].layout.lengths.max() == min(chunk, nano.layout.lengths.max())
        assert nano.plans[kinds[1]].layout is nano.layout

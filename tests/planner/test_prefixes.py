"""Prefix sharing: paths of sequences in prefix trees, each laid out as one document."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_distca.plan import Branches, Layout
from hf_distca.plan.intervals import ROWS
from hf_distca.plan.paths import along_paths
from hf_distca.planner import prefixes
from hf_distca.planner.layout import AttentionKind, fixed_layout, layout_of_kind
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.prefix_trees import PrefixTrees
from hf_distca.planner.prefixes import SequencePaths, hashes_of, share_prefixes
from hf_distca.planner.sequences import even_micro_batches, plan_sequences
from hf_distca.planner.settings import PlanSettings
from tests.planner.carried_out import check, drawn_branches, keys_of
from tests.planner.plan_checks import check_layout, check_plan, rows_of
from tests.planner.test_choose import FREE, costs

MANY = 1 << 30


@pytest.fixture
def blocks_of_two(monkeypatch):
    monkeypatch.setattr(prefixes, "BLOCK", 2)


def shared(sequences, most_rows=MANY):
    tokens = [np.array(sequence)[:, None] for sequence in sequences]
    return share_prefixes(list(map(len, sequences)), list(map(hashes_of, tokens)), most_rows)


def described(paths):
    """[(parent, first row, one past the last row, owner)] of documents, and where sequences end."""
    columns = (
        paths.trees.branches.parents,
        paths.trees.branches.starts,
        paths.trees.lengths,
        paths.owners,
    )
    return [tuple(map(int, row)) for row in zip(*columns, strict=True)], paths.ends.tolist()


@pytest.mark.usefixtures("blocks_of_two")
class TestSequencePaths:
    def test_sequences_without_a_common_block_are_trees_of_their_own(self):
        assert described(shared([[1, 2, 3], [1, 3, 3]])) == (
            [(-1, 0, 3, 0), (-1, 0, 3, 1)],
            [0, 1],
        )

    def test_a_branch_begins_at_a_block(self):
        # The fifth token is equal too, but it lies in a block that differs.
        paths = shared([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7, 8]])
        assert described(paths) == ([(-1, 0, 4, 0), (0, 4, 6, 0), (0, 4, 7, 1)], [1, 2])

    def test_equal_sequences_are_one(self):
        assert described(shared([[1, 2, 3]] * 3)) == ([(-1, 0, 3, 0)], [0, 0, 0])

    def test_a_sequence_that_another_one_continues_ends_inside_it(self):
        assert described(shared([[1, 2], [1, 2, 3, 4]])) == ([(-1, 0, 4, 1)], [0, 0])

    def test_trees_of_several_levels(self):
        paths = shared([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7]])
        documents = [(-1, 0, 2, 0), (0, 2, 4, 0), (1, 4, 5, 0), (1, 4, 5, 1), (0, 2, 3, 2)]
        assert described(paths) == (documents, [2, 3, 4])

    def test_equal_blocks_after_different_ones_are_not_shared(self):
        assert len(shared([[1, 2, 5, 6], [3, 4, 5, 6]]).trees.lengths) == 2

    def test_a_root_that_saves_little_is_computed_for_each_branch(self):
        # The root saves its 2 rows once, of 41 rows and of 40.
        long = list(range(10, 48))
        assert described(shared([[1, 2, *long], [1, 2, 3], [1, 2]])) == (
            [(-1, 0, 40, 0), (-1, 0, 3, 1)],
            [0, 1, 0],
        )
        assert described(shared([[1, 2, *long[1:]], [1, 2, 3]])) == (
            [(-1, 0, 2, 0), (0, 2, 39, 0), (0, 2, 3, 1)],
            [1, 2],
        )

    def test_a_tree_that_does_not_fit_is_divided_at_its_root(self):
        sequences = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7]]
        paths = shared(sequences, most_rows=6)
        documents = [(-1, 0, 4, 0), (0, 4, 5, 0), (0, 4, 5, 1), (-1, 0, 3, 2)]
        assert described(paths) == (documents, [1, 2, 3])

    def test_a_sequence_that_ended_in_a_root_ends_in_the_branch_that_is_left_of_it(self):
        # Two roots of the second sequence are divided: first [1, 2], then [1, 2, 3, 4].
        sequences = [[9, 9], [1, 2], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [1, 2, 9]]
        documents = [(-1, 0, 2, 0), (-1, 0, 6, 2), (-1, 0, 6, 3), (-1, 0, 3, 4)]
        assert described(shared(sequences, most_rows=5)) == (documents, [0, 1, 1, 2, 3])

    @given(
        st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8),
        st.integers(1, 40),
    )
    def test_every_sequence_is_its_path(self, sequences, most_rows):
        paths = shared(sequences, most_rows)
        ends = np.zeros(len(sequences), ROWS)
        ends["document"], ends["stop"] = paths.ends, list(map(len, sequences))
        parts, sequence_of = along_paths(ends, paths.trees.branches)
        read = [[] for _ in sequences]
        for (document, start, stop), sequence in zip(
            parts.tolist(), sequence_of.tolist(), strict=True
        ):
            assert len(read[sequence]) == start
            read[sequence] += sequences[paths.owners[document]][start:stop]
        assert read == sequences
        assert all(rows <= max(most_rows, 9) for rows in paths.trees.tree_lengths.tolist())
        assert paths.trees.rows <= sum(map(len, sequences))


@pytest.mark.parametrize(("token", "first_changed_block"), [(0, 0), (127, 0), (128, 1), (299, 2)])
def test_hashes_depend_on_every_column_and_on_all_tokens_before(token, first_changed_block):
    tokens = np.arange(600).reshape(300, 2)
    changed_tokens = tokens.copy()
    changed_tokens[token, 1] += 1
    hashes = hashes_of(tokens)
    changed_hashes = hashes_of(changed_tokens)
    assert hashes[:first_changed_block] == changed_hashes[:first_changed_block]
    for block in range(first_changed_block, 3):
        assert hashes[block] != changed_hashes[block]


def test_blocks_have_hashes_of_16_bytes_and_the_last_one_is_of_what_is_left():
    tokens = np.arange(600).reshape(300, 2)
    hashes = hashes_of(tokens)
    assert [len(block) for block in hashes] == [16, 16, 16]
    assert hashes_of(tokens[:200])[0] == hashes[0]
    assert hashes_of(tokens[:200])[1] != hashes[1]


def test_branches_are_numbered_depth_first_in_the_order_of_the_sequences():
    branches = Branches(np.array([-1, 0, 0, 1, -1]), np.array([0, 4, 4, 6, 0]))
    trees = PrefixTrees.of(np.array([4, 6, 7, 9, 5]), branches)
    assert trees.order.tolist() == [0, 1, 3, 2, 4]
    assert trees.placed["start"].tolist() == [0, 4, 6, 9, 0]
    assert trees.tree_lengths.tolist() == [12, 5]


@pytest.mark.parametrize(
    ("lengths", "layout", "micro_batches"),
    [
        ([4, 4], "auto", [[0, 1]]),  # as many rows as two ranks of four hold
        ([4, 4, 1], "auto", [[0, 2], [1]]),
        ([3, 3, 2], "whole", [[0, 1], [2]]),
    ],
)
def test_trees_come_in_as_few_micro_batches_as_hold_them(lengths, layout, micro_batches):
    trees = SequencePaths.unshared(np.array(lengths)).trees
    settings = PlanSettings(2, 4, document_layout=layout)
    assert [m.tolist() for m in even_micro_batches(trees, settings)] == micro_batches


@pytest.mark.parametrize(("layout", "fillers"), [("auto", 0), ("whole", 2)])
def test_ranks_without_a_row_get_a_filler(layout, fillers):
    # Two trees: whole ones lie on two of four ranks.
    lengths = np.array([8, 3])
    settings = PlanSettings(4, 8, document_layout=layout)
    (plan,) = plan_sequences(SequencePaths.unshared(lengths), lengths, settings).plans
    assert plan.fillers == fillers
    assert (plan.tokens > 0).all()


@st.composite
def drawn_trees(draw):
    own_lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    branches = draw(drawn_branches(own_lengths))
    return PrefixTrees.of(np.array(own_lengths) + branches.starts, branches)


@given(drawn_trees(), st.integers(1, 4), st.data())
def test_layouts_of_trees_have_every_row_of_their_branches_where_the_tree_had_it(
    trees, ranks, data
):
    order = np.array(data.draw(st.permutations(range(len(trees.tree_lengths)))))
    of_trees = fixed_layout([trees.tree_lengths[order].tolist()], ranks)
    documents, layout = trees.layout_of_branches(order, of_trees)
    check_layout(layout)
    assert sorted(documents.tolist()) == list(range(len(trees.lengths)))
    assert layout.tokens.tolist() == of_trees.tokens.tolist()
    # Depth first: a branch's rows lie before those of the branches that continue it.
    place = {row: number for number, row in enumerate(rows_of(layout.segments))}
    for document in range(len(documents)):
        parent = int(layout.branches.parents[document]) if layout.branches else -1
        if parent >= 0:
            first = int(layout.branches.starts[document])
            assert place[document, first] > place[parent, int(layout.own_starts[parent])]


@given(drawn_trees(), st.integers(1, 3), st.integers(1, 7))
def test_rows_of_a_chunk_see_the_rows_of_their_path_in_it(trees, ranks, chunk):
    numbers = np.arange(len(trees.tree_lengths))
    of_trees = fixed_layout([trees.tree_lengths.tolist()], ranks)
    _, layout = trees.layout_of_branches(numbers, of_trees)
    chunked = layout_of_kind(layout, AttentionKind(chunk=chunk))
    check_layout(chunked)
    whole = _Windowless(layout)
    for row, in_chunk in zip(rows_of(layout.segments), rows_of(chunked.segments), strict=True):
        seen = [key for key in keys_of(whole, *row) if key[1] // chunk == row[1] // chunk]
        assert len(keys_of(_Windowless(chunked), *in_chunk)) == len(seen)
        assert in_chunk[1] == row[1] % chunk


class _Windowless:
    """A plan with full attention, as `keys_of` reads it."""

    window = None

    def __init__(self, layout: Layout) -> None:
        self.layout = layout


def test_rows_before_a_document_without_parent_are_an_error():
    rows = np.array([(0, 1, 5)], ROWS)
    with pytest.raises(ValueError, match="a document without a parent has no rows before its own"):
        along_paths(rows, Branches(np.array([-1]), np.array([3])))


def test_rows_of_paths_lie_in_the_documents_that_hold_them():
    branches = Branches(np.array([-1, 0, 1]), np.array([0, 4, 6]))
    rows = np.array([(2, 1, 8), (0, 2, 3), (2, 6, 7), (1, 3, 5)], ROWS)
    parts, entries = along_paths(rows, branches)
    assert entries.tolist() == [0, 0, 0, 1, 2, 3, 3]
    assert parts.tolist() == [
        (0, 1, 4),
        (1, 4, 6),
        (2, 6, 8),
        (0, 2, 3),
        (2, 6, 7),
        (0, 3, 4),
        (1, 4, 5),
    ]
    # Windows in stages count document d of D in stage s as s · D + d.
    rows["document"] += 2 * 3
    assert along_paths(rows, branches)[0]["document"].tolist() == [6, 7, 8, 6, 8, 6, 7]


@settings(max_examples=60)
@given(
    drawn_trees(),
    st.integers(1, 4),
    st.sampled_from(["auto", "fixed", "whole"]),
    st.sampled_from([{}, {"window": 3}, {"chunk": 5}]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 8]),
    st.booleans(),
)
def test_plans_of_trees_let_every_row_see_its_path(
    trees, ranks, layout, reach, ping_pong, chooses, buffer_bytes, has_nodes
):
    lengths, branches = trees.lengths, trees.branches
    rows = int(trees.tree_lengths.sum())
    tokens_per_rank = rows if layout == "whole" else max(-(-rows // ranks), 1)
    assume(rows >= ranks)
    if layout == "whole":
        assume(len(trees.tree_lengths) >= ranks)
    kind = AttentionKind(**reach, q_heads=1, kv_heads=1, dim_qk=1, dim_v=1)
    free = costs(FREE, FREE)
    of_ranks = replace(free, kinds=(replace(free.kinds[0], kind=kind),))
    plan_settings = PlanSettings(
        ranks,
        tokens_per_rank,
        (kind,),
        document_layout=layout,
        ping_pong=ping_pong,
        balance_block_size=1,
        exchange_buffer_bytes=buffer_bytes,
        ranks_per_node=(1, ranks - 1) if has_nodes and ranks > 1 else 1,
        costs=of_ranks if chooses else None,
    )
    plan = plan_micro_batch(lengths.tolist(), plan_settings, branches)
    documents = np.concatenate([nano.documents for nano in plan.nano_batches])
    assert sorted(documents.tolist()) == list(range(len(lengths)))
    for nano in plan.nano_batches:
        assert nano.layout.lengths.tolist() == lengths[nano.documents].tolist()
        check_plan(nano.plans[kind])
        check(nano.plans[kind])

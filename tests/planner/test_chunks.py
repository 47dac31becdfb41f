import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.plan import AttentionKind
from hf_distca.planner.layout import fixed_layout, layout_of_kind
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from tests.planner.plan_checks import check_layout, check_plan


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 70))
def test_chunks_are_documents_whose_rows_stay_where_they_are(lengths, ranks, chunk):
    layout = fixed_layout([lengths], ranks)
    chunked = layout_of_kind(layout, AttentionKind(chunk=chunk))
    check_layout(chunked)
    numbers = {}  # of each chunk, in the order of its document and of its rows
    for document, length in enumerate(lengths):
        for row in range(length):
            numbers.setdefault((document, row // chunk), len(numbers))
    assert chunked.lengths.sum() == sum(lengths)
    assert len(chunked.lengths) == len(numbers)
    assert rows_of(chunked) == {
        (rank, offset): (numbers[document, row // chunk], row % chunk)
        for (rank, offset), (document, row) in rows_of(layout).items()
    }


def rows_of(layout):
    """The document and the row in it that lie at each place of each rank."""
    return {
        (rank, offset + row - start): (document, row)
        for document, start, stop, rank, offset in layout.segments.tolist()
        for row in range(start, stop)
    }


@pytest.mark.parametrize("chunk", [16, 96])
def test_chunks_are_planned_beside_whole_documents(chunk):
    kinds = (AttentionKind(chunk=chunk), AttentionKind())
    settings = PlanSettings(2, 200, kinds, balance_block_size=8, ping_pong=True)
    assert settings.dominant_kind == AttentionKind()
    plan = plan_micro_batch([150, 100, 90, 7, 1], settings)
    for nano in plan.nano_batches:
        for kind in kinds:
            check_plan(nano.plans[kind])
            assert np.array_equal(nano.plans[kind].layout.tokens, nano.layout.tokens)
        assert nano.plans[kinds[0]].layout.lengths.max() == min(chunk, nano.layout.lengths.max())
        assert nano.plans[kinds[1]].layout is nano.layout


def test_layers_of_chunks_alone_are_balanced():
    settings = PlanSettings(2, 300, (AttentionKind(chunk=64),), balance_block_size=8)
    assert plan_micro_batch([400, 5, 80, 15], settings).summary.max_over_mean < 1.06

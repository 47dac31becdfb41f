"""Documents that are too long, and the micro-batches that all of them are drawn into."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.batches.limits import NO_LIMITS, Limits
from hf_distca.checks.capacity_rules import Capacity
from hf_distca.collator.micro_batch_choice import draws_for_whole_ranks
from hf_distca.collator.sampler import GlobalBatchSampler, fit_documents
from hf_distca.collator.summary import documents_summary
from tests.planner.test_choose import FREE, SLOW
from tests.planner.test_whole_ranks import settings as slow_or_free
from tests.refused import refused


def fit(policy, limit=4):
    return fit_documents(np.array([3, 9, 4, 5]), limit, policy, "ranks · tokens_per_rank").tolist()


def test_policies_for_long_documents():
    whole = [(0, 0, 3, 3), (1, 0, 9, 9), (2, 0, 4, 4), (3, 0, 5, 5)]
    assert [fit(policy, limit=9) for policy in ("error", "truncate", "split")] == [whole] * 3
    with refused(
        Capacity.LONG,
        count=2,
        documents=4,
        limit_name="ranks · tokens_per_rank",
        limit=4,
        longest=1,
        length=9,
    ):
        fit("error")
    pieces = [(1, 0, 4, 9), (1, 4, 8, 9), (1, 8, 9, 9)]
    assert fit("split") == [(0, 0, 3, 3), *pieces, (2, 0, 4, 4), (3, 0, 4, 5), (3, 4, 5, 5)]
    assert fit("truncate") == [(0, 0, 3, 3), (1, 0, 4, 4), (2, 0, 4, 4), (3, 0, 4, 4)]
    spans = fit_documents(np.array([3, 9]), 9, "error", "limit")
    with pytest.raises(ValueError, match="there are 0 documents"):
        GlobalBatchSampler(spans[:0], 9)
    with pytest.raises(
        ValueError, match=r"2 documents of at most 9 tokens, but .* holds at most 8 tokens"
    ):
        GlobalBatchSampler(spans, 8)


def test_a_summary_names_documents_tokens_lengths_and_what_is_cut_or_dropped():
    def summary(lengths, limit, policy, limits=NO_LIMITS):
        lengths = np.array(lengths)
        return documents_summary(
            "data", lengths, fit_documents(lengths, limit, policy, "limit", limits=limits)
        )

    counted = "data: 4 documents, 2,021 tokens; median length 8, longest 2,003"
    lengths = [3, 2003, 4, 11]
    assert summary(lengths, 2003, "split") == f"{counted}; no document is cut"
    split = "long_documents='split' cuts {} into {} spans, which do not attend to each other"
    assert (
        summary(lengths, 1000, "split")
        == f"{counted}; {split.format('1 document of more than 1,000 tokens', 3)}"
    )
    assert (
        summary(lengths, 10, "split")
        == f"{counted}; {split.format('2 documents of more than 10 tokens', 203)}"
    )
    dropped = (
        "long_documents='truncate' drops 1,994 tokens (98.7%) of 2 documents of more than 10 tokens"
    )
    assert summary(lengths, 10, "truncate") == f"{counted}; {dropped}"
    assert (
        summary([1], 10, "error")
        == "data: 1 document, 1 token; median length 1, longest 1; no document is cut"
    )
    # The model's positions may be the limit.
    positions = split.format("1 document of more than 4 tokens", 2)
    assert summary([5], 9, "split", Limits(positions=4)).endswith(f"; {positions}")


def sampler_of(lengths, capacity, **options):
    return GlobalBatchSampler(
        fit_documents(np.array(lengths), capacity, "split", "capacity"), capacity, **options
    )


def drawn(sampler, epoch=0):
    sampler.set_epoch(epoch)
    return [batch.spans["document"].tolist() for (batch,) in sampler]


def test_epochs_and_seeds_differ_and_repeat_unless_documents_come_in_order():
    in_order = sampler_of([3, 4, 2, 1, 5], 6, shuffle=False)
    assert drawn(in_order) == drawn(in_order, 1) == [[0, 2, 3], [1], [4]]
    lengths = np.random.default_rng(0).integers(1, 100, 200)
    sampler = sampler_of(lengths, 500, seed=7)
    first, second = (drawn(sampler, epoch) for epoch in (0, 1))
    assert (
        len(set(map(frozenset, first)) & set(map(frozenset, second))) <= 1
    )  # not only in another order
    assert drawn(sampler_of(lengths, 500, seed=8)) != first
    assert drawn(sampler) == first == drawn(sampler_of(lengths, 500, seed=7))
    # Runs with neighbouring seeds do not repeat each other's epochs.
    others = [
        drawn(sampler_of(lengths, 500, seed=seed), epoch)
        for seed, epoch in ((6, 0), (8, 0), (6, 2))
    ]
    assert second not in others


def test_the_longest_document_comes_anywhere_in_an_epoch():
    sampler = sampler_of([50, *[10] * 45], 50)
    places = set()
    for epoch in range(100):
        batches = drawn(sampler, epoch)
        places |= {place for place, batch in enumerate(batches) if 0 in batch}
    assert places == set(range(len(sampler)))


def test_micro_batches_are_about_equally_full():
    lengths = np.random.default_rng(0).lognormal(5, 1.3, 3000).astype(int).clip(1, 8192)
    tokens = np.array([lengths[documents].sum() for documents in drawn(sampler_of(lengths, 16384))])
    assert tokens.max() / tokens.mean() < 1.01
    assert len(tokens) == -(-lengths.sum() // 16384)


@pytest.mark.parametrize("bins", [1, 2])
def test_documents_that_fit_in_one_way_only(bins):
    """Filling evenly puts each 5 into a bin of its own; only 5 + 5 and 4 + 3 + 3 hold them all, in
    two bins.
    """
    sampler = sampler_of([5, 5, 4, 3, 3], 10, bins=bins)
    assert len(sampler) == 2 // bins
    epochs = [drawn(sampler, epoch) for epoch in range(8)]
    for batches in epochs:
        parts = batches if bins == 1 else [batches[0][:2], batches[0][2:]]
        assert sorted(sorted(part) for part in parts) == [[0, 1], [2, 3, 4]]
    assert len({str(batches) for batches in epochs}) > 2


@given(
    st.lists(st.integers(1, 120), min_size=1, max_size=80),
    st.integers(50, 200),
    st.integers(0, 5),
    st.booleans(),
)
def test_each_row_once_per_epoch_never_over_capacity(lengths, capacity, seed, shuffle):
    sampler, on_another_rank = (
        sampler_of(lengths, capacity, seed=seed, shuffle=shuffle) for _ in range(2)
    )
    spans = sampler.spans.tolist()
    rows = [(document, row) for document, start, stop, _ in spans for row in range(start, stop)]
    assert rows == [
        (document, row) for document, length in enumerate(lengths) for row in range(length)
    ]
    for epoch in range(4):
        assert drawn(sampler, epoch) == drawn(on_another_rank, epoch)
        batches = [batch.spans.tolist() for (batch,) in sampler]
        assert len(batches) == len(sampler)
        assert sorted(span for batch in batches for span in batch) == spans
        for batch in batches:
            tokens = sum(stop - start for _, start, stop, _ in batch)
            assert 0 < tokens <= capacity


def test_micro_batches_of_a_data_set_are_drawn_for_whole_ranks_where_that_pays():
    lengths = np.array(
        [280] * 45
    )  # 9 of them are a full micro-batch of 4 ranks of 640, and 2 fit on a rank
    assert draws_for_whole_ranks(lengths, slow_or_free(SLOW), seed=1)
    assert not draws_for_whole_ranks(lengths, slow_or_free(FREE), seed=1)
    assert not draws_for_whole_ranks(
        np.append(lengths, 641), slow_or_free(SLOW), seed=1
    )  # a rank cannot hold it
    assert not draws_for_whole_ranks(lengths[:0], slow_or_free(SLOW), seed=1)
    # A large data set.
    assert draws_for_whole_ranks(np.array([280] * 40_000), slow_or_free(SLOW), seed=1)
    # A sorted one: it would pay for the documents of the first 32 micro-batches alone.
    assert draws_for_whole_ranks(np.array([280] * 300), slow_or_free(SLOW), seed=1)
    assert not draws_for_whole_ranks(
        np.array([280] * 300 + [320] * 2000), slow_or_free(SLOW), seed=1
    )

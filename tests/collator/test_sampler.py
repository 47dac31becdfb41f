import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.collator.lengths import fit_documents
from hf_distca.collator.sampler import GlobalBatchSampler


def sampler_of(lengths, capacity, **options):
    return GlobalBatchSampler(fit_documents(np.array(lengths), capacity, "split", "capacity"), capacity, **options)


def documents(sampler):
    return [batch.excerpts["document"].tolist() for (batch,) in sampler]


def test_in_order():
    sampler = sampler_of([3, 4, 2, 1, 5], 6, shuffle=False)
    assert len(sampler) == 3
    assert documents(sampler) == [[0, 2, 3], [1], [4]]
    sampler.set_epoch(1)
    assert documents(sampler) == [[0, 2, 3], [1], [4]]
    assert not hasattr(sampler, "batch_size")


def test_epochs_and_seeds_differ_and_repeat():
    lengths = np.random.default_rng(0).integers(1, 100, 200)
    sampler = sampler_of(lengths, 500, seed=7)
    first = documents(sampler)
    assert documents(sampler) == first
    sampler.set_epoch(1)
    second = documents(sampler)
    assert len(set(map(frozenset, first)) & set(map(frozenset, second))) <= 1  # not only in another order
    assert documents(sampler_of(lengths, 500, seed=8)) != first
    sampler.set_epoch(0)
    assert documents(sampler) == first == documents(sampler_of(lengths, 500, seed=7))


def test_the_longest_document_comes_anywhere_in_an_epoch():
    sampler = sampler_of([50, *[10] * 45], 50)
    places = set()
    for epoch in range(100):
        sampler.set_epoch(epoch)
        places.add(next(place for place, batch in enumerate(documents(sampler)) if 0 in batch))
    assert places == set(range(len(sampler)))


def test_micro_batches_are_about_equally_full():
    lengths = np.random.default_rng(0).lognormal(5, 1.3, 3000).astype(int).clip(1, 8192)
    sampler = sampler_of(lengths, 16384)
    tokens = np.array([batch.lengths.sum() for (batch,) in sampler])
    assert tokens.max() / tokens.mean() < 1.01
    assert len(sampler) == -(-lengths.sum() // 16384)


def test_documents_that_fit_in_one_way_only():
    """Filling evenly puts each 5 into a micro-batch of its own; only 5 + 5 and 4 + 3 + 3 hold them all."""
    sampler = sampler_of([5, 5, 4, 3, 3], 10)
    assert len(sampler) == 2
    orders = set()
    for epoch in range(8):
        sampler.set_epoch(epoch)
        batches = documents(sampler)
        assert sorted(sorted(batch) for batch in batches) == [[0, 1], [2, 3, 4]]
        orders.add(str(batches))
    assert len(orders) > 2


def test_two_bins_of_a_micro_batch_that_fit_in_one_way_only():
    """As above, each bin for a rank: both are in one micro-batch, one after the other."""
    sampler = sampler_of([5, 5, 4, 3, 3], 10, bins=2)
    assert len(sampler) == 1
    for epoch in range(8):
        sampler.set_epoch(epoch)
        (batch,) = documents(sampler)
        assert (sorted(batch[:2]), sorted(batch[2:])) == ([0, 1], [2, 3, 4])


@given(
    st.lists(st.integers(1, 120), min_size=1, max_size=80),
    st.integers(50, 200),
    st.integers(0, 5),
    st.booleans(),
)
def test_each_document_once_per_epoch_never_over_capacity(lengths, capacity, seed, shuffle):
    sampler = sampler_of(lengths, capacity, seed=seed, shuffle=shuffle)
    on_another_rank = sampler_of(lengths, capacity, seed=seed, shuffle=shuffle)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        on_another_rank.set_epoch(epoch)
        batches = [batch for (batch,) in sampler]
        assert len(batches) == len(sampler)
        assert sorted(excerpt for batch in batches for excerpt in batch.excerpts.tolist()) == sampler.excerpts.tolist()
        assert all(0 < batch.lengths.sum() <= capacity for batch in batches)
        assert [b.excerpts.tolist() for b in batches] == [b.excerpts.tolist() for (b,) in on_another_rank]


def test_no_documents_or_too_long_ones():
    excerpts = fit_documents(np.array([3, 9]), 9, "error", "limit")
    with pytest.raises(ValueError, match="there are 0 documents"):
        GlobalBatchSampler(excerpts[:0], 9)
    with pytest.raises(ValueError, match=r"2 documents of at most 9 tokens, but .* holds at most 8 tokens"):
        GlobalBatchSampler(excerpts, 8)

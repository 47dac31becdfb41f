import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.collator.lengths import fit_documents
from hf_distca.collator.sampler import GlobalBatchSampler


def sampler_of(lengths, capacity, **options):
    return GlobalBatchSampler(fit_documents(np.array(lengths), capacity, "split", "capacity"), capacity, **options)


def documents(sampler, epoch=0):
    sampler.set_epoch(epoch)
    return [batch.excerpts["document"].tolist() for (batch,) in sampler]


def test_in_order():
    sampler = sampler_of([3, 4, 2, 1, 5], 6, shuffle=False)
    assert len(sampler) == 3
    assert documents(sampler) == documents(sampler, 1) == [[0, 2, 3], [1], [4]]
    assert not hasattr(sampler, "batch_size")


def test_epochs_and_seeds_differ_and_repeat():
    lengths = np.random.default_rng(0).integers(1, 100, 200)
    sampler = sampler_of(lengths, 500, seed=7)
    first, second = (documents(sampler, epoch) for epoch in (0, 1))
    assert len(set(map(frozenset, first)) & set(map(frozenset, second))) <= 1  # not only in another order
    assert documents(sampler_of(lengths, 500, seed=8)) != first
    assert documents(sampler) == first == documents(sampler_of(lengths, 500, seed=7))


def test_the_longest_document_comes_anywhere_in_an_epoch():
    sampler = sampler_of([50, *[10] * 45], 50)
    epochs = [documents(sampler, epoch) for epoch in range(100)]
    places = {next(place for place, batch in enumerate(batches) if 0 in batch) for batches in epochs}
    assert places == set(range(len(sampler)))


def test_micro_batches_are_about_equally_full():
    lengths = np.random.default_rng(0).lognormal(5, 1.3, 3000).astype(int).clip(1, 8192)
    sampler = sampler_of(lengths, 16384)
    tokens = np.array([batch.lengths.sum() for (batch,) in sampler])
    assert tokens.max() / tokens.mean() < 1.01
    assert len(sampler) == -(-lengths.sum() // 16384)


@pytest.mark.parametrize("bins", [1, 2])
def test_documents_that_fit_in_one_way_only(bins):
    """Filling evenly puts each 5 into a bin of its own; only 5 + 5 and 4 + 3 + 3 hold them all, in two bins."""
    sampler = sampler_of([5, 5, 4, 3, 3], 10, bins=bins)
    assert len(sampler) == 2 // bins
    epochs = [documents(sampler, epoch) for epoch in range(8)]
    for batches in epochs:
        parts = batches if bins == 1 else [batches[0][:2], batches[0][2:]]
        assert sorted(sorted(part) for part in parts) == [[0, 1], [2, 3, 4]]
    assert len({str(batches) for batches in epochs}) > 2


@given(st.lists(st.integers(1, 120), min_size=1, max_size=80), st.integers(50, 200), st.integers(0, 5), st.booleans())
def test_each_document_once_per_epoch_never_over_capacity(lengths, capacity, seed, shuffle):
    sampler, on_another_rank = (sampler_of(lengths, capacity, seed=seed, shuffle=shuffle) for _ in range(2))
    for epoch in range(4):
        assert documents(sampler, epoch) == documents(on_another_rank, epoch)
        batches = [batch for (batch,) in sampler]
        assert len(batches) == len(sampler)
        assert sorted(excerpt for batch in batches for excerpt in batch.excerpts.tolist()) == sampler.excerpts.tolist()
        assert all(0 < batch.lengths.sum() <= capacity for batch in batches)


def test_no_documents_or_too_long_ones():
    excerpts = fit_documents(np.array([3, 9]), 9, "error", "limit")
    with pytest.raises(ValueError, match="there are 0 documents"):
        GlobalBatchSampler(excerpts[:0], 9)
    with pytest.raises(ValueError, match=r"2 documents of at most 9 tokens, but .* holds at most 8 tokens"):
        GlobalBatchSampler(excerpts, 8)

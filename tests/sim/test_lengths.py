"""Document lengths: distributions, and micro-batches that are drawn from them."""

import numpy as np
import pytest

from hf_distca.sim.lengths import corpora, lognormal, micro_batches, of_documents, of_histogram


@pytest.mark.parametrize(
    ("draw", "first", "batches"),
    [
        (lambda random, count: np.arange(1, count + 1), [], [[1, 2, 3, 4], [5], [6], [7]]),
        (of_documents(np.array([3])), [5], [[5, 3], [5, 3]]),
        (of_documents(np.array([30])), [], [[10]]),  # longer than a micro-batch
    ],
)
def test_micro_batches_take_documents_in_order_as_long_as_they_fit(draw, first, batches):
    drawn = micro_batches(draw, 10, seed=0, first=np.array(first, int))
    assert [next(drawn).tolist() for _ in batches] == batches


def test_a_document_beyond_a_micro_batch_may_keep_its_length():
    drawn = micro_batches(lambda random, count: np.resize([30, 3, 4], count), 10, seed=0, cut=False)
    assert [next(drawn).tolist() for _ in range(3)] == [[30], [3, 4], [30]]


@pytest.mark.parametrize(
    "draw", [lognormal(1000, 1.0), *corpora().values()], ids=["lognormal", *corpora()]
)
def test_the_same_seed_draws_the_same(draw):
    first = next(micro_batches(draw, 100_000, seed=3))
    second = next(micro_batches(draw, 100_000, seed=3))
    assert first.tolist() == second.tolist()
    assert 0 < first.sum() <= 100_000


def test_distributions():
    drawn = of_histogram(np.array([1, 10, 100]), np.array([3, 1]))(np.random.default_rng(0), 4000)
    assert 0.72 < (drawn < 10).mean() < 0.78
    assert (drawn.min(), drawn.max()) >= (1, 90)
    # Corpora have the mean and the percentiles that are published.
    prolong, agents = (
        corpora()[name](np.random.default_rng(0), 100_000) for name in ("prolong", "agents")
    )
    assert 0.97 < prolong.mean() / (237840913 / 77932) < 1.03
    assert np.allclose(np.quantile(agents, (0.5, 0.95, 0.99)), (23840, 69274, 89876), rtol=0.03)

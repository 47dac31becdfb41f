import numpy as np

from hf_distca.sim.lengths import corpora, lognormal, micro_batches, of_documents, of_histogram


def test_micro_batches_take_documents_in_order_as_long_as_they_fit():
    def draw(random, count):
        return np.arange(1, count + 1)

    batches = micro_batches(draw, 10, seed=0)
    assert [next(batches).tolist() for _ in range(4)] == [[1, 2, 3, 4], [5], [6], [7]]


def test_a_first_document_is_in_each():
    batches = micro_batches(of_documents(np.array([3])), 10, seed=0, first=np.array([5]))
    assert [next(batches).tolist() for _ in range(2)] == [[5, 3], [5, 3]]


def test_longer_than_a_micro_batch():
    assert next(micro_batches(of_documents(np.array([30])), 10, seed=0)).tolist() == [10]


def test_a_histogram_keeps_its_shares():
    draw = of_histogram(np.array([1, 10, 100]), np.array([3, 1]))
    drawn = draw(np.random.default_rng(0), 4000)
    assert 0.72 < (drawn < 10).mean() < 0.78
    assert (drawn.min(), drawn.max()) >= (1, 90)


def test_the_same_seed_draws_the_same():
    for source in (lognormal(1000, 1.0), *corpora().values()):
        first, second = (next(micro_batches(source, 100_000, seed=3)) for _ in range(2))
        assert first.tolist() == second.tolist()
        assert 0 < first.sum() <= 100_000


def test_corpora_have_the_tokens_that_are_published():
    drawn = corpora()["prolong"](np.random.default_rng(0), 100_000)
    assert 0.97 < drawn.mean() / (237840913 / 77932) < 1.03


def test_agent_traces_have_the_percentiles_that_are_published():
    drawn = corpora()["agents"](np.random.default_rng(0), 100_000)
    assert np.allclose(np.quantile(drawn, (0.5, 0.95, 0.99)), (23840, 69274, 89876), rtol=0.03)

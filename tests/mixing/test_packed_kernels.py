"""How often kernels run: once for all whole documents where they take packed ones, with the same results."""

from collections import Counter

import pytest

from tests.mixing.kernels import installed
from tests.mixing.steps import Step, assert_equal, reference, step
from tests.mixing.test_cut_documents import LENGTHS, PLANS

SHORT = [1, 12, 7, 30, 2]
MODELS = {"qwen3_next": "delta rule", "bamba": "scan"}


def _step(model_type: str, cut: bool, fused: bool = False) -> tuple[Step, list[tuple[str, int]]]:
    with installed(fused=fused) as calls:
        if cut:
            return step(model_type, LENGTHS, PLANS[2], document_layout="joint"), list(calls)
        return step(model_type, SHORT, ping_pong=False), list(calls)


@pytest.mark.parametrize("model_type", MODELS)
def test_whole_documents_take_one_call(rank_pools, model_type):
    ((got, calls),) = rank_pools[1].run(_step, model_type, False)
    # One layer of each kind; the convolution runs on all documents at once.
    assert calls == [("convolution", 1), (MODELS[model_type], 5)]
    assert_equal(got, reference(model_type, SHORT))


@pytest.mark.parametrize("model_type", MODELS)
def test_each_cut_segment_takes_a_call_of_its_own(rank_pools, model_type):
    first, second = rank_pools[2].run(_step, model_type, True)
    kernel = MODELS[model_type]
    # For each nano-batch a convolution; for each cut segment a call; the whole documents of each take one.
    assert Counter(first[1]) == {("convolution", 1): 2, (kernel, 1): 4 + 2}
    assert Counter(second[1]) == {("convolution", 1): 2, (kernel, 1): 4}
    for got, _ in (first, second):
        assert_equal(got, reference(model_type, LENGTHS))


def test_a_kernel_for_the_whole_module_gets_all_documents_unless_some_are_cut(rank_pools):
    ((_, calls),) = rank_pools[1].run(_step, "bamba", False, True)
    assert calls == [("whole module", 5)]
    for got, calls in rank_pools[2].run(_step, "bamba", True, True):
        assert "whole module" not in dict(calls)
        assert_equal(got, reference("bamba", LENGTHS))


def test_without_kernels_each_document_takes_a_call(rank_pools):
    (got,) = rank_pools[1].run(_without_kernels)
    assert_equal(got, reference("qwen3_next", SHORT))


def _without_kernels() -> Step:
    return step("qwen3_next", SHORT)

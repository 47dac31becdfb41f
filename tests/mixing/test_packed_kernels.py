"""How often kernels run: once for all whole documents where they take packed ones, with the same results."""

from collections import Counter

import pytest
import torch

from hf_distca import DistCAConfig
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.trainer.assembly import make_dispatcher
from tests.dispatch.test_equality import planned_step
from tests.mixing.kernels import installed
from tests.mixing.plans import cut_plan
from tests.mixing.test_cut_documents import LENGTHS, PLANS, make_model
from tests.models_and_batches import random_documents, reference_step, relative_error

SHORT = [1, 12, 7, 30, 2]
MODELS = {"qwen3_next": "delta rule", "bamba": "scan"}


def _step(model_type: str, cut: bool, fused: bool = False):
    with installed(fused=fused) as calls:
        model = make_model(model_type)
        config = DistCAConfig(tokens_per_rank=256, balance_block_size=8, document_layout="joint", ping_pong=cut)
        dispatcher = make_dispatcher(model, config, torch.device("cpu"))
        lengths = LENGTHS if cut else SHORT
        settings = dispatcher.settings
        plan = cut_plan(LENGTHS, PLANS[2], settings) if cut else plan_micro_batch(SHORT, settings)
        loss = planned_step(model, plan, dispatcher, random_documents(lengths))
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, list(calls)


def _assert_equal(step, model_type: str, lengths: list[int]) -> None:
    loss, grads = reference_step(make_model(model_type, "eager"), random_documents(lengths))
    assert step[0] == pytest.approx(loss, rel=1e-5)
    for name, grad in grads.items():
        assert relative_error(step[1][name], grad) < 2e-4, name


@pytest.mark.parametrize("model_type", MODELS)
def test_whole_documents_take_one_call(rank_pools, model_type):
    ((*step, calls),) = rank_pools[1].run(_step, model_type, False)
    # One layer of each kind; the convolution runs on all documents at once.
    assert calls == [("convolution", 1), (MODELS[model_type], 5)]
    _assert_equal(step, model_type, SHORT)


@pytest.mark.parametrize("model_type", MODELS)
def test_each_cut_segment_takes_a_call_of_its_own(rank_pools, model_type):
    first, second = rank_pools[2].run(_step, model_type, True)
    kernel = MODELS[model_type]
    # For each nano-batch a convolution; for each cut segment a call; the whole documents of each take one.
    assert Counter(first[2]) == {("convolution", 1): 2, (kernel, 1): 4 + 2}
    assert Counter(second[2]) == {("convolution", 1): 2, (kernel, 1): 4}
    for step in (first, second):
        _assert_equal(step[:2], model_type, LENGTHS)


def test_a_kernel_for_the_whole_module_gets_all_documents(rank_pools):
    ((*_, calls),) = rank_pools[1].run(_step, "bamba", False, True)
    assert calls == [("whole module", 5)]


def test_no_kernel_for_the_whole_module_where_documents_are_cut(rank_pools):
    for *step, calls in rank_pools[2].run(_step, "bamba", True, True):
        assert "whole module" not in dict(calls)
        _assert_equal(step, "bamba", LENGTHS)


def _without_kernels():
    model = make_model("qwen3_next")
    dispatcher = make_dispatcher(model, DistCAConfig(tokens_per_rank=256), torch.device("cpu"))
    loss = planned_step(model, plan_micro_batch(SHORT, dispatcher.settings), dispatcher, random_documents(SHORT))
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_without_kernels_each_document_takes_a_call(rank_pools):
    (step,) = rank_pools[1].run(_without_kernels)
    _assert_equal(step, "qwen3_next", SHORT)

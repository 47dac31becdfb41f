"""A planned step under autocast, with accumulation and on a rank without rows; and what it refuses."""

import copy
import re

import pytest
import torch
import torch.distributed as dist

from hf_distca.dispatch.attention import disaggregated_attention
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.kernels import AttentionParams
from hf_distca.patches.head import plan_head
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed
from hf_distca.planner.settings import PlanSettings
from tests.dispatch.test_equality import CHUNK_BYTES, assert_same_step, cut_rows, gradients_of, planned_step
from tests.models_and_batches import (
    SMALL_KIND,
    in_nodes,
    random_documents,
    reference_step,
    relative_error,
    small_kinds,
    small_model,
)

pytestmark = pytest.mark.usefixtures("backward_thread")

LENGTHS, FURTHER = [120, 7, 1, 33, 64], [90, 31, 2]


def dispatcher_of_all_ranks(**settings) -> Dispatcher:
    settings = {"tokens_per_rank": 4096, "balance_block_size": 8, "kinds": small_kinds(), **settings}
    return Dispatcher(PlanSettings(ranks=dist.get_world_size(), **settings), torch.device("cpu"))


def _step_in_bfloat16() -> tuple[float, dict]:
    dispatcher, model = dispatcher_of_all_ranks(), small_model()
    plan_head(model, CHUNK_BYTES)
    with torch.autocast("cpu", torch.bfloat16):
        plan = plan_micro_batch(LENGTHS, dispatcher.settings)
        return planned_step(model, plan, dispatcher, random_documents(LENGTHS)), gradients_of(model)


def test_autocast(rank_pools):
    exact_loss, exact = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    with torch.autocast("cpu", torch.bfloat16):
        stock_loss, stock = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    for got_loss, got in rank_pools[2].run(_step_in_bfloat16):
        assert abs(got_loss - exact_loss) < 2 * abs(stock_loss - exact_loss) + 1e-3
        for name in exact:
            assert relative_error(got[name], exact[name]) < 2 * relative_error(stock[name], exact[name]) + 1e-2, name


def _accumulated() -> tuple[float, dict]:
    """Two micro-batches whose plans are both alive; the second runs forward before the first runs backward."""
    dispatcher, model = dispatcher_of_all_ranks(), small_model()
    targets = sum(length - 1 for lengths in (LENGTHS, FURTHER) for length in lengths)
    losses = []
    for lengths in (LENGTHS, FURTHER):
        plan = plan_micro_batch(lengths, dispatcher.settings)
        batch = cut_rows(plan, dist.get_rank(), random_documents(lengths))
        bound = dispatcher.bind(plan)
        losses.append(model(**batch, labels=batch["shift_labels"], num_items_in_batch=targets, distca_plan=bound).loss)
    for loss in losses:
        loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    total = torch.stack(losses).sum().detach()
    dist.all_reduce(total)
    return total.item(), gradients_of(model)


def test_two_micro_batches_at_once(rank_pools):
    documents = [*random_documents(LENGTHS), *random_documents(FURTHER)]
    expected = reference_step(small_model(implementation="sdpa"), documents)
    for got in rank_pools[2].run(_accumulated):
        assert_same_step(got, expected)


def _attend_without_rows() -> list[list[int]]:
    """Attention alone, where a rank may hold no row at all."""
    dispatcher = dispatcher_of_all_ranks()
    plan = plan_placed([[40], []], dispatcher.settings)
    torch.manual_seed(0)
    inputs = [torch.randn(40, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    mine = [x if dist.get_rank() == 0 else x[:0].detach().requires_grad_() for x in inputs]
    output = disaggregated_attention(*mine, None, dispatcher.bind(plan), AttentionParams(scale=0.3))
    output.square().sum().backward()
    q, k, v = (x.detach().transpose(0, 1).requires_grad_() for x in inputs)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, scale=0.3, enable_gqa=True
    )
    expected.square().sum().backward()
    if dist.get_rank() == 0:
        torch.testing.assert_close(output, expected[0].transpose(0, 1))
        for got, other in zip(mine, (q, k, v), strict=True):
            torch.testing.assert_close(got.grad, other.grad.transpose(0, 1))
    moved = plan.nano_batches[0].plans[SMALL_KIND].tasks["worker"]
    return [list(output.shape), moved.tolist()]


def test_rank_without_rows_still_serves(rank_pools):
    (first_shape, workers), (second_shape, _) = rank_pools[2].run(_attend_without_rows)
    assert (first_shape, second_shape) == ([40, 4, 8], [0, 4, 8])
    assert set(workers) == {0, 1}


@pytest.fixture
def bound_step():
    model = small_model()
    dispatcher = Dispatcher(PlanSettings(ranks=1, tokens_per_rank=64, kinds=(SMALL_KIND,)), torch.device("cpu"))
    tokens = torch.arange(3, 15)[None]
    batch = {"input_ids": tokens, "position_ids": torch.arange(12)[None]}
    return model, batch, dispatcher.bind(dispatcher.plan_lengths([[12]])[0])


def test_plan_of_another_batch(bound_step):
    model, batch, plan = bound_step
    shorter = {name: value[:, :7] for name, value in batch.items()}
    with pytest.raises(ValueError, match="gives this rank 12 rows, but the model runs on 7"):
        model(**shorter, distca_plan=plan)


def test_plan_for_other_nodes():
    settings = PlanSettings(1, 8, small_kinds())
    plan = plan_micro_batch([8], settings)
    dispatcher = Dispatcher(settings, torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"on the nodes \(0,\), but the dispatcher's settings have the nodes None; use the same"
    ):
        dispatcher.bind(in_nodes(plan, (0,)))


@pytest.mark.parametrize(
    ("model_type", "config", "kind"),
    [
        ("mistral", {"sliding_window": 4}, "a window of 4 with 4 query and 2 key-value heads of 8 (values of 8)"),
        ("llama", {"head_dim": 16}, "full attention with 4 query and 2 key-value heads of 16 (values of 16)"),
        ("llama", {"num_key_value_heads": 1}, "full attention with 4 query and 1 key-value heads of 8 (values of 8)"),
    ],
    ids=["window", "head-dim", "heads"],
)
def test_kind_that_was_not_planned(bound_step, model_type, config, kind):
    _, batch, plan = bound_step
    planned = "full attention with 4 query and 2 key-value heads of 8 (values of 8)"
    message = (
        f"a layer has {kind}, but the plan was made for {planned}; list the kinds of all layers in PlanSettings.kinds"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        small_model(model_type, **config)(**batch, distca_plan=plan)


def test_model_is_left_as_it_was(bound_step):
    model, batch, plan = bound_step
    before = copy.deepcopy(model.state_dict())
    model(**batch, distca_plan=plan)
    assert plan.ran.attentions == model.config.num_hidden_layers
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

"""A planned step with gradient checkpointing, LoRA, autocast, sinks and accumulation; and what it refuses."""

import copy
import re

import peft
import pytest
import torch
import torch.distributed as dist

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.patches.head import plan_head
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from tests.dispatch.test_equality import CHUNK_BYTES, cut_rows, planned_step
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

LENGTHS = [120, 7, 1, 33, 64]


def dispatcher_of_all_ranks(**settings) -> Dispatcher:
    settings = {"tokens_per_rank": 4096, "balance_block_size": 8, "kinds": small_kinds(), **settings}
    return Dispatcher(PlanSettings(ranks=dist.get_world_size(), **settings), torch.device("cpu"))


def _step(checkpointing: bool | None, lora: bool, model_type: str, config: dict, windows: tuple) -> tuple[float, dict]:
    dispatcher = dispatcher_of_all_ranks(kinds=small_kinds(*windows))
    model = prepared_model(checkpointing, lora, model_type, "distca", config)
    plan = plan_micro_batch(LENGTHS, dispatcher.settings)
    loss = planned_step(model, plan, dispatcher, random_documents(LENGTHS))
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def prepared_model(checkpointing, lora, model_type, implementation, config):
    model = small_model(model_type, implementation, **config).train()
    if lora:
        torch.manual_seed(0)
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, settings)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        if checkpointing and lora:
            model.enable_input_require_grads()
    if implementation == "distca":
        plan_head(model, CHUNK_BYTES)
    return model


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_checkpointing_and_lora(rank_pools, checkpointing, lora):
    model = prepared_model(None, lora, "llama", "sdpa", {})
    loss, grads = reference_step(model, random_documents(LENGTHS))
    for got_loss, got in rank_pools[2].run(_step, checkpointing, lora, "llama", {}, (None,)):
        assert got_loss == pytest.approx(loss, rel=1e-6)
        assert got.keys() == grads.keys()
        assert max(relative_error(got[name], grads[name]) for name in grads) < 1e-5


@pytest.mark.parametrize("ranks", [1, 3])
def test_attention_sinks(rank_pools, ranks):
    config = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
    loss, grads = reference_step(small_model("gpt_oss", "eager", **config), random_documents(LENGTHS))
    for got_loss, got in rank_pools[ranks].run(_step, None, False, "gpt_oss", config, (24, None)):
        assert got_loss == pytest.approx(loss, rel=1e-6)
        assert "model.layers.0.self_attn.sinks" in grads
        assert max(relative_error(got[name], grads[name]) for name in grads) < 1e-5


def _step_in_bfloat16() -> tuple[float, dict]:
    with torch.autocast("cpu", torch.bfloat16):
        return _step(None, False, "llama", {}, (None,))


def test_autocast(rank_pools):
    exact_loss, exact = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    with torch.autocast("cpu", torch.bfloat16):
        stock_loss, stock = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    for got_loss, got in rank_pools[2].run(_step_in_bfloat16):
        assert abs(got_loss - exact_loss) < 2 * abs(stock_loss - exact_loss) + 1e-3
        for name in exact:
            assert relative_error(got[name], exact[name]) < 2 * relative_error(stock[name], exact[name]) + 1e-2, name


def _accumulated() -> tuple[list[float], dict]:
    """Two micro-batches whose plans are both alive; the second runs forward before the first runs backward."""
    dispatcher = dispatcher_of_all_ranks()
    model = small_model()
    groups = [LENGTHS, [90, 31, 2]]
    targets = sum(length - 1 for lengths in groups for length in lengths)
    losses = []
    for lengths in groups:
        plan = plan_micro_batch(lengths, dispatcher.settings)
        batch = cut_rows(plan, dist.get_rank(), random_documents(lengths))
        bound = dispatcher.bind(plan)
        losses.append(model(**batch, labels=batch["shift_labels"], num_items_in_batch=targets, distca_plan=bound).loss)
    for loss in losses:
        loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return [loss.item() for loss in losses], {name: p.grad.clone() for name, p in model.named_parameters()}


def test_two_micro_batches_at_once(rank_pools):
    documents = [*random_documents(LENGTHS), *random_documents([90, 31, 2])]
    loss, grads = reference_step(small_model(implementation="sdpa"), documents)
    results = rank_pools[2].run(_accumulated)
    assert sum(sum(losses) for losses, _ in results) == pytest.approx(loss, rel=1e-6)
    for _, got in results:
        assert max(relative_error(got[name], grads[name]) for name in grads) < 1e-5


def _attend_without_rows() -> list[list[int]]:
    """Attention alone, where a rank may hold no row at all."""
    from hf_distca.dispatch.attention import disaggregated_attention
    from hf_distca.kernels import AttentionParams
    from hf_distca.planner.build import plan_placed

    dispatcher = dispatcher_of_all_ranks()
    rows = [[40], []][: dist.get_world_size()]
    plan = plan_placed(rows, dispatcher.settings)
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

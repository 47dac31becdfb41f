"""The loss of a planned step over chunks of rows, beside the model's own loss of all logits."""

import inspect
import math
from dataclasses import replace
from types import MethodType

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import logging

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.patches.head import DeferredLogits, adapted_heads, plan_head
from hf_distca.patches.loss import ChunkedSum
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from tests.models_and_batches import cut_rows, gradients_of, random_documents, relative_error, small_kinds, small_model
from tests.whole_logits import WholeLogits

LENGTHS, ROWS, VOCABULARY = [40, 1, 23, 31], 40, 64
CHUNK_BYTES = 4 * VOCABULARY * ROWS
SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}
WINDOW = (24, None)
MODELS = {
    "llama": ("llama", {}, (None,)),
    "llama tied": ("llama", {"tie_word_embeddings": True}, (None,)),
    "qwen3": ("qwen3", {}, (None,)),
    "phi with a bias": ("phi", {}, (None,)),
    "gemma2": ("gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 8, "final_logit_softcapping": 0.05}, WINDOW),
    "granite": ("granite", {"logits_scaling": 0.3}, (None,)),
    "cohere": ("cohere", {"logit_scale": 5.0}, (None,)),
    "mixtral": ("mixtral", {"num_local_experts": 4, "output_router_logits": True}, (None,)),
    "gpt_oss": ("gpt_oss", SINKS, WINDOW),
}


def batch_of(model_windows: tuple) -> dict:
    """A planned micro-batch of one rank."""
    settings = PlanSettings(1, tokens_per_rank=4096, kinds=small_kinds(*model_windows), balance_block_size=8)
    dispatcher = Dispatcher(settings, torch.device("cpu"))
    plan = plan_micro_batch(LENGTHS, settings)
    batch = cut_rows(plan, 0, random_documents(LENGTHS))
    return {**batch, "labels": batch["shift_labels"], "distca_plan": dispatcher.bind(plan)}


def step(model: nn.Module, batch: dict, **kwargs) -> tuple[Tensor, dict[str, Tensor], list]:
    """Loss, gradients, and shapes of tensors of more rows × vocabulary than a chunk has."""
    model.zero_grad()
    with WholeLogits(VOCABULARY, ROWS) as watched:
        loss = model(**batch, **kwargs).loss
        (3 * loss).backward()
    return loss, gradients_of(model), watched.shapes


def assert_same(model: nn.Module, windows: tuple = (None,), within: float = 2e-6, **kwargs) -> None:
    """The loss in chunks gives what the model gives by itself, which takes logits in float32."""
    loss, grads, shapes = step(model, batch_of(windows), **kwargs)
    assert shapes
    plan_head(model, CHUNK_BYTES)
    got_loss, got, shapes = step(model, batch_of(windows), **kwargs)
    assert not shapes
    assert got_loss.dtype == loss.dtype
    torch.testing.assert_close(got_loss, loss, rtol=within, atol=0)
    assert got.keys() == grads.keys()
    for name in grads:
        assert got[name].dtype == grads[name].dtype
        assert relative_error(got[name], grads[name]) < within, name


@pytest.mark.parametrize("targets", [None, 70], ids=["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, targets):
    model_type, config, windows = MODELS[name]
    model = small_model(model_type, **config)
    if model_type == "phi":
        nn.init.normal_(model.lm_head.bias)
    is_mixture = model_type in ("mixtral", "gpt_oss")  # which torch computes in float32 at most
    within = 2e-5 if is_mixture else 2e-6
    assert_same(model if is_mixture else model.double(), windows, within, num_items_in_batch=targets)


TRAINED = {
    "all but the head": lambda name: "lm_head" not in name,
    "the head": lambda name: "lm_head" in name,
    "the bias of the head": lambda name: name == "lm_head.bias",
}
ADAPTERS = {
    "lora": {"target_modules": ["q_proj", "lm_head"]},
    "dora": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "below the head": {"target_modules": ["q_proj"]},
}


@pytest.mark.parametrize("part", [*TRAINED, *ADAPTERS])
def test_parts_that_are_trained(part):
    if part in TRAINED:
        model = small_model("phi").double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(TRAINED[part](name))
    else:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **ADAPTERS[part])
        model = peft.get_peft_model(small_model().double(), config)
    assert_same(model)
    assert len(adapted_heads(model)) == (part in ("lora", "dora", "saved"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi with a bias"])
def test_bfloat16(name, dtype):
    """Under autocast, and with weights in bfloat16: as close to float64 as the model's own loss."""
    model_type, config, windows = MODELS[name]
    exact_loss, exact, _ = step(small_model(model_type, **config).to(dtype).double(), batch_of(windows))
    model = small_model(model_type, **config).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        loss, grads, _ = step(model, batch_of(windows))
        plan_head(model, CHUNK_BYTES)
        got_loss, got, shapes = step(model, batch_of(windows))
    assert not shapes
    assert got_loss.dtype == loss.dtype == torch.float32
    assert abs(got_loss - exact_loss) < 1.1 * abs(loss - exact_loss) + 1e-5
    for name in grads:
        assert got[name].dtype == grads[name].dtype
        assert relative_error(got[name], exact[name]) < 2 * relative_error(grads[name], exact[name]) + 5e-3, name


def test_many_chunks_add_up_without_rounding_each_time():
    torch.manual_seed(0)
    hidden_TD, weight_VD = torch.rand(512, 4).bfloat16(), torch.randn(7, 4).bfloat16()
    chunked = ChunkedSum(torch.randint(7, (512,)), ignore_index=-100, steps=[Tensor.float], rows=1)
    one = replace(chunked, rows=512)
    weights_VD = [weight_VD.to(dtype).requires_grad_() for dtype in (torch.bfloat16, torch.float64)]
    losses = [
        x.of_linear(hidden_TD.to(weight_VD.dtype), weight_VD, None)
        for x, weight_VD in zip((chunked, replace(one, steps=[])), weights_VD, strict=True)
    ]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=2e-3)
    (grad_VD,), (exact_VD,) = (torch.autograd.grad(*pair) for pair in zip(losses, weights_VD, strict=True))
    assert relative_error(grad_VD, exact_VD) < 5e-3


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "any head"])
def test_targets_of_another_index_count_for_nothing(linear):
    weight_VD = torch.zeros(4, 1, requires_grad=True)
    hidden_TD = torch.ones(3, 1)
    chunked = ChunkedSum(torch.tensor([1, 2, 3]), ignore_index=2, steps=[], rows=1)
    if linear:
        loss = chunked.of_linear(hidden_TD, weight_VD, None)
    else:
        loss = chunked.of_head(lambda hidden_CD: hidden_CD @ weight_VD.T, hidden_TD)
    loss.backward()
    assert loss.item() == pytest.approx(2 * math.log(4))
    assert weight_VD.grad.flatten().tolist() == pytest.approx([0.5, -0.5, 0.5, -0.5])


def test_autocast_leaves_float64_as_it_is():
    """As it does for a linear layer: 257 is none of the numbers of bfloat16."""
    chunked = ChunkedSum(torch.tensor([1]), ignore_index=-100, steps=[], rows=1)
    for dtype, expected in ((torch.float64, 257.0), (torch.float32, 256.0)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = chunked.of_linear(torch.ones(1, 1, dtype=dtype), torch.tensor([[257.0], [0.0]], dtype=dtype), None)
        assert loss.item() == expected


@pytest.mark.parametrize("targets", [None, 70], ids=["mean", "sum"])
@pytest.mark.parametrize("rows", [slice(0, 45), slice(0, None)], ids=["a chunk", "all"])
def test_rows_without_targets(rows, targets):
    model = small_model().double()
    batch = batch_of((None,))
    batch["shift_labels"][0, rows] = -100
    loss, grads, _ = step(model, batch, num_items_in_batch=targets)
    plan_head(model, CHUNK_BYTES)
    got_loss, got, _ = step(model, batch, num_items_in_batch=targets)
    torch.testing.assert_close(got_loss, loss, rtol=1e-6, atol=0, equal_nan=True)
    for name in grads:
        torch.testing.assert_close(got[name], grads[name], rtol=1e-5, atol=1e-8, equal_nan=True)


def test_who_reads_logits_gets_them_and_an_evaluation_needs_none():
    model = small_model("gemma2", **MODELS["gemma2"][1])
    batch = batch_of(WINDOW)
    expected = model(**batch)
    plan_head(model, CHUNK_BYTES)
    logits = model(**batch).logits
    assert isinstance(logits, DeferredLogits)
    assert (logits.shape, logits.dtype, logits.device) == (expected.logits.shape, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(torch.log_softmax(logits, -1), torch.log_softmax(expected.logits, -1))
    gradients = [torch.autograd.grad((x * 2).exp().sum(), model.lm_head.weight) for x in (logits, expected.logits)]
    torch.testing.assert_close(*gradients)
    with torch.no_grad(), WholeLogits(VOCABULARY, ROWS) as watched:
        evaluated = model.eval()(**batch)
    assert not watched.shapes
    torch.testing.assert_close(evaluated.loss, expected.loss)


def test_without_labels_or_a_plan_logits_are_a_tensor():
    model = small_model()
    plan_head(model, CHUNK_BYTES)
    batch = batch_of((None,))
    for left_out in (["labels"], ["distca_plan"], ["labels", "distca_plan"]):
        logits = model(**{name: value for name, value in batch.items() if name not in left_out}).logits
        assert type(logits) is Tensor
    assert model.generate(batch["input_ids"][:, :5], max_new_tokens=3, do_sample=False).shape == (1, 8)


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """What is logged once."""
    messages: list[str] = []
    monkeypatch.setattr(logging.get_logger("hf_distca.patches.head"), "warning_once", messages.append)
    return messages


def test_heads_that_give_all_logits(told):
    hooked, replaced, wrapped = (small_model() for _ in range(3))
    wrapped.lm_head = nn.Sequential(wrapped.lm_head)
    for model in (hooked, replaced, wrapped):
        plan_head(model, CHUNK_BYTES)
    seen = []
    hooked.lm_head.register_forward_hook(lambda module, args, output: seen.append(output))
    forward = replaced.lm_head.forward
    replaced.lm_head.forward = lambda x: forward(x)
    outputs = [model(**batch_of((None,))).logits for model in (hooked, replaced, wrapped)]
    assert [type(logits) for logits in outputs] == [Tensor] * 3
    assert outputs[0] is seen[0]
    not_linear, hook, other = told
    assert "its head is Sequential, not a linear layer" in not_linear
    assert "the loss is computed from all logits at once: head has a hook of its own" in hook
    assert "the forward of the head (Linear) has been replaced" in other


def test_a_model_with_a_fused_loss_of_its_own():
    """As Liger has it: in training nothing is asked of the head, in evaluation logits."""
    model = small_model()
    own = model.forward

    def fused(self, **inputs):
        if not self.training:
            return own(**inputs)
        hidden = self.model(
            inputs["input_ids"], position_ids=inputs["position_ids"], distca_plan=inputs["distca_plan"]
        )
        logits = hidden.last_hidden_state[0] @ self.lm_head.weight.T
        return CausalLMOutput(loss=nn.functional.cross_entropy(logits, inputs["shift_labels"][0]))

    model.forward = MethodType(fused, model)
    plan_head(model, CHUNK_BYTES)
    assert inspect.signature(model.forward) == inspect.signature(MethodType(fused, model))
    batch = batch_of((None,))
    trained = model.train()(**batch)
    with WholeLogits(VOCABULARY, ROWS) as watched:
        evaluated = model.eval()(**batch)
    assert trained.logits is None
    assert not watched.shapes
    torch.testing.assert_close(evaluated.loss, trained.loss)


def test_another_loss_of_the_models_own_gets_all_logits(told):
    model = small_model().double()
    model.loss_function = lambda logits, labels, vocab_size, shift_labels, **kwargs: nn.functional.cross_entropy(
        logits.view(-1, vocab_size), shift_labels.view(-1), label_smoothing=0.1
    )
    loss, grads, _ = step(model, batch_of((None,)))
    plan_head(model, CHUNK_BYTES)
    got_loss, got, shapes = step(model, batch_of((None,)))
    assert shapes
    torch.testing.assert_close(got_loss, loss)
    assert max(relative_error(got[name], grads[name]) for name in grads) < 1e-12
    (message,) = told
    assert "'cross_entropy' reads all logits of a planned step at once" in message


def test_a_second_backward_is_refused():
    model = small_model()
    plan_head(model, CHUNK_BYTES)
    loss = model(**batch_of((None,))).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="set loss_chunk_bytes=0"):
        loss.backward()
    plan_head(model, 0)
    loss = model(**batch_of((None,))).loss
    loss.backward(retain_graph=True)
    loss.backward()


def test_planning_twice_or_not_at_all():
    model = small_model()
    cls = type(model)
    plan_head(model, 0)
    assert type(model) is cls
    plan_head(model, CHUNK_BYTES)
    planned = type(model), type(model.lm_head)
    plan_head(model, CHUNK_BYTES)
    assert (type(model), type(model.lm_head)) == planned
    assert [str(kind) for kind in planned] == [str(cls), str(nn.Linear)]

"""The loss of a planned step over chunks of rows, beside the model's own loss of all logits."""

import inspect
import math
import re
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import logging

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.memory.live import LiveMemory
from hf_distca.patches.head import DeferredLogits, adapted_heads, plan_head
from hf_distca.patches.loss import chosen_chunk_bytes, loss_of_head, loss_of_linear
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from tests.models_and_batches import (
    cut_rows,
    gradients_of,
    random_documents,
    relative_error,
    small_kinds,
    small_model,
)
from tests.whole_logits import WholeLogits

LENGTHS = [40, 1, 23, 31]
ROWS = 40
VOCABULARY = 64
CHUNK_BYTES = 4 * VOCABULARY * ROWS
MIXTURES = {
    "mixtral": {"output_router_logits": True},
    "gpt_oss": {"num_experts_per_tok": 2, "sliding_window": 24},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "phi": {},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 8, "final_logit_softcapping": 0.05},
    "granite": {"logits_scaling": 0.3},
    "cohere": {"logit_scale": 5.0},
    **{name: {"num_local_experts": 4, **config} for name, config in MIXTURES.items()},
}


def make_model(model_type: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    model = small_model(model_type, **MODELS[model_type])
    if model_type == "phi":
        nn.init.normal_(model.lm_head.bias)
    # Torch computes mixtures in float32 at most.
    return model.to(torch.float32 if model_type in MIXTURES else dtype)


def batch_of(model: nn.Module) -> dict:
    """A planned micro-batch of one rank."""
    windows = (24, None) if getattr(model.config, "sliding_window", None) == 24 else (None,)
    settings = PlanSettings(
        1, rows_per_rank=4096, kinds=small_kinds(*windows), balance_block_size=8
    )
    plan = plan_micro_batch(LENGTHS, settings)
    batch = cut_rows(plan, 0, random_documents(LENGTHS))
    bound = Dispatcher(settings, torch.device("cpu")).bind(plan)
    return {**batch, "labels": batch["shift_labels"], "distca_plan": bound}


def step(
    model: nn.Module, batch: dict | None = None, **kwargs
) -> tuple[Tensor, dict[str, Tensor], list]:
    """Loss, gradients, and shapes of tensors of more rows × vocabulary than a chunk has."""
    model.zero_grad()
    with WholeLogits(VOCABULARY, ROWS) as watched:
        loss = model(**(batch or batch_of(model)), **kwargs).loss
        (3 * loss).backward()
    return loss, gradients_of(model), watched.shapes


def assert_same(model: nn.Module, batch: dict | None = None, **kwargs) -> None:
    """The loss in chunks gives what the model gives by itself, which takes logits in float32."""
    loss, grads, shapes = step(model, batch, **kwargs)
    assert shapes
    plan_head(model, CHUNK_BYTES)
    got_loss, got, shapes = step(model, batch, **kwargs)
    assert not shapes
    within = 2e-6 if model.dtype == torch.float64 else 2e-5
    torch.testing.assert_close(got_loss, loss, rtol=within, atol=0, equal_nan=True)
    assert got.keys() == grads.keys()
    for name in grads:
        assert got[name].dtype == grads[name].dtype
        assert relative_error(got[name], grads[name]) < within, name


@pytest.mark.parametrize("targets", [None, 70], ids=["mean", "sum"])
@pytest.mark.parametrize("model_type", MODELS)
def test_models(model_type, targets):
    assert_same(make_model(model_type), num_items_in_batch=targets)


@pytest.mark.parametrize("targets", [None, 70], ids=["mean", "sum"])
@pytest.mark.parametrize("rows", [slice(0, 45), slice(0, None)], ids=["a chunk", "all"])
def test_rows_without_targets(rows, targets):
    model = make_model("llama")
    batch = batch_of(model)
    batch["shift_labels"][0, rows] = -100
    assert_same(model, batch, num_items_in_batch=targets)


TRAINED = {
    "all but the head": r"(?!lm_head).*",
    "the head": "lm_head.*",
    "the bias of the head": "lm_head.bias",
}
ADAPTERS = {
    "lora": {"target_modules": ["q_proj", "lm_head"]},
    "dora": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "below the head": {"target_modules": ["q_proj"]},
}


@pytest.mark.parametrize("part", [*TRAINED, *ADAPTERS])
def test_parts_that_are_trained(part):
    model = make_model("phi" if part in TRAINED else "llama")
    if part in TRAINED:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(re.fullmatch(TRAINED[part], name) is not None)
    else:
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=4, init_lora_weights=False, task_type="CAUSAL_LM", **ADAPTERS[part]
        )
        model = peft.get_peft_model(model, config)
    assert_same(model)
    assert len(adapted_heads(model)) == (part in ("lora", "dora", "saved"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi"])
def test_bfloat16(model_type, dtype):
    """Under autocast, and with weights in bfloat16: as close to float64 as the model's own loss."""
    model = make_model(model_type, dtype)
    exact_loss, exact, _ = step(make_model(model_type, dtype).double())
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        loss, grads, _ = step(model)
        plan_head(model, CHUNK_BYTES)
        got_loss, got, shapes = step(model)
    assert not shapes
    assert got_loss.dtype == loss.dtype == torch.float32
    assert abs(got_loss - exact_loss) < 1.1 * abs(loss - exact_loss) + 1e-5
    for name in grads:
        assert got[name].dtype == grads[name].dtype
        assert (
            relative_error(got[name], exact[name])
            < 2 * relative_error(grads[name], exact[name]) + 5e-3
        ), name


def test_many_chunks_add_up_without_rounding_each_time():
    torch.manual_seed(0)
    hidden_TD = torch.rand(512, 4).bfloat16()
    weight_VD = torch.randn(7, 4).bfloat16()
    target_T = torch.randint(7, (512,))
    gradients = []
    for dtype, steps, rows in ((torch.bfloat16, [Tensor.float], 1), (torch.float64, [], 512)):
        of_dtype = weight_VD.to(dtype).requires_grad_()
        loss = loss_of_linear(hidden_TD.to(dtype), of_dtype, None, target_T, -100, steps, rows)
        gradients.append((loss.item(), *torch.autograd.grad(loss, of_dtype)))
    (loss, grad_VD), (exact_loss, exact_VD) = gradients
    assert loss == pytest.approx(exact_loss, rel=2e-3)
    assert relative_error(grad_VD, exact_VD) < 5e-3


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "head"])
def test_targets_of_another_index_count_for_nothing(linear):
    hidden_TD = torch.ones(3, 1)
    head = nn.Linear(1, 4, bias=False)
    nn.init.zeros_(head.weight)
    others = torch.tensor([1, 2, 3]), 2, [], 1
    loss = (
        loss_of_linear(hidden_TD, head.weight, None, *others)
        if linear
        else loss_of_head(head, hidden_TD, *others)
    )
    loss.backward()
    assert loss.item() == pytest.approx(2 * math.log(4))
    assert head.weight.grad.flatten().tolist() == pytest.approx([0.5, -0.5, 0.5, -0.5])


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float64, 257.0), (torch.float32, 256.0)])
def test_autocast_leaves_float64_as_it_is(dtype, expected):
    """As it does for a linear layer: 257 is none of the numbers of bfloat16."""
    hidden_TD = torch.ones(1, 1, dtype=dtype)
    weight_VD = torch.tensor([[257.0], [0.0]], dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            loss_of_linear(hidden_TD, weight_VD, None, torch.tensor([1]), -100, [], 1).item()
            == expected
        )


@pytest.mark.parametrize(
    ("features", "dtype", "bytes_each"), [(1, torch.float32, 4 + 4), (99, torch.bfloat16, 2 + 2)]
)
def test_no_more_of_a_chunk_than_its_logits_and_their_gradient(features, dtype, bytes_each):
    """While a chunk is computed, and while gradients of the head are, of which a copy takes more
    memory.
    """
    rows = 4
    words = 1000
    live = LiveMemory()
    hidden_TD, weight_VD = (torch.rand(count, features, dtype=dtype) for count in (3 * rows, words))
    live.belong([hidden_TD, weight_VD.requires_grad_()], "weights")
    steps = [Tensor.float] if dtype == torch.bfloat16 else []
    with live:
        loss_of_linear(hidden_TD, weight_VD, None, torch.zeros(3 * rows).long(), -100, steps, rows)
    of_head = words * features * (4 + 2 * len(steps))
    assert round((live.peak["activations"] - of_head) / (rows * words)) == bytes_each


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """What is logged once."""
    messages: list[str] = []
    monkeypatch.setattr(
        logging.get_logger("hf_distca.patches.head"), "warning_once", messages.append
    )
    return messages


@pytest.mark.parametrize(
    "missing", [["labels"], ["distca_plan"], ["labels", "distca_plan"]], ids=" ".join
)
def test_logits_without_labels_or_a_plan_are_a_tensor(missing):
    model = make_model("gemma2", torch.float32)
    batch = batch_of(model)
    plan_head(model, CHUNK_BYTES)
    inputs = {name: value for name, value in batch.items() if name not in missing}
    assert type(model(**inputs).logits) is Tensor


def test_who_reads_logits_gets_them_and_an_evaluation_needs_none(told):
    model = make_model("gemma2", torch.float32)
    batch = batch_of(model)
    expected = model(**batch)
    plan_head(model, CHUNK_BYTES)
    logits = model(**batch).logits
    assert isinstance(logits, DeferredLogits)
    assert logits.shape == expected.logits.shape
    assert logits.dtype == torch.float32
    assert logits.device == torch.device("cpu")
    torch.testing.assert_close(
        torch.log_softmax(logits, -1), torch.log_softmax(expected.logits, -1)
    )
    (message,) = told
    assert "'log_softmax' reads all logits of a planned step at once" in message
    gradients = [
        torch.autograd.grad((x * 2).exp().sum(), model.lm_head.weight)
        for x in (logits, expected.logits)
    ]
    torch.testing.assert_close(*gradients)
    with torch.no_grad(), WholeLogits(VOCABULARY, ROWS) as watched:
        evaluated = model.eval()(**batch)
    assert not watched.shapes
    torch.testing.assert_close(evaluated.loss, expected.loss)
    assert model.generate(batch["input_ids"][:, :5], max_new_tokens=3, do_sample=False).shape == (
        1,
        8,
    )


def test_heads_that_give_all_logits(told):
    hooked, replaced, wrapped = (small_model() for _ in range(3))
    wrapped.lm_head = nn.Sequential(wrapped.lm_head)
    for model in (hooked, replaced, wrapped):
        plan_head(model, CHUNK_BYTES)
    seen = []
    hooked.lm_head.register_forward_hook(lambda module, args, output: seen.append(output))
    forward = replaced.lm_head.forward
    replaced.lm_head.forward = lambda x: forward(x)
    outputs = [model(**batch_of(model)).logits for model in (hooked, replaced, wrapped)]
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
        given = {name: inputs[name] for name in ("input_ids", "position_ids", "distca_plan")}
        logits = self.model(**given).last_hidden_state[0] @ self.lm_head.weight.T
        return CausalLMOutput(loss=nn.functional.cross_entropy(logits, inputs["shift_labels"][0]))

    model.forward = MethodType(fused, model)
    plan_head(model, CHUNK_BYTES)
    assert inspect.signature(model.forward) == inspect.signature(MethodType(fused, model))
    batch = batch_of(model)
    trained = model.train()(**batch)
    with WholeLogits(VOCABULARY, ROWS) as watched:
        evaluated = model.eval()(**batch)
    assert trained.logits is None
    assert not watched.shapes
    torch.testing.assert_close(evaluated.loss, trained.loss)


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


def test_a_second_backward():
    model = small_model()
    plan_head(model, CHUNK_BYTES)
    loss = model(**batch_of(model)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="set loss_chunk_bytes=0"):
        loss.backward()
    plan_head(model, 0)
    loss = model(**batch_of(model)).loss
    loss.backward(retain_graph=True)
    loss.backward()


MIB = 2**20
GB = 10**9


def test_chunks_that_are_chosen_by_the_memory_of_the_device():
    model = small_model()
    plan_head(model, "auto", None)
    assert model.lm_head.chunk_bytes == 256 * MIB
    plan_head(model, "auto", 10**12)
    assert model.lm_head.chunk_bytes == 256 * MIB
    plan_head(model, 1000, 10**12)
    assert model.lm_head.chunk_bytes == 1000
    wide = small_model(vocab_size=2**15)
    plan_head(wide, "auto", 80 * GB)
    assert wide.lm_head.chunk_rows == 4096


@pytest.mark.parametrize(
    ("memory", "vocabulary", "expected"),
    [
        (None, 128256, 256 * MIB),  # a CPU
        (141 * GB, 128256, 4 * 128256 * 4096),  # enough rows
        (80 * GB, 128256, 1_250_000_000),  # a share of the memory
        (8 * GB, 128256, 256 * MIB),  # at least as on a CPU
        (80 * GB, 1000, 256 * MIB),
    ],
    ids=["CPU", "enough rows", "share of the memory", "small GPU", "small vocabulary"],
)
def test_chunks_for_a_memory(memory, vocabulary, expected):
    assert chosen_chunk_bytes(memory, vocabulary) == expected

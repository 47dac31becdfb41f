"""Ping-pong in the company of what users train with: autocast, contexts of a model's own, any checkpoint, hooks."""

from contextlib import nullcontext

import peft
import pytest
import torch
import torch.distributed as dist
import transformers.modeling_utils
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from transformers.utils import logging

from hf_distca.config import DistCAConfig
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.patches.head import plan_head
from hf_distca.patches.layers import plan_layers
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.trainer.assembly import make_dispatcher
from tests.dispatch.test_equality import CHUNK_BYTES, cut_rows, planned_step
from tests.models_and_batches import (
    exchanging,
    in_stages,
    random_documents,
    reference_step,
    relative_error,
    small_kinds,
    small_model,
)

pytestmark = pytest.mark.usefixtures("backward_thread")

LENGTHS = [120, 7, 90, 33, 64, 1, 48]


def _dispatcher(ping_pong: bool = True, **options) -> Dispatcher:
    ranks, kinds = dist.get_world_size(), small_kinds()
    settings = PlanSettings(ranks, tokens_per_rank=4096, kinds=kinds, balance_block_size=8, ping_pong=ping_pong)
    return Dispatcher(settings, torch.device("cpu"), **options)


def thread_state() -> tuple:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def _seen_by_linear_layers(ping_pong: bool, context: str) -> dict[str, list]:
    """The thread's state and the dtype of the result in each call of each linear layer, and after the model."""
    dispatcher = _dispatcher(ping_pong)
    model = small_model(num_hidden_layers=2).train()
    if ping_pong:
        plan_layers(model)
    seen: dict[str, list] = {}

    def watched(name, forward):
        def call(x):
            result = forward(x)
            seen.setdefault(name, []).append((str(result.dtype), *map(str, thread_state())))
            return result

        return call

    def surrounded(forward, context):
        def call(*args, **kwargs):
            with context():
                return forward(*args, **kwargs)

        return call

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = watched(name, module.forward)
        if name.endswith("layers.0.self_attn"):
            module.forward = surrounded(module.forward, CONTEXTS[context])
    plan = plan_micro_batch(LENGTHS, dispatcher.settings)
    batch = cut_rows(plan, dist.get_rank(), random_documents(LENGTHS))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch, labels=batch["shift_labels"], distca_plan=dispatcher.bind(plan)).loss
        seen["after the model"] = [tuple(map(str, thread_state()))]
    loss.backward()
    return seen


CONTEXTS = {
    "none": nullcontext,
    "autocast": lambda: torch.autocast("cpu", enabled=False),
    "other dtype": lambda: torch.autocast("cpu", torch.float16),
    "no gradients": torch.no_grad,
}
"""What a model might have around its attention."""


@pytest.mark.parametrize("context", CONTEXTS)
def test_both_nano_batches_and_what_follows_see_the_thread_as_without_ping_pong(rank_pools, context):
    (plain, _), (in_turns, _) = (rank_pools[2].run(_seen_by_linear_layers, ping_pong, context) for ping_pong in (0, 1))
    assert in_turns.pop("after the model") == plain.pop("after the model")
    assert len(plain) == 15
    assert all(len(calls) == 1 for calls in plain.values())
    head = in_turns.pop("lm_head")
    assert head == plain.pop("lm_head")
    for name, calls in in_turns.items():
        assert calls == plain[name] * 2, name


def _step_in_company(strategy: str, lora: bool) -> tuple[float, dict, set[bool]]:
    dispatcher = _dispatcher()
    model = _model(strategy, lora)
    autocast: set[bool] = set()  # what the kernel finds
    kernel = dispatcher.kernel
    for direction in ("forward", "backward"):
        compute = getattr(kernel, direction)

        def watched(*args, compute=compute):
            autocast.add(torch.is_autocast_enabled("cpu"))
            return compute(*args)

        setattr(kernel, direction, watched)
    with torch.autocast("cpu", torch.bfloat16):
        plan = in_stages(plan_micro_batch(LENGTHS, dispatcher.settings), 30)
        loss = planned_step(model, plan, dispatcher, random_documents(LENGTHS))
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}, autocast


def _model(strategy: str, lora: bool, implementation: str = "distca"):
    model = small_model(implementation=implementation).train()
    if lora:
        torch.manual_seed(0)
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, settings)
    if implementation == "distca":
        plan_layers(model)
        plan_head(model, CHUNK_BYTES)
    if strategy in ("checkpoint", "reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": strategy == "reentrant"})
        if strategy == "reentrant":
            model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("strategy", ["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_bfloat16_autocast(rank_pools, strategy, lora):
    exact_loss, exact = reference_step(_model("plain", lora, "sdpa"), random_documents(LENGTHS))
    with torch.autocast("cpu", torch.bfloat16):
        stock_loss, stock = reference_step(_model("plain", lora, "sdpa"), random_documents(LENGTHS))
    for got_loss, got, autocast in rank_pools[2].run(_step_in_company, strategy, lora):
        assert autocast == {False}
        assert abs(got_loss - exact_loss) < 2 * abs(stock_loss - exact_loss) + 1e-3
        assert got.keys() == exact.keys()
        for name in exact:
            assert relative_error(got[name], exact[name]) < 2 * relative_error(stock[name], exact[name]) + 1e-2, name


CHECKPOINTS = {
    "transformers": lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
    "transformers reentrant": lambda model: model.gradient_checkpointing_enable({"use_reentrant": True}),
    "fsdp": lambda model: _wrap_layers(model, checkpoint_wrapper),
    "fsdp reentrant": lambda model: _wrap_layers(
        model, lambda layer: checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.REENTRANT)
    ),
    "fsdp offloaded": lambda model: _wrap_layers(model, lambda layer: offload_wrapper(checkpoint_wrapper(layer))),
}
if hasattr(transformers.modeling_utils, "save_on_cpu"):  # from 5.23 on
    CHECKPOINTS["transformers offloaded"] = lambda model: model.activation_checkpointing_enable(offload=True)
OFFLOADING = [way for way in CHECKPOINTS if way.endswith("offloaded")]
"""Ways to checkpoint every decoder layer; "fsdp" is what accelerate does for fsdp_activation_checkpointing."""


def _wrap_layers(model, wrapper) -> None:
    layers = list(model.model.layers)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: any(module is layer for layer in layers)
    )


def _checkpointed(way: str, ping_pong: bool, keep: bool) -> dict:
    dispatcher = _dispatcher(ping_pong, keep_core_attention=keep)
    model = small_model().train()
    if ping_pong:
        plan_layers(model)
    plan_head(model, CHUNK_BYTES)
    CHECKPOINTS[way](model)
    calls = []
    forward = dispatcher.kernel.forward
    dispatcher.kernel.forward = lambda *args: calls.append(1) or forward(*args)
    offloaded = []
    if way in OFFLOADING:  # there is no pinned memory without a GPU: stands in for save_on_cpu
        _OffloadingHooks.sizes = offloaded
        torch.distributed.algorithms._checkpoint.checkpoint_wrapper.save_on_cpu = _OffloadingHooks
        transformers.modeling_utils.save_on_cpu = _OffloadingHooks
    plan = plan_micro_batch(LENGTHS, dispatcher.settings)
    bound = []
    bind = dispatcher.bind
    dispatcher.bind = lambda plan: bound.append(bind(plan)) or bound[-1]
    loss = planned_step(model, plan, dispatcher, random_documents(LENGTHS))
    grads = {name.replace("_checkpoint_wrapped_module.", ""): p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": loss, "grads": grads, "kernel": len(calls), "left": len(bound[0].kept_results), "off": offloaded}


class _OffloadingHooks(torch.autograd.graph.saved_tensors_hooks):
    sizes: list

    def __init__(self, pin_memory: bool, device_type: str = "cuda") -> None:
        def pack(x):
            self.sizes.append(tuple(x.shape))
            return x.clone()

        super().__init__(pack, lambda x: x)


@pytest.mark.parametrize("ping_pong", [False, True], ids=["plain", "ping-pong"])
@pytest.mark.parametrize("way", CHECKPOINTS)
def test_core_attention_is_computed_once_whatever_checkpoints_the_layer(rank_pools, way, ping_pong):
    loss, grads = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    once = rank_pools[2].run(_checkpointed, way, ping_pong, True)
    twice = rank_pools[2].run(_checkpointed, way, ping_pong, False)
    for kept, recomputed in zip(once, twice, strict=True):
        assert 2 * kept["kernel"] == recomputed["kernel"]
        for got in (kept, recomputed):
            assert got["left"] == 0
            assert got["loss"] == pytest.approx(loss, rel=1e-6)
            assert max(relative_error(got["grads"][name], grads[name]) for name in grads) < 1e-5


@pytest.mark.parametrize("way", OFFLOADING)
def test_kept_results_are_offloaded_where_the_checkpoint_is(rank_pools, way):
    for ping_pong in (False, True):
        kept, recomputed = (rank_pools[2].run(_checkpointed, way, ping_pong, keep)[0] for keep in (1, 0))
        results = [shape for shape in kept["off"] if shape not in recomputed["off"]]
        # O [rows, 4 heads, 8] and log-sum-exp [rows, 4] of 2 layers, of all rows or of those of either nano-batch.
        assert len(results) == 2 * 2 * (1 + ping_pong)
        assert {shape[1:] for shape in results} == {(4, 8), (4,)}
        rows = sum(shape[0] for shape in results if len(shape) == 3)
        assert rows // 2 in (sum(LENGTHS) // 2, sum(LENGTHS) // 2 + 1)


def _left_by_an_evaluation() -> int:
    dispatcher = _dispatcher()
    model = small_model().train()
    plan_layers(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    plan = plan_micro_batch(LENGTHS, dispatcher.settings)
    bound = dispatcher.bind(plan)
    with torch.no_grad():
        model.eval()(**cut_rows(plan, dist.get_rank(), random_documents(LENGTHS)), distca_plan=bound)
    return len(bound.kept_results)


def test_an_evaluation_keeps_nothing(rank_pools):
    assert rank_pools[2].run(_left_by_an_evaluation) == [0, 0]


def _attending_twice() -> list[tuple[float, dict]]:
    """Steps of DiffLlama: either kind of checkpoint, with received rows kept or not."""
    steps = []
    for reentrant in (False, True):
        for keep_received in (False, True):
            model = small_model("diffllama").train()
            config = DistCAConfig(
                tokens_per_rank=4096, balance_block_size=8, keep_received=keep_received, **exchanging(model)
            )
            dispatcher = make_dispatcher(model, config, torch.device("cpu"))
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            plan = plan_micro_batch(LENGTHS, dispatcher.settings)
            loss = planned_step(model, plan, dispatcher, random_documents(LENGTHS))
            steps.append((loss, {name: p.grad.clone() for name, p in model.named_parameters()}))
    return steps


def test_a_module_that_attends_twice_in_a_checkpoint(rank_pools):
    loss, grads = reference_step(small_model("diffllama", "eager"), random_documents(LENGTHS))
    largest = max(grad.abs().max() for grad in grads.values())
    for steps in rank_pools[2].run(_attending_twice):
        for got_loss, got in steps:
            assert got_loss == pytest.approx(loss, rel=1e-6)
            for name, grad in grads.items():
                assert (got[name] - grad).abs().max() < 1e-5 * max(grad.abs().max(), 0.1 * largest), name


def _error_of_a_step(model, dispatcher: Dispatcher, kind: type[Exception]) -> str:
    plan = plan_micro_batch(LENGTHS, dispatcher.settings)
    with pytest.raises(kind) as raised:
        planned_step(model, plan, dispatcher, random_documents(LENGTHS))
    return str(raised.value)


def _output_changed_in_place() -> str:
    dispatcher = _dispatcher()
    model = small_model().train()
    plan_layers(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    projection = model.model.layers[1].self_attn.o_proj
    forward = projection.forward
    projection.forward = lambda x: forward(x.mul_(2))
    return _error_of_a_step(model, dispatcher, RuntimeError)


def test_a_kept_result_cannot_be_changed_by_the_model(rank_pools):
    for message in rank_pools[2].run(_output_changed_in_place):
        assert "being modified inplace" in message


def _checkpoint_around_the_attention_alone() -> str:
    dispatcher = _dispatcher()
    model = small_model().train()
    plan_layers(model)
    for layer in model.model.layers:
        layer.self_attn = checkpoint_wrapper(layer.self_attn)
    return _error_of_a_step(model, dispatcher, ValueError)


def test_a_checkpoint_inside_a_layer_is_refused(rank_pools):
    for message in rank_pools[2].run(_checkpoint_around_the_attention_alone):
        assert "ping-pong cannot pause inside it; put it around the whole layer" in message


def _with_a_hook_on_one_rank(hooked_rank: int) -> tuple[float, dict, list[int], list[str]]:
    dispatcher = _dispatcher()
    model = small_model().train()
    plan_layers(model)
    told: list[str] = []
    logging.get_logger("hf_distca.patches.layers").warning_once = told.append
    shapes: list[int] = []
    if dist.get_rank() == hooked_rank:
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: shapes.append(output.shape[1]))
    plan = plan_micro_batch(LENGTHS, dispatcher.settings)
    bound = []
    bind = dispatcher.bind
    dispatcher.bind = lambda plan: bound.append(bind(plan)) or bound[-1]
    loss = planned_step(model, plan, dispatcher, random_documents(LENGTHS))
    ran = bound[0].ran
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    return loss, grads, [ran.layers, ran.layers_in_turns, *shapes], told


def test_ranks_stay_in_step_where_only_one_has_a_hook_inside_a_layer(rank_pools):
    loss, grads = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    results = rank_pools[2].run(_with_a_hook_on_one_rank, 1)
    for got_loss, got, _, _ in results:
        assert got_loss == pytest.approx(loss, rel=1e-6)
        assert max(relative_error(got[name], grads[name]) for name in grads) < 1e-5
    (_, _, free, nothing), (_, _, hooked, told) = results
    assert (free, nothing) == ([2, 2], [])
    assert hooked[:2] == [2, 1]
    assert hooked[2] in (sum(LENGTHS) // 2, sum(LENGTHS) // 2 + 1)  # all rows of the rank, once
    (message,) = told
    assert "ping-pong is off in every LlamaDecoderLayer, because a module inside has a hook" in message
    assert "_with_a_hook_on_one_rank.<locals>.<lambda> on mlp (LlamaMLP)" in message

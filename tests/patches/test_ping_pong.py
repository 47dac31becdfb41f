"""Ping-pong: same loss and gradients, exchanges in the order that hides them, whatever users have around layers."""

from collections import UserDict
from contextlib import contextmanager, nullcontext
from typing import Any

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
from transformers import DynamicCache
from transformers.utils import logging

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.models.kinds import layers_by_kind
from hf_distca.patches.head import plan_head
from hf_distca.patches.layers import plan_layers
from hf_distca.patches.split import join_results, join_states, split_argument
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from tests.models_and_batches import (
    CHUNK_BYTES,
    Step,
    assert_same_step,
    cut_rows,
    in_stages,
    planned_step,
    random_documents,
    reference_step,
    relative_error,
    small_model,
    with_lora,
)

pytestmark = pytest.mark.usefixtures("backward_thread")

LENGTHS = [120, 7, 90, 33, 64, 1, 48]
HALF = (sum(LENGTHS) // 2, sum(LENGTHS) // 2 + 1)
"""Rows of a rank of two."""
SHARING = {  # the last layers read keys and values that earlier ones made
    "sliding_window": 24,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 2,
}


def prepared(model: Any, ping_pong: bool = True, **options: Any) -> Dispatcher:
    """A dispatcher of all ranks, for a model whose layers take turns."""
    kinds = tuple(layers_by_kind(model))
    settings = PlanSettings(dist.get_world_size(), 4096, kinds, balance_block_size=8, ping_pong=ping_pong)
    if ping_pong:
        plan_layers(model)
    return Dispatcher(settings, torch.device("cpu"), **options)


def step(model: Any, dispatcher: Dispatcher, stage_rows: int | None = None) -> tuple[Step, BoundPlan]:
    """Loss and gradients of all ranks, and the plan that they followed."""
    bound = dispatcher.bind(in_stages(plan_micro_batch(LENGTHS, dispatcher.settings), stage_rows))
    return planned_step(model, bound, random_documents(LENGTHS)), bound


def batch_of(dispatcher: Dispatcher, lengths: list[int] = LENGTHS) -> dict[str, Any]:
    """This rank's rows with labels and the bound plan."""
    plan = plan_micro_batch(lengths, dispatcher.settings)
    batch = cut_rows(plan, dist.get_rank(), random_documents(lengths))
    return {**batch, "labels": batch["shift_labels"], "distca_plan": dispatcher.bind(plan)}


CASES: dict[str, tuple[str, dict[str, Any], str, bool | None, dict[str, bool]]] = {
    # Other checkpoints and models take turns in tests/dispatch/test_equality.py and in the survey.
    "reentrant": ("llama", {}, "sdpa", True, {}),
    "received rows kept": ("mistral", {"sliding_window": 24}, "sdpa", None, {"keep_received": True}),
    "recomputed": (
        *("gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 8}, "eager", False),
        {"keep_core_attention": False, "keep_received": True},
    ),
    "shared keys": ("gemma3n_text", {**SHARING, "laurel_rank": 4}, "sdpa", None, {}),
    "shared keys, recomputed": (
        *("gemma3n_text", {**SHARING, "laurel_rank": 4}, "sdpa", False),
        {"keep_core_attention": False},
    ),
    "shared keys of global heads": ("gemma4_text", {**SHARING, "global_head_dim": 16}, "sdpa", False, {}),
}


def _step(model_type: str, config: dict[str, Any], checkpointing: bool | None, options: dict[str, bool]) -> Step:
    model = small_model(model_type, **config).train()
    dispatcher = prepared(model, **options)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    done, bound = step(model, dispatcher)
    assert bound.ran.layers_in_turns == bound.ran.layers > 0
    return done


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(rank_pools, case):
    model_type, config, other, *options = CASES[case]
    expected = reference_step(small_model(model_type, other, **config), random_documents(LENGTHS))
    for got in rank_pools[2].run(_step, model_type, config, *options):
        assert_same_step(got, expected)


class RecordedBuffer:
    """A buffer of a slot that writes down what is sent and waited for."""

    def __init__(self, buffer, slot, events: list[str]) -> None:
        self._buffer, self._events, (self._rows, _, self._nano_batch, _) = buffer, events, slot

    def __getattr__(self, name):
        return getattr(self._buffer, name)

    def send(self, *args):
        self._buffer.send(*args)
        self._sent = f"{self._rows} of {self._nano_batch}"
        self._events.append(f"send {self._sent}")

    def return_received(self, *args):
        self._buffer.return_received(*args)
        self._sent = f"{self._rows} back of {self._nano_batch}"
        self._events.append(f"send {self._sent}")

    def wait(self):
        self._events.append(f"wait {self._sent}")
        return self._buffer.wait()


def _events(checkpointing: bool, keep: bool) -> list[str]:
    """What happened in one step of one layer whose K/V rows alone move."""
    model = small_model(num_hidden_layers=1).train()
    dispatcher = prepared(model, keep_core_attention=keep)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    events: list[str] = []
    exchange, kernel = dispatcher.exchange, dispatcher.kernel
    buffer_of, forward, backward = exchange.buffer, kernel.forward, kernel.backward

    def recorded_buffer(slot, route, like):
        buffer = buffer_of(slot, route, like)
        return RecordedBuffer(buffer, slot, events) if route.crossing else buffer

    exchange.buffer = recorded_buffer
    kernel.forward = lambda *args: events.append("compute") or forward(*args)
    kernel.backward = lambda *args: events.append("compute") or backward(*args)
    # One document over both ranks in each nano-batch: rank 1 needs the K/V rows of rank 0.
    loss = model(**batch_of(dispatcher, [128, 128])).loss
    events.append("backward")
    loss.backward()
    return events


EXCHANGES = [
    *["send keys of 0", "send keys of 1", "wait keys of 0", "wait keys of 1"],
    "backward",
    # The gradient of nano-batch 1 comes first: K and V go out again, and dK and dV come back.
    *["send keys of 1", "send keys of 0", "wait keys of 1", "send keys back of 1"],
    *["wait keys of 0", "send keys back of 0", "wait keys back of 1", "wait keys back of 0"],
]


def test_order_of_exchanges(rank_pools):
    plain, kept, recomputed = (
        rank_pools[2].run(_events, *options) for options in ((False, True), (True, True), (True, False))
    )
    for events in (*plain, *kept):
        assert [event for event in events if event != "compute"] == EXCHANGES
    # Local tasks of both nano-batches come when both exchanges have started.
    forward = plain[1][: plain[1].index("backward")]
    sent, waited = (["send keys of 0", "send keys of 1"], ["wait keys of 0", "compute", "wait keys of 1", "compute"])
    assert forward == [*sent, "compute", "compute", *waited]
    # Recomputing costs an exchange of each nano-batch, and the forward's kernel calls.
    before, after = (
        [sum(event.startswith(name) for event in events) for name in ("send", "compute")]
        for events in (kept[0], recomputed[0])
    )
    computed = kept[0][: kept[0].index("backward")].count("compute")
    assert after == [before[0] + 2, before[1] + computed]


def _recorded() -> tuple[dict, dict]:
    """The phases that were recorded of one step of two layers, and those of the schedules, by core attention."""
    model = small_model().train()
    dispatcher = prepared(model)
    batch = batch_of(dispatcher)
    recording = dispatcher.recorder.listen()
    model(**batch).loss.backward()
    spans = recording.take()
    phases = [span for span in spans if span.kind == "phase"]
    recorded: dict = {}
    for phase in phases:
        recorded.setdefault(tuple(phase.work), []).append(phase.part)
    for span in spans:  # kernel calls and waits lie within a phase of their core attention
        assert any(each.work == span.work and each.begin <= span.begin <= span.end <= each.end for each in phases)
    planned = {}
    for nano in batch["distca_plan"].nano_batches:
        (routes,) = nano.routes.values()
        for layer in range(model.config.num_hidden_layers):
            planned[layer, nano.index, "forward"] = [phase.name for phase in routes.forward]
            planned[layer, nano.index, "backward"] = [phase.name for phase in routes.backward["nothing"]]
    return recorded, planned


def test_every_phase_of_every_layer_is_carried_out_and_recorded(rank_pools):
    for recorded, planned in rank_pools[2].run(_recorded):
        assert recorded == planned


def _seen_from_outside(ping_pong: bool) -> tuple[list, dict[str, Any]]:
    planned, model = (small_model("mixtral", num_local_experts=4, output_router_logits=True) for _ in range(2))
    dispatcher = prepared(planned)
    model = planned if ping_pong else model
    calls = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: calls.append(list(output.shape)))
    output = model(**batch_of(dispatcher), output_hidden_states=True)
    output.loss.backward()
    gate = model.model.layers[0].mlp.gate.weight.grad
    seen = {"router": output.router_logits, "hidden": output.hidden_states, "loss": output.aux_loss, "gate": gate}
    return calls, torch.utils._pytree.tree_map(torch.Tensor.detach, seen)


def test_routers_hidden_states_and_hooks_see_what_they_see_without(rank_pools):
    (calls, plain), (calls_in_turns, in_turns) = (
        rank_pools[2].run(_seen_from_outside, ping_pong)[0] for ping_pong in (False, True)
    )
    assert calls_in_turns == calls
    torch.testing.assert_close(in_turns, plain, rtol=1e-4, atol=1e-5)


# The state of the thread


@contextmanager
def _default_dtype(dtype: torch.dtype = torch.float64):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS = {
    "none": nullcontext,
    "autocast": lambda: torch.autocast("cpu", enabled=False),
    "other dtype": lambda: torch.autocast("cpu", torch.float16),
    "no gradients": torch.no_grad,
    "default dtype": _default_dtype,
}
"""What a model might have around its attention."""


def thread_state() -> tuple[str, ...]:
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return tuple(map(str, (*autocast, torch.is_grad_enabled(), torch.get_default_dtype())))


def _seen_by_linear_layers(ping_pong: bool, context: str) -> dict[str, list]:
    """The thread's state and the dtype of the result in each call of each linear layer, and after the model."""
    model = small_model(num_hidden_layers=2).train()
    dispatcher = prepared(model, ping_pong)
    seen: dict[str, list] = {}

    def watched(name, forward):
        def call(x):
            result = forward(x)
            seen.setdefault(name, []).append((str(result.dtype), *thread_state()))
            return result

        return call

    def surrounded(forward):
        def call(*args, **kwargs):
            with CONTEXTS[context]():
                return forward(*args, **kwargs)

        return call

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = watched(name, module.forward)
        if name.endswith("layers.0.self_attn"):
            module.forward = surrounded(module.forward)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch_of(dispatcher)).loss
        seen["after the model"] = [thread_state()]
    loss.backward()
    return seen


@pytest.mark.parametrize("context", CONTEXTS)
def test_both_nano_batches_and_what_follows_see_the_thread_as_without_ping_pong(rank_pools, context):
    (plain, _), (in_turns, _) = (rank_pools[2].run(_seen_by_linear_layers, ping_pong, context) for ping_pong in (0, 1))
    assert len(plain) == 16
    for name, calls in plain.items():
        assert len(calls) == 1
        assert in_turns[name] == calls * (2 if name.startswith("model.") else 1), name


def _model(lora: bool, implementation: str = "distca") -> Any:
    model = small_model(implementation=implementation).train()
    return with_lora(model) if lora else model


def _step_under_autocast(checkpointing: bool | None, lora: bool) -> tuple[Step, set[bool]]:
    model = _model(lora)
    dispatcher = prepared(model)
    plan_head(model, CHUNK_BYTES)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    autocast: set[bool] = set()  # what the kernel finds
    kernel = dispatcher.kernel
    forward, backward = kernel.forward, kernel.backward
    kernel.forward = lambda *args: autocast.add(torch.is_autocast_enabled("cpu")) or forward(*args)
    kernel.backward = lambda *args: autocast.add(torch.is_autocast_enabled("cpu")) or backward(*args)
    with torch.autocast("cpu", torch.bfloat16):
        return step(model, dispatcher, stage_rows=30)[0], autocast


@pytest.mark.parametrize(("checkpointing", "lora"), [(None, False), (False, True), (True, True)])
def test_bfloat16_autocast(rank_pools, checkpointing, lora):
    exact_loss, exact = reference_step(_model(lora, "sdpa"), random_documents(LENGTHS))
    with torch.autocast("cpu", torch.bfloat16):
        stock_loss, stock = reference_step(_model(lora, "sdpa"), random_documents(LENGTHS))
    for (got_loss, got), autocast in rank_pools[2].run(_step_under_autocast, checkpointing, lora):
        assert autocast == {False}
        assert abs(got_loss - exact_loss) < 2 * abs(stock_loss - exact_loss) + 1e-3
        assert got.keys() == exact.keys()
        for name in exact:
            assert relative_error(got[name], exact[name]) < 2 * relative_error(stock[name], exact[name]) + 1e-2, name


# Checkpoints and hooks


def _wrap_layers(model, wrapper) -> None:
    layers = list(model.model.layers)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: any(module is layer for layer in layers)
    )


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
"""Ways to checkpoint every decoder layer; "fsdp" is what accelerate does for fsdp_activation_checkpointing."""


class _OffloadingHooks(torch.autograd.graph.saved_tensors_hooks):
    """Stands in for save_on_cpu: there is no pinned memory without a GPU."""

    shapes: list[tuple[int, ...]]

    def __init__(self, pin_memory: bool, device_type: str = "cuda") -> None:
        super().__init__(lambda x: self.shapes.append(tuple(x.shape)) or x.clone(), lambda x: x)


def _checkpointed(way: str, ping_pong: bool, keep: bool) -> tuple[Step, int, list[tuple[int, ...]]]:
    """A step, the kernel calls of its forwards, and the shapes of what it offloaded."""
    model = small_model().train()
    dispatcher = prepared(model, ping_pong, keep_core_attention=keep)
    plan_head(model, CHUNK_BYTES)
    CHECKPOINTS[way](model)
    calls: list[int] = []
    forward = dispatcher.kernel.forward
    dispatcher.kernel.forward = lambda *args: calls.append(1) or forward(*args)
    _OffloadingHooks.shapes = []
    if "offloaded" in way:
        torch.distributed.algorithms._checkpoint.checkpoint_wrapper.save_on_cpu = _OffloadingHooks
        transformers.modeling_utils.save_on_cpu = _OffloadingHooks
    done, bound = step(model, dispatcher)
    assert len(bound.kept_results) == 0
    computed = len(calls)
    batch = batch_of(dispatcher)
    with torch.no_grad():
        model.eval()(**batch)
    assert len(batch["distca_plan"].kept_results) == 0  # an evaluation keeps nothing
    return done, computed, _OffloadingHooks.shapes


@pytest.mark.parametrize("ping_pong", [False, True], ids=["plain", "ping-pong"])
@pytest.mark.parametrize("way", CHECKPOINTS)
def test_core_attention_is_computed_once_whatever_checkpoints_the_layer(rank_pools, way, ping_pong):
    expected = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    once, twice = (rank_pools[2].run(_checkpointed, way, ping_pong, keep) for keep in (True, False))
    for (kept, calls, offloaded), (recomputed, all_calls, others) in zip(once, twice, strict=True):
        assert_same_step(kept, expected)
        assert_same_step(recomputed, expected)
        assert 2 * calls == all_calls
        if "offloaded" in way:  # what is kept is offloaded with the checkpoint
            results = [shape for shape in offloaded if shape not in others]
            # O [rows, 4 heads, 8] and log-sum-exp [rows, 4] of 2 layers, of all rows or of those of either nano-batch.
            assert len(results) == 2 * 2 * (1 + ping_pong)
            assert {shape[1:] for shape in results} == {(4, 8), (4,)}
            assert sum(shape[0] for shape in results if len(shape) == 3) // 2 in HALF


def _attending_twice() -> list[Step]:
    """Steps of DiffLlama: either kind of checkpoint, with received rows kept or not."""
    steps = []
    for reentrant, keep_received in ((False, False), (False, True), (True, False), (True, True)):
        model = small_model("diffllama").train()
        dispatcher = prepared(model, keep_received=keep_received)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        steps.append(step(model, dispatcher)[0])
    return steps


def test_a_module_that_attends_twice_in_a_checkpoint(rank_pools):
    loss, grads = reference_step(small_model("diffllama", "eager"), random_documents(LENGTHS))
    largest = max(grad.abs().max() for grad in grads.values())
    for steps in rank_pools[2].run(_attending_twice):
        for got_loss, got in steps:
            assert got_loss == pytest.approx(loss, rel=1e-6)
            for name, grad in grads.items():
                assert (got[name] - grad).abs().max() < 1e-5 * max(grad.abs().max(), 0.1 * largest), name


def _errors() -> tuple[str, str]:
    """Of a model that changes a kept result in place, and of a checkpoint around the attention alone."""
    changing = small_model().train()
    changing.gradient_checkpointing_enable({"use_reentrant": False})
    projection = changing.model.layers[1].self_attn.o_proj
    forward = projection.forward
    projection.forward = lambda x: forward(x.mul_(2))
    inside = small_model().train()
    for layer in inside.model.layers:
        layer.self_attn = checkpoint_wrapper(layer.self_attn)
    errors = []
    for model, kind in ((changing, RuntimeError), (inside, ValueError)):
        with pytest.raises(kind) as raised:
            step(model, prepared(model))
        errors.append(str(raised.value))
    return errors[0], errors[1]


def test_changed_results_and_checkpoints_inside_a_layer_are_refused(rank_pools):
    for changed, inside in rank_pools[2].run(_errors):
        assert "being modified inplace" in changed
        assert "ping-pong cannot pause inside it; put it around the whole layer" in inside


def _with_a_hook_on_one_rank() -> tuple[Step, list[int], list[str]]:
    model = small_model().train()
    dispatcher = prepared(model)
    told: list[str] = []
    logging.get_logger("hf_distca.patches.layers").warning_once = told.append
    shapes: list[int] = []
    if dist.get_rank() == 1:
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: shapes.append(output.shape[1]))
    done, bound = step(model, dispatcher)
    return done, [bound.ran.layers, bound.ran.layers_in_turns, *shapes], told


def test_ranks_stay_in_step_where_only_one_has_a_hook_inside_a_layer(rank_pools):
    expected = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    (got, free, nothing), (got_hooked, hooked, told) = rank_pools[2].run(_with_a_hook_on_one_rank)
    assert_same_step(got, expected)
    assert_same_step(got_hooked, expected)
    assert (free, nothing) == ([2, 2], [])
    assert hooked[:2] == [2, 1]
    assert hooked[2] in HALF  # all rows of the rank, once
    (message,) = told
    assert "ping-pong is off in every LlamaDecoderLayer, because a module inside has a hook" in message
    assert "_with_a_hook_on_one_rank.<locals>.<lambda> on mlp (LlamaMLP)" in message


# Arguments of a layer


def test_arguments_are_split_by_shape_and_results_joined():
    sizes, hidden = (2, 4), torch.arange(12).view(1, 6, 2)
    stacked, masked, positions = torch.arange(72).view(4, 1, 6, 3), hidden[None, :, :, :1], torch.arange(6)
    argument = {"full": (hidden, [-hidden]), "stacked": stacked, "mask": masked, "positions": positions}
    parts = split_argument("x", argument, sizes)
    assert parts[0]["full"][0].tolist() == [[[0, 1], [2, 3]]]
    assert [list(part["stacked"].shape) for part in parts] == [[4, 1, 2, 3], [4, 1, 4, 3]]
    assert parts[1]["mask"].shape == (1, 1, 4, 1)
    for key in ("full", "stacked", "positions"):
        joined = join_results("x", tuple(part[key] for part in parts), sizes)
        torch.testing.assert_close(joined, argument[key], rtol=0, atol=0)
    assert split_argument("use_cache", False, sizes) == (False, False)
    assert split_argument("num_items_in_batch", torch.tensor(5), sizes) == (5, 5)
    # The backward joins gradients in one copy.
    first, _ = split_argument("hidden_states", torch.zeros(1, 6, 2, requires_grad=True), sizes)
    assert type(first.grad_fn).__name__ == "SplitWithSizesBackward0"


def test_states_that_layers_leave_to_later_ones():
    whole = UserDict({"old": (torch.arange(6).view(1, 1, 6, 1),)})
    first, second = split_argument("x", whole, (2, 4))
    assert second["old"][0].flatten().tolist() == [2, 3, 4, 5]
    first["new"], second["new"] = (torch.zeros(1, 1, 2, 1),), (torch.ones(1, 1, 4, 1),)
    join_states(whole, (first, second))
    assert whole["new"][0].flatten().tolist() == [0, 0, 1, 1, 1, 1]
    assert list(whole) == ["old", "new"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(1, 1, 6, 6), r"layer's memory \(a tensor of shape \[1, 1, 6, 6\]\).*set ping_pong=False"),
        (torch.zeros(2, 6), r"a tensor of shape \[2, 6\]"),
        (torch.zeros(3), r"a tensor of shape \[3\]"),
        (object(), r"\(object\)"),
        (DynamicCache(), r"cannot use cached keys and values; set model\.config\.use_cache = False"),
    ],
)
def test_what_cannot_be_split_or_joined(value, message):
    with pytest.raises(ValueError, match=message):
        split_argument("memory", value, (2, 4))
    with pytest.raises(ValueError, match=r"cannot join the decoder layer's output.*got float; set"):
        join_results("output", (1.0, 2.0), (2, 4))

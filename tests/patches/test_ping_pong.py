"""Ping-pong: same loss and gradients, exchanges in the order that hides them, whatever users have
around layers.
"""

from collections import UserDict
from contextlib import ExitStack, nullcontext
from functools import partial
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
from hf_distca.dispatch.recorder import NO_ROWS, Span
from hf_distca.models.checkpointing import enable_checkpointing
from hf_distca.models.kinds import layers_by_kind
from hf_distca.patches.head import plan_head
from hf_distca.patches.layers import plan_layers
from hf_distca.patches.split import join_results, join_states, split_argument
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from tests.mixing.steps import assert_equal, reference
from tests.mixing.steps import step as step_of_config
from tests.models_and_batches import (
    CHUNK_BYTES,
    Step,
    assert_same_step,
    cut_rows,
    planned_step,
    random_documents,
    reference_step,
    small_model,
)

pytestmark = pytest.mark.usefixtures("backward_thread")

LENGTHS = [120, 7, 90, 33, 64, 1, 48]
HALF = (sum(LENGTHS) // 2, sum(LENGTHS) // 2 + 1)
"""Rows of a rank of two."""


def prepared(model: Any, ping_pong: bool = True, checkpointing: bool | None = None) -> Dispatcher:
    """A dispatcher of all ranks, for a model whose layers take turns.

    Args:
        checkpointing: whether transformers' checkpoints are reentrant; None for none.
    """
    kinds = tuple(layers_by_kind(model))
    settings = PlanSettings(
        dist.get_world_size(), 4096, kinds, balance_block_size=8, ping_pong=ping_pong
    )
    if ping_pong:
        plan_layers(model)
    if checkpointing is not None:
        enable_checkpointing(model, {"use_reentrant": checkpointing})
    return Dispatcher(settings, torch.device("cpu"))


def step(
    model: Any, dispatcher: Dispatcher, lengths: list[int] = LENGTHS
) -> tuple[Step, BoundPlan]:
    """Loss and gradients of all ranks, and the plan that they followed."""
    bound = dispatcher.bind(plan_micro_batch(lengths, dispatcher.settings))
    return planned_step(model, bound, random_documents(lengths)), bound


def batch_of(dispatcher: Dispatcher, lengths: list[int] = LENGTHS) -> dict[str, Any]:
    """This rank's rows with labels and the bound plan."""
    plan = plan_micro_batch(lengths, dispatcher.settings)
    batch = cut_rows(plan, dist.get_rank(), random_documents(lengths))
    return {**batch, "labels": batch["shift_labels"], "distca_plan": dispatcher.bind(plan)}


CASES: list[tuple[str, dict[str, bool]]] = [
    # Other checkpoints and models take turns in tests/dispatch/test_planned_step.py and in the
    # survey.
    ("gemma3n_text", {}),  # its last layers read keys and values that earlier ones made
    ("gemma3n_text", {"checkpointing": False}),
    # Its modules attend twice, so that a recomputation exchanges and computes again.
    ("diffllama", {"checkpointing": False}),
    ("diffllama", {"checkpointing": True}),
]


@pytest.mark.parametrize(("model_type", "options"), CASES)
def test_equals_one_process(rank_pools, model_type, options):
    for got in rank_pools[2].run(
        partial(step_of_config, model_type, LENGTHS, document_layout="fixed", **options)
    ):
        # A difference of two attentions is rounded more.
        assert_equal(
            got, reference(model_type, LENGTHS), within=2e-4 if model_type == "diffllama" else 1e-5
        )
        assert got.ran[1] == got.ran[2] > 0


# The order of work


def _recorded(checkpointing: bool | None) -> tuple[list[Span], dict[tuple, list[str]]]:
    """What a step of one layer recorded, of which K/V rows alone move; and the phases of its
    schedules.
    """
    model = small_model(num_hidden_layers=1).train()
    dispatcher = prepared(model, checkpointing=checkpointing)
    # One document over both ranks in each nano-batch: rank 1 needs the K/V rows of rank 0.
    batch = batch_of(dispatcher, [128, 128])
    recording = dispatcher.recorder.listen()
    model(**batch).loss.backward()
    planned = {}
    for nano in batch["distca_plan"].nano_batches:
        (routes,) = nano.routes.values()
        for direction, schedule in routes.schedules.items():
            planned[0, nano.index, direction] = [phase.name for phase in schedule]
    return recording.take(), planned


FORWARD = ["send k v 0", "send k v 1", "wait k v 0", "wait k v 1"]
# The gradient of nano-batch 1 comes first: K and V go out again, and dK and dV come back.
BACKWARD = [
    *["send k v 1", "send k v 0", "wait k v 1", "send dk dv 1", "wait k v 0", "send dk dv 0"],
    *["wait dk dv 1", "wait dk dv 0"],
]


def _events(spans: list[Span]) -> list[str]:
    """Exchanges and kernel calls in order, with their nano-batches."""
    happened = [span for span in spans if span.kind in ("wait", "kernel") or span.rows != NO_ROWS]
    return [f"{span.kind} {span.part} {span.work.nano_batch}" for span in happened]


def test_order_of_work(rank_pools):
    plain, kept = (rank_pools[2].run(_recorded, checkpointing) for checkpointing in (None, False))
    for spans, planned in plain:
        phases = [span for span in spans if span.kind == "phase"]
        for work, planned_parts in planned.items():
            assert [phase.part for phase in phases if phase.work == work] == planned_parts, work
        for span in spans:  # kernel calls and exchanges lie within a phase of their core attention
            assert any(
                phase.work == span.work and phase.begin <= span.begin <= span.end <= phase.end
                for phase in phases
            ), span
    events = [_events(spans) for spans, _ in (*plain, *kept)]
    for of_rank in events:
        assert [event for event in of_rank if not event.startswith("kernel")] == FORWARD + BACKWARD
    # Local tasks of both nano-batches come when both exchanges have started.
    local = ["kernel local 1", "kernel local 0"]
    remote = ["kernel remote-KV 0", "kernel remote-KV 1"]
    assert events[1][:8] == [*FORWARD[:2], *local, "wait k v 0", remote[0], "wait k v 1", remote[1]]
    # A recomputation exchanges and computes nothing.
    assert events[2:] == events[:2]


def _seen_from_outside(ping_pong: bool) -> tuple[list, dict[str, Any]]:
    planned, model = (
        small_model("mixtral", num_local_experts=4, output_router_logits=True) for _ in range(2)
    )
    dispatcher = prepared(planned)
    model = planned if ping_pong else model
    calls = []
    model.model.layers[0].register_forward_hook(
        lambda module, args, output: calls.append(list(output.shape))
    )
    output = model(**batch_of(dispatcher), output_hidden_states=True)
    output.loss.backward()
    gate = model.model.layers[0].mlp.gate.weight.grad
    seen = {
        "router": output.router_logits,
        "hidden": output.hidden_states,
        "loss": output.aux_loss,
        "gate": gate,
    }
    return calls, torch.utils._pytree.tree_map(torch.Tensor.detach, seen)


def test_routers_hidden_states_and_hooks_see_what_they_see_without(rank_pools):
    (calls, plain), (calls_in_turns, in_turns) = (
        rank_pools[2].run(_seen_from_outside, ping_pong)[0] for ping_pong in (False, True)
    )
    assert calls_in_turns == calls
    torch.testing.assert_close(in_turns, plain, rtol=1e-4, atol=1e-5)


# The state of the thread


def _default_dtype() -> ExitStack:
    stack = ExitStack()
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)
    return stack


CONTEXTS = {
    "none": nullcontext,
    "autocast": lambda: torch.autocast("cpu", enabled=False),
    "other dtype": lambda: torch.autocast("cpu", torch.float16),
    "no gradients": torch.no_grad,
    "default dtype": _default_dtype,
}
"""What a model might have around its attention."""


def _seen_by_linear_layers(ping_pong: bool, context: str) -> dict[str, list]:
    """The thread's state and the dtype of the result in each call of each linear layer, and after
    the model.
    """
    model = small_model(num_hidden_layers=2).train()
    dispatcher = prepared(model, ping_pong)
    seen: dict[str, list] = {}

    def look(name, *results):
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        state = (
            *autocast,
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            *(x.dtype for x in results),
        )
        seen.setdefault(name, []).append(list(map(str, state)))

    def watched(name, forward, x):
        result = forward(x)
        look(name, result)
        return result

    def surrounded(forward, *args, **kwargs):
        with CONTEXTS[context]():
            return forward(*args, **kwargs)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = partial(watched, name, module.forward)
        if name.endswith("layers.0.self_attn"):
            module.forward = partial(surrounded, module.forward)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch_of(dispatcher)).loss
        look("after the model")
    loss.backward()
    return seen


@pytest.mark.parametrize("context", CONTEXTS)
def test_both_nano_batches_and_what_follows_see_the_thread_as_without_ping_pong(
    rank_pools, context
):
    (plain, _), (in_turns, _) = (
        rank_pools[2].run(_seen_by_linear_layers, ping_pong, context) for ping_pong in (0, 1)
    )
    assert len(plain) == 16
    for name, calls in plain.items():
        assert len(calls) == 1
        assert in_turns[name] == calls * (2 if name.startswith("model.") else 1), name


# Checkpoints and hooks


def _wrap_layers(wrapper, model) -> None:
    layers = list(model.model.layers)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=wrapper,
        check_fn=lambda module: any(module is layer for layer in layers),
    )


CHECKPOINTS = {
    "transformers": lambda model: enable_checkpointing(model, {"use_reentrant": False}),
    "transformers reentrant": lambda model: enable_checkpointing(model, {"use_reentrant": True}),
    "fsdp": partial(_wrap_layers, checkpoint_wrapper),
    "fsdp reentrant": partial(
        _wrap_layers, partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    ),
    "fsdp offloaded": partial(
        _wrap_layers, lambda layer: offload_wrapper(checkpoint_wrapper(layer))
    ),
}
if hasattr(transformers.modeling_utils, "save_on_cpu"):  # from 5.23 on
    CHECKPOINTS["transformers offloaded"] = lambda model: model.activation_checkpointing_enable(
        offload=True
    )
"""Ways to checkpoint every decoder layer; "fsdp" is what accelerate does for
fsdp_activation_checkpointing."""


def _checkpointed(way: str | None, ping_pong: bool) -> tuple[Step, int, list[tuple[int, ...]]]:
    """A step, the kernel calls of its forwards, and the shapes of what it offloaded.

    Args:
        way: how layers are checkpointed; None for no checkpoints.
    """
    model = small_model().train()
    dispatcher = prepared(model, ping_pong)
    plan_head(model, CHUNK_BYTES)
    if way is not None:
        CHECKPOINTS[way](model)
    recording = dispatcher.recorder.listen("kernel")
    offloaded: list[tuple[int, ...]] = []

    def save_on_cpu(*_: Any, **__: Any) -> Any:  # without pinned memory, which takes a GPU
        return torch.autograd.graph.saved_tensors_hooks(
            lambda x: offloaded.append(tuple(x.shape)) or x.clone(), lambda x: x
        )

    with pytest.MonkeyPatch.context() as patch:
        for module in (
            torch.distributed.algorithms._checkpoint.checkpoint_wrapper,
            transformers.modeling_utils,
        ):
            patch.setattr(module, "save_on_cpu", save_on_cpu, raising=False)
        done, bound = step(model, dispatcher)
    assert len(bound.kept_results) == 0
    calls = sum(span.work.direction == "forward" for span in recording.take())
    batch = batch_of(dispatcher)
    with torch.no_grad():
        model.eval()(**batch)
    assert len(batch["distca_plan"].kept_results) == 0  # an evaluation keeps nothing
    return done, calls, offloaded


@pytest.mark.parametrize("ping_pong", [False, True], ids=["plain", "ping-pong"])
@pytest.mark.parametrize("way", CHECKPOINTS)
def test_core_attention_is_computed_once_whatever_checkpoints_the_layer(rank_pools, way, ping_pong):
    expected = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    plain, checkpointed = (
        rank_pools[2].run(_checkpointed, each_way, ping_pong) for each_way in (None, way)
    )
    for (_, plain_calls, _), (got, calls, offloaded) in zip(plain, checkpointed, strict=True):
        assert_same_step(got, expected)
        assert calls == plain_calls > 0
        if "offloaded" in way:  # what is kept is offloaded with the checkpoint
            # O [rows, 4 heads, 8] and log-sum-exp [rows, 4] of 2 layers, of all rows or of those of
            # either nano-batch.
            results = [shape for shape in offloaded if shape[1:] in ((4, 8), (4,))]
            assert len(results) == 2 * 2 * (1 + ping_pong)
            assert sum(shape[0] for shape in results if len(shape) == 3) // 2 in HALF


def _errors() -> list[str]:
    """Of a model that changes a kept result in place, and of a checkpoint around the attention
    alone.
    """
    changing, inside = (small_model().train() for _ in range(2))
    projection = changing.model.layers[1].self_attn.o_proj
    projection.forward = lambda x, forward=projection.forward: forward(x.mul_(2))
    for layer in inside.model.layers:
        layer.self_attn = checkpoint_wrapper(layer.self_attn)
    errors = []
    for model, checkpointing, kind in ((changing, False, RuntimeError), (inside, None, ValueError)):
        with pytest.raises(kind) as raised:
            # K/V rows alone move: no rank waits for results of one that has failed.
            step(model, prepared(model, checkpointing=checkpointing), [128, 128])
        errors.append(str(raised.value))
    return errors


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
        model.model.layers[1].mlp.register_forward_hook(
            lambda module, args, output: shapes.append(output.shape[1])
        )
    done, bound = step(model, dispatcher)
    return done, [bound.ran.layers, bound.ran.layers_in_turns, *shapes], told


def test_ranks_stay_in_step_where_only_one_has_a_hook_inside_a_layer(rank_pools):
    expected = reference_step(small_model(implementation="sdpa"), random_documents(LENGTHS))
    (got, free, nothing), (got_hooked, hooked, (message,)) = rank_pools[2].run(
        _with_a_hook_on_one_rank
    )
    assert_same_step(got, expected)
    assert_same_step(got_hooked, expected)
    assert free == [2, 2]
    assert nothing == []
    assert hooked[:2] == [2, 1]
    assert hooked[2] in HALF  # all rows of the rank, once
    assert (
        "ping-pong is off in every LlamaDecoderLayer, because a module inside has a hook" in message
    )
    assert "_with_a_hook_on_one_rank.<locals>.<lambda> on mlp (LlamaMLP)" in message


# Arguments of a layer


def test_arguments_are_split_by_shape_and_results_joined():
    sizes = (2, 4)
    hidden = torch.arange(12.0, requires_grad=True).view(1, 6, 2)
    stacked = torch.arange(72).view(4, 1, 6, 3)
    masked = hidden[None, :, :, :1]
    positions = torch.arange(6)
    argument = {
        "full": (hidden, [-hidden]),
        "stacked": stacked,
        "mask": masked,
        "positions": positions,
        "axes": positions.expand(3, 1, 6),
    }
    parts = split_argument("x", argument, sizes)
    assert parts[0]["full"][0].tolist() == [[[0, 1], [2, 3]]]
    assert (
        type(parts[0]["full"][0].grad_fn).__name__ == "SplitWithSizesBackward0"
    )  # joins gradients in one copy
    assert [list(part["stacked"].shape) for part in parts] == [[4, 1, 2, 3], [4, 1, 4, 3]]
    assert parts[1]["mask"].shape == (1, 1, 4, 1)
    assert parts[1]["axes"].tolist() == [[[2, 3, 4, 5]]] * 3
    joined = {
        name: join_results("x", tuple(part[name] for part in parts), sizes)
        for name in ("full", "stacked", "positions")
    }
    torch.testing.assert_close(joined["full"], argument["full"], rtol=0, atol=0)
    torch.testing.assert_close(joined["stacked"], argument["stacked"], rtol=0, atol=0)
    torch.testing.assert_close(joined["positions"], argument["positions"], rtol=0, atol=0)
    assert split_argument("x", [False, torch.tensor(5)], sizes) == ([False, 5], [False, 5])
    # States that layers leave to later ones.
    whole = UserDict({"old": (torch.arange(6).view(1, 1, 6, 1),)})
    first, second = split_argument("x", whole, sizes)
    assert second["old"][0].flatten().tolist() == [2, 3, 4, 5]
    first["new"] = (torch.zeros(1, 1, 2, 1),)
    second["new"] = (torch.ones(1, 1, 4, 1),)
    join_states(whole, (first, second))
    assert whole["new"][0].flatten().tolist() == [0, 0, 1, 1, 1, 1]
    assert list(whole) == ["old", "new"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.zeros(1, 1, 6, 6),
            r"memory of the decoder layer is a tensor of shape \[1, 1, 6, 6\]"
            r".*set planning=\{'ping_pong': False\}",
        ),
        (torch.zeros(2, 6), r"a tensor of shape \[2, 6\]"),
        (torch.zeros(3, 1, 6), r"a tensor of shape \[3, 1, 6\]"),
        (torch.zeros(3), r"a tensor of shape \[3\]"),
        (object(), r"is object, but"),
        (
            DynamicCache(),
            r"cannot use cached keys and values; set model\.config\.use_cache = False",
        ),
    ],
)
def test_what_cannot_be_split_or_joined(value, message):
    with pytest.raises(ValueError, match=message):
        split_argument("memory", value, (2, 4))
    with pytest.raises(ValueError, match="output of the decoder layer is float for"):
        join_results("output", (1.0, 2.0), (2, 4))

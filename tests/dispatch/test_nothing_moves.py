"""A micro-batch planned without exchange runs like stock padding-free training: counted, and compared to the bit."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

from hf_distca.dispatch.attention import disaggregated_attention
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.kernels import AttentionParams, TaskShapes
from hf_distca.models.kinds import layers_by_kind
from hf_distca.patches.layers import plan_layers
from hf_distca.plan import AttentionKind, MicroBatchPlan
from hf_distca.planner.micro_batch import plan_placed
from hf_distca.planner.settings import PlanSettings
from tests.counting import Counting, Sums, bound_plan, counted, empty_model, fake_group, without_numbers
from tests.dispatch.test_equality import assert_same_step, gradients_of, planned_step
from tests.dispatch.test_launches import MODELS, SMALL
from tests.models_and_batches import random_documents, reference_step, small_kinds, small_model

CPU = torch.device("cpu")
CONFIG = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
ON_RANKS = [[160, 96]] * 4
RANKS, RANK = len(ON_RANKS), 1


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with fake_group(RANKS) as group:
        yield group


def made(model_type: str, turns: bool, on_ranks: list[list[int]]) -> tuple[torch.nn.Module, MicroBatchPlan]:
    model = empty_model(model_type, **{**SMALL, **MODELS[model_type]})
    kinds = tuple(layers_by_kind(model))
    plan_layers(model)
    return model, plan_placed(on_ranks, PlanSettings(RANKS, 2048, kinds, balance_tolerance=0.3, ping_pong=turns))


def sums_of_layer(mode: Counting, layer: int) -> Sums:
    return replace(Sums.of([c for c in mode.calls if c.owner == "dispatch" and c.layer == layer]), views=0)


ONE_CALL_EACH_WAY = Sums(attention=2)
"""No launch, copy, gather, merge or exchange besides."""


@pytest.mark.parametrize(
    ("model_type", "checkpoint", "turns"),
    [
        ("llama", "none", False),
        ("llama", "reentrant", True),
        ("llama with LoRA", "non-reentrant", True),
        ("gemma3_text", "none", True),
        ("gemma3_text", "non-reentrant", False),
    ],
)
def test_one_kernel_call_a_layer_and_direction(group, model_type, checkpoint, turns):
    """With any checkpointing, and with one nano-batch or two."""
    model_type, *lora = model_type.split(" with ")
    with without_numbers():
        model, plan = made(model_type, turns, ON_RANKS)
        assert len(plan.nano_batches) == 1 + turns
        if lora:
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
            model.enable_input_require_grads()
        if checkpoint != "none":
            model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
        bound = bound_plan(plan, RANK, group)
        mode = counted(model, bound)
    layers = model.config.num_hidden_layers
    # In the last layer of each kind, whose backward is the first, the kernel makes a tensor that it uses again.
    inner = layers - len(bound.local)
    assert [sums_of_layer(mode, layer) for layer in range(inner)] == [ONE_CALL_EACH_WAY] * inner
    assert bound.runtime.exchange.size() == 0
    assert bound.ran.layers == layers * (1 if checkpoint == "none" else 2)
    assert bound.ran.layers_in_turns == 0
    assert len(bound.kept_results) == 0


def test_a_recomputation_calls_the_kernel_where_results_are_not_kept(group):
    with without_numbers():
        model, plan = made("llama", False, ON_RANKS)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        mode = counted(model, bound_plan(plan, RANK, group, keep_core_attention=False))
    assert sums_of_layer(mode, 1) == Sums(attention=3)


def test_views_of_a_layer(group):
    """Q, K, V and O as the model has them, [B, H, T, D], and as kernels take them, in both directions; two of LSE, of
    the kernel; two of O, of autograd, which has it as a result."""
    with without_numbers():
        model, plan = made("llama", False, ON_RANKS)
        mode = counted(model, bound_plan(plan, RANK, group))
    views = Counter(c.name for c in mode.calls if c.owner == "dispatch" and c.layer == 1 and c.what == "view")
    assert views == {"squeeze": 4, "transpose": 6, "unsqueeze": 4, "permute": 2, "detach": 2}


def test_binding_makes_no_routes(group, monkeypatch):
    """And copies one buffer to the device."""
    monkeypatch.setattr("hf_distca.dispatch.bound.make_routes", lambda *_: pytest.fail("made routes"))
    with without_numbers():
        _, plan = made("gemma3_text", False, ON_RANKS)
        with Counting() as mode:
            bound = bound_plan(plan, RANK, group)
    assert [call.name for call in mode.calls if call.launches] == ["copy_"]
    assert [tasks.shapes.q_lens for tasks in bound.local.values()] == [(160, 96)] * 2
    full, window = (160 * 161 + 96 * 97) // 2, 96 * 97 // 2 * 2 + 64 * 96
    assert {kind.window: tasks.pairs for kind, tasks in bound.local.items()} == {None: full, 96: window}


@pytest.mark.parametrize("turns", [False, True], ids=["one", "two"])
def test_ranks_keep_step_where_one_kind_of_layer_moves(group, turns):
    """Full attention moves, sliding windows do not: these exchange nothing on any rank, the others alike on all."""
    exchanges = []
    for rank in range(RANKS):
        with without_numbers():
            model, plan = made("gemma3_text", turns, [[1024, 1024], *[[512] * 4] * 3])
            bound = bound_plan(plan, rank, group)
            mode = counted(model, bound)
        assert [kind.window for kind in bound.local] == [96]
        exchanges.append([sums_of_layer(mode, layer).exchanges for layer in range(5)])
        for layer in (1, 3):
            sums = sums_of_layer(mode, layer)
            assert (sums.attention, sums.exchanges) == (2 * len(bound.nano_batches), 0)
    assert exchanges == [exchanges[0]] * RANKS
    assert min(exchanges[0][::2]) > 0


def _step(on_ranks: list[list[int]], turns: bool) -> tuple:
    settings = PlanSettings(
        2, 256, small_kinds(24, None), balance_block_size=8, balance_tolerance=0.3, ping_pong=turns
    )
    dispatcher = Dispatcher(settings, CPU)
    model = small_model("gemma3_text", **CONFIG)
    plan_layers(model)
    plan = plan_placed(on_ranks, settings)
    loss = planned_step(model, plan, dispatcher, random_documents([n for row in on_ranks for n in row]))
    local = [kind.window for kind in dispatcher.bind(plan).local]
    return (loss, gradients_of(model)), local, len(plan.nano_batches)


@pytest.mark.parametrize("turns", [False, True], ids=["one", "two"])
@pytest.mark.parametrize(
    ("on_ranks", "expected"),
    [([[60, 40], [60, 40]], [24, None]), ([[70, 64], [32, 38, 31, 33]], [24])],
    ids=["nothing moves", "full attention moves"],
)
def test_equality(rank_pools, on_ranks, expected, turns):
    of_one = reference_step(
        small_model("gemma3_text", "sdpa", **CONFIG), random_documents([n for row in on_ranks for n in row])
    )
    for got, local, nano_batches in rank_pools[2].run(_step, on_ranks, turns):
        assert (local, nano_batches) == (expected, 1 + turns)
        assert_same_step(got, of_one)


def _results(autocast: bool, softcap: float | None) -> tuple:
    """O and gradients of disaggregated attention, and those of the kernel itself; and what was measured."""
    kind = AttentionKind(None, 4, 2, 8, 8)
    settings = PlanSettings(1, 64, (kind,))
    dispatcher = Dispatcher(settings, CPU)
    bound, params = dispatcher.bind(plan_placed([[20, 11]], settings)), AttentionParams(0.3, softcap=softcap)
    recording = dispatcher.recorder.listen("phase", "kernel", "send", "wait")
    torch.manual_seed(0)
    inputs = [torch.randn(31, heads, 8).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    do = torch.randn(31, 4, 8).bfloat16()
    module = torch.nn.Identity()
    module.layer_idx = 3
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        output = disaggregated_attention(*inputs, None, bound, params, module)
        output.backward(do)
    shapes, qkv = TaskShapes.build([20, 11], [20, 11], CPU), [x.detach() for x in inputs]
    o, lse = dispatcher.kernel.forward(*qkv, shapes, params)
    expected = [o, *dispatcher.kernel.backward(do, *qkv, o, lse, shapes, params)]
    spans = [(s.kind, s.part, *s.work, s.pairs) for s in recording.take()]
    return [output.detach(), *(x.grad for x in inputs)], expected, spans


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("autocast", [False, True])
def test_what_the_kernel_gives_to_the_bit(rank_pools, autocast, softcap):
    ((got, expected, spans),) = rank_pools[1].run(_results, autocast, softcap)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert spans == [
        (kind, part, 3, 0, direction, pairs)
        for direction in ("forward", "backward")
        for kind, part, pairs in (("kernel", "local", 20 * 21 // 2 + 11 * 12 // 2), ("phase", "run local", 0))
    ]

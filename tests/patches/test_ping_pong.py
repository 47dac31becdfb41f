"""Ping-pong execution: same loss and gradients, exchanges in the order that hides them, one call of one layer."""

from collections import UserDict

import pytest
import torch
import torch.distributed as dist
from transformers import DynamicCache

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.models.kinds import layers_by_kind
from hf_distca.patches.layers import plan_layers
from hf_distca.patches.split import join_results, join_states, split_argument
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed
from hf_distca.planner.settings import PlanSettings
from tests.dispatch.test_equality import cut_rows, planned_step
from tests.models_and_batches import random_documents, reference_step, relative_error, small_kinds, small_model

pytestmark = pytest.mark.usefixtures("backward_thread")

LENGTHS = [120, 7, 90, 33, 64, 1, 48]
ROWS = [[64, 30, 60], [100, 40, 2, 31, 77]]
GEMMA = {
    "sliding_window": 24,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}
MODELS = {
    "llama": ({}, "sdpa"),
    "qwen3": ({}, "sdpa"),
    "mistral": ({"sliding_window": 24}, "sdpa"),
    "gemma2": ({"sliding_window": 24, "query_pre_attn_scalar": 8}, "eager"),
    "mixtral": ({"num_local_experts": 4}, "sdpa"),
}
SHARING = {  # the last layers read keys and values that earlier ones made
    "gemma3n_text": ({**GEMMA, "num_kv_shared_layers": 2, "laurel_rank": 4}, "sdpa"),
    "gemma4_text": ({**GEMMA, "num_kv_shared_layers": 2, "global_head_dim": 16}, "sdpa"),
}
GLOBAL_HEADS = ({**GEMMA, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}, "sdpa")


def _dispatcher(model=None, **options) -> Dispatcher:
    kinds = small_kinds() if model is None else tuple(layers_by_kind(model))
    settings = PlanSettings(
        ranks=dist.get_world_size(), tokens_per_rank=4096, kinds=kinds, balance_block_size=8, ping_pong=True
    )
    return Dispatcher(settings, torch.device("cpu"), **options)


def _step(model_type, config, fixed, checkpointing, keep_core_attention, keep_received):
    model = small_model(model_type, **config).train()
    dispatcher = _dispatcher(model, keep_received=keep_received, keep_core_attention=keep_core_attention)
    plan_layers(model)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    if fixed:
        plan = plan_placed(ROWS, dispatcher.settings)
        documents = random_documents([length for row in ROWS for length in row])
    else:
        plan = plan_micro_batch(LENGTHS, dispatcher.settings)
        documents = random_documents(LENGTHS)
    assert len(plan.nano_batches) == 2
    loss = planned_step(model, plan, dispatcher, documents)
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _assert_equals_one_process(rank_pools, model_type, config, other, fixed, *options, ranks=2):
    lengths = [length for row in ROWS for length in row] if fixed else LENGTHS
    loss, grads = reference_step(small_model(model_type, other, **config), random_documents(lengths))
    for got_loss, got in rank_pools[ranks].run(_step, model_type, config, fixed, *options):
        assert got_loss == pytest.approx(loss, rel=1e-6)
        assert got.keys() == grads.keys()
        assert max(relative_error(got[name], grads[name]) for name in grads) < 1e-5


OPTIONS = {  # checkpointing, keep_core_attention, keep_received
    "plain": (None, True, False),
    "keep-received": (None, True, True),
    "checkpoint": (False, True, False),
    "checkpoint-recompute": (False, False, True),
    "reentrant": (True, True, False),
}


@pytest.mark.parametrize(
    ("layout", "model_type", "options"),
    [  # all options in both layouts, each model in both
        ("joint", "llama", "plain"),
        ("joint", "qwen3", "keep-received"),
        ("joint", "mistral", "checkpoint"),
        ("joint", "gemma2", "checkpoint-recompute"),
        ("joint", "mixtral", "reentrant"),
        ("fixed", "llama", "reentrant"),
        ("fixed", "qwen3", "plain"),
        ("fixed", "mistral", "keep-received"),
        ("fixed", "gemma2", "checkpoint"),
        ("fixed", "mixtral", "checkpoint-recompute"),
    ],
)
def test_equals_one_process(rank_pools, layout, model_type, options):
    _assert_equals_one_process(rank_pools, model_type, *MODELS[model_type], layout == "fixed", *OPTIONS[options])


@pytest.mark.parametrize("model_type", SHARING)
@pytest.mark.parametrize(("checkpointing", "keep_core_attention"), [(None, True), (False, True), (False, False)])
def test_layers_that_share_keys_and_values(rank_pools, model_type, checkpointing, keep_core_attention):
    options = (False, checkpointing, keep_core_attention, False)
    _assert_equals_one_process(rank_pools, model_type, *SHARING[model_type], *options)


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_layers_with_heads_of_their_own(rank_pools, checkpointing):
    """Float32 itself is 1.3e-5 off for this model: planned gradients may be twice as far from those in float64."""
    config, other = GLOBAL_HEADS
    documents = random_documents([length for row in ROWS for length in row])
    model = small_model("gemma4_text", other, **config)
    loss, stock = reference_step(model, documents)
    _, exact = reference_step(model.double(), documents)
    stock_error = max(relative_error(stock[name], exact[name]) for name in exact)
    for got_loss, got in rank_pools[2].run(_step, "gemma4_text", config, True, checkpointing, True, False):
        assert got_loss == pytest.approx(loss, rel=1e-6)
        assert max(relative_error(got[name], exact[name]) for name in exact) < 2 * stock_error


def test_three_ranks(rank_pools):
    _assert_equals_one_process(rank_pools, "llama", {}, "sdpa", False, *OPTIONS["plain"], ranks=3)


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


def _events(checkpointing: bool, keep: bool) -> tuple[list[str], list[str]]:
    """What happened in one step of one layer whose K/V rows move only, and what its schedules say."""
    dispatcher = _dispatcher(keep_core_attention=keep)
    model = small_model(num_hidden_layers=1).train()
    plan_layers(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # One document over both ranks in each nano-batch: rank 1 needs the K/V rows of rank 0.
    plan = plan_micro_batch([128, 128], dispatcher.settings)
    events: list[str] = []
    exchange, kernel = dispatcher.exchange, dispatcher.kernel
    buffer_of, forward, backward = exchange.buffer, kernel.forward, kernel.backward

    def recorded_buffer(slot, route, like):
        buffer = buffer_of(slot, route, like)
        return RecordedBuffer(buffer, slot, events) if route.crossing else buffer

    exchange.buffer = recorded_buffer
    kernel.forward = lambda *args: events.append("compute") or forward(*args)
    kernel.backward = lambda *args: events.append("compute") or backward(*args)
    documents = random_documents([128, 128])
    batch = cut_rows(plan, dist.get_rank(), documents)
    bound = dispatcher.bind(plan)
    loss = model(**batch, labels=batch["shift_labels"], distca_plan=bound).loss
    events.append("backward")
    loss.backward()
    (first,), (second,) = (nano.routes.values() for nano in bound.nano_batches)
    planned = _in_turns([(0, first, first.forward), (1, second, second.forward)])
    planned += ["backward"]
    planned += _in_turns([(1, second, second.backward["nothing"]), (0, first, first.backward["nothing"])])
    return events, planned


def _in_turns(schedules) -> list[str]:
    """What schedules say when one runs up to its pause, then the other."""
    events: list[str] = []
    left = [(index, routes, list(schedule)) for index, routes, schedule in schedules]
    while any(phases for _, _, phases in left):
        for index, routes, phases in left:
            while phases:
                phase = phases.pop(0)
                for verb, transfers in (("wait", phase.wait), ("send", phase.send)):
                    if verb == "send":
                        events += ["compute"] * len(phase.run)
                    for transfer in transfers:
                        if (routes.queries if transfer.rows == "queries" else routes.keys[0]).crossing:
                            events.append(f"{verb} {transfer.rows}{' back' if transfer.back else ''} of {index}")
                if phase.pause:
                    break
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
    for events, planned in plain:
        assert events == planned
    for events, _ in (*plain, *kept):
        assert [event for event in events if event != "compute"] == EXCHANGES
    # Local tasks of both nano-batches come when both exchanges have started.
    forward = plain[1][0][: plain[1][0].index("backward")]
    sent, waited = (["send keys of 0", "send keys of 1"], ["wait keys of 0", "compute", "wait keys of 1", "compute"])
    assert forward == [*sent, "compute", "compute", *waited]
    # Recomputing costs an exchange of each nano-batch, and the forward's kernel calls.
    before, after = (
        [sum(event.startswith(name) for event in events) for name in ("send", "compute")]
        for events in (kept[0][0], recomputed[0][0])
    )
    computed = kept[0][0][: kept[0][0].index("backward")].count("compute")
    assert after == [before[0] + 2, before[1] + computed]


def _recorded() -> tuple[dict, dict]:
    """The phases that were recorded of one step of two layers, and those of the schedules, by core attention."""
    dispatcher = _dispatcher()
    model = small_model().train()
    plan_layers(model)
    documents = random_documents(LENGTHS)
    plan = plan_micro_batch(LENGTHS, dispatcher.settings)
    batch = cut_rows(plan, dist.get_rank(), documents)
    bound = dispatcher.bind(plan)
    recording = dispatcher.recorder.listen()
    model(**batch, labels=batch["shift_labels"], distca_plan=bound).loss.backward()
    recorded: dict = {}
    spans = recording.take()
    for span in spans:
        if span.kind == "phase":
            recorded.setdefault(tuple(span.work), []).append(span.part)
        else:  # kernel calls and waits lie within a phase of their core attention
            assert any(
                phase.kind == "phase"
                and phase.work == span.work
                and phase.begin <= span.begin <= span.end <= phase.end
                for phase in spans
            )
    planned = {}
    for nano in bound.nano_batches:
        ((_, routes),) = nano.routes.items()
        for layer in range(model.config.num_hidden_layers):
            planned[layer, nano.index, "forward"] = [phase.name for phase in routes.forward]
            planned[layer, nano.index, "backward"] = [phase.name for phase in routes.backward["nothing"]]
    return recorded, planned


def test_every_phase_of_every_layer_is_recorded(rank_pools):
    for recorded, planned in rank_pools[2].run(_recorded):
        assert recorded == planned


def _seen_from_outside(ping_pong: bool) -> dict:
    dispatcher = _dispatcher()
    model = small_model("mixtral", num_local_experts=4, output_router_logits=True).train()
    calls = []
    if ping_pong:
        plan_layers(model)
    model.model.layers[0].register_forward_hook(lambda module, args, output: calls.append(list(output.shape)))
    plan = plan_micro_batch(LENGTHS, dispatcher.settings)
    batch = cut_rows(plan, dist.get_rank(), random_documents(LENGTHS))
    output = model(**batch, labels=batch["shift_labels"], distca_plan=dispatcher.bind(plan), output_hidden_states=True)
    output.loss.backward()
    return {
        "calls": calls,
        "router_logits": [logits.detach() for logits in output.router_logits],
        "hidden_states": [states.detach() for states in output.hidden_states],
        "aux_loss": output.aux_loss.item(),
        "gate": model.model.layers[0].mlp.gate.weight.grad,
    }


def test_routers_hidden_states_and_hooks_see_what_they_see_without(rank_pools):
    plain, in_turns = (rank_pools[2].run(_seen_from_outside, ping_pong)[0] for ping_pong in (False, True))
    assert in_turns["calls"] == plain["calls"]
    assert in_turns["aux_loss"] == pytest.approx(plain["aux_loss"], rel=1e-6)
    torch.testing.assert_close(in_turns["gate"], plain["gate"], rtol=1e-4, atol=1e-6)
    for key in ("router_logits", "hidden_states"):
        assert len(in_turns[key]) == len(plain[key])
        for got, expected in zip(in_turns[key], plain[key], strict=True):
            torch.testing.assert_close(got, expected)


def test_layers_keep_their_name_and_stock_behaviour():
    model, plain = small_model(), small_model(implementation="sdpa")
    (subclass,) = plan_layers(model)
    assert subclass.__name__ == "LlamaDecoderLayer"
    assert plan_layers(model) == [subclass]  # once is enough
    tokens = torch.arange(3, 15)[None]
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)


def test_arguments_are_split_by_shape():
    sizes = (2, 4)
    hidden = torch.arange(12).view(1, 6, 2)
    first, second = split_argument("hidden_states", hidden, sizes)
    assert first.tolist() == [[[0, 1], [2, 3]]]
    assert second.tolist() == [[[4, 5], [6, 7], [8, 9], [10, 11]]]
    assert [part.tolist() for part in split_argument("cache_position", torch.arange(6), sizes)] == [
        [0, 1],
        [2, 3, 4, 5],
    ]
    (cos, sin), _ = split_argument("position_embeddings", (hidden, -hidden), sizes)
    assert (cos.shape, sin.shape) == ((1, 2, 2), (1, 2, 2))
    assert split_argument("per_type", {"full": hidden}, sizes)[1]["full"].shape == (1, 4, 2)
    assert split_argument("use_cache", False, sizes) == (False, False)
    assert split_argument("num_items_in_batch", torch.tensor(5), sizes) == (5, 5)


def test_gradients_of_nano_batches_are_joined_in_one_copy():
    hidden = torch.zeros(1, 6, 2, requires_grad=True)
    first, second = split_argument("hidden_states", hidden, (2, 4))
    assert type(first.grad_fn).__name__ == type(second.grad_fn).__name__ == "SplitWithSizesBackward0"


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (torch.zeros(1, 1, 6, 6), r"a tensor of shape \[1, 1, 6, 6\]"),
        (torch.zeros(2, 6), r"a tensor of shape \[2, 6\]"),
        (torch.zeros(3), r"a tensor of shape \[3\]"),
        (object(), "object"),
    ],
)
def test_argument_that_cannot_be_split(value, described):
    with pytest.raises(ValueError, match=rf"layer's memory \({described}\).*set ping_pong=False"):
        split_argument("memory", value, (2, 4))


def test_stacked_hidden_states():
    whole = torch.arange(4 * 6 * 3).view(4, 1, 6, 3)
    parts = split_argument("x", whole, (2, 4))
    assert [list(part.shape) for part in parts] == [[4, 1, 2, 3], [4, 1, 4, 3]]
    assert torch.equal(parts[1], whole[:, :, 2:])
    assert torch.equal(join_results("x", parts, (2, 4)), whole)


def test_states_that_layers_leave_to_later_ones():
    whole = UserDict({"old": (torch.arange(6).view(1, 1, 6, 1),)})
    first, second = split_argument("x", whole, (2, 4))
    assert second["old"][0].flatten().tolist() == [2, 3, 4, 5]
    first["new"] = (torch.zeros(1, 1, 2, 1), torch.ones(1, 1, 2, 1))
    second["new"] = (torch.ones(1, 1, 4, 1), torch.zeros(1, 1, 4, 1))
    join_states(whole, (first, second))
    assert [state.flatten().tolist() for state in whole["new"]] == [[0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]
    assert list(whole) == ["old", "new"]


def test_cache():
    with pytest.raises(ValueError, match=r"cannot use cached keys and values; set model\.config\.use_cache = False"):
        split_argument("past_key_values", DynamicCache(), (2, 4))


def test_output_that_cannot_be_joined():
    with pytest.raises(ValueError, match=r"cannot join the decoder layer's output.*got float; set"):
        join_results("output", (1.0, 2.0), (2, 4))

"""Steps that are only counted, against literal bytes and against what a process takes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from hf_distca.cli.model import config_of_shape
from hf_distca.dispatch import rows
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.memory import counted_step, counter
from hf_distca.memory.counted_step import (
    Peaks,
    bound_plan,
    busiest_rank,
    count_core_attention,
    count_peaks,
    run_core_attention,
)
from hf_distca.memory.counter import MemoryCounter
from hf_distca.memory.live import LiveMemory
from hf_distca.memory.model_state import ModelState, model_state
from hf_distca.memory.simulated import gpu_memory
from hf_distca.memory.stand_ins import (
    COUNTED_FUNCTIONS,
    FlashMemory,
    RecurrenceMemory,
    grouped_products,
    unequal_chunks,
    unequal_results,
)
from hf_distca.models.fake import fake_tensors, model_after, model_of_config
from hf_distca.models.kinds import layers_by_kind
from hf_distca.models.mixing_modules import DELTA_RULE, SCAN
from hf_distca.models.shape import model_shape
from hf_distca.patches import mixing_functions
from hf_distca.patches.chunked_mlp import results_of_chunks
from hf_distca.patches.layers import plan_layers
from hf_distca.patches.prepare import prepare_model
from hf_distca.plan import AttentionKind
from hf_distca.plan.routes import make_routes
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.simulation import with_servers
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.shapes import CHUNK, ModelShape
from hf_distca.predict.step_costs import on_a_gpu
from hf_distca.run import RunSpec
from hf_distca.sim.strategies import all_strategies
from tests.counting import Counting
from tests.models_and_batches import SMALL, small_kinds, small_model, small_run
from tests.survey.tiny import tiny_config

TOKENS, HIDDEN, HEADS = 1024, 32, 4
SLOTS_IN_HOPS = 5
"""Stages that are in memory at once where rows are forwarded."""
EMPTY = small_run(PlanSettings(1, 8192, small_kinds()))
FLASH = small_run()
CHECKPOINTING = small_run(checkpointing={})
KEPT_O = TOKENS * (HIDDEN + HEADS) * 4
"""A row of O and the log-sum-exps of each token of a layer."""


def counted(run: RunSpec, *, dtype: torch.dtype = torch.float32, **config) -> dict[str, int]:
    model = model_of_config(AutoConfig.for_model("llama", **SMALL | config), dtype)
    return count_peaks(
        model, plan_micro_batch([TOKENS], PlanSettings(1, TOKENS, small_kinds())), 0, run
    ).on_device


def test_checkpointed_layers():
    less, more = (counted(CHECKPOINTING, num_hidden_layers=layers) for layers in (2, 3))
    assert less["kept O"] == 2 * KEPT_O
    assert more["kept O"] == 3 * KEPT_O
    assert more["activations"] - less["activations"] == TOKENS * HIDDEN * 4
    assert less["backward"] > less["loss"]  # a layer is computed again at the peak
    assert "kept O" not in counted(FLASH)
    parts = counted(small_run(checkpointing={"every_n_layers": 2}), num_hidden_layers=4)
    assert parts["kept O"] == 2 * KEPT_O


@pytest.mark.parametrize("run", [FLASH, CHECKPOINTING], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_next"])
def test_a_few_chunks_of_the_loss_take_what_all_take(monkeypatch, model_type, run):
    """Of 8 or 9 chunks, the last with 24 rows, three are counted."""
    kept = []

    def parts(chosen):
        model = model_of_config(tiny_config(model_type), torch.float32)
        chunk_rows = 125
        chunk_bytes = 4 * model.config.vocab_size * chunk_rows
        prepare_model(model, small_run(loss_chunk_bytes=chunk_bytes))
        settings = PlanSettings(1, TOKENS, tuple(layers_by_kind(model)))
        monkeypatch.setattr(
            counted_step, "unequal_chunks", lambda *counts: kept.append(chosen(*counts)) or kept[-1]
        )
        return count_peaks(model, plan_micro_batch([TOKENS], settings), 0, run).on_device

    few, all_chunks = parts(unequal_chunks), parts(lambda count, rows: range(0, count, rows))
    assert few == all_chunks
    assert [list(starts) for starts in kept] == [[0, 125, 1000], list(range(0, 1001, 125))]


@pytest.mark.parametrize(
    ("model_type", "run", "chunk_rows"),
    [
        ("llama", FLASH, 65),
        ("llama", CHECKPOINTING, 341),
        ("qwen3", CHECKPOINTING, 100),
        ("qwen3", small_run(mixed=True, checkpointing={}, accumulates=False), 128),
        ("gemma2", small_run(checkpointing={"use_reentrant": True}), 200),
    ],
)
def test_a_few_chunks_of_a_layer_take_what_all_take(monkeypatch, model_type, run, chunk_rows):
    """Of 4 to 16 chunks, the last of which may be shorter, four are counted."""
    runs = []

    def peaks(chosen):
        config = tiny_config(model_type)
        config.intermediate_size = 8 * config.hidden_size
        model = model_of_config(config, torch.float32)
        prepare_model(model, small_run(mlp_chunk_rows=chunk_rows, device_memory=10**9))
        mlp = model.model.layers[0].mlp.act_fn
        runs.append([])
        mlp.register_forward_hook(lambda _, args, __: runs[-1].append(args[0].shape[-2]))
        settings = PlanSettings(1, TOKENS, tuple(layers_by_kind(model)))
        monkeypatch.setattr(counted_step, "unequal_results", chosen)
        return count_peaks(model, plan_micro_batch([TOKENS], settings), 0, run)

    few, all_chunks = peaks(unequal_results), peaks(results_of_chunks)
    assert few == all_chunks
    chunks = -(-TOKENS // chunk_rows)
    counted_runs, all_runs = map(len, runs)
    assert counted_runs * chunks == all_runs * min(chunks, 4)


def test_exchange_buffers_of_a_step_count_although_the_backward_makes_some_of_them():
    """Without checkpointing the peak is in the loss, before the backward's buffers are made."""
    settings = PlanSettings(2, TOKENS, small_kinds(), 4, exchange_buffer_bytes=200 * 128)
    plan = plan_micro_batch([900, 500, 300, 200, 100, 40], settings)
    model = model_of_config(AutoConfig.for_model("llama", **SMALL), torch.float32)
    plan_layers(model)
    parts = [count_peaks(model, plan, rank, FLASH).on_device for rank in (0, 1)]
    assert [bytes_by_part["exchange buffers"] for bytes_by_part in parts] == [129024, 159744]
    assert all("backward" not in bytes_by_part for bytes_by_part in parts)


def test_row_numbers_of_a_plan_take_the_memory_of_their_copies(monkeypatch):
    plan = plan_micro_batch([900, 124], PlanSettings(1, TOKENS, small_kinds()))
    taken = []
    for copied in (1000, 10):
        monkeypatch.setattr(rows, "CHUNK_BYTES", copied)
        live = LiveMemory()
        bound = bound_plan(plan, 0, FLASH, live)
        live.begin()
        taken.append((bound.rows, dict(live.peak)))
    # An int32 table of where both documents begin, and where they end: 12 bytes.
    assert taken == [(TOKENS, {"plan": 1000}), (TOKENS, {"plan": 12})]


def test_the_peak_is_when_tensors_beside_exchange_buffers_take_the_most():
    with fake_tensors(), LiveMemory() as live:
        kept = torch.empty(200, dtype=torch.uint8)
        freed = torch.empty(100, dtype=torch.uint8)
        del freed
        with live.making("exchange buffers"):
            buffer = torch.empty(150, dtype=torch.uint8)
        assert live.peak == {"activations": 300}
        assert (kept.nbytes, buffer.nbytes) == (200, 150)


def test_weights_and_gradients_are_those_of_the_model():
    parameters = sum(p.numel() for p in small_model().parameters())
    buffers = 2 * 4 * 4  # inverse frequencies of the position embedding, and as they were at first
    parts = counted(FLASH)
    assert parts["weights"] == parameters * 4 + buffers
    assert parts["gradients"] == parameters * 4
    assert "exchange buffers" not in parts  # a rank alone sends nothing
    assert counted(FLASH, dtype=torch.bfloat16)["gradients"] == parameters * 2


@pytest.mark.parametrize(("kernel", "sums_rows"), [("torch_varlen", True), ("cpu", False)])
def test_rows_are_added_up_as_by_the_device_of_the_kernel(kernel, sums_rows):
    (kind,) = small_kinds()
    plan = plan_micro_batch([3 * TOKENS], PlanSettings(3, TOKENS, small_kinds()))
    bound = bound_plan(plan, 2, small_run(kernel=kernel), LiveMemory())
    with fake_tensors(), Counting(torch.device("cpu")) as counting:
        run_core_attention(bound, kind, torch.float32)
    assert ("sum_rows" in {call.name for call in counting.calls}) == sums_rows


@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear", "bamba"])
def test_mixing_layers_take_what_their_kernels_take(model_type, monkeypatch):
    runs = []
    compute = RecurrenceMemory.__call__
    states = []
    monkeypatch.setattr(
        RecurrenceMemory, "__call__", lambda *args, **kw: runs.append(1) or compute(*args, **kw)
    )
    # As where mamba_ssm is installed, whose kernel for a whole module must not be launched.
    monkeypatch.setattr(
        mixing_functions,
        "_takes_packed",
        lambda stock, name: getattr(stock, "packed_by", name) == name,
    )
    for documents in ([2 * TOKENS], [TOKENS, TOKENS], 4 * [TOKENS // 2]):
        model = model_of_config(tiny_config(model_type), torch.float32)
        settings = PlanSettings(2, TOKENS, tuple(layers_by_kind(model)), document_layout="auto")
        plan_layers(model)
        parts = count_peaks(
            model, plan_micro_batch(documents, settings), 1, CHECKPOINTING
        ).on_device
        states.append(parts["kept O"])
    shape = model_shape(model).mixing
    # Of a document that is cut a checkpointed layer keeps the halo and the state before the
    # segment.
    rows, columns = shape.state
    kept = 4 * (shape.width * shape.channels + shape.heads * rows * columns)
    assert states[0] - states[1] == shape.layers * kept
    assert (
        len(runs) == 3 * 2 * shape.layers
    )  # twice a checkpointed layer, which packs its documents


def test_a_recurrence_keeps_what_it_reads_and_makes_states_of_chunks():
    with fake_tensors(), LiveMemory() as live:
        query, key, value = (torch.empty(1, 4 * CHUNK, 2, 8, requires_grad=True) for _ in range(3))
        g, beta = (torch.empty(1, 4 * CHUNK, 2, requires_grad=True) for _ in range(2))
        live.begin()
        before = live.peak.total()
        out, final = COUNTED_FUNCTIONS[DELTA_RULE](
            query, key, value, g=g, beta=beta, output_final_state=True
        )
        inverse = 4 * CHUNK * 2 * CHUNK * 4
        states = 4 * 2 * 8 * 8 * 4
        assert (
            live.peak.total() - before == inverse + states + 4 * CHUNK * 2 * 8 * 4 + 2 * 8 * 8 * 4
        )
        assert out.shape == value.shape
        assert final.shape == (1, 2, 8, 8)
        assert final.dtype == torch.float32
        live.begin()
        before = live.peak.total()
        out.backward(out)
        assert g.grad.shape == g.shape
        assert key.grad.shape == key.shape
        # Two states of each chunk, a gradient of each input, and one of the last state.
        assert (
            live.peak.total() - before
            == 2 * states + 4 * 4 * CHUNK * 2 * (3 * 8 + 2) + 2 * 8 * 8 * 4
        )
        shapes = (4, 16), (4,), (4,), (1, 8), (1, 8)
        hidden, dt, A, B, C = (
            torch.empty(1, CHUNK + 36, *shape, dtype=torch.bfloat16) for shape in shapes
        )
        scan = COUNTED_FUNCTIONS[SCAN]
        live.begin()
        before = live.peak.total()
        out = scan(hidden, dt, A, B, C, return_final_states=False)
        # The result, a state of each of two chunks, and the last state in float32.
        assert live.peak.total() - before == 2 * (CHUNK + 36) * 4 * 16 + (2 * 2 + 4) * 4 * 16 * 8
        assert out.shape == hidden.shape
        _, final = scan(hidden, dt, A, B, C, return_final_states=True)
        assert final.shape == (1, 4, 16, 8)
        assert final.dtype == torch.float32


def test_core_attention_takes_what_flash_attention_takes():
    """In bfloat16, with two query heads for each key-value head."""
    rows, keys = 1000, 3000
    with fake_tensors(), LiveMemory() as live:
        q, k, v = (
            torch.empty(*shape, dtype=torch.bfloat16)
            for shape in ((rows, 4, 16), (keys, 2, 16), (keys, 2, 8))
        )
        live.begin()
        before = live.peak.total()
        o, lse = FlashMemory().forward(q, k, v)
        forward = live.peak.total() - before
        live.begin()
        before = live.peak.total()
        gradients = FlashMemory().backward(o, q, k, v, o, lse)
        backward = live.peak.total() - before
    assert o.shape == (rows, 4, 8)
    assert o.dtype == torch.bfloat16
    assert lse.shape == (rows, 4)
    assert lse.dtype == torch.float32
    assert forward == rows * 4 * (2 * 8 + 4)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]
    gradient_bytes = 2 * (rows * 4 * 16 + keys * 2 * (16 + 8))
    # dQ and a sum of each row in float32, and dK and dV for every query head.
    assert backward == gradient_bytes + 4 * rows * 4 * (16 + 1) + 2 * keys * 4 * (16 + 8)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "granitemoehybrid"])
def test_models_of_experts_are_counted_without_values(monkeypatch, model_type):
    """Transformers 5.17 reads in the backward how many rows each expert has, which fake tensors do
    not have.
    """
    monkeypatch.setattr(
        torch.ops.transformers, "grouped_mm_fallback", lambda *_, offs: offs.tolist()
    )
    model = model_of_config(tiny_config(model_type), torch.float32)
    settings = PlanSettings(1, TOKENS, tuple(layers_by_kind(model)))
    parts = count_peaks(model, plan_micro_batch([TOKENS], settings), 0, CHECKPOINTING).on_device
    assert parts["gradients"] == 4 * model.num_parameters()


def test_products_of_experts_are_counted_without_values():
    with fake_tensors(), LiveMemory() as live:
        rows, weights = (
            torch.empty(*shape, requires_grad=True) for shape in ((1000, 16), (4, 16, 24))
        )
        ends = torch.empty(4)
        live.begin()
        before = live.peak.total()
        out = grouped_products(rows, weights, ends)
        assert out.shape == (1000, 24)
        assert live.peak.total() - before == 4 * 1000 * 24
        live.begin()
        before = live.peak.total()
        out.backward(out)
        assert live.peak.total() - before == 4 * (1000 * 16 + 4 * 16 * 24)
        # Autocast may leave rows in another dtype than the weights.
        assert grouped_products(rows.bfloat16(), weights, ends).dtype == torch.float32


def test_exchange_buffers_of_forwarded_rows_are_as_the_setting_says():
    kind = AttentionKind(q_heads=1, kv_heads=1, dim_qk=16, dim_v=16)
    buffer = 1 << 15
    settings = PlanSettings(
        4, TOKENS, (kind,), 4, balance_tolerance=0.1, exchange_buffer_bytes=buffer, ranks_per_node=2
    )
    plan = plan_micro_batch([4 * TOKENS], settings)
    (nano,) = plan.nano_batches
    most = 0
    for rank in (1, 2):  # one of each node
        stages = make_routes(nano.plans[kind], rank).stages
        assert len(stages) > 2 * SLOTS_IN_HOPS
        assert any(stage.forwarded.send_counts.any() for stage in stages)
        most = max(
            most, count_core_attention(plan, kind, torch.float32, rank, FLASH)["exchange buffers"]
        )
    assert (
        6 * buffer < most - 4096 <= 10 * buffer
    )  # six times would do without the second hop; no queries: a page


@pytest.mark.parametrize(("lengths", "rank"), [([8, 12, 4], 1), ([12, 4, 8], 0)])
def test_the_busiest_rank_exchanges_the_most(lengths, rank):
    """Of three ranks with 8 rows each, one sends four rows of a document to the next, and one
    exchanges nothing.
    """
    unbalanced = {"document_layout": "fixed", "balance_tolerance": 100.0, "ping_pong": False}
    settings = PlanSettings(3, 8, (AttentionKind(),), balance_block_size=1, **unbalanced)
    assert busiest_rank(plan_micro_batch(lengths, settings), settings) == rank


def test_a_copy_of_a_model_takes_what_the_model_does():
    plan = plan_micro_batch([TOKENS], PlanSettings(1, TOKENS, small_kinds()))
    model = small_model()
    expected = counted(CHECKPOINTING)
    assert count_peaks(model_after(model), plan, 0, CHECKPOINTING).on_device == expected
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(
        *args, **kwargs
    )  # as a fused loss puts it on a model
    assert count_peaks(model_after(model), plan, 0, CHECKPOINTING).on_device == expected


@pytest.mark.parametrize("checkpointing", [None, {}], ids=["plain", "checkpointing"])
@pytest.mark.parametrize(
    ("model_type", "config", "period"),
    [
        ("llama", {}, 1),
        (
            "gemma2",
            {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 4},
            2,
        ),
    ],
)
def test_a_deep_model_is_counted_by_a_few_layers(
    monkeypatch, model_type, config, period, checkpointing
):
    deep = AutoConfig.for_model(model_type, **SMALL | {"num_hidden_layers": 8} | config)
    model = model_of_config(deep, torch.float32)
    depths = []
    settings = PlanSettings(1, TOKENS, small_kinds(*[None, 16][:period]), kernel="torch_varlen")
    plan = plan_micro_batch([TOKENS], settings)
    run = small_run(settings, checkpointing=checkpointing)
    monkeypatch.setattr(
        counter,
        "model_of_config",
        lambda *given: depths.append(given[0]) or model_of_config(*given),
    )
    few = MemoryCounter(model, by_config=True).count(plan, run)
    assert [counted_config.num_hidden_layers for counted_config in depths] == [2 * period]
    monkeypatch.setattr(counter, "repeated_layers", lambda _: None)
    assert MemoryCounter(model, by_config=True).count(plan, run) == few
    assert depths[-1].num_hidden_layers == 8


def test_trainings_share_counts_only_where_they_take_the_same():
    settings = PlanSettings(1, TOKENS, small_kinds(), kernel="torch_varlen")
    plan = plan_micro_batch([TOKENS], settings)
    shared = MemoryCounter(small_model())

    def counted_alone(strategy):
        counter = MemoryCounter(small_model())
        return counter.count(plan, small_run(settings, strategy=strategy, mixed=True)).parts

    # Under fsdp2 the weights are in bfloat16; under ddp autocast makes copies of the weights.
    under_fsdp2 = shared.count(plan, small_run(settings, strategy="fsdp2", mixed=True)).parts
    assert under_fsdp2.get("cast weights", 0) == 0
    assert under_fsdp2 == counted_alone("fsdp2")
    under_ddp = shared.count(plan, small_run(settings, strategy="ddp", mixed=True)).parts
    assert under_ddp["cast weights"] > 0
    assert under_ddp == counted_alone("ddp")
    # Models that are counted by their config are prepared for each run.
    by_config = MemoryCounter(small_model(intermediate_size=512), by_config=True)
    at_once, in_chunks = (
        by_config.count(plan, small_run(settings, mlp_chunk_rows=rows)).parts["activations"]
        for rows in (0, 128)
    )
    assert in_chunks < at_once


@pytest.mark.parametrize(
    ("available", "longest"),
    [
        (0, 0),
        (1023, 0),
        (1024, 1),
        (3 * 1024 + 5, 3),
        (9000, 6),
        (10**6, 490),
    ],
    ids=[
        "nothing",
        "less than a block",
        "one block",
        "three blocks",
        "where two bytes begin",
        "many",
    ],
)
def test_the_longest_rows_that_fit(monkeypatch, available, longest):
    """A byte a token; above 5000 tokens two of them."""
    memory = MemoryCounter(small_model())

    def count(plan, _):
        tokens = int(plan.tokens.sum())
        return SimpleNamespace(total=tokens + max(0, tokens - 5000))

    monkeypatch.setattr(memory, "count", count)
    monkeypatch.setattr(memory, "_state_of", lambda _: ModelState(0, 0, 0))
    assert memory.longest(available, EMPTY) == longest * 1024, available


@pytest.mark.parametrize(
    ("per_token", "state", "known", "sizes"),
    [
        (1, 1001, None, []),
        (1000, 0, None, [8, 1]),
        (0.4, 0, None, [8, 2, 4]),
        (0.01, 0, None, [8, 64, 128]),
        (0.01, 0, 82, [64, 128]),
        (0.01, 0, 9999, [1, 64, 128]),  # of a micro-batch that takes more
    ],
    ids=[
        "the state does not fit",
        "no rows fit",
        "fewer than the first",
        "on a line",
        "on a known line",
        "on another line",
    ],
)
def test_few_sizes_are_counted_to_find_the_longest_rows(
    monkeypatch, per_token, state, known, sizes
):
    memory = MemoryCounter(small_model())
    counted_sizes = []

    def count(plan, _):
        tokens = int(plan.tokens.sum())
        counted_sizes.append(tokens // 1024)
        return SimpleNamespace(total=state + per_token * tokens)

    monkeypatch.setattr(memory, "count", count)
    monkeypatch.setattr(memory, "_state_of", lambda _: ModelState(state, 0, 0))
    counted: Any = None if known is None else SimpleNamespace(total=known)
    memory.longest(1000, EMPTY, counted)
    assert list(dict.fromkeys(counted_sizes)) == sizes


@pytest.mark.parametrize(
    ("lengths", "layout", "planned"),
    [
        ([2 * TOKENS], "auto", [2 * TOKENS]),
        ([2 * TOKENS - 1, 1], "auto", [TOKENS, 2 * TOKENS]),
        ([2 * TOKENS - 1], "auto", [TOKENS, 2 * TOKENS]),
        (2 * [TOKENS], "whole", [2 * TOKENS]),
    ],
)
def test_a_plan_of_the_longest_documents_is_not_made_again(monkeypatch, lengths, layout, planned):
    settings = PlanSettings(2, TOKENS, small_kinds(), document_layout=layout)
    plan = plan_micro_batch(lengths, settings)
    memory = MemoryCounter(small_model())
    tokens = []

    def plan_noted(lengths, settings):
        tokens.append(settings.rows_per_rank)
        return plan_micro_batch(lengths, settings)

    parts = {"activations": 1000}
    monkeypatch.setattr(memory, "_count", lambda *_, **__: Peaks(parts, parts))
    monkeypatch.setattr(counter, "plan_micro_batch", plan_noted)
    run = small_run(settings)
    counted_memory = memory.count(plan, run)
    available = counted_memory.total
    monkeypatch.setattr(counter, "MOST", 2 * TOKENS)
    memory.longest(available, run, counted_memory)
    assert tokens == planned


def _buffers(
    lengths: list[int], ping_pong: bool, ranks_per_node: tuple[int, ...] | int
) -> tuple[int, int]:
    """Bytes that the exchange of this rank took in a layer's forward and backward, and those that
    are counted.
    """
    (kind,) = small_kinds()
    nodes = {
        "exchange_buffer_bytes": 200 * 128,
        "ping_pong": ping_pong,
        "ranks_per_node": ranks_per_node,
    }
    settings = PlanSettings(dist.get_world_size(), TOKENS, (kind,), 4, **nodes)
    plan = plan_micro_batch(lengths, settings)
    dispatcher = Dispatcher(settings, torch.device("cpu"))
    bound = dispatcher.bind(plan)
    assert bound.stages > (2 if ranks_per_node == 1 else SLOTS_IN_HOPS)
    assert all(nano.routes[kind].forwards == (ranks_per_node != 1) for nano in bound.nano_batches)
    run_core_attention(bound, kind, torch.float32)
    parts = count_core_attention(
        plan, kind, torch.float32, dist.get_rank(), small_run(kernel="cpu")
    )
    return dispatcher.exchange.size(), parts["exchange buffers"]


@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "lengths", "ping_pong"),
    [(2, 1, [900, 500, 300, 200, 100, 40], False), (3, (1, 2), [1400, 1300, 100, 40], True)],
)
def test_buffers_are_those_that_ranks_take(rank_pools, ranks, ranks_per_node, lengths, ping_pong):
    by_rank = rank_pools[ranks].run(_buffers, lengths, ping_pong, ranks_per_node)
    assert [taken for taken, _ in by_rank] == [counted_bytes for _, counted_bytes in by_rank]


# The strategies of a simulation.

SHAPE = ModelShape.llama(2, 64, 160, 4, 2, 100, head_dim=16)
SETTINGS = PlanSettings(2, 1024, kinds=tuple(SHAPE.layers))
RUN = RunSpec(
    SETTINGS,
    SHAPE,
    DeviceProfile.load("h100"),
    checkpointing={},
    strategy="fsdp2",
    mixed=True,
)
PLAIN, WHOLE, ULYSSES, CONTEXT, FIXED, CHOSEN = all_strategies(RUN)
SERVERS = with_servers(1, RUN)


def memory_of(of_plans=SETTINGS, **changes):
    run = replace(RUN, plans=of_plans, mixed=of_plans.bytes_per_value == 2, **changes)
    kinds = tuple(on_a_gpu(kind, run.tensor_parallel) for kind in SHAPE.layers)
    return gpu_memory(replace(run, plans=replace(of_plans, kinds=kinds)), config_of_shape(SHAPE))


def test_rows_take_memory_along_a_line():
    alone = PlanSettings(1, 1536, kinds=tuple(SHAPE.layers))
    memory = memory_of()
    rows, state = memory(PLAIN, 1536, None, 0)
    assert rows == pytest.approx(
        memory(PLAIN, 1536, plan_micro_batch([1536], alone), 0)[0], rel=0.01
    )
    assert memory_of(checkpointing=None)(PLAIN, 1536, None, 0)[0] > 1.5 * rows
    gathered = 2 * 1536 * 2 * (16 + 16) * 2  # K and V of the other rank, and their gradients
    assert memory(CONTEXT, 1536, None, 0) == (rows + gathered, state)
    # Half of Q, K, V and O of four heads and two key-value heads, and their gradients.
    exchanged = 2 * 1536 * (4 + 2) * (16 + 16) // 2 * 2
    assert memory(ULYSSES, 1536, None, 0) == (rows + exchanged, state)
    assert memory(SERVERS, 1536, None, 0) == (None, state)
    # The state is divided over both ranks. Without autocast numbers have four bytes.
    model = model_of_config(config_of_shape(SHAPE), torch.float32)
    wide = memory_of(replace(SETTINGS, bytes_per_value=4))
    assert memory(PLAIN, 1024, None, 0)[1] == sum(model_state(model, "fsdp2", 2, mixed=True))
    assert wide(PLAIN, 1024, None, 0)[1] == sum(model_state(model, "fsdp2", 2, mixed=False))
    assert wide(PLAIN, 1536, None, 0)[0] > 1.4 * memory(PLAIN, 1536, None, 0)[0]
    # Exchange buffers of a plan take memory.
    rows, state = memory(PLAIN, 1024, None, 0)
    assert rows < memory(CHOSEN, 1024, plan_micro_batch([2048], SETTINGS), 0)[0]
    # GPUs that share layers take less.
    shared_rows, shared_state = memory_of(tensor_parallel=2)(PLAIN, 1024, None, 0)
    assert shared_rows < rows
    assert shared_state < state


def test_a_gpu_is_simulated_whatever_computes_here(monkeypatch):
    kernels = set()
    count = MemoryCounter.count

    def noted(counter, plan, run, *args):
        kernels.add(run.plans.kernel)
        return count(counter, plan, run, *args)

    monkeypatch.setattr(MemoryCounter, "count", noted)
    memory_of(replace(SETTINGS, kernel="cpu"))(PLAIN, 1536, None, 0)
    assert kernels == {"torch_varlen"}

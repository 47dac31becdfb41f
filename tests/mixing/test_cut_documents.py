"""Documents cut between ranks, in models with every kind of mixing that can be cut: as in one
process.
"""

import gc
import weakref
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next import modeling_qwen3_next

from hf_distca import DistCAConfig
from hf_distca.dispatch.exchange import Exchange
from hf_distca.dispatch.segment_exchanges import StateExchange
from hf_distca.models.checkpointing import enable_checkpointing
from hf_distca.models.mixing_modules import DELTA_RULE, FUNCTIONS
from hf_distca.trainer.assembly import make_dispatcher
from tests.mixing.steps import Step, assert_equal, cut_plan, make_model, reference, step
from tests.models_and_batches import cut_rows, random_documents

pytestmark = pytest.mark.usefixtures("backward_thread")

DELTA = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "kimi_linear",
    "bailing_hybrid",
)
SHORT = ("lfm2", "lfm2_moe", "lfm3")
SCANS = ("bamba", "granitemoehybrid", "nemotron_h", "falcon_h1", "zamba2", "minimax")

LENGTHS = [150, 9, 80, 70, 12]
PLANS = {
    # Cuts after a first row, before a last row, around single rows and inside chunks; segments that
    # go back and forth between ranks and lie in another order; whole documents, in one nano-batch
    # alone on a rank.
    2: [
        [
            [(0, 0, 70), (0, 71, 72), (1, 0, 9)],
            [(0, 70, 71), (0, 72, 150)],
        ],
        [
            [(2, 0, 1), (3, 0, 69), (4, 0, 12)],
            [(2, 1, 80), (3, 69, 70)],
        ],
    ],
    3: [
        [
            [(0, 0, 66), (1, 0, 9)],
            [(0, 66, 67), (0, 130, 150)],
            [(0, 67, 130)],
        ],
        [
            [(2, 0, 1), (3, 2, 30), (2, 79, 80)],
            [(2, 1, 3), (3, 0, 2), (2, 3, 79), (3, 30, 70)],
            [(4, 0, 12)],
        ],
    ],
}
JOINED = {
    ranks: [[[*first, *second] for first, second in zip(*nanos, strict=True)]]
    for ranks, nanos in PLANS.items()
}
"""The same segments in one nano-batch."""
CUT = {"document_layout": "fixed"}
CPU = torch.device("cpu")


@cache
def expected(model_type: str, **options) -> Step:
    return reference(model_type, LENGTHS, **options)


@pytest.mark.parametrize("model_type", [*DELTA, *SHORT, *SCANS])
@pytest.mark.parametrize("ranks", [2, 3])
def test_loss_and_gradients_are_those_of_one_process(rank_pools, ranks, model_type):
    for got in rank_pools[ranks].run(partial(step, model_type, LENGTHS, PLANS[ranks], **CUT)):
        assert_equal(got, expected(model_type))


COMPANY = {
    "one nano-batch": {"ping_pong": False},
    "checkpoints": {"checkpointing": False},
    "reentrant checkpoints, LoRA": {"checkpointing": True, "lora": True},
    "LoRA": {"lora": True},
    "DDP, checkpoints": {"ddp": True, "checkpointing": False},
}


@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("company", COMPANY)
def test_in_company(rank_pools, model_type, company):
    options = {**CUT, **COMPANY[company]}
    plans = PLANS if options.get("ping_pong", True) else JOINED
    for got in rank_pools[3].run(partial(step, model_type, LENGTHS, plans[3], **options)):
        assert_equal(got, expected(model_type, lora=options.get("lora", False)))


@pytest.mark.parametrize(
    "rough", [{"dtype": torch.bfloat16}, {"autocast": True}], ids=["weights", "autocast"]
)
@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear", "bamba", "minimax"])
def test_bfloat16_is_as_rough_as_in_one_process(rank_pools, model_type, rough):
    for got in rank_pools[2].run(partial(step, model_type, LENGTHS, PLANS[2], **CUT, **rough)):
        assert_equal(got, expected(model_type), expected(model_type, **rough))


def _exchanged(model_type: str, options: dict) -> tuple[list[tuple[str, torch.dtype]], int]:
    """What a step of three ranks or two exchanges in order, and its dtypes; how many exchanges it
    leaves open.
    """
    made, buffers = [], []
    buffer_of = Exchange.buffer

    def recorded(exchange, slot, route, like):
        buffers.append(buffer_of(exchange, slot, route, like))
        if route.crossing:
            made.append((f"{slot[0]} {slot[2]}", like[0].dtype))
        return buffers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "buffer", recorded)
        step(model_type, LENGTHS, PLANS[dist.get_world_size()], **CUT, **options)
    return made, sum(buffer.under_way for buffer in buffers)


@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1"])
def test_all_ranks_exchange_in_the_same_order(rank_pools, model_type):
    ranks = rank_pools[3].run(_exchanged, model_type, {"checkpointing": False})
    assert all(exchanges == (ranks[0][0], 0) for exchanges in ranks)
    first = [name for name, _ in ranks[0][0]]
    # A document of each nano-batch is cut: halos of both, states of both. The second's gradients
    # come first.
    of_layer = ["halos 0", "halos 1", "states 0", "states 1"]
    assert first[:4] == of_layer
    assert first[-4:] == of_layer[::-1]
    # Checkpoints keep what has arrived: their recomputations exchange nothing.
    plain, *_ = rank_pools[3].run(_exchanged, model_type, {})
    assert plain == ranks[0]


@pytest.mark.parametrize(
    ("options", "dtype_of_halos"),
    [
        # Gates alone are trained: of what the recurrence of a first layer reads, they alone need
        # gradients.
        ({"lora": True}, torch.float32),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"autocast": True}, torch.bfloat16),
    ],
    ids=["LoRA", "bfloat16", "autocast"],
)
def test_exchanges_end_on_ranks_without_a_cut_segment_and_states_travel_in_float32(
    rank_pools, options, dtype_of_halos
):
    for exchanged, left_open in rank_pools[3].run(_exchanged, "qwen3_next", options):
        assert left_open == 0
        mixing_dtypes = {
            (name.split()[0], dtype)
            for name, dtype in exchanged
            if name.startswith(("halos", "states"))
        }
        assert mixing_dtypes == {("halos", dtype_of_halos), ("states", torch.float32)}


def test_a_forward_without_a_backward_leaves_nothing():
    """Results that a checkpoint keeps do not keep the graph in which they are, and with it
    themselves.
    """
    model = make_model("qwen3_next")
    dispatcher = make_dispatcher(model, DistCAConfig(tokens_per_rank=64, **CUT), CPU)
    enable_checkpointing(model, {"use_reentrant": False})
    one_rank = [[(0, 0, 5), (1, 0, 3), (0, 5, 9)]]
    bound = dispatcher.bind(cut_plan([9, 3], [one_rank], dispatcher.settings))
    kept = weakref.ref(bound.kept_results)
    batch = cut_rows(bound.plan, 0, random_documents([9, 3]))
    loss = model(**batch, labels=batch["shift_labels"], distca_plan=bound).loss
    assert len(kept()) == 3  # halos, states and core attention
    del bound, batch, loss
    gc.collect()
    assert kept() is None


def _order() -> list[str]:
    """Runs of the delta rule, and exchanges of states."""
    events: list[str] = []

    def recorded(owner, name):
        function = getattr(owner, name)
        return lambda *args, **kwargs: events.append(name) or function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (StateExchange, "send"),
            (StateExchange, "receive"),
            (modeling_qwen3_next, DELTA_RULE),
        ):
            patch.setattr(owner, name, recorded(owner, name))
        step("qwen3_next", LENGTHS, PLANS[2], **CUT)
    return events


def test_whole_documents_of_both_nano_batches_are_computed_while_states_travel(rank_pools):
    events, _ = rank_pools[2].run(_order)  # the other rank has no whole documents
    # Two cut segments of each nano-batch, then the whole document of each.
    assert events == [
        *[DELTA_RULE, DELTA_RULE, "send"] * 2,
        DELTA_RULE,
        DELTA_RULE,
        "receive",
        "receive",
    ]


def _hooked_on_one_rank() -> Step:
    """A step whose nano-batches take turns on rank 1 only: on rank 0 a hook inside wants to see all
    rows.
    """
    return step("qwen3_next", LENGTHS, PLANS[2], hooked=dist.get_rank() == 0, **CUT)


def test_ranks_stay_in_step_if_nano_batches_take_turns_on_some_only(rank_pools):
    for got in rank_pools[2].run(_hooked_on_one_rank):
        assert_equal(got, expected("qwen3_next"))


def _error_of_a_table(*names: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FUNCTIONS, "Lfm2ShortConv", names)
        patch.setattr(modeling_lfm2, "another", len, raising=False)
        with pytest.raises(ValueError, match="Lfm2ShortConv mixes") as raised:
            step("lfm2", [9, 5])
    return str(raised.value)


@pytest.mark.parametrize("other", ["another", "causal_conv1d_fn"])
def test_functions_that_a_module_should_call_and_does_not_are_an_error(rank_pools, other):
    (error,) = rank_pools[1].run(_error_of_a_table, "causal_conv1d_fn", other)
    known = f"['causal_conv1d_fn', '{other}']"
    assert f"mixes rows by ['causal_conv1d_fn'], but a planned step knows it with {known}" in error

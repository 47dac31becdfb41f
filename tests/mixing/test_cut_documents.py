"""Documents cut between ranks, in models with short convolutions, gated delta rules and Mamba-2: as in one process."""

import peft
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.models.lfm2 import modeling_lfm2

from hf_distca import DistCAConfig
from hf_distca.dispatch.exchange import Exchange
from hf_distca.models.mixing import FUNCTIONS
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.trainer.assembly import make_dispatcher
from tests.dispatch.test_equality import planned_step
from tests.mixing.plans import cut_plan
from tests.models_and_batches import random_documents, reference_step, relative_error
from tests.survey.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("backward_thread")

DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid")
SHORT = ("lfm2", "lfm2_moe", "lfm3")
SCANS = ("bamba", "granitemoehybrid", "nemotron_h", "falcon_h1", "zamba2")
MODELS = (*DELTA, *SHORT, *SCANS)

LENGTHS = [150, 9, 80, 70, 12]
PLANS = {
    # Cuts after a first row, before a last row, around single rows and inside chunks; segments that go back and forth
    # between ranks and lie in another order; whole documents, in one nano-batch alone on a rank.
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
JOINED = {ranks: [[[*first, *second] for first, second in zip(*nanos, strict=True)]] for ranks, nanos in PLANS.items()}
"""The same segments in one nano-batch."""


def make_model(model_type: str, implementation: str = "distca", *, lora: bool = False):
    torch.manual_seed(0)
    config = tiny_config(model_type)
    for name in ("mamba_n_groups", "n_groups"):
        if hasattr(config, name):
            setattr(config, name, 2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # a state lasts for a document: else what other ranks add would hardly count
            torch.nn.init.uniform_(parameter, -4.5, -2.5)
    if lora:
        modules = ["q_proj", "in_proj", "in_proj_ba"]  # gates alone, so that values of a first layer need no gradient
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False))
    return model.train()


def _step(
    model_type: str,
    in_turns: bool = True,
    checkpointing: bool | None = None,
    lora: bool = False,
    dtype: torch.dtype = torch.float32,
    ddp: bool = False,
    hooked: bool = False,
    **options,
):
    model = make_model(model_type, lora=lora).to(dtype)
    config = DistCAConfig(
        tokens_per_rank=256,
        balance_block_size=8,
        loss_chunk_bytes=4 * 64 * 20,
        document_layout="joint",
        balance_tolerance=0.01,
        ping_pong=in_turns,
        **options,
    )
    dispatcher = make_dispatcher(model, config, torch.device("cpu"))
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        if checkpointing:
            model.enable_input_require_grads()
    if hooked:
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda *_: None)
    plans = (PLANS if in_turns else JOINED)[dist.get_world_size()]
    plan = cut_plan(LENGTHS, plans, dispatcher.settings)
    wrapped = DistributedDataParallel(model) if ddp else model
    loss = planned_step(wrapped, plan, dispatcher, random_documents(LENGTHS))
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _check(steps, model_type: str, lora: bool = False):
    loss, grads = reference_step(make_model(model_type, "eager", lora=lora), random_documents(LENGTHS))
    largest = max(grad.abs().max() for grad in grads.values())
    for got_loss, got in steps:
        assert got_loss == pytest.approx(loss, rel=1e-5)
        assert got.keys() == grads.keys()
        for name, grad in grads.items():
            if grad.abs().max() >= 1e-3 * largest:
                assert relative_error(got[name], grad) < 2e-4, name


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_loss_and_gradients_are_those_of_one_process(rank_pools, ranks, model_type):
    _check(rank_pools[ranks].run(_step, model_type), model_type)


COMPANY = {
    "one nano-batch": {"in_turns": False},
    "checkpoints": {"checkpointing": False},
    "checkpoints that exchange again": {"checkpointing": False, "keep_core_attention": False},
    "reentrant checkpoints, LoRA": {"checkpointing": True, "lora": True},
    "LoRA": {"lora": True},
    "DDP, checkpoints": {"ddp": True, "checkpointing": False},
}


@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("company", COMPANY)
def test_in_company(rank_pools, model_type, company):
    options = COMPANY[company]
    _check(rank_pools[3].run(_named_step, model_type, options), model_type, options.get("lora", False))


def _named_step(model_type: str, options: dict):
    return _step(model_type, **options)


@pytest.mark.parametrize("model_type", ["qwen3_next", "kimi_linear", "bamba"])
def test_bfloat16_is_as_rough_as_in_one_process(rank_pools, model_type):
    documents = random_documents(LENGTHS)
    loss, grads = reference_step(make_model(model_type, "eager"), documents)
    rough_loss, rough = reference_step(make_model(model_type, "eager").bfloat16(), documents)
    for got_loss, got in rank_pools[2].run(_named_step, model_type, {"dtype": torch.bfloat16}):
        assert abs(got_loss - loss) < 2 * abs(rough_loss - loss) + 1e-2
        largest = max(grad.abs().max() for grad in grads.values())
        for name, grad in grads.items():
            if grad.abs().max() >= 1e-2 * largest:
                assert relative_error(got[name].float(), grad) < 2 * relative_error(rough[name].float(), grad) + 5e-2


def _exchanges(model_type: str, options: dict) -> list[str]:
    """What each rank exchanges in one step, in order."""
    made: list[str] = []
    buffer_of = Exchange.buffer

    def recorded(exchange, slot, route, like):
        if route.crossing:
            made.append(f"{slot[0]} {slot[2]}")
        return buffer_of(exchange, slot, route, like)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "buffer", recorded)
        _step(model_type, **options)
    return made


@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1"])
def test_all_ranks_exchange_in_the_same_order(rank_pools, model_type):
    first, *others = rank_pools[3].run(_exchanges, model_type, {"checkpointing": False})
    assert all(other == first for other in others)
    # A document of each nano-batch is cut: halos of both, states of both. The second's gradients come first.
    of_layer = ["halos 0", "halos 1", "states 0", "states 1"]
    assert first[:4] == of_layer
    assert first[-4:] == of_layer[::-1]
    again = rank_pools[3].run(_exchanges, model_type, {"checkpointing": False, "keep_core_attention": False})[0]
    layers = first[: len(first) // 2].count("states 0")
    assert again.count("states 0") == first.count("states 0") + layers


def test_functions_that_a_module_should_call_and_does_not_are_an_error(monkeypatch):
    monkeypatch.setitem(FUNCTIONS, "Lfm2ShortConv", ("causal_conv1d_fn", "another"))
    monkeypatch.setattr(modeling_lfm2, "another", len, raising=False)
    model = make_model("lfm2")
    dispatcher = make_dispatcher(model, DistCAConfig(tokens_per_rank=256), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"Lfm2ShortConv mixes rows by \['causal_conv1d_fn'\], but .*'another'\]"):
        planned_step(model, plan_micro_batch([9, 5], dispatcher.settings), dispatcher, random_documents([9, 5]))


def test_states_travel_in_float32(rank_pools):
    for dtypes in rank_pools[2].run(_dtypes):
        assert dtypes == {("halos", torch.bfloat16), ("states", torch.float32)}


def _dtypes() -> set[tuple[str, torch.dtype]]:
    found = set()
    buffer_of = Exchange.buffer

    def recorded(exchange, slot, route, like):
        if slot[0] in ("halos", "states"):
            found.update((slot[0], x.dtype) for x in like)
        return buffer_of(exchange, slot, route, like)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "buffer", recorded)
        _step("qwen3_next", dtype=torch.bfloat16)
    return found


def _hooked_on_one_rank(model_type: str):
    """A step whose nano-batches take turns on rank 1 only: on rank 0 a hook inside wants to see all rows."""
    return _step(model_type, hooked=dist.get_rank() == 0)


def test_ranks_stay_in_step_if_nano_batches_take_turns_on_some_only(rank_pools):
    _check(rank_pools[2].run(_hooked_on_one_rank, "qwen3_next"), "qwen3_next")

"""Documents cut between ranks, in models with short convolutions, gated delta rules and Mamba-2: as in one process."""

import peft
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_distca import DistCAConfig
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

LENGTHS = [150, 9, 80, 70]
PLANS = {
    # In turn: a document over all ranks, with segments of a single row and of a chunk and more; a whole one; one cut
    # after its first row; one cut before its last row.
    2: [
        [
            [(0, 0, 70), (0, 71, 72), (1, 0, 9)],
            [(0, 70, 71), (0, 72, 150)],
        ],
        [
            [(2, 0, 1), (3, 0, 69)],
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
            [(2, 0, 1), (3, 2, 30)],
            [(2, 1, 3), (3, 0, 2), (3, 30, 69)],
            [(2, 3, 80), (3, 69, 70)],
        ],
    ],
}
JOINED = {
    ranks: [[[*first, *second] for first, second in zip(*nanos, strict=True)]] for ranks, nanos in PLANS.items()
}
"""The same segments in one nano-batch."""


def make_model(model_type: str, implementation: str = "distca", *, lora: bool = False):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), attn_implementation=implementation)
    if lora:
        modules = ["q_proj", "in_proj", "in_proj_qkvz"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False))
    return model.train()


def _step(model_type: str, in_turns: bool = True, checkpointing: bool | None = None, lora: bool = False, **options):
    model = make_model(model_type, lora=lora)
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
        model.enable_input_require_grads()
    plans = (PLANS if in_turns else JOINED)[dist.get_world_size()]
    plan = cut_plan(LENGTHS, plans, dispatcher.settings)
    loss = planned_step(model, plan, dispatcher, random_documents(LENGTHS))
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
    "LoRA": {"lora": True, "in_turns": False},
}


@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("company", COMPANY)
def test_in_company(rank_pools, model_type, company):
    options = COMPANY[company]
    _check(rank_pools[3].run(_named_step, model_type, options), model_type, options.get("lora", False))


def _named_step(model_type: str, options: dict):
    return _step(model_type, **options)

"""Modules that mix along the row otherwise than by attention, document by document, with what users train with."""

import peft
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers import AutoModelForCausalLM

from hf_distca import DistCAConfig, plan_settings
from hf_distca.models.decoder import decoder_attentions, is_attention, mixing_layers, mixing_modules
from hf_distca.patches.layers import plan_layers
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.trainer.assembly import make_dispatcher
from tests.dispatch.test_equality import planned_step
from tests.models_and_batches import random_documents, reference_step, relative_error
from tests.survey.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("backward_thread")

LENGTHS = [60, 7, 45, 33, 24, 1, 18]
FEW = [60, 7, 29]
CONFIG = DistCAConfig(
    tokens_per_rank=96,
    balance_block_size=8,
    loss_chunk_bytes=4 * 64 * 20,
    document_layout="whole",
    balance_tolerance=0.01,
    ping_pong=True,
)
MODELS = ("qwen3_next", "falcon_h1")
"""With a mixing module instead of attention in some layers, and with one beside it in every layer."""


def make_model(model_type: str, implementation: str = "distca", *, lora: bool = False):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), attn_implementation=implementation)
    if lora:
        modules = ["q_proj", "in_proj", "in_proj_qkvz"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False))
    return model.train()


COMPANY = {
    "alone": {},
    "without ping-pong": {"ping_pong": False},
    "checkpoints": {"checkpointing": {"use_reentrant": False}},
    "LoRA, reentrant checkpoints": {"lora": True, "checkpointing": {"use_reentrant": True}},
    "autocast, checkpoints": {"autocast": True, "checkpointing": {"use_reentrant": False}},
}


Step = tuple[float, dict[str, torch.Tensor], tuple[int, ...]]
"""Loss and gradients of all ranks, and how often mixing modules, layers and layers in turns ran."""


def _step(model_type: str, company: dict, lengths: list[int] = LENGTHS) -> Step:
    model = make_model(model_type, lora=company.get("lora", False))
    config = DistCAConfig(**{**vars(CONFIG), "ping_pong": company.get("ping_pong", True)})
    dispatcher = make_dispatcher(model, config, torch.device("cpu"))
    if "checkpointing" in company:
        model.gradient_checkpointing_enable(company["checkpointing"])
        model.enable_input_require_grads()
    for name in company.get("checkpointed", ()):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, checkpoint_wrapper(model.get_submodule(name), company["kind"]))
    plan = plan_micro_batch(lengths, dispatcher.settings)
    bound = []
    bind = dispatcher.bind
    dispatcher.bind = lambda plan: bound.append(bind(plan)) or bound[-1]
    with torch.autocast("cpu", torch.bfloat16, enabled=company.get("autocast", False)):
        loss = planned_step(model, plan, dispatcher, random_documents(lengths))
    ran = bound[0].ran
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss, grads, (ran.mixing, ran.layers, ran.layers_in_turns)


def _steps() -> dict[tuple[str, str], Step]:
    return {
        (model_type, name): _step(model_type, company) for model_type in MODELS for name, company in COMPANY.items()
    }


@pytest.fixture(scope="module")
def steps(rank_pools):
    return rank_pools[2].run(_steps)


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("name", COMPANY)
def test_loss_and_gradients_are_those_of_document_by_document(steps, model_type, name):
    company = COMPANY[name]
    model = make_model(model_type, "eager", lora=company.get("lora", False))
    rough = None
    if company.get("autocast"):
        with torch.autocast("cpu", torch.bfloat16):
            rough = reference_step(model, random_documents(LENGTHS))
    reference = reference_step(model, random_documents(LENGTHS))
    for of_rank in steps:
        assert_equal(of_rank[model_type, name], reference, rough)


def assert_equal(step, reference, rough=None) -> None:
    """A step's loss and gradients are those of the reference, or of one as rough in bfloat16."""
    (got_loss, got, _), (loss, grads) = step, reference
    largest = max(grad.abs().max() for grad in grads.values())
    assert got.keys() == grads.keys()
    if rough:
        assert abs(got_loss - loss) < 2 * abs(rough[0] - loss) + 1e-3
    else:
        assert got_loss == pytest.approx(loss, rel=1e-6)
    for key in grads:
        if grads[key].abs().max() < 1e-3 * largest:
            continue
        bound = 2 * relative_error(rough[1][key], grads[key]) + 5e-2 if rough else 2e-5
        assert relative_error(got[key], grads[key]) < bound, key


def _checkpointed_steps(model_type: str, lengths: list[int]) -> list[Step]:
    return [_step(model_type, {"checkpointing": {"use_reentrant": kind}}, lengths) for kind in (False, True)]


@pytest.mark.parametrize(("ranks", "lengths"), [(1, FEW), (2, LENGTHS)])
@pytest.mark.parametrize("model_type", ["zamba", "zamba2"])
def test_checkpoints_inside_checkpointed_layers(rank_pools, ranks, lengths, model_type):
    # A hybrid layer has a Mamba layer inside, which is a checkpoint too and is recomputed apart from it.
    reference = reference_step(make_model(model_type, "eager"), random_documents(lengths))
    for of_kinds in rank_pools[ranks].run(_checkpointed_steps, model_type, lengths):
        for step in of_kinds:
            assert_equal(step, reference)
            assert step[2][1:] == (4, 4 if ranks == 2 else 0)  # two layers with attention, each recomputed


def test_layers_with_attention_take_turns_and_all_mixing_is_by_document(steps):
    # qwen3_next has a layer of either kind; falcon_h1 two that have both. A checkpointed layer runs twice.
    for of_rank in steps:
        assert of_rank["qwen3_next", "alone"][2] == (1, 1, 1)
        assert of_rank["qwen3_next", "checkpoints"][2] == (2, 2, 2)
        assert of_rank["falcon_h1", "alone"][2] == (4, 2, 2)
        assert of_rank["falcon_h1", "without ping-pong"][2] == (2, 2, 0)


def _errors() -> list[str]:
    errors = []
    for model_type, changed, use_cache in (("jamba", {"document_layout": "joint"}, False), ("qwen3_next", {}, True)):
        model = make_model(model_type)
        dispatcher = make_dispatcher(model, CONFIG, torch.device("cpu"))
        settings = type(dispatcher.settings)(**{**vars(dispatcher.settings), **changed})
        model.config.use_cache = use_cache
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            planned_step(model, plan_micro_batch(LENGTHS, settings), dispatcher, random_documents(LENGTHS))
        errors.append(str(raised.value))
    return errors


def test_cut_documents_and_caches_are_refused_on_every_rank(rank_pools):
    for cut, cached in rank_pools[2].run(_errors):
        assert "the plan cuts documents between ranks; plan with document_layout='whole'" in cut
        assert "set model.config.use_cache = False" in cached


INNER_CHECKPOINTS = {
    "plain": {"kind": CheckpointImpl.NO_REENTRANT},
    "reentrant": {"kind": CheckpointImpl.REENTRANT},
    "plain in a checkpoint": {"kind": CheckpointImpl.NO_REENTRANT, "checkpointing": {"use_reentrant": False}},
    "reentrant in a reentrant one": {"kind": CheckpointImpl.REENTRANT, "checkpointing": {"use_reentrant": True}},
}


def _errors_of_inner_checkpoints() -> dict[str, str]:
    errors = {}
    for name, company in INNER_CHECKPOINTS.items():
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            _step("qwen3_next", {**company, "checkpointed": ["model.layers.0.linear_attn"]}, FEW)
        errors[name] = str(raised.value)
    return errors


def test_a_mixing_module_that_would_be_recomputed_without_the_plan_is_refused(rank_pools):
    (errors,) = rank_pools[1].run(_errors_of_inner_checkpoints)
    for message in errors.values():
        assert "Qwen3NextGatedDeltaNet runs in a gradient checkpoint that begins inside its decoder layer" in message


def _error_without_the_plan(model_type: str, module: str) -> str:
    model = make_model(model_type)
    dispatcher = make_dispatcher(model, CONFIG, torch.device("cpu"))
    inner = model.get_submodule(module)
    forward = inner.forward
    inner.forward = lambda *args, distca_plan=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        planned_step(model, plan_micro_batch(FEW, dispatcher.settings), dispatcher, random_documents(FEW))
    return str(raised.value)


def test_a_layer_that_loses_its_plan_on_the_way_is_refused(rank_pools):
    for message in rank_pools[1].run(_error_without_the_plan, "falcon_h1", "model.layers.0.self_attn"):
        assert "FalconH1DecoderLayer did not pass its plan to every module that attends" in message


@pytest.mark.parametrize("model_type", ["jamba", "minimax"])
def test_documents_stay_whole_where_a_module_cannot_be_cut(model_type):
    model = make_model(model_type)
    settings = plan_settings(model, DistCAConfig(), ranks=2, device=torch.device("cpu"))
    assert settings.document_layout == "whole"
    for layout in ("joint", "fixed"):
        with pytest.raises(
            ValueError, match=rf"document_layout='{layout}' cuts documents.*set document_layout='whole'"
        ):
            plan_settings(model, DistCAConfig(document_layout=layout), ranks=2, device=torch.device("cpu"))


@pytest.mark.parametrize("model_type", ["llama", *MODELS])
def test_documents_may_be_cut_elsewhere(model_type):
    settings = plan_settings(make_model(model_type), DistCAConfig(), ranks=2, device=torch.device("cpu"))
    assert settings.document_layout == "joint"


MIXING = {
    "qwen3_next": {"Qwen3NextGatedDeltaNet"},
    "jamba": {"JambaMambaMixer"},
    "zaya": {"ZayaCCAProjection"},  # inside its attention
    "minimax": {"MiniMaxLightningAttention"},
    "recurrent_gemma": {"RecurrentGemmaRecurrentBlock"},
    "llama": set(),
    "mixtral": set(),
}


@pytest.mark.parametrize("model_type", MIXING)
def test_what_mixes_is_found(model_type):
    with torch.device("meta"):
        model = make_model(model_type)
    found = {type(module).__name__ for layer in mixing_layers(model) for module in mixing_modules(layer)}
    assert found == MIXING[model_type]
    assert all(map(is_attention, decoder_attentions(model).values()))


def test_mixing_that_is_not_known_is_refused():
    model = make_model("llama")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"LlamaConfig has 1 layers of the types .*, and only in 0 of them a module"):
        plan_settings(model, DistCAConfig(), ranks=2, device=torch.device("cpu"))


@pytest.mark.parametrize("model_type", MODELS)
def test_outside_a_planned_step_nothing_changes(model_type):
    model, plain = make_model(model_type), make_model(model_type, "sdpa")
    plan_layers(model)
    tokens = torch.arange(3, 40)[None]
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)
    names, plain_names = ([type(module).__name__ for module in each.modules()] for each in (model, plain))
    assert names == plain_names

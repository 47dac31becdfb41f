"""Modules that mix along the row otherwise than by attention, on whole documents; and which models
cut none.
"""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

from hf_distca import DistCAConfig, describe_run
from hf_distca.models.decoder import decoder_attentions, is_attention, mixing_layers, mixing_modules
from hf_distca.models.mixing_modules import uncuttable
from hf_distca.patches.layers import plan_layers
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.trainer.assembly import make_dispatcher
from tests.mixing.steps import Step, assert_equal, make_model, reference, step
from tests.models_and_batches import planned_step, random_documents

pytestmark = pytest.mark.usefixtures("backward_thread")

LENGTHS = (60, 7, 45, 33, 24, 1, 18)
FEW = (60, 7, 29)
WHOLE = {"document_layout": "whole", "tokens_per_rank": 96}
MODELS = ("qwen3_next", "falcon_h1", "jamba")
"""With a mixing module instead of attention in some layers, with one beside it in every layer, and
by document."""
COMPANY = {
    "alone": {},
    "without ping-pong": {"ping_pong": False},
    "checkpoints": {"checkpointing": False},
    "LoRA, reentrant checkpoints": {"lora": True, "checkpointing": True},
    "autocast, checkpoints": {"autocast": True, "checkpointing": False},
}


RAN = {
    # qwen3_next has a layer of either kind; falcon_h1 two that have both. A checkpointed layer runs
    # twice.
    ("qwen3_next", "alone"): (1, 1, 1),
    ("qwen3_next", "checkpoints"): (2, 2, 2),
    ("falcon_h1", "alone"): (4, 2, 2),
    ("falcon_h1", "without ping-pong"): (2, 2, 0),
}
"""How often mixing modules ran, layers with attention, and those of them that took turns."""


alone = cache(reference)
"""Steps of one process, which several trainings are compared with."""


def _steps(model_type: str) -> list[Step]:
    return [step(model_type, LENGTHS, **WHOLE, **company) for company in COMPANY.values()]


@pytest.mark.parametrize("model_type", MODELS)
def test_loss_and_gradients_are_those_of_document_by_document(rank_pools, model_type, subtests):
    for rank, steps in enumerate(rank_pools[2].run(_steps, model_type)):
        for (name, company), got in zip(COMPANY.items(), steps, strict=True):
            lora = company.get("lora", False)
            rough = None
            if "autocast" in company:
                rough = alone(model_type, LENGTHS, lora, autocast=True)
            with subtests.test(name, rank=rank):
                assert_equal(got, alone(model_type, LENGTHS, lora), rough, within=2e-5)
                assert got.ran == RAN.get((model_type, name), got.ran)


@pytest.mark.parametrize(("ranks", "lengths"), [(1, FEW), (2, LENGTHS)])
@pytest.mark.parametrize("model_type", ["zamba", "zamba2"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_checkpointed_layers(rank_pools, ranks, lengths, model_type, reentrant):
    # A hybrid layer has a Mamba layer inside, which is a checkpoint too and is recomputed apart
    # from it.
    expected = alone(model_type, lengths)
    run = partial(step, model_type, lengths, checkpointing=reentrant, **WHOLE)
    for got in rank_pools[ranks].run(run):
        assert_equal(got, expected)
        # Two layers with attention, each recomputed.
        assert got.ran[1:] == (4, 4 if ranks == 2 else 0)


PLAIN, REENTRANT = CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT


def _errors() -> list[str]:
    """Of checkpoints inside a layer, of a cache, of a layer that drops its plan, and of a plan that
    cuts documents.
    """
    errors = []
    for kind, around in ((PLAIN, None), (REENTRANT, None), (PLAIN, False), (REENTRANT, True)):
        with pytest.raises(ValueError, match="runs in a gradient checkpoint") as raised:
            step(
                "qwen3_next",
                FEW,
                inner=("model.layers.0.linear_attn", kind),
                checkpointing=around,
                **WHOLE,
            )
        errors.append(str(raised.value))
    caching, dropping, cutting = map(make_model, ("qwen3_next", "falcon_h1", "jamba"))
    caching.config.use_cache = True
    inner = dropping.model.layers[0].self_attn
    forward = inner.forward
    inner.forward = lambda *args, distca_plan=None, **kwargs: forward(*args, **kwargs)
    for model in (caching, dropping, cutting):
        dispatcher = make_dispatcher(
            model, DistCAConfig(planning={"ping_pong": True}, **WHOLE), torch.device("cpu")
        )
        settings = dispatcher.settings
        if model is cutting:
            settings = replace(settings, document_layout="auto")
        with pytest.raises(ValueError, match=r"cached keys|did not pass|cuts documents") as raised:
            planned_step(
                model, dispatcher.bind(plan_micro_batch(FEW, settings)), random_documents(FEW)
            )
        errors.append(str(raised.value))
    return errors


def test_what_would_mix_documents_is_refused_on_every_rank(rank_pools):
    for *inner, cached, dropped, cut in rank_pools[2].run(_errors):
        for message in inner:
            assert (
                "Qwen3NextGatedDeltaNet runs in a gradient checkpoint that begins inside its "
                "decoder lay" in message
            )
        assert "set model.config.use_cache = False" in cached
        assert "FalconH1DecoderLayer did not pass its plan to every module that attends" in dropped
        assert "the plan cuts documents between ranks or shares prefixes; plan with" in cut


MIXING = {
    "qwen3_next": {"Qwen3NextGatedDeltaNet"},
    "jamba": {"JambaMambaMixer"},
    "zaya": {"ZayaCCAProjection"},  # inside its attention
    "minimax": {"MiniMaxLightningAttention"},
    "recurrent_gemma": {"RecurrentGemmaRecurrentBlock"},
    "llama": set(),
    "mixtral": set(),
}
CUTTABLE = ("qwen3_next", "minimax", "llama", "mixtral")


def model_without_weights(model_type):
    with torch.device("meta"):
        return make_model(model_type)


def modules_that_mix(model):
    return [module for layer in mixing_layers(model) for module in mixing_modules(layer)]


def layout_of(model, **options) -> str:
    config = DistCAConfig(**options)
    return describe_run(model, config, ranks=2, device=torch.device("cpu")).plans.document_layout


@pytest.mark.parametrize("model_type", MIXING)
def test_what_mixes_is_found_and_documents_stay_whole_where_it_cannot_be_cut(model_type):
    model = model_without_weights(model_type)
    assert {type(module).__name__ for module in modules_that_mix(model)} == MIXING[model_type]
    assert all(map(is_attention, decoder_attentions(model).values()))
    assert layout_of(model) == ("auto" if model_type in CUTTABLE else "whole")


def test_a_layout_that_cuts_documents_is_refused_where_mixing_cannot_be_cut():
    message = "document_layout='fixed' cuts.*set document_layout='whole'"
    with pytest.raises(ValueError, match=message):
        layout_of(model_without_weights("jamba"), document_layout="fixed")


def test_a_mixing_module_with_another_part_cannot_be_cut():
    model = model_without_weights("minimax")
    first = modules_that_mix(model)[0]
    first.short_conv = torch.nn.Identity()
    assert uncuttable(model) is first


def test_mixing_that_is_not_known_is_refused():
    model = make_model("llama")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(
        ValueError,
        match=r"LlamaConfig has 1 layers of the types .*, and only in 0 of them a module",
    ):
        describe_run(model, DistCAConfig(), ranks=2, device=torch.device("cpu"))


@pytest.mark.parametrize("model_type", [*MODELS, "llama"])
def test_outside_a_planned_step_nothing_changes(model_type):
    model, plain = make_model(model_type), make_model(model_type, "sdpa")
    assert plan_layers(model) == plan_layers(model)  # once is enough
    tokens = torch.arange(3, 40)[None]
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)
    names, plain_names = (
        [type(module).__name__ for module in compared.modules()] for compared in (model, plain)
    )
    assert names == plain_names

"""What cannot be trained exactly is refused before any work starts, on every rank."""

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import datasets
import peft
import pytest
import torch
import trl
from accelerate import DistributedType
from accelerate.utils import DynamoBackend
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    DataCollatorWithFlattening,
)

import hf_distca
from hf_distca.collator.refusals import Data
from hf_distca.models.decoder import decoder_attentions
from hf_distca.models.refusals import ADAPTERS, ALORA, PROMPT_LEARNING, Models
from hf_distca.refusal import check
from hf_distca.trainer import refusals
from hf_distca.trainer.refusals import PADDING, Given, check_given
from tests.models_and_batches import small_model
from tests.ranks import RankPool
from tests.refused import refused
from tests.survey.tiny import tiny_config
from tests.trainer.comparison import CHECKPOINTING
from tests.trainer.features import with_tower
from tests.trainer.small_trainers import make_trainer


def arguments(tmp_path, **options):
    return hf_distca.DistCATrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, **options
    )


def trainer(tmp_path, model=None, collator=None, documents=((1, 2, 3),), **options):
    dataset = datasets.Dataset.from_dict({"input_ids": [list(document) for document in documents]})
    return hf_distca.DistCATrainer(
        model=model or small_model(),
        args=arguments(tmp_path, **options),
        train_dataset=dataset,
        data_collator=collator,
    )


# Tables


def settings(**changes):
    # Arguments of TRL's trainer, which have those of transformers, changed after they were checked.
    args = hf_distca.DistCASFTConfig("unused", use_cpu=True, bf16=False, report_to=[])
    loading = {name: changes.pop(name) for name in list(changes) if hasattr(args.accelerator_config, name)}
    args.accelerator_config = SimpleNamespace(**{**vars(args.accelerator_config), **loading})
    vars(args).update(changes)
    return args


def given(args=None, trainer=hf_distca.DistCATrainer, **named):
    return Given(trainer, {"args": settings() if args is None else args, **named})


def launched(args=None, model=None, tensor=1, optimizers=(None, None), **changes):
    # A trainer as it would be launched, with tensor parallelism of this size.
    accelerator = SimpleNamespace(
        state=SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=changes.pop("backend", DynamoBackend.NO))),
        mixed_precision=changes.pop("mixed_precision", "no"),
        is_fsdp2=changes.pop("is_fsdp2", False),
        distributed_type=changes.pop("distributed_type", DistributedType.NO),
    )
    facts = {"is_deepspeed_enabled": False, "model_accepts_loss_kwargs": True, **changes}
    facts |= dict(zip(("optimizer", "lr_scheduler"), optimizers, strict=True))
    args, model = args or settings(), model or small_model()
    return refusals.launched(
        SimpleNamespace(args=args, model=model, accelerator=accelerator, get_tp_size=lambda: tensor, **facts)
    )


def divided(adapters=False, tp_plan=(), **sizes):
    # A model that was divided when it was loaded, of which only facts are looked at.
    sized = SimpleNamespace(**{"pp_size": 1, "dp_replicate_size": 1, **sizes})
    model = SimpleNamespace(config=SimpleNamespace(distributed_config=sized), tp_plan=dict.fromkeys(tp_plan, NORMS))
    model.is_distributed_loading_by_transformers = True
    if adapters:
        model.get_base_model = lambda: divided(**sizes)
    return model


NORMS = "replicated_with_grad_allreduce"
ADAFACTOR = {"optim": "adafactor"}
DDP = {"distributed_type": DistributedType.MULTI_CPU}
REENTRANT = {CHECKPOINTING: True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
ZERO = {"is_deepspeed_enabled": True}
LIGER = {"use_liger_kernel": True}


def each(**values: Any) -> list[Callable[[], Any]]:
    """Arguments with one of these values at a time."""
    return [partial(settings, **{name: value}) for name, value in values.items()]


CASES: dict[str, list[Callable[[], Any]]] = {
    "ARGUMENTS": [
        *each(label_smoothing_factor=0.1, average_tokens_across_devices=False, auto_find_batch_size=True),
        *each(dataloader_drop_last=True, use_cache=True, label_names=["targets"], packing=True, eval_packing=True),
        *each(padding_free=True, pad_to_multiple_of=8, activation_offloading=True),
        lambda: settings(**LIGER, liger_kernel_config={"cross_entropy": True}),
        lambda: settings(**LIGER, liger_kernel_config={"geglu": False}, mlp_chunk_rows=16),
    ],
    "GIVEN": [
        lambda: given(trainer=trl.DPOTrainer),
        lambda: Given(hf_distca.DistCATrainer, {}),
        lambda: given(compute_metrics=print),
        lambda: given(preprocess_logits_for_metrics=print),
        lambda: given(compute_loss_func=print),
        lambda: given(model_init=print),
        lambda: given(data_collator=PADDING[-1].__new__(PADDING[-1])),
        lambda: given(settings(_n_gpu=2)),
    ],
    "PACKING": [
        *each(per_device_train_batch_size=4, per_device_eval_batch_size=4, train_sampling_strategy="group_by_length"),
        *each(split_batches=True, dispatch_batches=True, even_batches=False, use_seedable_sampler=False),
        *each(dataloader_in_order=False),
    ],
    "ROWS_ARE_PLACED": [lambda: SimpleNamespace(cp_size=2), lambda: SimpleNamespace(cp_size=1, sp_size=2)],
    "LOADED_ALREADY": [lambda: given(SimpleNamespace(model_init_kwargs={"dtype": "bfloat16"}), model=small_model())],
    "SFT_ARGUMENTS": [
        lambda: arguments("unused"),
        lambda: settings(gradient_checkpointing_kwargs={"selective": True}),
    ],
    "SFT_TRAINER": [
        lambda: SimpleNamespace(get_tp_size=lambda: 2, _is_vision_dataset=False),
        lambda: SimpleNamespace(get_tp_size=lambda: 1, _is_vision_dataset=True),
    ],
    "TRAINER": [
        lambda: launched(backend=DynamoBackend.INDUCTOR),
        lambda: launched(tensor=2),
        lambda: launched(model=divided(pp_size=4)),
        lambda: launched(model=divided(adapters=True), tensor=2),
        lambda: launched(settings(attention_servers="external"), divided(), tensor=2),
        lambda: launched(settings(gradient_accumulation_steps=2), divided(tp_plan=["norm"]), tensor=2),
        lambda: launched(mixed_precision="fp16"),
        lambda: launched(settings(**ADAFACTOR), is_fsdp2=True),
        lambda: launched(optimizers=(1, None), **ZERO),
        lambda: launched(model_accepts_loss_kwargs=False),
        lambda: launched(settings(**REENTRANT), with_tower("distca"), **DDP),
        lambda: launched(settings(ddp_find_unused_parameters=False), with_tower("distca"), **DDP),
    ],
}
"""A subject for each rule of each table, in the order of the rules."""
TABLES = {name: rules if isinstance(rules := getattr(refusals, name), tuple) else (rules,) for name in CASES}


@pytest.mark.parametrize("table", CASES)
def test_each_rule_refuses_its_case(table):
    subjects = [make() for make in CASES[table]]
    assert [next(rule for rule in TABLES[table] if rule.when(it)) for it in subjects] == list(TABLES[table])
    assert [str(rule.error(it)) for rule, it in zip(TABLES[table], subjects, strict=True)]  # texts have their values


def test_values_in_messages():
    def message(table: str, number: int) -> str:
        return str(TABLES[table][number].error(CASES[table][number]()))

    assert message("ARGUMENTS", 5).startswith("label_names=['targets'] is set, but ")
    assert message("ARGUMENTS", 12).endswith("or liger_kernel_config={'swiglu': False, 'geglu': False}")
    assert message("GIVEN", 1).startswith("args are NoneType, but ")
    assert message("PACKING", 5).startswith("accelerator_config.even_batches=False is set, but ")
    assert "(sp_size=2)" in message("ROWS_ARE_PLACED", 1)
    assert "'adamw_torch" in message("TRAINER", 8)
    towers = "model.vision_tower, model.multi_modal_projector of Gemma3ForConditionalGeneration get no gradient"
    assert towers in message("TRAINER", 10)


def test_what_is_not_refused():
    check(refusals.ARGUMENTS, settings(**LIGER, label_names=["labels"], eval_packing=False))
    check(refusals.ARGUMENTS, settings(mlp_chunk_rows=16))
    no_mlps = {"swiglu": False, "geglu": False}
    check(refusals.ARGUMENTS, settings(mlp_chunk_rows=16, **LIGER, liger_kernel_config=no_mlps))
    check_given(given(trainer=hf_distca.DistCASFTTrainer))
    collated = settings(per_device_train_batch_size=4, train_sampling_strategy="group_by_length")
    check_given(given(collated, data_collator=DataCollatorWithFlattening()))
    check(refusals.SFT_ARGUMENTS, settings(gradient_checkpointing_kwargs={"use_reentrant": False}))
    check(TABLES["LOADED_ALREADY"], given(settings(model_init_kwargs={"dtype": "bfloat16"}), model="name"))
    check(refusals.TRAINER, launched(settings(gradient_accumulation_steps=2), divided(), tensor=2))
    check(refusals.TRAINER, launched(settings(gradient_accumulation_steps=2), divided(tp_plan=["norm"])))
    check(refusals.TRAINER, launched(model=divided(adapters=True)))
    check(refusals.TRAINER, launched(settings(**ADAFACTOR)))
    check(refusals.TRAINER, launched(settings(**REENTRANT), with_tower("distca")))
    check(refusals.TRAINER, launched(settings(ddp_find_unused_parameters=True), with_tower("distca"), **DDP))


# Refused by a trainer


def test_trainers_check_the_tables(tmp_path):
    with refused(refusals.ARGUMENTS[0]):
        arguments(tmp_path, label_smoothing_factor=0.1)
    with refused(refusals.PACKING[0]):
        trainer(tmp_path, per_device_train_batch_size=4)
    with refused(refusals.GIVEN[2]):
        hf_distca.DistCATrainer(small_model(), arguments(tmp_path), compute_metrics=print)
    with refused(refusals.ROWS_ARE_PLACED[0]):
        check_given(given(settings(parallelism_config=SimpleNamespace(cp_size=2))))
    with refused(Data.LONG, limit_name="ranks · tokens_per_rank", limit=64, length=65):
        trainer(tmp_path, documents=[[1] * 65], tokens_per_rank=64).train()
    with pytest.raises(NotImplementedError, match="evaluate"):
        trainer(tmp_path).predict(None)
    sharing = {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1, "vocab_size_per_layer_input": 64}
    with refused(Models.REENTRANT, module="layers.1.self_attn"):
        trainer(tmp_path, small_model("gemma4_text", **sharing), **REENTRANT)


# Models


def tiny(model_type: str, auto: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    """A tiny model on the meta device, with changes to its config."""
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        return auto.from_config(config, attn_implementation="eager" if model_type == "bloom" else "distca")


def with_dropout(name: str, value: Any, *model: str, **config: Any) -> Any:
    """A small model whose last attention layer alone has dropout."""
    made = small_model(*model, **config)
    setattr(list(decoder_attentions(made).values())[-1], name, value)
    return made


def plan(model: Any) -> Any:
    config = hf_distca.DistCAConfig(ping_pong=True)
    return hf_distca.plan_settings(model, config, ranks=2, device=torch.device("cpu"))


REFUSED_ADAPTERS = [
    (PROMPT_LEARNING, "PromptTuningConfig", {"num_virtual_tokens": 4}),
    (PROMPT_LEARNING, "PrefixTuningConfig", {"num_virtual_tokens": 4}),
    (ALORA, "LoraConfig", {"r": 4, "target_modules": ["q_proj"], "alora_invocation_tokens": [5]}),
    (ADAPTERS["ADALORA"], "AdaLoraConfig", {"total_step": 10, "target_modules": ["q_proj"]}),
    (ADAPTERS["POLY"], "PolyConfig", {"r": 4, "target_modules": ["q_proj"]}),
    (ADAPTERS["LILY"], "LilyConfig", {"r": 4, "target_modules": ["q_proj"]}),
    (ADAPTERS["SHADOW"], "ShadowConfig", {"shadow_num_hidden_layers": 1}),
]


@pytest.mark.parametrize(("entry", "config", "settings"), REFUSED_ADAPTERS, ids=[each[1] for each in REFUSED_ADAPTERS])
def test_an_adapter_that_would_be_wrong(entry, config, settings):
    if not hasattr(peft, config):
        pytest.skip(f"peft {peft.__version__} has no {config}")
    model = peft.get_peft_model(small_model(), getattr(peft, config)(**settings, task_type="CAUSAL_LM"))
    with refused(entry):
        plan(model)


DROPOUT = torch.nn.Dropout(0.2)
WRONG: list[tuple[Any, dict[str, Any], Callable[[], Any]]] = [
    (Models.DROPOUT_IN_CONFIG, {"name": "attention_dropout"}, lambda: small_model(attention_dropout=0.1)),
    (Models.DROPOUT_IN_CONFIG, {"name": "attn_pdrop", "value": 0.1}, lambda: small_model("gpt2")),
    (Models.DROPOUT_IN_LAYER, {"value": 0.2}, lambda: with_dropout("attention_dropout", 0.2)),
    (
        Models.DROPOUT_IN_LAYER,
        {"name": "dropout", "value": 0.2},
        lambda: with_dropout("dropout", DROPOUT, "bert", attention_probs_dropout_prob=0.0, is_decoder=True),
    ),
    (Models.OWN_MASK, {"model": "DogeForCausalLM"}, lambda: small_model("doge")),
    (Models.OTHER_ATTENTION, {"name": "sdpa"}, lambda: small_model(implementation="sdpa")),
    (Models.DROPS_KEYWORDS, {"module": "StableLmDecoderLayer"}, lambda: tiny("stablelm")),
    (Models.NO_INTERFACE, {"stock": "'eager'"}, lambda: tiny("bloom")),
    (Models.POSITIONS_FROM_PADDING, {}, lambda: tiny("roberta")),
    (Models.BIAS, {}, lambda: tiny("inkling_text")),
    (Models.NO_LAYERS, {}, lambda: tiny("ctrl")),
    (Models.NO_POSITIONS, {}, lambda: tiny("bart")),
    (Models.NOT_DECODER, {}, lambda: tiny("bert", is_decoder=False)),
    (Models.NOT_CAUSAL, {"model": "BltForCausalLM"}, lambda: tiny("blt")),
    (Models.NOT_CAUSAL, {"model": "WhisperForCausalLM"}, lambda: tiny("whisper")),
    (Models.NOT_CAUSAL, {}, lambda: tiny("paligemma", AutoModelForImageTextToText)),
    (Models.NOT_CAUSAL, {"module": "layers.0.self_attn"}, lambda: small_model(is_causal=False)),
    (Models.OWN_LOSS, {}, lambda: tiny("gpt2", AutoModelForTokenClassification)),
]


@pytest.mark.parametrize(("entry", "values", "make"), WRONG)
def test_models_that_planned_steps_would_get_wrong(entry, values, make):
    with refused(entry, **values):
        plan(make())


def test_models_that_are_not_refused():
    model = small_model("gpt2", attn_pdrop=0.0)
    assert model.config.resid_pdrop == model.config.embd_pdrop == 0.1  # not of attention
    assert plan(model).kinds
    assert plan(tiny("gpt2", AutoModel)).kinds  # without a head there is no loss: a custom loop computes one


def test_layers_of_an_unknown_type():
    with pytest.raises(ValueError, match=r"layers of type \['indexed_attention'\].*model with stock attention"):
        plan(tiny("deepseek_v32"))


def test_a_layer_that_does_not_take_the_plan(monkeypatch):
    model = tiny("qwen3_next")
    layer = type(model.model.layers[0])
    monkeypatch.setattr(layer, "forward", lambda self, hidden_states, position_embeddings=None: hidden_states)
    with refused(Models.MIXING_WITHOUT_KEYWORDS, module=layer.__name__):
        plan(model)


# Every rank

MODELS: list[tuple[Callable[[bool], Any], Callable[[bool], dict[str, Any]], str]] = [
    (
        lambda other: small_model(implementation="sdpa" if other else "distca"),
        lambda other: {},
        "LlamaForCausalLM runs attn_implementation='sdpa', but plans do not reach that attention",
    ),
    (
        lambda other: small_model("gpt2", attn_pdrop=0.1 if other else 0.0),
        lambda other: {},
        "attn_pdrop is 0.1, but ranks cannot draw the same dropped attention weights",
    ),
    (lambda other: small_model(), lambda other: {"torch_compile": other}, "torch.compile is set for the whole model"),
    (
        lambda other: small_model(),
        lambda other: {"attention_kernel": "torch_varlen" if other else "auto"},
        "kernel 'torch_varlen' computes on CUDA, got cpu",
    ),
    (
        lambda other: without_mlps(small_model()) if other else small_model(),
        lambda other: {"mlp_chunk_rows": 16},
        "mlp_chunk_rows=16 has no effect on",
    ),
    (
        lambda other: with_tower("distca"),
        lambda other: {"ddp_find_unused_parameters": not other},
        "ddp_find_unused_parameters=False is set, but model.vision_tower",
    ),
]
"""Models and arguments of ranks, of which rank 1 alone cannot be trained; and the error."""
SETTINGS: list[dict[str, Any]] = [
    {"tokens_per_rank": 96},
    {"balance_tolerance": 0.1},
    {"attention_kernel": "reference"},
    {"keep_received": True},
    {"ranks_per_node": 1},
    {"seed": 2},
    {"long_documents": "split"},
    {"gradient_accumulation_steps": 2},
]
"""Settings of rank 1 alone."""
DATA = {
    "ranks were given different data sets (rank 0: 1 documents, 3 tokens; rank 1: 1": [[1, 2, 4]],
    "rank 1: 2 documents, 4 tokens": [[1, 2, 3], [1]],
    "rank 1: ValueError: document 0 is empty": [[]],
}
"""Documents of rank 1 alone, by the error."""


def _errors(folder: str) -> list[str]:
    """What this rank raises for each of these, and for nodes of another number of ranks."""
    other, errors = torch.distributed.get_rank() == 1, []

    def raised(make: Callable[[], Any]) -> None:
        with pytest.raises(ValueError, match=r".") as error:
            make()
        errors.append(str(error.value))

    for model, arguments, _ in MODELS:
        raised(lambda m=model, a=arguments: make_trainer(folder, model=m(other), exchange_timeout=20, **a(other)))
    for settings in SETTINGS:
        raised(lambda settings=settings: make_trainer(folder, **(settings if other else {})))
    for documents in DATA.values():
        made = make_trainer(folder)
        made.train_dataset = [{"input_ids": document} for document in (documents if other else [[1, 2, 3]])]
        raised(made.get_train_dataloader)
    raised(lambda: make_trainer(folder, ranks_per_node="2,1"))
    return errors


def without_mlps(model):
    for layer in model.model.layers:
        layer.mlp = torch.nn.Identity()
    return model


def test_every_rank_raises_where_one_cannot_train(tmp_path, rank_pools: dict[int, RankPool]):
    begun = time.monotonic()
    for errors in rank_pools[2].run(_errors, str(tmp_path)):
        of_models, of_settings = errors[: len(MODELS)], errors[len(MODELS) : -len(DATA) - 1]
        for error, (_, _, message) in zip(of_models, MODELS, strict=True):
            assert error.startswith(f"rank 1: ValueError: {message}")
        assert [("differ" in error and "between ranks" in error) for error in of_settings] == [True] * len(SETTINGS)
        assert [message in error for message, error in zip(DATA, errors[-len(DATA) - 1 :], strict=False)] == [True] * 3
        assert errors[-1].startswith("ranks_per_node=2,1 adds up to 3 ranks, but 2 ranks train; give the number")
    assert time.monotonic() - begun < 60

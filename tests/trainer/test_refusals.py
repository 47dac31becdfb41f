"""What cannot be trained exactly is refused before any work starts, on every rank."""

import re
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
from hf_distca.refusal import Rule, check
from hf_distca.trainer import refusals
from hf_distca.trainer.refusals import PADDING, SUMMED_GRADIENTS, Given, check_given, check_trainer
from tests.models_and_batches import small_model
from tests.refused import refused
from tests.survey.tiny import tiny_config
from tests.trainer.comparison import CHECKPOINTING
from tests.trainer.features import with_tower
from tests.trainer.small_trainers import make_trainer

# Tables


def settings(**changes: Any) -> Any:
    # Arguments of TRL's trainer, which have those of transformers, changed after they were checked.
    args = hf_distca.DistCASFTConfig("unused", use_cpu=True, bf16=False, report_to=[])
    loading = {name: changes.pop(name) for name in list(changes) if hasattr(args.accelerator_config, name)}
    args.accelerator_config = SimpleNamespace(**{**vars(args.accelerator_config), **loading})
    vars(args).update(changes)
    return args


def given(args: Any = None, trainer: type = hf_distca.DistCATrainer, **named: Any) -> Given:
    return Given(trainer, {"args": settings() if args is None else args, **named})


def launched(args: Any = None, model: Any = None, tensor: int = 1, **changes: Any) -> Any:
    # A trainer as it would be launched, with tensor parallelism of this size.
    backend = SimpleNamespace(backend=changes.pop("backend", DynamoBackend.NO))
    accelerator = {"mixed_precision": "no", "is_fsdp2": False, "distributed_type": DistributedType.NO}
    accelerator |= {name: changes.pop(name) for name in accelerator if name in changes}
    facts = {"is_deepspeed_enabled": False, "model_accepts_loss_kwargs": True, "optimizer": None, "lr_scheduler": None}
    return SimpleNamespace(
        args=args or settings(),
        model=model or small_model(),
        get_tp_size=lambda: tensor,
        accelerator=SimpleNamespace(
            state=SimpleNamespace(dynamo_plugin=backend), parallelism_config=None, **accelerator
        ),
        **{**facts, **changes},
    )


def divided(adapters: bool = False, tp_plan: tuple[str, ...] = (), **sizes: int) -> Any:
    # A model that was divided when it was loaded, of which only facts are looked at.
    sized = SimpleNamespace(**{"pp_size": 1, "dp_replicate_size": 1, **sizes})
    model = SimpleNamespace(config=SimpleNamespace(distributed_config=sized))
    model.tp_plan = dict.fromkeys(tp_plan, SUMMED_GRADIENTS)
    model.is_distributed_loading_by_transformers = True
    if adapters:
        model.get_base_model = lambda: divided(**sizes)
    return model


DDP = {"distributed_type": DistributedType.MULTI_CPU}
REENTRANT = {CHECKPOINTING: True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
LIGER = {"use_liger_kernel": True}
NO_MLPS = {**LIGER, "liger_kernel_config": {"swiglu": False, "geglu": False}}


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
        lambda: hf_distca.DistCATrainingArguments("unused", use_cpu=True, report_to=[]),
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
        lambda: launched(settings(gradient_accumulation_steps=2), divided(tp_plan=("norm",)), tensor=2),
        lambda: launched(mixed_precision="fp16"),
        lambda: launched(settings(optim="adafactor"), is_fsdp2=True),
        lambda: launched(optimizer=1, is_deepspeed_enabled=True),
        lambda: launched(model_accepts_loss_kwargs=False),
        lambda: launched(settings(**REENTRANT), with_tower("distca"), **DDP),
        lambda: launched(settings(ddp_find_unused_parameters=False), with_tower("distca"), **DDP),
    ],
}
"""A subject for each rule of each table, in the order of the rules."""


def rules_of(table: str) -> tuple[Rule, ...]:
    rules = getattr(refusals, table)
    return rules if isinstance(rules, tuple) else (rules,)


@pytest.mark.parametrize("table", CASES)
def test_each_rule_refuses_its_case(table):
    for rule, make in zip(rules_of(table), CASES[table], strict=True):
        with refused(rule):
            check_trainer(make()) if table == "TRAINER" else check(rules_of(table), make())


def test_values_in_messages():
    for table, number, text in (
        ("ARGUMENTS", 12, "or liger_kernel_config={'swiglu': False, 'geglu': False}"),
        ("GIVEN", 1, "args are NoneType, but "),
        ("PACKING", 5, "accelerator_config.even_batches=False is set, but "),
        ("ROWS_ARE_PLACED", 1, "(sp_size=2)"),
    ):
        assert text in str(rules_of(table)[number].error(CASES[table][number]()))
    towers = "model.vision_tower, model.multi_modal_projector of Gemma3ForConditionalGeneration get no gradient"
    for number, text in ((8, "'adamw_torch"), (10, towers)):
        with pytest.raises(ValueError, match=text):
            check_trainer(CASES["TRAINER"][number]())


def test_what_is_not_refused():
    for args in (settings(**LIGER, label_names=["labels"], eval_packing=False), settings(mlp_chunk_rows=16)):
        check(refusals.ARGUMENTS, args)
    check(refusals.ARGUMENTS, settings(mlp_chunk_rows=16, **NO_MLPS))
    check_given(given(trainer=hf_distca.DistCASFTTrainer))
    collated = settings(per_device_train_batch_size=4, train_sampling_strategy="group_by_length")
    check_given(given(collated, data_collator=DataCollatorWithFlattening()))
    check(refusals.SFT_ARGUMENTS, settings(gradient_checkpointing_kwargs={"use_reentrant": False}))
    loading = settings(model_init_kwargs={"dtype": "bfloat16"})
    check(rules_of("LOADED_ALREADY"), given(loading, model="name"))
    for trainer in (
        launched(settings(gradient_accumulation_steps=2), divided(), tensor=2),
        launched(settings(gradient_accumulation_steps=2), divided(tp_plan=("norm",))),
        launched(model=divided(adapters=True)),
        launched(settings(optim="adafactor")),
        launched(settings(**REENTRANT), with_tower("distca")),
        launched(settings(ddp_find_unused_parameters=True), with_tower("distca"), **DDP),
    ):
        check_trainer(trainer)


def test_trainers_check_the_tables(tmp_path):
    def trainer(model: Any = None, documents: Any = ((1, 2, 3),), compute_metrics: Any = None, **options: Any) -> Any:
        dataset = datasets.Dataset.from_dict({"input_ids": [list(document) for document in documents]})
        options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, **options}
        args = hf_distca.DistCATrainingArguments(str(tmp_path), **options)
        model = model or small_model()
        return hf_distca.DistCATrainer(model, args, train_dataset=dataset, compute_metrics=compute_metrics)

    with refused(refusals.ARGUMENTS[0]):
        trainer(label_smoothing_factor=0.1)
    with refused(refusals.PACKING[0]):
        trainer(per_device_train_batch_size=4)
    with refused(refusals.GIVEN[2]):
        trainer(compute_metrics=print)
    with refused(refusals.ROWS_ARE_PLACED[0]):
        check_given(given(settings(parallelism_config=SimpleNamespace(cp_size=2))))
    with refused(Data.LONG, limit_name="ranks · tokens_per_rank", limit=64, length=65):
        trainer(documents=[[1] * 65], tokens_per_rank=64).train()
    with pytest.raises(NotImplementedError, match="evaluate"):
        trainer().predict(None)
    sharing = {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1, "vocab_size_per_layer_input": 64}
    with refused(Models.REENTRANT, module="layers.1.self_attn"):
        trainer(small_model("gemma4_text", **sharing), **REENTRANT)


# Models


def tiny(model_type: str, auto: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    """A tiny model on the meta device, with changes to its config."""
    config = tiny_config(model_type)
    vars(config).update(changes)
    with torch.device("meta"):
        return auto.from_config(config, attn_implementation="eager" if model_type == "bloom" else "distca")


def with_dropout(name: str, value: Any, *model: str, **config: Any) -> Any:
    """A small model whose last attention layer alone has dropout."""
    made = small_model(*model, **config)
    setattr(list(decoder_attentions(made).values())[-1], name, value)
    return made


def adapted(name: str, **settings: Any) -> Any:
    """A small model with an adapter of PEFT."""
    if not hasattr(peft, name):
        pytest.skip(f"peft {peft.__version__} has no {name}")
    return peft.get_peft_model(small_model(), getattr(peft, name)(**settings, task_type="CAUSAL_LM"))


def plan(model: Any) -> Any:
    config = hf_distca.DistCAConfig(ping_pong=True)
    return hf_distca.plan_settings(model, config, ranks=2, device=torch.device("cpu"))


Q = {"r": 4, "target_modules": ["q_proj"]}
WRONG: list[tuple[Any, dict[str, Any], Callable[[], Any]]] = [
    (PROMPT_LEARNING, {}, lambda: adapted("PromptTuningConfig", num_virtual_tokens=4)),
    (PROMPT_LEARNING, {}, lambda: adapted("PrefixTuningConfig", num_virtual_tokens=4)),
    (ALORA, {}, lambda: adapted("LoraConfig", **Q, alora_invocation_tokens=[5])),
    (ADAPTERS["ADALORA"], {}, lambda: adapted("AdaLoraConfig", total_step=10, target_modules=["q_proj"])),
    (ADAPTERS["POLY"], {}, lambda: adapted("PolyConfig", **Q)),
    (ADAPTERS["LILY"], {}, lambda: adapted("LilyConfig", **Q)),
    (ADAPTERS["SHADOW"], {}, lambda: adapted("ShadowConfig", shadow_num_hidden_layers=1)),
    (Models.DROPOUT_IN_CONFIG, {"name": "attention_dropout"}, lambda: small_model(attention_dropout=0.1)),
    (Models.DROPOUT_IN_CONFIG, {"name": "attn_pdrop", "value": 0.1}, lambda: small_model("gpt2")),
    (Models.DROPOUT_IN_LAYER, {"value": 0.2}, lambda: with_dropout("attention_dropout", 0.2)),
    (
        Models.DROPOUT_IN_LAYER,
        {"name": "dropout", "value": 0.2},
        lambda: with_dropout(
            "dropout", torch.nn.Dropout(0.2), "bert", attention_probs_dropout_prob=0.0, is_decoder=True
        ),
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


def test_layers_of_an_unknown_type_or_that_do_not_take_the_plan(monkeypatch):
    with pytest.raises(ValueError, match=r"layers of type \['indexed_attention'\].*model with stock attention"):
        plan(tiny("deepseek_v32"))
    model = tiny("qwen3_next")
    layer = type(model.model.layers[0])
    monkeypatch.setattr(layer, "forward", lambda self, hidden_states, position_embeddings=None: hidden_states)
    with refused(Models.MIXING_WITHOUT_KEYWORDS, module=layer.__name__):
        plan(model)


# Every rank

SETTINGS: dict[str, Any] = {
    **{"tokens_per_rank": 96, "balance_tolerance": 0.1, "attention_kernel": "reference", "keep_received": True},
    **{"ranks_per_node": 1, "seed": 2, "long_documents": "split", "gradient_accumulation_steps": 2},
}
"""Settings of rank 1 alone, one at a time."""
DATA = {
    "ranks were given different data sets (rank 0: 1 documents, 3 tokens; rank 1: 1": [[1, 2, 4]],
    "rank 1: 2 documents, 4 tokens": [[1, 2, 3], [1]],
    "rank 1: ValueError: document 0 is empty": [[]],
}
"""Documents of rank 1 alone, by the error."""


def _raise_together(folder: str) -> None:
    """Give rank 1 alone what cannot be trained, or what differs; then both ranks a number of nodes that is wrong."""
    other, without_mlps = torch.distributed.get_rank() == 1, small_model()
    for layer in without_mlps.model.layers if other else ():
        layer.mlp = torch.nn.Identity()
    wrong: dict[str, dict[str, Any]] = {
        "LlamaForCausalLM runs attn_implementation='sdpa', but plans do not reach that attention": {
            "model": small_model(implementation="sdpa" if other else "distca")
        },
        "torch.compile is set for the whole model": {"torch_compile": other},
        "kernel 'torch_varlen' computes on CUDA, got cpu": {"attention_kernel": "torch_varlen" if other else "auto"},
        "mlp_chunk_rows=16 has no effect on": {"model": without_mlps, "mlp_chunk_rows": 16},
        "ddp_find_unused_parameters=False is set, but model.vision_tower": {
            **{"model": with_tower("distca"), "ddp_find_unused_parameters": not other}
        },
    }
    for message, options in wrong.items():
        with pytest.raises(ValueError, match=f"^rank 1: ValueError: {re.escape(message)}"):
            make_trainer(folder, exchange_timeout=20, **options)
    for name, value in SETTINGS.items():
        with pytest.raises(ValueError, match=r"differs? between ranks"):
            make_trainer(folder, **({name: value} if other else {}))
    for message, documents in DATA.items():
        made = make_trainer(folder)
        made.train_dataset = [{"input_ids": document} for document in (documents if other else [[1, 2, 3]])]
        with pytest.raises(ValueError, match=re.escape(message)):
            made.get_train_dataloader()
    with pytest.raises(ValueError, match=r"^ranks_per_node=2,1 adds up to 3 ranks, but 2 ranks train"):
        make_trainer(folder, ranks_per_node="2,1")


def test_every_rank_raises_where_one_cannot_train(tmp_path, rank_pools):
    rank_pools[2].run(_raise_together, str(tmp_path))

"""What cannot be trained exactly is refused before any work starts."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
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
from hf_distca.trainer.refusals import PADDING, Given
from tests.models_and_batches import small_model
from tests.ranks import RankPool
from tests.refused import refused
from tests.survey.tiny import tiny_config
from tests.trainer.features import with_tower
from tests.trainer.launches import CHECKPOINTING
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
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def given(args=None, trainer=hf_distca.DistCATrainer, **named):
    return Given(trainer, {"args": settings() if args is None else args, **named})


def loading(**changes):
    return settings(accelerator_config=SimpleNamespace(**{**vars(settings().accelerator_config), **changes}))


def launched(args=None, model=None, sizes=(1, 1, 1), optimizers=(None, None), **changes):
    # A trainer as it would be launched, with context, sequence and tensor parallelism of these sizes.
    model = model or small_model()
    context, sequence, tensor = (lambda size=size: size for size in sizes)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=changes.pop("backend", DynamoBackend.NO))),
        mixed_precision=changes.pop("mixed_precision", "no"),
        is_fsdp2=changes.pop("is_fsdp2", False),
        distributed_type=changes.pop("distributed_type", DistributedType.NO),
    )
    facts = {"is_deepspeed_enabled": False, "model_accepts_loss_kwargs": True, **changes}
    optimizer, scheduler = optimizers
    return refusals.launched(
        SimpleNamespace(
            args=args or settings(),
            model=model,
            accelerator=accelerator,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            get_cp_size=context,
            get_sp_size=sequence,
            get_tp_size=tensor,
            **facts,
        )
    )


def divided(adapters=False, tp_plan=(), **sizes):
    # A model that was divided when it was loaded, of which only facts are looked at.
    sized = SimpleNamespace(**{"pp_size": 1, "dp_replicate_size": 1, **sizes})
    model = SimpleNamespace(config=SimpleNamespace(distributed_config=sized), tp_plan=dict.fromkeys(tp_plan, NORMS))
    model.is_distributed_loading_by_transformers = True
    if adapters:
        model.get_base_model = lambda: divided(**sizes)
    return model


TENSOR = (1, 1, 2)
NORMS = "replicated_with_grad_allreduce"
ADAFACTOR = {"optim": "adafactor"}
DDP = {"distributed_type": DistributedType.MULTI_CPU}
REENTRANT = {CHECKPOINTING: True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
ZERO = {"is_deepspeed_enabled": True}


def with_losses(*names: str, **changes: Any) -> Any:
    return settings(use_liger_kernel=True, liger_kernel_config=dict.fromkeys(names, True), **changes)


def parallel(**sizes: int) -> Any:
    return settings(parallelism_config=SimpleNamespace(**{"cp_size": 1, "sp_size": 1, **sizes}))


CASES: dict[str, list[Callable[[], Any]]] = {
    "ARGUMENTS": [
        lambda: settings(label_smoothing_factor=0.1),
        lambda: settings(average_tokens_across_devices=False),
        lambda: settings(auto_find_batch_size=True),
        lambda: settings(dataloader_drop_last=True),
        lambda: settings(use_cache=True),
        lambda: settings(label_names=["targets"]),
        lambda: settings(packing=True),
        lambda: settings(eval_packing=True),
        lambda: settings(padding_free=True),
        lambda: settings(pad_to_multiple_of=8),
        lambda: settings(activation_offloading=True),
        lambda: with_losses("fused_linear_cross_entropy"),
        lambda: with_losses("cross_entropy"),
        lambda: settings(use_liger_kernel=True, liger_kernel_config={"geglu": False}, mlp_chunk_rows=16),
    ],
    "GIVEN": [
        lambda: given(trainer=trl.DPOTrainer),
        lambda: Given(hf_distca.DistCATrainer, {}),
        lambda: given(compute_metrics=print),
        lambda: given(preprocess_logits_for_metrics=print),
        lambda: given(compute_loss_func=print),
        lambda: given(model_init=print),
        lambda: given(settings(per_device_train_batch_size=4)),
        lambda: given(settings(per_device_eval_batch_size=4)),
        lambda: given(data_collator=transformers.DataCollatorWithPadding.__new__(PADDING[-1])),
        lambda: given(settings(train_sampling_strategy="group_by_length")),
        lambda: given(loading(split_batches=True)),
        lambda: given(loading(dispatch_batches=True)),
        lambda: given(loading(even_batches=False)),
        lambda: given(loading(use_seedable_sampler=False)),
        lambda: given(settings(dataloader_in_order=False)),
        lambda: given(parallel(cp_size=2)),
        lambda: given(parallel(sp_size=2)),
        lambda: given(settings(_n_gpu=2)),
    ],
    "LOADED_ALREADY": [
        lambda: given(SimpleNamespace(model_init_kwargs={"dtype": "bfloat16"}), model=small_model()),
    ],
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
        lambda: launched(sizes=(2, 1, 1)),
        lambda: launched(sizes=(1, 2, 1)),
        lambda: launched(sizes=TENSOR),
        lambda: launched(model=divided(pp_size=4)),
        lambda: launched(model=divided(adapters=True), sizes=TENSOR),
        lambda: launched(settings(attention_servers="external"), divided(), TENSOR),
        lambda: launched(settings(gradient_accumulation_steps=2), divided(tp_plan=["norm"]), TENSOR),
        lambda: launched(mixed_precision="fp16"),
        lambda: launched(settings(**ADAFACTOR), is_fsdp2=True),
        lambda: launched(settings(**ADAFACTOR), **ZERO),
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
    for make, expected in zip(CASES[table], TABLES[table], strict=True):
        subject = make()
        with refused(expected):
            check(TABLES[table], subject)


def test_values_in_messages():
    messages = {
        name: [str(rule.error(make())) for make, rule in zip(CASES[name], TABLES[name], strict=True)] for name in CASES
    }
    assert messages["ARGUMENTS"][5].startswith("label_names=['targets'] is set, but ")
    assert messages["ARGUMENTS"][13].endswith("or liger_kernel_config={'swiglu': False, 'geglu': False}")
    assert messages["GIVEN"][1].startswith("args are NoneType, but ")
    assert messages["GIVEN"][12].startswith("accelerator_config's even_batches=False is set, but ")
    assert "(sp_size=2)" in messages["GIVEN"][16]
    assert "'adamw_torch" in messages["TRAINER"][11]
    towers = "model.vision_tower, model.multi_modal_projector of Gemma3ForConditionalGeneration get no gradient"
    assert towers in messages["TRAINER"][13]


def test_what_is_not_refused():
    check(refusals.ARGUMENTS, settings(use_liger_kernel=True, label_names=["labels"], eval_packing=False))
    check(refusals.ARGUMENTS, settings(mlp_chunk_rows=16))
    no_mlps = {"swiglu": False, "geglu": False}
    check(refusals.ARGUMENTS, settings(mlp_chunk_rows=16, use_liger_kernel=True, liger_kernel_config=no_mlps))
    check(refusals.GIVEN, given(trainer=hf_distca.DistCASFTTrainer))
    collated = settings(per_device_train_batch_size=4, train_sampling_strategy="group_by_length")
    check(refusals.GIVEN, given(collated, data_collator=DataCollatorWithFlattening()))
    check(refusals.SFT_ARGUMENTS, settings(gradient_checkpointing_kwargs={"use_reentrant": False}))
    check(TABLES["LOADED_ALREADY"], given(settings(model_init_kwargs={"dtype": "bfloat16"}), model="name"))
    check(refusals.TRAINER, launched(model=divided(), sizes=TENSOR))
    check(refusals.TRAINER, launched(settings(gradient_accumulation_steps=2), divided(), TENSOR))
    check(refusals.TRAINER, launched(settings(gradient_accumulation_steps=2), divided(tp_plan=["norm"])))
    check(refusals.TRAINER, launched(model=divided(adapters=True)))
    check(refusals.TRAINER, launched(settings(**ADAFACTOR)))
    check(refusals.TRAINER, launched(settings(**REENTRANT), with_tower("distca")))
    check(refusals.TRAINER, launched(settings(ddp_find_unused_parameters=True), with_tower("distca"), **DDP))


# Refused by a trainer


def test_trainers_check_the_tables(tmp_path):
    with refused(refusals.ARGUMENTS[0]):
        arguments(tmp_path, label_smoothing_factor=0.1)
    with refused(refusals.GIVEN[6]):
        trainer(tmp_path, per_device_train_batch_size=4)
    trainer(tmp_path, collator=DataCollatorWithFlattening(), per_device_train_batch_size=4)
    with refused(Data.LONG, limit_name="ranks · tokens_per_rank", limit=64, length=65):
        trainer(tmp_path, documents=[[1] * 65], tokens_per_rank=64).train()
    with pytest.raises(NotImplementedError, match="evaluate"):
        trainer(tmp_path).predict(None)


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
def test_an_adapter_that_would_be_wrong(tmp_path, entry, config, settings):
    if not hasattr(peft, config):
        pytest.skip(f"peft {peft.__version__} has no {config}")
    model = peft.get_peft_model(small_model(), getattr(peft, config)(**settings, task_type="CAUSAL_LM"))
    with refused(entry):
        trainer(tmp_path, model=model)


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


def test_reentrant_checkpoints_of_layers_that_share_keys(tmp_path):
    sharing = {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1, "vocab_size_per_layer_input": 64}
    with refused(Models.REENTRANT, module="layers.1.self_attn"):
        trainer(tmp_path, small_model("gemma4_text", **sharing), **REENTRANT)


def test_a_layer_that_does_not_take_the_plan(monkeypatch):
    model = tiny("qwen3_next")
    layer = type(model.model.layers[0])
    monkeypatch.setattr(layer, "forward", lambda self, hidden_states, position_embeddings=None: hidden_states)
    with refused(Models.MIXING_WITHOUT_KEYWORDS, module=layer.__name__):
        plan(model)


# Every rank


def test_device_and_dtype_beyond_the_kernel(tmp_path):
    with pytest.raises(ValueError, match="kernel 'torch_varlen' computes on CUDA, got cpu"):
        trainer(tmp_path, attention_kernel="torch_varlen")


def _of_data(folder: str) -> list[str]:
    """Errors of this rank where rank 1 alone has other or faulty data."""
    rank, errors = torch.distributed.get_rank(), []
    for number, other in enumerate([[[1, 2, 4]], [[1, 2, 3], [1]], [[]]]):
        made = make_trainer(f"{folder}/{number}")
        made.train_dataset = [{"input_ids": document} for document in (other if rank == 1 else [[1, 2, 3]])]
        with pytest.raises(ValueError, match=r"different data sets|empty") as error:
            made.get_train_dataloader()
        errors.append(str(error.value))
    return errors


def test_every_rank_raises_where_one_has_other_data(tmp_path, rank_pools: dict[int, RankPool]):
    for tokens, number, faulty in rank_pools[2].run(_of_data, str(tmp_path)):
        assert "ranks were given different data sets (rank 0: 1 documents, 3 tokens; rank 1: 1" in tokens
        assert "rank 1: 2 documents, 4 tokens" in number
        assert "rank 1: ValueError: document 0 is empty" in faulty


def _refusals(folder: str) -> list[str]:
    """What this rank is told where rank 1 alone has a model, or an argument, that cannot be trained."""
    import torch.distributed as dist

    other = dist.get_rank() == 1
    told = []
    for model, arguments in [
        (small_model(implementation="sdpa" if other else "distca"), {}),
        (small_model("gpt2", attn_pdrop=0.1 if other else 0.0), {}),
        (small_model(), {"torch_compile": other}),
        (small_model(), {"attention_kernel": "torch_varlen" if other else "auto"}),
        (without_mlps(small_model()) if other else small_model(), {"mlp_chunk_rows": 16}),
        (with_tower("distca"), {"ddp_find_unused_parameters": not other}),
        (with_tower("distca"), {CHECKPOINTING: True, "gradient_checkpointing_kwargs": {"use_reentrant": other}}),
    ]:
        try:
            make_trainer(folder, model=model, exchange_timeout=20, **arguments)
        except ValueError as error:
            told.append(str(error))
        else:
            told.append("no error")
    return told


def without_mlps(model):
    for layer in model.model.layers:
        layer.mlp = torch.nn.Identity()
    return model


def test_every_rank_raises_where_one_cannot_train(tmp_path, rank_pools: dict[int, RankPool]):
    messages = [
        "rank 1: ValueError: LlamaForCausalLM runs attn_implementation='sdpa', but plans do not reach that attention",
        "rank 1: ValueError: attn_pdrop is 0.1, but ranks cannot draw the same dropped attention weights",
        "rank 1: ValueError: torch.compile is set for the whole model, but",
        "rank 1: ValueError: kernel 'torch_varlen' computes on CUDA, got cpu",
        "rank 1: ValueError: mlp_chunk_rows=16 has no effect on",
        "rank 1: ValueError: ddp_find_unused_parameters=False is set, but model.vision_tower",
        "rank 1: ValueError: gradient_checkpointing_kwargs={'use_reentrant': True} is set, but model.vision_tower",
    ]
    begun = time.monotonic()
    for told in rank_pools[2].run(_refusals, str(tmp_path)):
        for got, message in zip(told, messages, strict=True):
            assert got.startswith(message)
    assert time.monotonic() - begun < 60

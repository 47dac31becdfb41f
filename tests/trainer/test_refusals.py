"""What cannot be trained exactly is refused before any work starts, on every rank."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
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
    AutoModelForMultimodalLM,
    AutoModelForTokenClassification,
    DataCollatorForLanguageModeling,
    LlamaForCausalLM,
)

import hf_distca
from hf_distca.checks import argument_rules, launch_rules
from hf_distca.checks.model_rules import ADAPTERS, Models
from hf_distca.checks.refusal import RefusedError, check
from hf_distca.checks.run_rules import Resume, Run
from hf_distca.checks.setting_names import EARLIER
from hf_distca.collator.place import DataPlace, DataProgress, capacity_and_bins
from hf_distca.models.decoder import decoder_attentions
from hf_distca.planner.settings import PlanSettings
from hf_distca.trainer import resuming
from hf_distca.trainer.launch_facts import SUMMED_GRADIENTS, check_given, check_trainer
from tests.models_and_batches import small_model
from tests.refused import refused
from tests.survey.tiny import tiny_config
from tests.trainer.chats import tokenizer as chat_tokenizer
from tests.trainer.comparison import CHECKPOINTING
from tests.trainer.features import with_tower
from tests.trainer.small_trainers import LENGTHS, make_trainer

# Tables


def settings(kind: Any = hf_distca.DistCASFTConfig, **changes: Any) -> Any:
    """Arguments of TRL's trainer, which have those of transformers, changed after they were
    checked.
    """
    args = kind("unused", use_cpu=True, bf16=False, report_to=[])
    vars(args).update(changes)
    return args


def give(trainer: type = hf_distca.DistCATrainer, options: Any = None, **named: Any) -> None:
    packs = issubclass(trainer, hf_distca.DistCAMixin)
    given = {"model": "a name", "args": settings(**(options or {})), **named}
    check_given(trainer, given, packs=packs)


def launch(
    model: Any = small_model,
    tensor: int = 1,
    trainer: Any = None,
    by: Any = None,
    packs: bool = True,
    **changes: Any,
) -> None:
    """Check a trainer as it would be launched by an accelerator, with tensor parallelism of this
    size.
    """
    state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO))
    accelerator = {
        "mixed_precision": "no",
        "is_fsdp2": False,
        "parallelism_config": None,
        "state": state,
    }
    accelerator |= {"distributed_type": DistributedType.NO, **(by or {})}
    facts: dict[str, Any] = {"compute_loss": hf_distca.DistCAMixin.compute_loss}
    facts |= {
        "is_deepspeed_enabled": False,
        "optimizer": None,
        "lr_scheduler": None,
    }
    facts |= {
        "args": settings(**changes),
        "model": model(),
        "get_tp_size": lambda: tensor,
        **(trainer or {}),
    }
    check_trainer(SimpleNamespace(accelerator=SimpleNamespace(**accelerator), **facts), packs=packs)


def divided(
    adapters: bool = False, tp_plan: tuple[str, ...] = (), **sizes: int
) -> Callable[[], Any]:
    """Make a model that was divided when it was loaded, of which only facts are looked at."""
    sized = SimpleNamespace(**{"pp_size": 1, "dp_replicate_size": 1, **sizes})
    model = SimpleNamespace(
        config=SimpleNamespace(distributed_config=sized), forward=lambda labels: None
    )
    model.tp_plan = dict.fromkeys(tp_plan, SUMMED_GRADIENTS)
    model.is_distributed_loading_by_transformers = True
    if adapters:
        model.get_base_model = divided(**sizes)
    return lambda: model


def adapted_by(*, tied: bool = True, **lora: Any) -> dict[str, Any]:
    """A launch under FSDP2 of a model with LoRA, whose embeddings of input and output are one
    weight.
    """

    def make() -> Any:
        config = peft.LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **lora})
        return peft.get_peft_model(small_model(tie_word_embeddings=tied), config)

    return {"model": make, "by": {"is_fsdp2": True}}


def with_shared_keys() -> Any:
    """A model whose second layer reads keys and values of the first."""
    sharing = {
        "layer_types": ["full_attention"] * 2,
        "num_kv_shared_layers": 1,
        "vocab_size_per_layer_input": 64,
    }
    return small_model("gemma4_text", **sharing)


REENTRANT = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}}
TOWER = {
    "model": lambda: with_tower("distca"),
    "by": {"distributed_type": DistributedType.MULTI_CPU},
}
COMPILED = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.INDUCTOR))
OFFLOADED_BY_FSDP = SimpleNamespace(
    dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO),
    fsdp_plugin=SimpleNamespace(activation_checkpointing_offload=True),
)
LIGER = {"use_liger_kernel": True}
CHECKS: dict[str, Callable[..., None]] = {
    "ARGUMENTS": lambda kind=hf_distca.DistCASFTConfig, **changes: check(
        argument_rules.ARGUMENTS, settings(kind, **changes)
    ),
    "GIVEN": give,
    "PACKED_ARGUMENTS": lambda **changes: check(
        argument_rules.PACKED_ARGUMENTS, settings(**changes)
    ),
    "PACKED_GIVEN": give,
    "TRAINER": launch,
}
PICTURES = SimpleNamespace(column_names=["prompt", "image"])
HIDING = DataCollatorForLanguageModeling(chat_tokenizer(), mlm=False)
HIDING.mlm = True  # which only a tokenizer with a token for it allows
METRICS = {"compute_metrics": print, "preprocess_logits_for_metrics": print}
CASES: dict[str, list[dict[str, Any]]] = {
    "ARGUMENTS": [
        *({"auto_find_batch_size": True}, {"ddp_static_graph": True}, {"bf16_full_eval": True}),
        {"fp16_full_eval": True},
        {"kind": hf_distca.DistCAGRPOConfig, "use_transformers_continuous_batching": True},
        {f"{CHECKPOINTING}_kwargs": {"offload": True}},
        {**LIGER, "liger_kernel_config": {"geglu": False}, "mlp_chunk_rows": 16},
    ],
    "GIVEN": [
        {"processing_class": "gpt2"},
        {"model_init": print},
        {"options": {"_n_gpu": 2}},
        {"model": small_model(), "options": {"model_init_kwargs": {"dtype": "bfloat16"}}},
    ],
    "PACKED_ARGUMENTS": [
        *(
            {"label_smoothing_factor": 0.1},
            {"average_tokens_across_devices": False},
        ),
        *({"use_cache": True}, {"label_names": ["targets"]}),
    ],
    "PACKED_GIVEN": [
        {"trainer": type("Mixed", (hf_distca.DistCAMixin, trl.DPOTrainer), {})},
        {"trainer": hf_distca.DistCASFTTrainer, "preprocess_logits_for_metrics": print},
        *({"compute_metrics": print}, {**METRICS, "options": {"batch_eval_metrics": True}}),
        *({**METRICS, "options": {"include_for_metrics": ["loss"]}}, {"compute_loss_func": print}),
        {"data_collator": HIDING},
    ],
    "TRAINER": [
        {"by": {"parallelism_config": SimpleNamespace(cp_size=2)}},
        {"by": {"parallelism_config": SimpleNamespace(cp_size=1, sp_size=2)}},
        {"trainer": {"_buffered_inputs": None, "train_dataset": PICTURES}},
        {"trainer": {"_is_vision_dataset": True}},
        {"tensor": 2, "model": divided(), "packs": False},
        {"by": {"state": COMPILED}},
        {"by": {"state": OFFLOADED_BY_FSDP}},
        {"tensor": 2},
        {"model": divided(pp_size=4)},
        {"model": divided(adapters=True), "tensor": 2},
        {"attention_servers": "external", "model": divided(), "tensor": 2},
        {"gradient_accumulation_steps": 2, "model": divided(tp_plan=("norm",)), "tensor": 2},
        {"by": {"mixed_precision": "fp16"}},
        adapted_by(modules_to_save=["embed_tokens"]),
        adapted_by(trainable_token_indices=[3]),
        {**adapted_by(target_modules=["embed_tokens"], ensure_weight_tying=True), "by": {}},
        {"trainer": {"optimizer": 1, "is_deepspeed_enabled": True}},
        {**TOWER, **REENTRANT},
        {"model": with_shared_keys, **REENTRANT},
        {**TOWER, "ddp_find_unused_parameters": False},
    ],
}
"""What each rule of each table refuses, in the order of the rules."""
TEXTS = {
    "ARGUMENTS": "or liger_kernel_config={'swiglu': False, 'geglu': False}",
    "TRAINER": ("model.visual of Qwen3VLForConditionalGeneration get no gradient"),
}
"""Values in one of the messages."""
ACCUMULATED = {"gradient_accumulation_steps": 2}
NOT_REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("PACKED_ARGUMENTS", {"label_names": ["labels"]}),
    ("ARGUMENTS", {"mlp_chunk_rows": 16}),
    ("ARGUMENTS", {f"{CHECKPOINTING}_kwargs": {"offload": False, "every_n_layers": 2}}),
    (
        "ARGUMENTS",
        {**LIGER, "liger_kernel_config": {"swiglu": False, "geglu": False}, "mlp_chunk_rows": 16},
    ),
    ("PACKED_GIVEN", {"trainer": hf_distca.DistCASFTTrainer}),
    *(("PACKED_GIVEN", given) for given in (METRICS, {"preprocess_logits_for_metrics": print})),
    ("PACKED_GIVEN", {"options": {"batch_eval_metrics": True, "include_for_metrics": ["loss"]}}),
    ("PACKED_GIVEN", {"trainer": hf_distca.DistCADPOTrainer, "compute_metrics": print}),
    ("TRAINER", {**ACCUMULATED, "model": divided(), "tensor": 2}),
    ("TRAINER", {**ACCUMULATED, "model": divided(tp_plan=("norm",))}),
    ("TRAINER", {"model": divided(adapters=True)}),
    ("TRAINER", {**adapted_by(modules_to_save=["embed_tokens"]), "by": {}}),
    ("TRAINER", {**adapted_by(trainable_token_indices=[3]), "by": {}}),
    ("TRAINER", adapted_by(modules_to_save=["norm"])),
    ("TRAINER", adapted_by(target_modules=["embed_tokens"])),
    ("TRAINER", adapted_by(modules_to_save=["embed_tokens"], tied=False)),
    ("TRAINER", adapted_by(trainable_token_indices=[3], tied=False)),
    ("TRAINER", {"tensor": 2, "model": divided()}),
    ("TRAINER", {"model": lambda: with_shared_keys()}),
    ("TRAINER", {"model": TOWER["model"], **REENTRANT}),
    ("TRAINER", {**TOWER, "ddp_find_unused_parameters": True}),
]


TABLES = {**vars(argument_rules), "TRAINER": launch_rules.TRAINER}


@pytest.mark.parametrize("table", CASES)
def test_each_rule_refuses_its_case(table):
    messages = []
    for rule, case in zip(TABLES[table], CASES[table], strict=True):
        with refused(rule) as error:
            CHECKS[table](**case)
        messages.append(str(error.value))
    assert any(TEXTS.get(table, "") in message for message in messages)
    for _, case in (not_refused for not_refused in NOT_REFUSED if not_refused[0] == table):
        CHECKS[table](**case)


def test_all_that_is_refused_is_listed_at_once(tmp_path):
    with pytest.raises(RefusedError) as error:
        make_trainer(
            str(tmp_path),
            label_smoothing_factor=0.1,
            auto_find_batch_size=True,
            tokens_per_rank="many",
            ranks_per_node="0",
            exchange_timeout=-1,
        )
    assert str(error.value).splitlines() == [
        "5 settings cannot be used:",
        "- tokens_per_rank must be a number of tokens, such as 32768 or '32k', got 'many'",
        "- ranks_per_node must be one number of ranks, a number for each node such as '8,8,4', or "
        "'auto', got '0'",
        "- exchange_timeout must be positive, got -1",
        "- auto_find_batch_size=True is set, but memory is set by tokens_per_rank; set False",
        "- label_smoothing_factor=0.1 is set, but targets of packed documents are already shifted, "
        "and it shifts again; set 0.0",
    ]


def test_the_tables_are_checked(tmp_path):
    for rule, options in (
        (argument_rules.ARGUMENTS[0], {"auto_find_batch_size": True}),
        (argument_rules.PACKED_ARGUMENTS[0], {"label_smoothing_factor": 0.1}),
    ):
        with refused(rule):
            make_trainer(str(tmp_path), **options)


def test_all_that_a_trainer_is_given_is_listed_at_once():
    with pytest.raises(RefusedError) as error:
        give(model=torch.nn.Linear(1, 1), train_dataset=5, eval_dataset={"a": 6}, model_init=print)
    assert [line.split(", but ")[0] for line in str(error.value).splitlines()] == [
        "4 settings cannot be used:",
        "- model_init is given",
        "- model is of the type Linear",
        "- train_dataset is 5",
        "- eval_dataset['a'] is 6",
    ]


# Models


def tiny(model_type: str, auto: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    """A tiny model on the meta device, with changes to its config."""
    config = tiny_config(model_type)
    vars(config).update(changes)
    with torch.device("meta"):
        return auto.from_config(
            config, attn_implementation="eager" if model_type == "bloom" else "distca"
        )


def with_dropout(name: str, value: Any, *model: str, **config: Any) -> Any:
    """A small model whose last attention layer alone has dropout."""
    made = small_model(*model, **config)
    setattr(list(decoder_attentions(made).values())[-1], name, value)
    return made


def adapted(name: str, **settings: Any) -> Any:
    """A small model with an adapter of PEFT."""
    if not hasattr(peft, name):
        pytest.skip(f"peft {peft.__version__} has no {name}")
    return peft.get_peft_model(
        small_model(), getattr(peft, name)(**settings, task_type="CAUSAL_LM")
    )


def plan(model: Any) -> Any:
    config = hf_distca.DistCAConfig(planning={"ping_pong": True})
    return hf_distca.describe_run(model, config, ranks=2, device=torch.device("cpu")).plans


class WithoutKeywords(LlamaForCausalLM):
    """A model of a user whose loss does not get the number of targets."""

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids, labels=labels)


Q = {"r": 4, "target_modules": ["q_proj"]}
BERT = {"attention_probs_dropout_prob": 0.0, "is_decoder": True}
WRONG: list[tuple[Any, dict[str, Any], Callable[[], Any]]] = [
    (ADAPTERS[0], {}, lambda: adapted("PromptTuningConfig", num_virtual_tokens=4)),
    (ADAPTERS[1], {}, lambda: adapted("LoraConfig", **Q, alora_invocation_tokens=[5])),
    (ADAPTERS[2], {}, lambda: adapted("LoHaConfig", **Q, module_dropout=0.1)),
    (ADAPTERS[3], {}, lambda: adapted("AdaLoraConfig", total_step=10, target_modules=["q_proj"])),
    (ADAPTERS[4], {}, lambda: adapted("ShadowConfig", shadow_num_hidden_layers=1)),
    (ADAPTERS[5], {}, lambda: adapted("LilyConfig", **Q)),
    (
        Models.DROPOUT_IN_CONFIG,
        {"name": "attention_dropout"},
        lambda: small_model(attention_dropout=0.1),
    ),
    (Models.DROPOUT_IN_CONFIG, {"name": "attn_pdrop", "value": 0.1}, lambda: small_model("gpt2")),
    (Models.DROPOUT_IN_LAYER, {"value": 0.2}, lambda: with_dropout("attention_dropout", 0.2)),
    (
        *(Models.DROPOUT_IN_LAYER, {"name": "dropout", "value": 0.2}),
        lambda: with_dropout("dropout", torch.nn.Dropout(0.2), "bert", **BERT),
    ),
    (
        *(Models.LAYERDROP, {"name": "layerdrop", "value": 0.1}),
        lambda: small_model("opt", layerdrop=0.1, attention_dropout=0.0, word_embed_proj_dim=32),
    ),
    (Models.OWN_MASK, {"model": "DogeForCausalLM"}, lambda: small_model("doge")),
    (Models.DROPS_KEYWORDS, {"drops_keywords": "StableLmDecoderLayer"}, lambda: tiny("stablelm")),
    (
        Models.DROPS_KEYWORDS,
        {"drops_keywords": "WithoutKeywords"},
        lambda: WithoutKeywords(small_model().config),
    ),
    (Models.NO_INTERFACE, {"stock": "'eager'"}, lambda: tiny("bloom")),
    (Models.NO_FORWARD, {}, lambda: tiny("qwen2_5_omni", AutoModelForMultimodalLM)),
    (Models.POSITIONS_FROM_PADDING, {}, lambda: tiny("roberta")),
    (Models.BIAS, {}, lambda: tiny("inkling_text")),
    (Models.NO_LAYERS, {}, lambda: tiny("ctrl")),
    (Models.NO_POSITIONS, {}, lambda: tiny("bart")),
    (Models.NOT_DECODER, {}, lambda: tiny("bert", is_decoder=False)),
    (Models.NOT_CAUSAL, {"model": "BltForCausalLM"}, lambda: tiny("blt")),
    (Models.NOT_CAUSAL, {"model": "WhisperForCausalLM"}, lambda: tiny("whisper")),
    (Models.NOT_CAUSAL, {}, lambda: tiny("paligemma", AutoModelForImageTextToText)),
    (Models.NOT_CAUSAL, {"not_causal": "layers.0.self_attn"}, lambda: small_model(is_causal=False)),
    (Models.OWN_LOSS, {}, lambda: tiny("gpt2", AutoModelForTokenClassification)),
    (Models.MEAN_OF_ROWS, {"value": 1e-4}, lambda: tiny("bamba", z_loss_coefficient=1e-4)),
]


@pytest.mark.parametrize(("entry", "values", "make"), WRONG)
def test_models_that_planned_steps_would_get_wrong(entry, values, make):
    with refused(entry, **values):
        plan(make())


def test_all_settings_of_a_model_are_listed_at_once_and_one_reason_is_enough():
    with pytest.raises(RefusedError) as error:
        plan(small_model("gpt2"))  # its config and its layers have dropout
    assert [line.split(", but ")[0] for line in str(error.value).splitlines()[:2]] == [
        "2 settings cannot be used:",
        "- attn_pdrop is 0.1",
    ]
    with refused(Models.NOT_DECODER) as alone:
        plan(tiny("bert", is_decoder=False, attention_probs_dropout_prob=0.1))
    assert "settings cannot be used" not in str(alone.value)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_arguments_are_refused_under_other_names_and_as_json():
    """Names of earlier versions, and texts of a command line, are read by others."""
    continuous, offloads = argument_rules.ARGUMENTS[4:6]
    options: dict[str, Any] = {"use_cpu": True, "report_to": []}
    for name in (EARLIER, CHECKPOINTING):
        for given in ({"offload": True}, '{"offload": true}'):
            with refused(offloads):
                hf_distca.DistCATrainingArguments("unused", **options, **{f"{name}_kwargs": given})
        stock = {f"{name}_kwargs": '{"use_reentrant": false}'}
        hf_distca.DistCATrainingArguments("unused", **options, **stock)
    with refused(continuous):
        hf_distca.DistCAGRPOConfig("unused", **options, bf16=False, use_transformers_paged=True)
    # Also where others have not read them, because settings are refused.
    with refused(offloads) as error:
        hf_distca.DistCATrainingArguments(
            "unused", tokens_per_rank=0, **options, **{f"{CHECKPOINTING}_kwargs": given}
        )
    assert "2 settings cannot be used" in str(error.value)


def test_models_that_are_not_refused():
    model = small_model("gpt2", attn_pdrop=0.0)
    assert model.config.resid_pdrop == model.config.embd_pdrop == 0.1  # not of attention
    assert plan(model).kinds
    assert plan(
        tiny("gpt2", AutoModel)
    ).kinds  # without a head there is no loss: a custom loop computes one


def test_layers_of_an_unknown_type_or_that_do_not_take_the_plan(monkeypatch):
    with pytest.raises(
        ValueError, match=r"layers of type \['indexed_attention'\].*model with stock attention"
    ):
        plan(tiny("deepseek_v32"))
    model = tiny("qwen3_next")
    layer = type(model.model.layers[0])
    monkeypatch.setattr(
        layer, "forward", lambda self, hidden_states, position_embeddings=None: hidden_states
    )
    with refused(Models.MIXING_WITHOUT_KEYWORDS, unplanned_mixing=layer.__name__):
        plan(model)


# Resuming

STREAM = datasets.IterableDataset.from_generator(lambda: iter(()))


def groups(ranks: int = 2) -> Any:
    return SimpleNamespace(
        ranks=ranks,
        rank=0,
        raised_together=lambda **_: nullcontext(),
        all_gather=lambda value: [value] * ranks,
    )


def order(source: str, ranks: int = 2, skip: int = 0, **changed: Any) -> dict[str, Any]:
    """The order of documents on some ranks: packed without the first ones, of a stream, or by a
    custom collator.
    """
    base = {"tokens_per_rank": 96, "gradient_accumulation_steps": 3, "seed": 1}
    args = settings(**{**base, **changed})
    layout = "whole" if args.document_layout == "whole" else "auto"
    plans = PlanSettings(ranks, args.tokens_per_rank, document_layout=layout)
    return resuming.data_order(
        SimpleNamespace(
            args=args, train_dataset=STREAM if "stream" in source else range(len(LENGTHS))
        ),
        SimpleNamespace(groups=groups(ranks), settings=plans),
        SimpleNamespace(
            lengths=lambda dataset: (np.array(LENGTHS[skip:]), str(skip) * 64),
            prefixes=lambda dataset, shares: None,
        ),
        packs="flattened" not in source,
        shares=True,
    )


WHOLE = {"document_layout": "whole"}
RANDOM = "train_sampling_strategy is {}, but must be random with seed 1"
OF_BATCHES = {"per_device_train_batch_size": 3}
OTHERS: list[tuple[str, dict[str, Any], int, dict[str, Any], str]] = [
    (
        "packed",
        {},
        3,
        {"tokens_per_rank": 63},
        "is 189, but must be at least 192: with 3 ranks, tokens_per_rank=64",
    ),
    (
        "packed",
        {},
        2,
        {"gradient_accumulation_steps": 2},
        "gradient_accumulation_steps is 2, but must be 3",
    ),
    ("packed", {}, 2, {"data_seed": 7}, RANDOM.format("random with seed 7")),
    ("packed", {}, 2, {"train_sampling_strategy": "sequential"}, RANDOM.format("sequential")),
    ("packed", {}, 2, {"long_documents": "split"}, "long_documents is split, but must be error"),
    (
        "packed",
        {},
        2,
        {"skip": 1},
        "train_dataset is 11 documents of 471 tokens, fingerprint 1111111111111111",
    ),
    (
        "packed",
        WHOLE,
        3,
        WHOLE,
        "document_layout is whole on 3 ranks, but must be whole on 2 ranks",
    ),
    ("stream", {}, 3, {}, "ranks is 3, but must be 2"),
    ("stream", {}, 2, {"tokens_per_rank": 97}, "tokens_per_rank is 97, but must be 96"),
    ("stream", {}, 2, {"dataloader_num_workers": 1}, "dataloader_num_workers is 1, but must be 0"),
    (
        "stream",
        {"dataloader_num_workers": 1},
        2,
        {},
        "dataloader_num_workers is 0, but must be 1",
    ),  # an old default
    ("stream", {}, 2, {"divided_streams": True}, "divided_streams is True, but must be False"),
    ("stream", {"divided_streams": True}, 2, {}, "divided_streams is False, but must be True"),
    (
        "flattened stream",
        {"dataloader_num_workers": 1},
        2,
        {},
        "dataloader_num_workers is 0, but must be 1",
    ),
    (
        "flattened",
        OF_BATCHES,
        3,
        OF_BATCHES,
        "ranks * per_device_train_batch_size is 9, but must be 6",
    ),
]
"""What the data are, settings that were saved, ranks that resume, their settings, and what differs.
"""


@pytest.fixture
def data_place(tmp_path):
    """A checkpoint's place in the data: `save` one, and agree on the one to `resume` from."""

    def save(order: dict[str, Any]) -> None:
        DataProgress(DataPlace(order, epoch=1)).save(tmp_path, step=5)

    def resume(order: dict[str, Any], ranks: int = 2, **changed: Any) -> DataPlace:
        return resuming.agreed_place(order, str(tmp_path), settings(**changed), groups(ranks))

    return SimpleNamespace(save=save, resume=resume)


@pytest.mark.parametrize(
    ("source", "saved", "ranks", "changed", "differences"),
    [pytest.param(*row, id=f"{row[0]}, {row[4][:40]}") for row in OTHERS],
)
def test_another_order(data_place, source, saved, ranks, changed, differences):
    data_place.save(order(source, **saved))
    resumed = order(source, ranks, **changed)
    with refused(Resume.OTHER_ORDER) as error:
        data_place.resume(resumed, ranks)
    assert differences in str(error.value)
    ignored = data_place.resume(resumed, ranks, ignore_data_skip=True)
    assert ignored == DataPlace(resumed)
    assert data_place.resume(order(source, **saved)).epoch == 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_layouts_that_cut_documents_go_on_with_whole_ranks(data_place, ranks):
    """Documents of a micro-batch that was saved fit into whole ranks."""
    data_place.save(order("packed", **WHOLE))
    resumed = data_place.resume(order("packed", ranks), ranks).order
    assert resumed == order("packed", **WHOLE)
    assert capacity_and_bins(resumed) == (192, 2)


def test_another_kind_of_data(data_place):
    """What only the checkpoint, or only this run has."""
    data_place.save(order("packed"))
    with refused(Resume.OTHER_ORDER) as error:
        data_place.resume(order("stream"))
    assert "ranks is 2, but must be None" in str(error.value)
    assert RANDOM.format(None) in str(error.value)


def without(name: str, order: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in order.items() if key != name}


def test_checkpoints_of_an_earlier_version(data_place):
    data_place.save(without("document_layout", order("packed")))
    assert data_place.resume(order("packed")).epoch == 1
    differences = "document_layout is whole on 2 ranks, but must be auto or fixed"
    with refused(Resume.OTHER_ORDER, differences=differences):
        data_place.resume(order("packed", **WHOLE))
    data_place.save(without("dataloader_num_workers", order("flattened stream")))
    with refused(Resume.OTHER_ORDER, differences="dataloader_num_workers is 0, but must be 1"):
        data_place.resume(order("flattened stream"))
    one_worker = order("flattened stream", dataloader_num_workers=1)
    assert data_place.resume(one_worker).epoch == 1


# Agreement


def test_what_ranks_must_agree_on():
    of_ranks: list[dict[str, Any]] = []
    groups = SimpleNamespace(all_gather=lambda mine, in_world: of_ranks.append(mine) or of_ranks)
    dispatcher: Any = SimpleNamespace(groups=groups, settings=None)
    for name, value in {
        **{
            "seed": 2,
            "long_documents": "split",
            "remove_unused_columns": False,
            "length_column_name": "tokens",
        },
        **{
            "num_train_epochs": 5,
            "max_steps": 9,
            "trace_steps": 1,
        },
        **{"gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential"},
    }.items():
        of_ranks.clear()
        resuming.check_agreement(settings(data_seed=1), dispatcher)
        with refused(Run.DIFFERENT_ARGUMENTS, name=name):
            resuming.check_agreement(settings(**{"data_seed": 1, name: value}), dispatcher)

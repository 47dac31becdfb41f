"""What cannot be trained exactly is refused before any work starts."""

import time
from types import SimpleNamespace

import datasets
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
from hf_distca.models.decoder import decoder_attentions
from hf_distca.models.refusals import Models
from hf_distca.refusal import check
from hf_distca.trainer import refusals
from hf_distca.trainer.refusals import PADDING, Given, Launched
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


def trainer(tmp_path, documents=((1, 2, 3),), model=None, **options):
    dataset = datasets.Dataset.from_dict({"input_ids": [list(document) for document in documents]})
    return hf_distca.DistCATrainer(
        model=model or small_model(), args=arguments(tmp_path, **options), train_dataset=dataset
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_rank": 0}, "tokens_per_rank must be positive, got 0"),
        ({"tokens_per_rank": -5}, "tokens_per_rank must be positive, got -5"),
        ({"long_documents": "cut"}, r"one of \['error', 'truncate', 'split'\], got 'cut'"),
        ({"document_layout": "best"}, r"one of \['auto', 'joint', 'fixed', 'whole'\], got 'best'"),
        ({"attention_kernel": "fast"}, "attention_kernel must be one of"),
        ({"balance_tolerance": -0.1}, "balance_tolerance must be 0 or more"),
        ({"balance_block_size": 0}, "balance_block_size must be positive"),
        ({"loss_chunk_bytes": -1}, r"loss_chunk_bytes must be 0 \(all logits at once\) or more, got -1"),
        ({"mlp_chunk_rows": -1}, r"mlp_chunk_rows must be 0 .* or more, got -1"),
        ({"attention_servers": "many"}, "attention_servers must be a number of processes or 'external', got 'many'"),
    ],
)
def test_settings_out_of_range(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)


# The tables: each rule refuses its case, with its message, and all rules let the other cases pass


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
    return Launched(
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
TOWERS = r"model\.vision_tower, model\.multi_modal_projector of Gemma3ForConditionalGeneration get no gradient"
ZERO = {"is_deepspeed_enabled": True}
# The cases of each table, the beginning of the message of each, and a part of its remedy.
CASES = {
    "ARGUMENTS": [
        (lambda: settings(label_smoothing_factor=0.1), "label_smoothing_factor=0.1 is set", "leave it at 0.0"),
        (lambda: settings(average_tokens_across_devices=False), "average_tokens_across_devices=False", "at True"),
        (lambda: settings(auto_find_batch_size=True), "auto_find_batch_size=True", "at False"),
        (lambda: settings(dataloader_drop_last=True), "dataloader_drop_last=True", "at False"),
        (lambda: settings(use_cache=True), "use_cache=True", "at False"),
        (lambda: settings(label_names=["targets"]), r"label_names=\['targets'\]", "at None"),
        (lambda: settings(packing=True), "packing=True", "at False"),
        (lambda: settings(eval_packing=True), "eval_packing=True", "at None"),
        (lambda: settings(padding_free=True), "padding_free=True", "at False"),
        (lambda: settings(pad_to_multiple_of=8), "pad_to_multiple_of=8", "at None"),
        (lambda: settings(activation_offloading=True), "activation_offloading=True", "use gradient_checkpointing"),
        (
            lambda: settings(use_liger_kernel=True, liger_kernel_config={"cross_entropy": True}),
            r"liger_kernel_config=\{'cross_entropy': True\}",
            "remove 'cross_entropy'",
        ),
        (
            lambda: settings(use_liger_kernel=True, liger_kernel_config={"fused_linear_cross_entropy": True}),
            r"liger_kernel_config=\{'fused_linear_cross_entropy': True\}",
            "remove 'fused_linear_cross_entropy'",
        ),
        (
            lambda: settings(use_liger_kernel=True, liger_kernel_config={"geglu": False}, mlp_chunk_rows=16),
            "mlp_chunk_rows=16",
            r"set mlp_chunk_rows=0, or liger_kernel_config=\{'swiglu': False, 'geglu': False\}",
        ),
    ],
    "GIVEN": [
        (lambda: given(trainer=trl.DPOTrainer), "DPOTrainer compares whole answers", "without DistCAMixin"),
        (lambda: Given(hf_distca.DistCATrainer, {}), "args are NoneType", "pass DistCATrainingArguments"),
        (lambda: given(compute_metrics=print), "compute_metrics is given", r"call evaluate\(\)"),
        (lambda: given(preprocess_logits_for_metrics=print), "preprocess_logits_for_metrics", r"call evaluate\(\)"),
        (lambda: given(compute_loss_func=print), "compute_loss_func is given", "takes shift_labels"),
        (lambda: given(model_init=print), "model_init is given", "pass it as model"),
        (lambda: given(settings(per_device_train_batch_size=4)), "per_device_train_batch_size=4 is set", "at 1"),
        (lambda: given(settings(per_device_eval_batch_size=4)), "per_device_eval_batch_size=4 is set", "at 1"),
        (
            lambda: given(data_collator=transformers.DataCollatorWithPadding.__new__(PADDING[-1])),
            "data_collator=DataCollatorWithPadding pads",
            "leave data_collator out",
        ),
        (
            lambda: given(settings(train_sampling_strategy="group_by_length")),
            "train_sampling_strategy='group_by_length'",
            "set 'random' or 'sequential'",
        ),
        (lambda: given(loading(split_batches=True)), "accelerator_config's split_batches=True", "set it to False"),
        (lambda: given(loading(dispatch_batches=True)), "accelerator_config's dispatch_batches=True", "to None"),
        (lambda: given(loading(even_batches=False)), "accelerator_config's even_batches=False", "set it to True"),
        (lambda: given(loading(use_seedable_sampler=False)), ".*use_seedable_sampler=False", "set it to True"),
        (lambda: given(settings(dataloader_in_order=False)), "dataloader_in_order=False", "set dataloader_in_order="),
        (
            lambda: given(settings(parallelism_config=SimpleNamespace(cp_size=2, sp_size=1))),
            r"context parallelism \(cp_size=2\)",
            "set cp_size=1, and raise dp_shard_size",
        ),
        (
            lambda: given(settings(parallelism_config=SimpleNamespace(cp_size=1, sp_size=2))),
            r"sequence parallelism \(sp_size=2\)",
            "set sp_size=1, and use ZeRO-3",
        ),
        (lambda: given(settings(_n_gpu=2)), "one process sees 2 GPUs", "accelerate launch --num_processes"),
    ],
    "LOADED_ALREADY": [
        (
            lambda: given(SimpleNamespace(model_init_kwargs={"dtype": "bfloat16"}), model=small_model()),
            r"model_init_kwargs=\{'dtype': 'bfloat16'\}",
            "pass the model's name",
        ),
    ],
    "SFT_ARGUMENTS": [
        (lambda: arguments("unused"), "args are DistCATrainingArguments", "by a DistCASFTConfig"),
        (
            lambda: settings(gradient_checkpointing_kwargs={"selective": True}),
            ".*keeps attention's",
            "leave",
        ),
    ],
    "SFT_TRAINER": [
        (
            lambda: SimpleNamespace(get_tp_size=lambda: 2, _is_vision_dataset=False),
            "DistCASFTTrainer runs with tensor parallelism",
            "set tp_size=1, or train with DistCATrainer",
        ),
        (
            lambda: SimpleNamespace(get_tp_size=lambda: 1, _is_vision_dataset=True),
            "the data set has images",
            "train on text",
        ),
    ],
    "TRAINER": [
        (lambda: launched(backend=DynamoBackend.INDUCTOR), "torch.compile is set", r"layer\.mlp\.compile\(\)"),
        (lambda: launched(sizes=(2, 1, 1)), r"context parallelism \(cp_size=2\)", "set cp_size=1"),
        (lambda: launched(sizes=(1, 2, 1)), r"sequence parallelism \(sp_size=2\)", "set sp_size=1"),
        (lambda: launched(sizes=(1, 1, 2)), "tensor parallelism of size 2", r"DistributedConfig\(tp_size=…, fsdp"),
        (lambda: launched(model=divided(pp_size=4)), r"pipeline parallelism \(pp_size=4\)", "set pp_size=1"),
        (
            lambda: launched(model=divided(adapters=True), sizes=TENSOR),
            "adapters of PEFT train with tp_size=2 and dp_replicate_size=1",
            "set both to 1",
        ),
        (
            lambda: launched(settings(attention_servers="external"), divided(), TENSOR),
            r"attention_servers='external' .* \(tp_size=2\)",
            "set attention_servers=0",
        ),
        (
            lambda: launched(settings(gradient_accumulation_steps=2), divided(tp_plan=["norm"]), TENSOR),
            r"gradient_accumulation_steps=2 is set for SimpleNamespace .*\(tp_size=2\)",
            "set gradient_accumulation_steps=1",
        ),
        (lambda: launched(mixed_precision="fp16"), "fp16 mixed precision is set on the CPU", "set bf16=True"),
        (lambda: launched(settings(**ADAFACTOR), is_fsdp2=True), "optim='adafactor' .* FSDP2", "optim='adamw_torch'"),
        (lambda: launched(settings(**ADAFACTOR), **ZERO), "optim='adafactor' .* DeepSpeed", "optim='adamw_torch'"),
        (lambda: launched(optimizers=(1, None), **ZERO), "optimizers=… is given", "set optimizer_cls"),
        (
            lambda: launched(model_accepts_loss_kwargs=False),
            "LlamaForCausalLM does not take num_items",
            r"\*\*kw",
        ),
        (
            lambda: launched(settings(**REENTRANT), with_tower("distca"), **DDP),
            f".*'use_reentrant': True.* is set, but {TOWERS}",
            "'use_reentrant' to False",
        ),
        (
            lambda: launched(settings(ddp_find_unused_parameters=False), with_tower("distca"), **DDP),
            f"ddp_find_unused_parameters=False is set, but {TOWERS}",
            "leave ddp_find_unused_parameters unset",
        ),
    ],
}
TABLES = {
    **{name: getattr(refusals, name) for name in CASES if name != "LOADED_ALREADY"},
    "LOADED_ALREADY": (refusals.LOADED_ALREADY,),
}


@pytest.mark.parametrize(("table", "case"), [(name, each) for name in CASES for each in range(len(CASES[name]))])
def test_a_rule_refuses_its_case(table, case):
    make, found, remedy = CASES[table][case]
    with pytest.raises(ValueError, match=rf"^{found}.*; .*{remedy}"):
        check(TABLES[table], make())


@pytest.mark.parametrize("table", CASES)
def test_every_rule_has_a_case(table):
    subjects = [make() for make, _, _ in CASES[table]]
    found = [next(rule for rule in TABLES[table] if rule.when(subject)) for subject in subjects]
    assert set(found) == set(TABLES[table])
    assert len(found) == len(TABLES[table])


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


def test_batch_size_belongs_to_a_collator_of_the_users(tmp_path):
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 4})
    hf_distca.DistCATrainer(
        model=small_model(),
        args=arguments(tmp_path, per_device_train_batch_size=4),
        train_dataset=dataset,
        data_collator=DataCollatorWithFlattening(),
    )


def test_prediction(tmp_path):
    with pytest.raises(NotImplementedError, match="evaluate"):
        trainer(tmp_path).predict(None)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("llama", "attention_dropout"), ("gpt2", "attn_pdrop"), ("bert", "attention_probs_dropout_prob")],
)
def test_attention_dropout_in_the_config(tmp_path, model_type, name):
    with refused(Models.DROPOUT_IN_CONFIG, name=name, value=0.1):
        trainer(tmp_path, model=small_model(model_type, **{name: 0.1}))


@pytest.mark.parametrize(
    ("model_type", "config", "name", "dropout"),
    [
        ("llama", {}, "attention_dropout", 0.2),
        ("gpt2", {"attn_pdrop": 0.0}, "attn_dropout", torch.nn.Dropout(0.2)),
        ("bert", {"attention_probs_dropout_prob": 0.0, "is_decoder": True}, "dropout", torch.nn.Dropout(0.2)),
    ],
)
def test_attention_dropout_in_a_layer(tmp_path, model_type, config, name, dropout):
    model = small_model(model_type, **config)
    layer_name, layer = list(decoder_attentions(model).items())[-1]
    setattr(layer, name, dropout)
    with refused(Models.DROPOUT_IN_LAYER, name=name, layer=layer_name, value=0.2):
        trainer(tmp_path, model=model)


def test_other_dropout_is_none_of_attention(tmp_path):
    model = small_model("gpt2", attn_pdrop=0.0)
    assert model.config.resid_pdrop == model.config.embd_pdrop == 0.1
    trainer(tmp_path, model=model)


def test_model_that_computes_a_mask(tmp_path):
    with refused(Models.OWN_MASK, model="DogeForCausalLM") as error:
        trainer(tmp_path, model=small_model("doge"))
    assert "attn_implementation='eager' or 'sdpa'" in str(error.value)


@pytest.mark.parametrize("ping_pong", [False, True])
def test_reentrant_checkpoints_of_layers_that_share_keys(tmp_path, ping_pong):
    sharing = {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1, "vocab_size_per_layer_input": 64}
    model = small_model("gemma4_text", **sharing)
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with refused(Models.REENTRANT, module="layers.1.self_attn"):
        trainer(tmp_path, model=model, ping_pong=ping_pong, **options)


def test_other_attention_implementation(tmp_path):
    with refused(Models.OTHER_ATTENTION, model="LlamaForCausalLM", name="sdpa"):
        trainer(tmp_path, model=small_model(implementation="sdpa"))


WRONG = {
    "stablelm": (Models.DROPS_KEYWORDS, {"module": "StableLmDecoderLayer"}),
    "bloom": (Models.NO_INTERFACE, {}),
    "gptj": (Models.NO_INTERFACE, {"model": "GPTJForCausalLM"}),
    "roberta": (Models.POSITIONS_FROM_PADDING, {}),
    "inkling_text": (Models.BIAS, {}),
    "blt": (Models.NOT_CAUSAL, {"model": "BltForCausalLM"}),
    "ctrl": (Models.NO_LAYERS, {}),
    "whisper": (Models.NOT_CAUSAL, {"model": "WhisperForCausalLM"}),
    **dict.fromkeys(("bart", "mbart", "blenderbot", "marian", "pegasus", "plbart"), (Models.NO_POSITIONS, {})),
    **dict.fromkeys(("bert", "electra", "ernie", "roc_bert"), (Models.NOT_DECODER, {})),
}


@pytest.mark.parametrize("model_type", WRONG)
def test_models_that_planned_steps_would_get_wrong(model_type):
    refusal, values = WRONG[model_type]
    implementation = "eager" if model_type in ("gptj", "bloom") else "distca"
    config = tiny_config(model_type)
    if refusal is Models.NOT_DECODER:
        config.is_decoder = False  # the default
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with refused(refusal, **values):
        hf_distca.plan_settings(model, hf_distca.DistCAConfig(ping_pong=True), ranks=2, device=torch.device("cpu"))


def test_a_config_that_lets_rows_attend_to_later_ones():
    model = small_model(is_causal=False)
    with refused(Models.NOT_CAUSAL, module="layers.0.self_attn"):
        hf_distca.plan_settings(model, hf_distca.DistCAConfig(), ranks=2, device=torch.device("cpu"))


def test_a_loss_of_the_models_own():
    with torch.device("meta"):
        models = [
            auto.from_config(tiny_config("gpt2"), attn_implementation="distca")
            for auto in (AutoModelForTokenClassification, AutoModel)
        ]
    with refused(Models.OWN_LOSS):
        hf_distca.plan_settings(models[0], hf_distca.DistCAConfig(), ranks=2, device=torch.device("cpu"))
    # One without a head computes none: a custom loop may.
    assert hf_distca.plan_settings(models[1], hf_distca.DistCAConfig(), ranks=2, device=torch.device("cpu")).kinds


def test_a_text_model_that_is_not_causal(tmp_path):
    model = AutoModelForImageTextToText.from_config(tiny_config("paligemma"), attn_implementation="distca")
    with refused(Models.NOT_CAUSAL, model="PaliGemmaForConditionalGeneration"):
        trainer(tmp_path, model=model)


def test_a_model_without_the_number_of_targets(tmp_path, monkeypatch):
    def forward(self, input_ids=None, labels=None):
        return self.model(input_ids)

    model = small_model()
    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(ValueError, match=r"does not take num_items_in_batch.*let its forward take \*\*kwargs"):
        trainer(tmp_path, model=model)


def test_a_layer_that_does_not_take_the_plan(tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_next"), attn_implementation="distca")
    layer = type(model.model.layers[0])
    forward = layer.forward

    def without_keywords(self, hidden_states, position_embeddings=None, attention_mask=None):
        return forward(self, hidden_states, position_embeddings, attention_mask)

    monkeypatch.setattr(layer, "forward", without_keywords)
    with refused(Models.MIXING_WITHOUT_KEYWORDS, module=layer.__name__):
        trainer(tmp_path, model=model)


def test_layers_that_cannot_be_cut(tmp_path):
    config = tiny_config("deepseek_v32")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")
    with pytest.raises(
        ValueError, match=r"layers of type \['indexed_attention'\].*train this model with stock attention"
    ):
        trainer(tmp_path, model=model)


def test_device_and_dtype_beyond_the_kernel(tmp_path):
    with pytest.raises(ValueError, match="kernel 'torch_varlen' computes on CUDA, got cpu"):
        trainer(tmp_path, attention_kernel="torch_varlen")


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "no documents|empty"),
        ([[1, 2], []], "document 1 is empty"),
        ([[1] * 65], "1 of 1 documents are longer than ranks · tokens_per_rank = 64"),
    ],
    ids=["no-documents", "empty-document", "long-document"],
)
def test_documents(tmp_path, documents, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, documents, tokens_per_rank=64).train()


def test_labels_of_another_length(tmp_path):
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]], "labels": [[1, 2]]})
    with pytest.raises(ValueError, match=r"document 0 has .*2"):
        hf_distca.DistCATrainer(
            model=small_model(), args=arguments(tmp_path), train_dataset=dataset
        ).get_train_dataloader()


def _loader_error(folder: str, documents_by_rank: list[list[list[int]]]) -> str:
    import torch.distributed as dist

    rank = dist.get_rank()
    try:
        trainer(f"{folder}/{rank}", documents_by_rank[rank]).get_train_dataloader()
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([[1, 2, 4]], "ranks were given different data sets (rank 0: 1 documents, 3 tokens; rank 1: 1"),
        ([[1, 2, 3], [1]], "rank 1: 2 documents, 4 tokens"),
        ([[]], "rank 1: ValueError: document 0 is empty"),
    ],
    ids=["tokens", "number", "faulty"],
)
def test_every_rank_raises_where_one_has_other_data(tmp_path, rank_pools: dict[int, RankPool], other, message):
    errors = rank_pools[2].run(_loader_error, str(tmp_path), [[[1, 2, 3]], other])
    assert all(message in error for error in errors), errors


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

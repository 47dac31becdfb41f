"""Tables of what trainers refuse before any work starts.

They are about arguments, about launch and model, about a run, and about resuming.
"""

import inspect
import multiprocessing
import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.utils import DynamoBackend
from torch import nn
from transformers import (
    DataCollatorForLanguageModeling,
    TrainingArguments,
)

from hf_distca.checks.refusal import Refusal, Rule, check, errors_of, raise_all
from hf_distca.collator.documents import check_dataset
from hf_distca.config import DistCAConfig
from hf_distca.dispatch.groups import RankMesh
from hf_distca.models.checkpointing import CHECKPOINTING, checkpointing_options
from hf_distca.models.decoder import base_model
from hf_distca.models.refusals import check_is_model, check_loss, check_reentrant
from hf_distca.models.tensor_parallel import is_divided_at_load
from hf_distca.trainer.parallel import DDP, asked_for, launched_processes, trained_towers
from hf_distca.units import AUTO

LIGERS_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")
"""Liger kernels that replace the loss of a model, or of all of transformers."""
SUMMED_GRADIENTS = "replicated_with_grad_allreduce"
"""Name in transformers for modules that stay whole inside divided attention, such as norms of Q and
K."""


def _restricted(path: str, allowed: tuple[Any, ...], reason: str) -> Rule:
    """Return the rule of an argument with restricted values.

    Args:
        path: name of the argument, with dots for an attribute of an argument. The arguments of a
            trainer may lack it.
        allowed: values, the recommended one first.
        reason: why other values cannot work.
    """

    def refuses(args: Any) -> bool:
        value = args
        for name in path.split("."):
            value = getattr(value, name, allowed[0])
        return value not in allowed

    return Rule(
        f"{path}={{0.{path}!r}} is set", reason, f"set {' or '.join(map(repr, allowed))}", refuses
    )


def _liger_kernels(args: Any) -> dict[str, bool]:
    """Return which of Liger's kernels the arguments turn on or off, by name."""
    return args.liger_kernel_config or {}


def liger_replaces_mlps(args: Any) -> bool:
    """Return whether Liger's kernels compute the MLPs of a model."""
    kernels = [_liger_kernels(args).get(name, True) for name in ("swiglu", "geglu")]
    return bool(args.use_liger_kernel) and any(kernels)


CONVERTED = (
    "evaluate() would round the weights themselves, which are then trained on and saved; bf16=True "
    "evaluates in bfloat16 without that"
)
ARGUMENTS: tuple[Rule, ...] = (
    _restricted("auto_find_batch_size", (False,), "memory is set by tokens_per_rank"),
    _restricted(
        "ddp_static_graph",
        (None, False),
        "torch's static graph allows no accumulation, and steps differ by plan",
    ),
    _restricted("bf16_full_eval", (False,), CONVERTED),
    _restricted("fp16_full_eval", (False,), CONVERTED),
    # TRL's GRPO and RLOO.
    _restricted(
        "use_transformers_continuous_batching",
        (False,),
        "it generates with paged attention in place of the model's attention, "
        "attn_implementation='distca'",
    ),
    Rule(
        f"{CHECKPOINTING}_kwargs={{{{'offload': True}}}} copies checkpoints of layers to the host",
        "every layer would wait for its copies",
        "leave 'offload' out and set offload_activations=True, which copies while layers compute",
        lambda args: bool((getattr(args, f"{CHECKPOINTING}_kwargs") or {}).get("offload")),
    ),
    Rule(
        "mlp_chunk_rows={0.mlp_chunk_rows} is set with use_liger_kernel=True",
        "it would have no effect: Liger replaces the MLPs that are computed in chunks",
        "set mlp_chunk_rows=0, or liger_kernel_config={{'swiglu': False, 'geglu': False}}",
        lambda args: args.mlp_chunk_rows not in (0, AUTO) and liger_replaces_mlps(args),
    ),
)
"""Arguments that no trainer can follow, checked when they are made."""
PACKED_ARGUMENTS: tuple[Rule, ...] = (
    _restricted(
        "label_smoothing_factor",
        (0.0,),
        "targets of packed documents are already shifted, and it shifts again",
    ),
    _restricted(
        "average_tokens_across_devices", (True,), "ranks hold different numbers of targets"
    ),
    _restricted("use_cache", (False,), "training has no use for cached keys and values"),
    _restricted(
        "label_names",
        (None, ["labels"]),
        "targets are the column 'labels', or every token where there is none",
    ),
)
"""Arguments that a trainer with packed documents cannot follow."""
IMPORTED_AGAIN = Rule(
    "a process that reads data makes the arguments of training",
    "it only imports the script, and would train, too",
    "put the script's code under `if __name__ == '__main__':`, or leave dataloader_num_workers "
    "at 0",
    # multiprocessing sets this while a process that it spawned imports the script, for a check of
    # its own.
    lambda _: getattr(multiprocessing.current_process(), "_inheriting", False),
    condition=(
        "`dataloader_num_workers` with spawn or forkserver in a script without `if __name__ == "
        "'__main__':`"
    ),
)
LOSES_DEEPSPEED = Rule(
    "DeepSpeed is configured with use_cpu or ACCELERATE_USE_CPU",
    "accelerate would then train without DeepSpeed",
    "leave use_cpu out: processes that see no GPU (CUDA_VISIBLE_DEVICES=) train on the CPU "
    "without it",
    lambda args: (
        launched_processes() > 1 and asked_for("DEEPSPEED", args.deepspeed) and args.use_cpu
    ),
)
NO_BACKEND = Rule(
    "deepspeed={0.deepspeed!r:.60} configures DeepSpeed for processes without GPUs",
    "transformers then names no backend to accelerate, so that each process would train alone",
    "leave deepspeed out of the arguments, and use accelerate launch --config_file "
    "examples/configs/zero2.yaml, zero3.yaml or your own, which may name a deepspeed_config_file",
    lambda args: (
        launched_processes() > 1 and bool(args.deepspeed) and not torch.accelerator.is_available()
    ),
    condition="`deepspeed` in the arguments of several processes without GPUs",
)
NOT_CONNECTED = Rule(
    "the launcher started {0.launched} processes, torch.distributed connects {0.in_torch} and "
    "accelerate {0.by_accelerate}",
    "processes that are not connected would each train alone, on the same documents",
    "without GPUs set ACCELERATE_USE_CPU=true, or use_cpu=True (--use_cpu) in a trainer's "
    "arguments; else launch with accelerate launch or torchrun; where each process is to train "
    "alone, set WORLD_SIZE=1",
    lambda counts: counts.differ,
    condition="the launcher, torch.distributed and accelerate count different processes",
)

# Arguments of a trainer, before it is built


def arguments_by_name(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a bound method by name.

    Raise TypeError for one whose position has no name.
    """
    names = [
        parameter.name
        for parameter in inspect.signature(method).parameters.values()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(args) > len(names):
        raise TypeError(
            f"{method.__qualname__} takes {len(names)} positional arguments, got {len(args)}; pass "
            "the others by name"
        )
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _must_be_none(name: str, reason: str, remedy: str) -> Rule:
    """Return the rule of an argument of a trainer that must stay None."""
    return Rule(
        f"{name} is given", reason, remedy, lambda arguments: arguments.get(name) is not None
    )


OBJECTS: tuple[Rule, ...] = (
    Rule(
        "model is {0[model]!r}",
        "there is no such folder",
        "give the folder of a saved model, or the name of a model on the Hub such as "
        "'Qwen/Qwen3-0.6B'",
        lambda arguments: (
            isinstance(arguments.get("model"), str) and _is_missing_folder(arguments["model"])
        ),
        condition="the path of a model that does not exist",
    ),
    Rule(
        "processing_class is {0[processing_class]!r}",
        "it is no tokenizer",
        "load it: processing_class=AutoTokenizer.from_pretrained(name)",
        lambda arguments: isinstance(arguments.get("processing_class"), str | type),
        condition="the name or the class of a tokenizer as `processing_class`",
    ),
)
"""Arguments of a trainer's `__init__`, by name, that are objects of another kind."""


def _is_missing_folder(name: str) -> bool:
    return (os.path.isabs(name) or name.startswith((".", "~"))) and not os.path.exists(name)


def check_objects(arguments: Mapping[str, Any], *, packs: bool) -> None:
    """Raise ValueError if an argument is not the model, data set or tokenizer that it should be.

    Args:
        arguments: arguments of a trainer's `__init__` by name.
        packs: whether the trainer packs documents. Otherwise it gets padded batches.
    """
    check(OBJECTS, arguments)
    model: Any = arguments.get("model")
    is_made_later = model is None and arguments.get("model_init") is not None
    if not isinstance(model, str) and not is_made_later:
        check_is_model(model)
        if packs:
            check_loss(model)
    train_dataset = arguments.get("train_dataset")
    if train_dataset is not None:
        check_dataset(train_dataset, "train_dataset")
    eval_dataset = arguments.get("eval_dataset")
    if isinstance(eval_dataset, dict):
        for key, dataset in eval_dataset.items():
            check_dataset(dataset, f"eval_dataset[{key!r}]")
    elif eval_dataset is not None:
        check_dataset(eval_dataset, "eval_dataset")


DISPATCHED: tuple[Rule, ...] = (
    Rule(
        "config is {0[config]}",
        "make_dispatcher needs the settings of hf_distca",
        "pass hf_distca.DistCAConfig(tokens_per_rank=…)",
        lambda arguments: not isinstance(arguments["config"], DistCAConfig),
        condition="settings in a dictionary, or none, in `make_dispatcher`",
    ),
    Rule(
        "mesh is {0[mesh]}",
        "ranks are named by a mesh or by a group",
        "pass one dimension of a DeviceMesh such as mesh['dp'], a process group, or None for all "
        "ranks",
        lambda arguments: not isinstance(arguments["mesh"], RankMesh | None),
        condition="ranks as a list in `make_dispatcher`",
    ),
)
"""Arguments of `make_dispatcher` that are objects of another kind."""


METRICS_FUNCTION = "compute_metrics"
LOGITS_FUNCTION = "preprocess_logits_for_metrics"
METRICS_ALONE = (
    "evaluate() reports the exact loss, mean_token_accuracy and entropy over all targets without "
    "compute_metrics"
)
NO_SETTINGS = Rule(
    "args are {0[args].__class__.__name__}",
    "hf_distca needs its settings, such as tokens_per_rank",
    "pass DistCATrainingArguments; for a trainer with its own arguments combine both classes "
    "in one dataclass: class MyArguments(hf_distca.DistCAArguments, SFTConfig)",
    lambda arguments: (
        not (
            isinstance(arguments["args"], DistCAConfig)
            and isinstance(arguments["args"], TrainingArguments)
        )
    ),
    condition="`args` without the settings of hf_distca",
)
"""Arguments of a trainer that lack the settings."""
GIVEN: tuple[Rule, ...] = (
    _must_be_none(
        "model_init",
        "it would replace the model when training begins, and the new model would lack the changes "
        "for planned steps",
        "make the model first and pass it as model",
    ),
    Rule(
        "one process sees {0[args].n_gpu} GPUs, which Trainer would use with DataParallel",
        "a rank is one process with one GPU",
        "start one process per GPU: accelerate launch --num_processes N script.py",
        lambda arguments: arguments["args"].n_gpu > 1,
    ),
)
"""Arguments of a trainer's `__init__`, by name, that cannot train exactly."""
PACKED_GIVEN: tuple[Rule, ...] = (
    Rule(
        "{0[trl_trainer]} compares whole answers",
        "DistCAMixin spreads the rows of packed documents over ranks",
        "put hf_distca.DistCAPaddedMixin before it, whose model takes padded batches: DPO, GRPO, "
        "RLOO, KTO and reward models come ready made, such as DistCADPOTrainer",
        lambda arguments: arguments["trl_trainer"] not in ("", "SFTTrainer", "_BaseTrainer"),
        condition="`DPOTrainer`, `RewardTrainer` and others with `DistCAMixin`",
    ),
    Rule(
        "{0[trl_trainer]} gets compute_metrics or preprocess_logits_for_metrics",
        "TRL computes the loss without logits, and gives none to these functions from its version "
        "2 on",
        f"leave them out, because {METRICS_ALONE}; or evaluate with DistCATrainer",
        lambda arguments: (
            bool(arguments["trl_trainer"])
            and any(map(arguments.get, (METRICS_FUNCTION, LOGITS_FUNCTION)))
        ),
        condition="`compute_metrics` or `preprocess_logits_for_metrics` with `DistCASFTTrainer`",
    ),
    Rule(
        "compute_metrics is given without preprocess_logits_for_metrics",
        "it would get the logits of all tokens, which take memory for tokens × vocabulary values "
        "on every rank",
        "give a preprocess_logits_for_metrics that makes them small token by token, such as "
        f"lambda logits, labels: logits.argmax(-1); {METRICS_ALONE}",
        lambda arguments: (
            arguments.get(METRICS_FUNCTION) is not None and arguments.get(LOGITS_FUNCTION) is None
        ),
    ),
    Rule(
        "batch_eval_metrics=True is set with compute_metrics",
        "a micro-batch of a rank may have parts of documents, and compute_metrics gets whole ones",
        "set batch_eval_metrics=False",
        lambda arguments: (
            arguments.get(METRICS_FUNCTION) is not None and arguments["args"].batch_eval_metrics
        ),
    ),
    Rule(
        "include_for_metrics={0[args].include_for_metrics} is set with compute_metrics",
        "compute_metrics gets predictions and labels alone",
        "leave it out; inputs are in the data set, in the order of the predictions",
        lambda arguments: (
            arguments.get(METRICS_FUNCTION) is not None
            and bool(arguments["args"].include_for_metrics)
        ),
    ),
    _must_be_none(
        "compute_loss_func",
        "it would get targets that are already shifted",
        "leave it out and use the model's own loss, which takes shift_labels",
    ),
    Rule(
        "data_collator={0[data_collator].__class__.__name__} has mlm=True",
        "it hides tokens at random, and a causal language model predicts the next ones",
        "leave data_collator out, or set mlm=False",
        lambda arguments: (
            isinstance(arguments.get("data_collator"), DataCollatorForLanguageModeling)
            and arguments["data_collator"].mlm
        ),
    ),
)
"""The same for trainers with packed documents."""
PLACED = "plans already divide a document of up to ranks * tokens_per_rank tokens among ranks"
ROWS_ARE_PLACED: tuple[Rule, ...] = (
    Rule(
        "context parallelism (cp_size={0.cp_size}) divides documents among ranks",
        PLACED,
        "set cp_size=1, and raise dp_shard_size to shard the weights over the same ranks",
        lambda sizes: getattr(sizes, "cp_size", 1) > 1,
    ),
    Rule(
        "sequence parallelism (sp_size={0.sp_size}) divides documents among ranks",
        PLACED,
        "set sp_size=1, and use ZeRO-3 to shard the weights over the same ranks",
        lambda sizes: getattr(sizes, "sp_size", 1) > 1,
    ),
)
"""Sizes of a `ParallelismConfig`, which may be None; the launch may set other sizes than the
arguments."""


def check_arguments(trainer: type, arguments: Mapping[str, Any], *, packs: bool) -> None:
    """Raise ValueError if a trainer cannot train exactly with these arguments of its `__init__`.

    Args:
        trainer: class of the trainer.
        arguments: arguments of its `__init__` by name.
        packs: whether the trainer packs documents. Otherwise it gets padded batches.
    """
    args: Any = arguments.get("args")
    subject = {**arguments, "args": args, "trl_trainer": _name_of_trl_trainer(trainer)}
    check((NO_SETTINGS,), subject)
    rules = (*PACKED_GIVEN, *GIVEN) if packs else GIVEN
    placed = errors_of(ROWS_ARE_PLACED, args.parallelism_config)
    raise_all([*errors_of(rules, subject), *placed])


def _name_of_trl_trainer(trainer: type) -> str:
    """Return the name of the trainer of TRL that a class is or derives from; "" without one."""
    for base in trainer.__mro__:
        package = base.__module__.split(".")[0]
        if package == "trl" and base.__name__.endswith("Trainer"):
            return base.__name__
    return ""


LOADED_ALREADY = Rule(
    "model_init_kwargs={0[args].model_init_kwargs!r} is set with a loaded model",
    "it would have no effect",
    "pass the model's name as model, or leave model_init_kwargs out",
    lambda arguments: (
        not isinstance(arguments.get("model"), str)
        and getattr(arguments["args"], "model_init_kwargs", None) is not None
    ),
)
NO_SFT_SETTINGS = Rule(
    "args of DistCASFTTrainer are {0.__class__.__name__}",
    "DistCASFTTrainer needs the settings of hf_distca and of TRL's SFTConfig",
    "replace them by a DistCASFTConfig with the same settings",
    lambda args: (
        not isinstance(args, DistCAConfig)
        or all(base.__name__ != "SFTConfig" for base in type(args).__mro__)
    ),
)
IMAGES = Rule(
    "{0.__class__.__name__} gets a data set with images",
    "plans divide only text among ranks, not pixels",
    "train on text, or use TRL's own trainer with attn_implementation='sdpa'",
    lambda trainer: getattr(trainer, "_is_vision_dataset", False),
)
SFT_TRAINER: tuple[Rule, ...] = (
    Rule(
        "DistCASFTTrainer runs with tensor parallelism, where each rank has a shard of the output "
        "head",
        "TRL's losses are not tested with it",
        "set tp_size=1, or train with DistCATrainer on input_ids and labels",
        lambda trainer: trainer.get_tp_size() > 1,
    ),
    IMAGES,
)

# Model and launch, once the trainer is built


NO_GRADIENT = (
    "{0.towers} of {0.model_class} get no gradient from batches of text, so DDP would leave ranks "
    "with different weights"
)
TRAINER: tuple[Rule, ...] = (
    Rule(
        "torch.compile is set for the whole model (torch_compile, --dynamo_backend)",
        "it cannot compile planned attention and decoder layers under ping-pong, which are most of "
        "the model",
        "leave torch_compile=False and accelerate's --dynamo_backend at no; to compile modules "
        "inside the layers: for layer in model.model.layers: layer.mlp.compile()",
        lambda facts: facts.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO,
    ),
    Rule(
        "FSDP's activation_checkpointing_offload is set",
        "every layer would wait for its copies",
        "set offload_activations=True instead, which copies while layers compute",
        lambda facts: getattr(
            getattr(facts.accelerator.state, "fsdp_plugin", None),
            "activation_checkpointing_offload",
            False,
        ),
    ),
    Rule(
        "tensor parallelism of size {0.tp_size} is set without DistributedConfig",
        "the model was not divided when it was loaded, or DeepSpeed divided it, which is not "
        "supported",
        'load the model with from_pretrained(name, attn_implementation="distca",'
        " distributed_config=transformers.distributed.DistributedConfig(tp_size=…, fsdp_size=…)), "
        "and launch without --use_fsdp and --use_deepspeed",
        lambda facts: facts.tp_size > 1 and facts.divided is None,
    ),
    Rule(
        "pipeline parallelism (pp_size={0.divided.pp_size}) gives ranks different layers",
        "ranks exchange core attention within the same layer",
        "set pp_size=1, and raise fsdp_size to use the same ranks",
        lambda facts: facts.divided is not None and facts.divided.pp_size > 1,
    ),
    Rule(
        "adapters of PEFT train with tp_size={0.tp_size} and "
        "dp_replicate_size={0.divided.dp_replicate_size}",
        "PEFT does not divide its adapters as the model's layers are divided",
        "set both to 1, and raise fsdp_size to use the same ranks",
        lambda facts: (
            facts.divided is not None
            and facts.adapted
            and max(facts.tp_size, facts.divided.dp_replicate_size) > 1
        ),
    ),
    Rule(
        "attention_servers={0.args.attention_servers!r} is set with tensor parallelism "
        "(tp_size={0.tp_size})",
        "servers serve one group of ranks, and ranks with different heads form separate groups",
        "set attention_servers=0, or tp_size=1",
        lambda facts: facts.tp_size > 1 and facts.args.attention_servers != 0,
    ),
    Rule(
        "gradient_accumulation_steps={0.args.gradient_accumulation_steps} is set for "
        "{0.model_class} with tensor parallelism (tp_size={0.tp_size})",
        "transformers sums gradients of norms of Q and K over ranks after each micro-batch, and "
        "earlier sums again",
        "set gradient_accumulation_steps=1 and raise tokens_per_rank; where memory is short, use "
        f"mlp_chunk_rows and {CHECKPOINTING}",
        lambda facts: (
            min(facts.tp_size, facts.args.gradient_accumulation_steps) > 1
            and SUMMED_GRADIENTS in facts.model.tp_plan.values()
        ),
    ),
    Rule(
        "fp16 mixed precision is set on the CPU",
        "it needs loss scaling, which accelerate does on GPUs only",
        "set bf16=True, or leave out fp16 and bf16",
        lambda facts: (
            facts.accelerator.mixed_precision == "fp16" and facts.args.device.type == "cpu"
        ),
    ),
    Rule(
        "modules_to_save={0.tied} has a copy of tied embeddings under FSDP2",
        "accelerate ties the weights again when it divides the model, and the other one would use "
        "the trained copy",
        "train under DDP or ZeRO",
        lambda facts: facts.tied,
    ),
    Rule(
        "trainable_token_indices is set for tied embeddings under FSDP2",
        "the head would add trained tokens to a weight of which each rank has a shard",
        "train under DDP or ZeRO",
        lambda facts: facts.tied_tokens,
    ),
    Rule(
        "ensure_weight_tying=True lets {0.views} share memory with other trained weights",
        "DDP takes them for weights of their own and trains other ones; FSDP2 and DeepSpeed fail",
        "leave ensure_weight_tying=False, or leave embed_tokens out of target_modules",
        lambda facts: facts.views,
    ),
    Rule(
        "optimizers=… is given under DeepSpeed",
        "transformers silently ignores it and makes its own from the arguments optim and "
        "lr_scheduler_type",
        "set optimizer_cls_and_kwargs, or override create_optimizer and create_scheduler",
        lambda facts: (
            facts.deepspeed
            and (facts.trainer.optimizer is not None or facts.trainer.lr_scheduler is not None)
        ),
    ),
    Rule(
        f"{CHECKPOINTING}_kwargs={{{{'use_reentrant': True}}}} is set",
        NO_GRADIENT,
        "freeze them (requires_grad_(False)), or set 'use_reentrant' to False",
        lambda facts: facts.reentrant and facts.towers,
    ),
    Rule(
        "ddp_find_unused_parameters=False is set",
        NO_GRADIENT,
        "freeze them (requires_grad_(False)), or leave ddp_find_unused_parameters unset",
        lambda facts: facts.args.ddp_find_unused_parameters is False and facts.towers,
    ),
)
"""Trainers that cannot train exactly as launched."""
PACKED_TRAINER: tuple[Rule, ...] = (
    Rule(
        "the forward of {0.model_class} takes no labels",
        "it computes no loss: the model has no head",
        "load the model with AutoModelForCausalLM, or override compute_loss",
        lambda facts: _asks_for_loss(facts.trainer) and not _takes_labels(facts.base),
    ),
)
"""The same for trainers with packed documents."""
PADDED_TRAINER: tuple[Rule, ...] = (
    Rule(
        "padded batches are computed with tensor parallelism (tp_size={0.tp_size})",
        "it is not tested with them",
        "set tp_size=1, and share the weights with FSDP2 or ZeRO-3",
        lambda facts: facts.tp_size > 1,
    ),
)
"""The same for trainers with padded batches."""


def transposed_adapters(model: nn.Module) -> list[str]:
    """Return the names of trained weights that are transposed views.

    PEFT makes them for a LoRA of tied embeddings.
    """
    return [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and not weight.is_contiguous()
    ]


def tied_in(model: Any, wrapper: str) -> list[str]:
    """Return the names of embeddings that share a weight and that PEFT wraps.

    Args:
        wrapper: name of PEFT's class around the embedding of the input or of the output.
    """
    if not getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False):
        return []
    embeddings = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    return [
        name
        for name, module in model.named_modules()
        if id(module) in embeddings and type(module).__name__ == wrapper
    ]


def _takes_labels(model: nn.Module) -> bool:
    return "labels" in inspect.signature(model.forward).parameters


def _asks_for_loss(trainer: Any) -> bool:
    """Return whether a trainer asks the model for its loss.

    Otherwise the trainer overrides `compute_loss`.
    """
    module: str = trainer.compute_loss.__module__
    return module.startswith("hf_distca.")


def check_trainer(trainer: Any, *, packs: bool) -> None:
    """Raise ValueError unless a trainer with model and accelerator can train exactly as launched.

    Args:
        packs: whether the trainer packs documents. Otherwise it gets padded batches.
    """
    check(ROWS_ARE_PLACED, trainer.accelerator.parallelism_config)
    facts = _trainer_facts(trainer)
    check(TRAINER, facts)
    check(PACKED_TRAINER if packs else PADDED_TRAINER, facts)
    if facts.reentrant:
        check_reentrant(trainer.model)


def _trainer_facts(trainer: Any) -> SimpleNamespace:
    """Return what the rules about a trainer and their texts read."""
    args = trainer.args
    model = trainer.model
    accelerator = trainer.accelerator
    base: Any = base_model(model)
    is_adapted = base is not model  # by PEFT
    # The DistributedConfig by which transformers divided the model at load.
    divided = base.config.distributed_config if is_divided_at_load(model) else None
    # DDP would wait for the gradients of trained parts that text does not reach.
    towers: list[str] = []
    if accelerator.distributed_type in DDP and divided is None:
        towers = trained_towers(base)
    return SimpleNamespace(
        trainer=trainer,
        args=args,
        model=model,
        accelerator=accelerator,
        deepspeed=trainer.is_deepspeed_enabled,
        base=base,
        model_class=type(base).__name__,
        adapted=is_adapted,
        tp_size=trainer.get_tp_size(),
        divided=divided,
        reentrant=(checkpointing_options(args) or {}).get("use_reentrant"),
        towers=", ".join(towers),
        tied=tied_in(base, "ModulesToSaveWrapper") if accelerator.is_fsdp2 else [],
        tied_tokens=tied_in(base, "TrainableTokensWrapper") if accelerator.is_fsdp2 else [],
        views=transposed_adapters(model) if is_adapted and divided is None else [],
    )


# A run, and resuming


class Run:
    """What is refused when training or an evaluation begins."""

    DIFFERENT_ARGUMENTS = Refusal(
        "{name} differs between ranks ({by_rank})",
        "all ranks must train on the same micro-batches, with the same plans",
        "start all ranks with the same {name}",
    )
    NO_CHECKPOINTS = Refusal(
        "offload_activations=True is set without gradient checkpointing",
        "only what checkpoints of layers keep goes to the host",
        f"set {CHECKPOINTING}=True",
    )
    HOST_MEMORY = Refusal(
        "checkpoints of {layers} layers take {needed} GB on the host {host} (ranks there: {ranks})",
        "{available} GB can be used, {fraction} of what is available",
        "lower tokens_per_rank, train on more hosts, or set offload_activations='auto', which "
        "moves as many layers as fit",
        condition="`offload_activations=True` with too little host memory",
    )
    NO_STEPS = Refusal(
        "num_train_epochs={epochs} and max_steps={steps} are set",
        "training would end before its first step",
        "set one of them above 0; evaluate() needs no training",
        condition="`num_train_epochs=0` without `max_steps`",
    )
    ALL_FROZEN = Refusal(
        "every weight of {model} is frozen",
        "training would change nothing",
        "call requires_grad_() on the weights to train; an adapter whose folder is given as model "
        "is loaded frozen: load it with peft.PeftModel.from_pretrained(model, folder, "
        "is_trainable=True)",
        condition="a model whose weights are all frozen, such as an adapter given by its folder",
    )
    SECOND_TRAINING = Refusal(
        "train() was called a second time under DeepSpeed",
        "its engine and optimizer serve one call only",
        "train all epochs in one call; or make a new {trainer} with the same model, whose "
        "optimizer starts anew",
    )
    NOT_WRAPPED = Refusal(
        "{model} is not wrapped for {processes} ranks ({strategy})",
        "each rank would train apart",
        "give the trainer a model that no Accelerator has prepared, and call train()",
    )
    NEEDS_WHOLE_WEIGHTS = Refusal(
        "{optimizer} is the optimizer where a rank has shards of weights",
        "its steps on shards of weights are not its steps on whole weights",
        "set another optimizer, such as optim='adamw_torch', or train under DDP",
        condition=(
            "Adafactor, GaLore, Shampoo or another optimizer of rows, columns, matrices or norms "
            "of whole weights under DeepSpeed or FSDP2"
        ),
    )
    LOST_PLAN = Refusal(
        "{model} did not pass {key} on to its decoder layers",
        "they need it to keep documents apart",
        "train it with transformers' Trainer and attn_implementation='sdpa'",
    )
    LOST_TARGETS = Refusal(
        "{model} computed a loss from other rows than its decoder returned",
        "documents that begin alike share rows, and a row comes once for each of its targets",
        "set share_prefixes=False",
    )
    NO_TARGETS = Refusal(
        "no document of the first optimizer step has a target ({tokens} tokens on all ranks)",
        "its loss would be 0 and change no weight: every label is -100, or documents have a single "
        "token",
        "check the labels that the stream or data_collator gives, and leave the column 'labels' "
        "out where each token predicts the next; if later documents have targets, shuffle the "
        "data",
        condition=(
            "a stream, or the batches of a custom collator, without any target in the first "
            "optimizer step"
        ),
    )
    ALL_LOGITS = Refusal(
        "predict() is called without preprocess_logits_for_metrics",
        "it would return the logits of all tokens, which take memory for tokens × vocabulary "
        "values on every rank",
        "give the trainer a preprocess_logits_for_metrics that makes them small token by token, "
        "such as lambda logits, labels: logits.argmax(-1); evaluate() reports the exact loss, "
        "token accuracy and entropy",
    )
    NO_LOGITS_OF_TRL = Refusal(
        "predict() of {trainer} is called",
        "TRL computes the loss without logits",
        "tokenize the chats and predict with DistCATrainer; evaluate() reports the exact loss, "
        "token accuracy and entropy",
        condition="`predict()` of `DistCASFTTrainer`",
    )
    NO_ORDER = Refusal(
        "predictions are asked for documents of a stream, or with a data_collator",
        "documents are numbered in a data set with a length only, so that predictions could not be "
        "put in order",
        "evaluate on a data set with a length, such as datasets.Dataset.from_list(list(stream)), "
        "and leave data_collator out; or leave compute_metrics out",
        condition="`compute_metrics` or `predict()` with a stream or a custom collator",
    )
    OTHER_ROWS = Refusal(
        "{function} returned {what} for logits of the shape {logits}",
        "a document's rows lie on several ranks, so that its results are joined token by token",
        "return one value or one vector for each token, [1, tokens] or [1, tokens, …], such as "
        "logits.argmax(-1); labels are unshifted: shift where compute_metrics compares",
        condition=(
            "`preprocess_logits_for_metrics` that returns another number of tokens than it gets"
        ),
    )
    NOT_BY_ROWS = Refusal(
        "{function} returns other values for a token when it gets fewer tokens around it",
        "a document's rows lie on several ranks and in several chunks, so that the function gets "
        "parts of documents",
        "compute each token's value from its own logits, such as logits.argmax(-1), and shift and "
        "average in compute_metrics",
    )
    NO_LOGITS = Refusal(
        "{function} saw the logits of {seen} of {rows} tokens",
        "the model does not compute its loss by one cross entropy of all logits",
        "leave compute_metrics out; or set loss_chunk_bytes=0",
        condition=(
            "`preprocess_logits_for_metrics` with a model whose loss is not one cross entropy of "
            "its logits"
        ),
    )
    EARLY_EVALUATION = Refusal(
        "evaluate() was called before train()",
        "FSDP, ZeRO-1 and ZeRO-2 prepare a model only together with its optimizer",
        "set eval_on_start=True to evaluate before the first training step",
    )


WHOLE_WEIGHTS = frozenset(
    (
        *("adafactor", "came", "grokadamw", "lamb", "lars", "muon", "prodigy", "shampoo", "soap"),
        *("stableadamw", "apollo_torch", "galore_torch", "lomo_optim"),
    )
)
"""Optimizers whose steps need whole weights: names of their classes, or of their packages.

They step by rows, columns, matrices or norms of a weight, or in the backward pass.
"""
EXACT_BY_ROWS = frozenset(("galore_torch", "grokadamw", "muon"))
"""Those of them that step alike on DTensors of rows, into which FSDP2 divides weights."""


def check_optimizer(trainer: Any) -> None:
    """Raise ValueError if a rank has shards of weights and the optimizer needs whole weights.

    An optimizer that is not known is accepted.
    """
    accelerator = trainer.accelerator
    has_rows = accelerator.is_fsdp2 or is_divided_at_load(trainer.model)
    has_flat_shards = accelerator.distributed_type in (
        DistributedType.DEEPSPEED,
        DistributedType.FSDP,
    )
    kind = type(trainer.optimizer)
    names = {base.__name__ for base in kind.__mro__}
    names |= {base.__module__.partition(".")[0] for base in kind.__mro__}
    optimizer = f"{kind.__module__}.{kind.__name__}"
    if trainer.is_deepspeed_enabled:
        named = accelerator.state.deepspeed_plugin.hf_ds_config.get_value("optimizer.type")
        if named is not None and named.lower() != "muon":  # DeepSpeed's own, which knows shards
            names.add(named)
            optimizer = named
    refused = WHOLE_WEIGHTS - EXACT_BY_ROWS if has_rows else WHOLE_WEIGHTS
    if (has_rows or has_flat_shards) and not refused.isdisjoint(map(str.lower, names)):
        raise Run.NEEDS_WHOLE_WEIGHTS.error(optimizer=optimizer)


class Resume:
    """What is refused when training resumes."""

    NO_CHECKPOINT = Refusal(
        "resume_from_checkpoint={given} is set",
        "ranks have no complete checkpoint in common, with the {file} that is written last (found: "
        "{found})",
        "name a complete checkpoint such as '{folder}/checkpoint-500', set output_dir to the "
        "folder of the earlier run, or leave resume_from_checkpoint out",
        condition=(
            "`resume_from_checkpoint` without a complete checkpoint, or without the same one on "
            "every rank"
        ),
    )
    NO_STATE = Refusal(
        "the checkpoint {checkpoint} has no {files}",
        "the optimizer and the learning rate would begin anew: the checkpoint was saved with "
        "save_only_model=True or under another strategy",
        "load its weights as the model and train without resume_from_checkpoint; or resume from a "
        "checkpoint that was saved with save_only_model=False under the same strategy",
        condition=(
            "a checkpoint without the state of the optimizer or of the learning rate, or of "
            "DeepSpeed under another strategy"
        ),
    )
    NO_PLACE = Refusal(
        "the checkpoint {checkpoint} has no {file}",
        "that file records the place in the training data: another trainer or an earlier version "
        "saved the checkpoint",
        "set ignore_data_skip=True to begin a new pass over the data",
        condition="a checkpoint of another trainer",
    )
    OTHER_ORDER = Refusal(
        "settings differ from those of the checkpoint: {differences}",
        "documents would come in another order, so that training would skip some documents and "
        "repeat others",
        "set them as they were, or set ignore_data_skip=True to begin a new pass over the data",
    )

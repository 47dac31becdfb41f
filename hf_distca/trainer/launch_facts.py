"""Facts of a launch and of a trainer, and the passes that apply the rules of `checks` to them.

A training is checked when its arguments are made, when a trainer is given its arguments, when the
trainer has a model and an accelerator, and when `train()` is called. Each pass lists all that is
refused.
"""

import multiprocessing
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.utils import DynamoBackend

from hf_distca.checks.argument_rules import GIVEN, PACKED_GIVEN, WITHOUT_SETTINGS
from hf_distca.checks.launch_rules import PROCESSES, TRAINER
from hf_distca.checks.model_rules import Models
from hf_distca.checks.refusal import RefusedError, check, errors_of, raise_all, raised_by
from hf_distca.checks.run_rules import TRAINING, Run
from hf_distca.collator.documents import check_dataset
from hf_distca.models.checkpointing import checkpointing_options
from hf_distca.models.decoder import base_model
from hf_distca.models.images import why_no_images
from hf_distca.models.model_facts import (
    GivenModel,
    check_is_model,
    reads_earlier_keys,
    tied_in,
    trained_towers,
    transposed_adapters,
)
from hf_distca.models.tensor_parallel import is_divided_at_load
from hf_distca.trainer.parallel import DDP, asked_for, launched_processes, replicas_of

SUMMED_GRADIENTS = "replicated_with_grad_allreduce"
"""Name in transformers for modules that stay whole inside divided attention, such as norms of Q and
K."""

# Arguments when they are made


def refused_processes(args: Any) -> list[RefusedError]:
    """Return the errors of the process that makes a trainer's arguments, and of its launch."""
    processes = SimpleNamespace(
        # multiprocessing sets this while a process that it spawned imports the script, for a check
        # of its own.
        imports_script=getattr(multiprocessing.current_process(), "_inheriting", False),
        processes=launched_processes() - args.attention_servers.in_launch,
        asks_for_deepspeed=asked_for("DEEPSPEED", args.deepspeed),
        deepspeed=args.deepspeed,
        use_cpu=args.use_cpu,
        has_gpu=torch.accelerator.is_available(),
    )
    return errors_of(PROCESSES, processes)


# What a trainer is given


def check_given(trainer: type, arguments: Mapping[str, Any], *, packs: bool) -> None:
    """Raise ValueError if a trainer cannot train exactly with these arguments of its `__init__`.

    Args:
        trainer: class of the trainer.
        arguments: arguments of its `__init__` by name.
        packs: whether the trainer packs documents. Otherwise it gets padded batches.
    """
    facts = {
        "args": None,
        **arguments,
        "trainer": trainer.__name__,
        "trl_trainer": _name_of_trl_trainer(trainer),
    }
    errors = errors_of(WITHOUT_SETTINGS, facts)
    if not errors:
        errors = errors_of((*PACKED_GIVEN, *GIVEN) if packs else GIVEN, facts)
    raise_all([*errors, *_refused_model(arguments, packs=packs), *_refused_datasets(arguments)])


def _refused_model(arguments: Mapping[str, Any], *, packs: bool) -> list[RefusedError]:
    """Return the errors of what is given as a model."""
    model: Any = arguments.get("model")
    is_made_later = model is None and arguments.get("model_init") is not None
    if isinstance(model, str) or is_made_later:
        return []
    errors = raised_by(check_is_model, model)
    return errors if errors or not packs else errors_of((Models.OTHER_LOSS,), GivenModel(model))


def _refused_datasets(arguments: Mapping[str, Any]) -> list[RefusedError]:
    """Return the errors of what is given as data sets."""
    train_dataset = arguments.get("train_dataset")
    eval_dataset = arguments.get("eval_dataset")
    datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    if isinstance(eval_dataset, dict):
        del datasets["eval_dataset"]
        datasets |= {f"eval_dataset[{key!r}]": part for key, part in eval_dataset.items()}
    errors: list[RefusedError] = []
    for name, dataset in datasets.items():
        if dataset is not None:
            errors += raised_by(check_dataset, dataset, name)
    return errors


def _name_of_trl_trainer(trainer: type) -> str:
    """Return the name of the trainer of TRL that a class is or derives from; "" without one."""
    for base in trainer.__mro__:
        package = base.__module__.split(".")[0]
        if package == "trl" and base.__name__.endswith("Trainer"):
            return base.__name__
    return ""


# A trainer with model and accelerator


def check_trainer(trainer: Any, *, packs: bool) -> None:
    """Raise ValueError unless a trainer with model and accelerator can train exactly as launched.

    Args:
        packs: whether the trainer packs documents. Otherwise it gets padded batches.
    """
    args = trainer.args
    has_images = getattr(trainer, "_is_vision_dataset", False)
    reentrant = (checkpointing_options(args) or {}).get("use_reentrant")
    facts = SimpleNamespace(
        packs=packs,
        trainer=type(trainer).__name__,
        is_of_trl=bool(_name_of_trl_trainer(type(trainer))),
        has_images=has_images,
        rolls_out_images=_rolls_out_images(trainer),
        why_no_images=why_no_images(base_model(trainer.model)) if has_images else "",
        tp_size=trainer.get_tp_size(),
        attention_servers=args.attention_servers.count,
        accumulation=args.gradient_accumulation_steps,
        ddp_finds_unused=args.ddp_find_unused_parameters,
        reentrant=reentrant,
        reads_earlier_keys=reads_earlier_keys(trainer.model) if reentrant else None,
        deepspeed_ignores_optimizer=trainer.is_deepspeed_enabled
        and not (trainer.optimizer is None and trainer.lr_scheduler is None),
        **_facts_of_accelerator(trainer),
        **_facts_of_model(trainer),
    )
    check(TRAINER, facts)


def _rolls_out_images(trainer: Any) -> bool:
    """Return whether a trainer of rollouts has prompts with images."""
    if not hasattr(trainer, "_buffered_inputs"):
        return False
    columns = getattr(trainer.train_dataset, "column_names", None) or ()
    return not {"image", "images"}.isdisjoint(columns)


def _facts_of_accelerator(trainer: Any) -> dict[str, Any]:
    accelerator = trainer.accelerator
    sizes = accelerator.parallelism_config
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    has_no_scaler = trainer.args.device.type == "cpu"
    return {
        "cp_size": getattr(sizes, "cp_size", 1),
        "sp_size": getattr(sizes, "sp_size", 1),
        "compiles": accelerator.state.dynamo_plugin.backend != DynamoBackend.NO,
        "fsdp_offloads": getattr(fsdp, "activation_checkpointing_offload", False),
        "is_fp16_on_cpu": accelerator.mixed_precision == "fp16" and has_no_scaler,
    }


def _facts_of_model(trainer: Any) -> dict[str, Any]:
    model = trainer.model
    accelerator = trainer.accelerator
    base: Any = base_model(model)
    is_adapted = base is not model  # by PEFT
    is_divided = is_divided_at_load(model)
    # The DistributedConfig by which transformers divided the model at load.
    sizes = base.config.distributed_config if is_divided else None
    # DDP would wait for the gradients of trained parts that text does not reach.
    is_in_ddp = accelerator.distributed_type in DDP and not is_divided
    is_fsdp2 = accelerator.is_fsdp2
    return {
        "model": type(base).__name__,
        "is_adapted": is_adapted,
        "is_divided": is_divided,
        "pp_size": getattr(sizes, "pp_size", 1),
        "replicas": replicas_of(sizes),
        "sums_gradients": SUMMED_GRADIENTS in (getattr(model, "tp_plan", None) or {}).values(),
        "towers": ", ".join(trained_towers(base)) if is_in_ddp else "",
        "tied": tied_in(base, "ModulesToSaveWrapper") if is_fsdp2 else [],
        "tied_tokens": tied_in(base, "TrainableTokensWrapper") if is_fsdp2 else [],
        "views": transposed_adapters(model) if is_adapted and not is_divided else [],
    }


# A training


def check_training(trainer: Any) -> None:
    """Raise ValueError if a training would change nothing, or fail, from its start."""
    has_engine = trainer.is_deepspeed_enabled and trainer.deepspeed is not None
    facts = SimpleNamespace(
        trainer=type(trainer).__name__,
        model=type(trainer.model).__name__,
        epochs=trainer.args.num_train_epochs,
        steps=trainer.args.max_steps,
        all_frozen=not any(weight.requires_grad for weight in trainer.model.parameters()),
        had_deepspeed=has_engine and trainer.state.global_step > 0,
    )
    check(TRAINING, facts)


def check_optimizer(trainer: Any) -> None:
    """Raise ValueError if a rank has shards of weights and the optimizer needs whole weights.

    An optimizer that is not known is accepted.
    """
    accelerator = trainer.accelerator
    weights = "whole"
    if accelerator.is_fsdp2 or is_divided_at_load(trainer.model):
        weights = "rows"
    elif accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        weights = "flat"
    kind = type(trainer.optimizer)
    names = {base.__name__ for base in kind.__mro__}
    names |= {base.__module__.partition(".")[0] for base in kind.__mro__}
    optimizer = f"{kind.__module__}.{kind.__name__}"
    if trainer.is_deepspeed_enabled:
        named = accelerator.state.deepspeed_plugin.hf_ds_config.get_value("optimizer.type")
        if named is not None and named.lower() != "muon":  # DeepSpeed's own, which knows shards
            names.add(named)
            optimizer = named
    lower_names = set(map(str.lower, names))
    check(
        (Run.NEEDS_WHOLE_WEIGHTS,),
        SimpleNamespace(weights=weights, names=lower_names, optimizer=optimizer),
    )

"""Rules of settings and of what a trainer or `make_dispatcher` is given."""

import json
from collections.abc import Mapping
from typing import Any

from hf_distca.checks.refusal import Rule
from hf_distca.checks.setting_names import CHECKPOINTING


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


def descends_from(value: Any, *names: str) -> bool:
    """Return whether a value's class, or a class that it is based on, has one of these names."""
    return any(base.__name__ in names for base in type(value).__mro__)


def _must_be_none(name: str, reason: str, remedy: str) -> Rule:
    """Return the rule of an argument of a trainer that must stay None."""
    return Rule(f"{name} is given", reason, remedy, lambda given: given.get(name) is not None)


def _options(value: Any) -> Mapping[str, Any]:
    """Return the options of an argument, which are JSON on a command line."""
    if isinstance(value, str):
        value = json.loads(value) if value.startswith("{") else None
    options: Mapping[str, Any] = value or {}
    return options


def liger_replaces_mlps(args: Any) -> bool:
    """Return whether Liger's kernels compute the MLPs of a model."""
    named = _options(args.liger_kernel_config)
    kernels = [named.get(name, True) for name in ("swiglu", "geglu")]
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
        f"{CHECKPOINTING}_kwargs={{{{'offload': True}}}} copies activation checkpoints to the host",
        "every layer would wait for its copies",
        "leave 'offload' out and set offload_activations=True, which copies while layers compute",
        lambda args: bool(_options(getattr(args, f"{CHECKPOINTING}_kwargs")).get("offload")),
    ),
    Rule(
        "mlp_chunk_rows={0.mlp_chunk_rows} is set with use_liger_kernel=True",
        "it would have no effect: Liger replaces the MLPs that are computed in chunks",
        "set mlp_chunk_rows=0, or liger_kernel_config={{'swiglu': False, 'geglu': False}}",
        lambda args: args.mlp_chunk_rows not in (0, "auto") and liger_replaces_mlps(args),
    ),
)
"""Arguments that no trainer can follow; they are refused when they are made."""
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
NO_TOKENIZER = Rule(
    "processing_class is {0[processing_class]!r}",
    "it is no tokenizer",
    "load it: processing_class=AutoTokenizer.from_pretrained(name)",
    lambda given: isinstance(given.get("processing_class"), str | type),
    condition="the name or the class of a tokenizer as `processing_class`",
)
DISPATCHED: tuple[Rule, ...] = (
    Rule(
        "config is {0[config]}",
        "make_dispatcher needs the settings of hf_distca",
        "pass hf_distca.DistCAConfig(tokens_per_rank=…)",
        lambda given: not descends_from(given["config"], "DistCAConfig"),
        condition="settings in a dictionary, or none, in `make_dispatcher`",
    ),
    Rule(
        "mesh is {0[mesh]}",
        "ranks are named by a mesh or by a group",
        "pass one dimension of a DeviceMesh such as mesh['dp'], a process group, or None for all "
        "ranks",
        lambda given: (
            given["mesh"] is not None
            and not descends_from(given["mesh"], "DeviceMesh", "ProcessGroup")
        ),
        condition="ranks as a list in `make_dispatcher`",
    ),
    Rule(
        "the mesh has the dimensions {0[mesh].mesh_dim_names} of sizes {0[mesh].shape}",
        "ranks that train together are one dimension, that of the data-parallel ranks",
        "pass that dimension, such as mesh['dp']",
        lambda given: getattr(given["mesh"], "ndim", 1) != 1,
        condition="a mesh of several dimensions in `make_dispatcher`",
    ),
)
"""Arguments of `make_dispatcher` that are objects of another kind."""


METRICS_FUNCTION = "compute_metrics"
LOGITS_FUNCTION = "preprocess_logits_for_metrics"
METRICS_ALONE = (
    "evaluate() reports the exact loss, mean_token_accuracy and entropy over all targets without "
    "compute_metrics"
)
WITHOUT_SETTINGS: tuple[Rule, ...] = (
    Rule(
        "args are {0[args].__class__.__name__}",
        "hf_distca needs its settings, such as tokens_per_rank",
        "pass DistCATrainingArguments; for a trainer with its own arguments combine both classes "
        "in one dataclass: class MyArguments(hf_distca.DistCAArguments, SFTConfig)",
        lambda given: (
            given["trl_trainer"] != "SFTTrainer"
            and not (
                descends_from(given["args"], "DistCAConfig")
                and descends_from(given["args"], "TrainingArguments")
            )
        ),
        condition="`args` without the settings of hf_distca",
    ),
    Rule(
        "args of {0[trainer]} are {0[args].__class__.__name__}",
        "it needs the settings of hf_distca and of TRL's SFTConfig",
        "replace them by a DistCASFTConfig with the same settings",
        lambda given: (
            given["trl_trainer"] == "SFTTrainer"
            and not (
                descends_from(given["args"], "DistCAConfig")
                and descends_from(given["args"], "SFTConfig")
            )
        ),
        condition="`args` of `DistCASFTTrainer` that are no `DistCASFTConfig`",
    ),
)
"""Arguments of a trainer that lack the settings, which all other rules read."""
GIVEN: tuple[Rule, ...] = (
    NO_TOKENIZER,
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
        lambda given: given["args"].n_gpu > 1,
    ),
    Rule(
        "model_init_kwargs={0[args].model_init_kwargs!r} is set with a loaded model",
        "it would have no effect",
        "pass the model's name as model, or leave model_init_kwargs out",
        lambda given: (
            not given["trl_trainer"]  # TRL warns of it
            and not isinstance(given.get("model"), str)
            and getattr(given["args"], "model_init_kwargs", None) is not None
        ),
    ),
)
"""Arguments of a trainer's `__init__`, by name, that cannot train exactly."""
PACKED_GIVEN: tuple[Rule, ...] = (
    Rule(
        "{0[trl_trainer]} compares whole answers",
        "DistCAMixin spreads the rows of packed documents over ranks",
        "put hf_distca.DistCAPaddedMixin before it, whose model takes padded batches: DPO, GRPO, "
        "RLOO, KTO and reward models come ready made, such as DistCADPOTrainer",
        lambda given: given["trl_trainer"] not in ("", "SFTTrainer", "_BaseTrainer"),
        condition="`DPOTrainer`, `RewardTrainer` and others with `DistCAMixin`",
    ),
    Rule(
        "{0[trl_trainer]} gets compute_metrics or preprocess_logits_for_metrics",
        "TRL computes the loss without logits, and gives none to these functions from its version "
        "2 on",
        f"leave them out, because {METRICS_ALONE}; or evaluate with DistCATrainer",
        lambda given: (
            bool(given["trl_trainer"]) and any(map(given.get, (METRICS_FUNCTION, LOGITS_FUNCTION)))
        ),
        condition="`compute_metrics` or `preprocess_logits_for_metrics` with `DistCASFTTrainer`",
    ),
    Rule(
        "compute_metrics is given without preprocess_logits_for_metrics",
        "it would get the logits of all tokens, which take memory for tokens × vocabulary values "
        "on every rank",
        "give a preprocess_logits_for_metrics that makes them small token by token, such as "
        f"lambda logits, labels: logits.argmax(-1); {METRICS_ALONE}",
        lambda given: (
            given.get(METRICS_FUNCTION) is not None and given.get(LOGITS_FUNCTION) is None
        ),
    ),
    Rule(
        "batch_eval_metrics=True is set with compute_metrics",
        "a micro-batch of a rank may have parts of documents, and compute_metrics gets whole ones",
        "set batch_eval_metrics=False",
        lambda given: given.get(METRICS_FUNCTION) is not None and given["args"].batch_eval_metrics,
    ),
    Rule(
        "include_for_metrics={0[args].include_for_metrics} is set with compute_metrics",
        "compute_metrics gets predictions and labels alone",
        "leave it out; inputs are in the data set, in the order of the predictions",
        lambda given: (
            given.get(METRICS_FUNCTION) is not None and bool(given["args"].include_for_metrics)
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
        lambda given: (
            descends_from(given.get("data_collator"), "DataCollatorForLanguageModeling")
            and getattr(given["data_collator"], "mlm", False)  # TRL's of this name has none
        ),
    ),
)
"""The same for trainers with packed documents."""

"""Refuse trainings that would not be exact, before any work starts."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from accelerate.utils import DynamoBackend
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding, Trainer
from transformers.training_args import OptimizerNames

from hf_distca.patches.model import check_reentrant
from hf_distca.trainer.arguments import DistCAArguments
from hf_distca.trainer.refused_parallelism import check_parallelism, check_rows_are_whole

NO_LOGITS = (
    "needs logits document by document, but rows are spread over ranks as the plan says; evaluate() reports the exact "
    "token-weighted loss"
)
REFUSED_FUNCTIONS = {
    "compute_metrics": NO_LOGITS,
    "preprocess_logits_for_metrics": NO_LOGITS,
    "compute_loss_func": "would get targets that are already shifted; use the model's own loss, which takes "
    "shift_labels",
    "model_init": "would make another model when training begins, without what planned steps change in it; make the "
    "model beforehand and give it as model",
}
"""Trainer arguments that must stay None, with reasons."""
PADDING = (DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding)
"""Collators of transformers that pad rows to one length."""
LOADING: dict[str, tuple[Any, ...]] = {
    "split_batches": (False,),
    "dispatch_batches": (None, False),
    "even_batches": (True,),
    "use_seedable_sampler": (True,),
}
"""Fields of `accelerator_config` and the values that packed documents allow, the recommended value first."""


def named_arguments(init: Callable[..., None], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a trainer by name.

    Args:
        init: bound `__init__` that will take the arguments.

    Raises:
        TypeError: `init` has fewer names than there are positional arguments.
    """
    named = [
        name
        for name, parameter in inspect.signature(init).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(args) > len(named):
        raise TypeError(
            f"{init.__qualname__} names {len(named)} arguments and got {len(args)} by position; give them by name"
        )
    return {**dict(zip(named, args, strict=False)), **kwargs}


def check_kind(trainer: type) -> None:
    """Raise ValueError if a trainer class is a subclass of a TRL trainer other than SFTTrainer."""
    for base in trainer.__mro__:
        if base.__module__.split(".")[0] == "trl" and base.__name__.endswith("Trainer"):
            if base.__name__ in ("SFTTrainer", "_BaseTrainer"):
                return
            raise ValueError(
                f"{base.__name__} compares whole answers, but rows of packed documents are spread over ranks as the "
                "plan says; use it without DistCAMixin: with attn_implementation='distca' it then computes what it "
                "does with 'sdpa'"
            )


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise ValueError unless a trainer with these named arguments can train exactly; called before it is built."""
    args, packs = given.get("args"), given.get("data_collator") is None
    if not isinstance(args, DistCAArguments):
        raise ValueError(
            f"args must be DistCATrainingArguments, got {type(args).__name__}; for a trainer with arguments of its "
            "own make one dataclass of both: class MyArguments(hf_distca.DistCAArguments, SFTConfig)"
        )
    args.serve_if_server()  # a server's arguments are incomplete
    for name, why in REFUSED_FUNCTIONS.items():
        if given.get(name) is not None:
            raise ValueError(f"{name} {why}")
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if packs and getattr(args, name) != 1:
            raise ValueError(
                f"{name}={getattr(args, name)} contradicts tokens_per_rank={args.tokens_per_rank}: a rank's batch is "
                "one packed row of up to tokens_per_rank tokens; leave it at 1"
            )
    if isinstance(given.get("data_collator"), PADDING):
        raise ValueError(
            f"data_collator={type(given['data_collator']).__name__} pads documents, which are packed here; leave "
            "data_collator out: every token is then the target of the one before it, unless the data set has labels"
        )
    if packs and args.train_sampling_strategy not in ("random", "sequential"):
        raise ValueError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} would be ignored: documents are packed by "
            "their lengths as it is, drawn at random or in order; choose 'random' or 'sequential'"
        )
    if packs:
        _check_loading(args)
    if args.parallelism_config is not None:  # before accelerate checks more
        check_rows_are_whole(args.parallelism_config.cp_size, args.parallelism_config.sp_size)
    if args.n_gpu > 1:
        raise ValueError(
            f"this one process sees {args.n_gpu} GPUs, which Trainer would use as DataParallel; start one process per "
            "GPU: accelerate launch --num_processes N script.py"
        )


def _check_loading(args: Any) -> None:
    """Raise if arguments set how batches are made and divided, which plans decide."""
    for name, values in LOADING.items():
        value = getattr(args.accelerator_config, name)
        if value not in values:
            raise ValueError(
                f"accelerator_config's {name}={value!r} would be ignored: every rank reads the rows that the plan "
                f"gives it, in an order drawn from the seed; leave it at {values[0]!r}"
            )
    if not getattr(args, "dataloader_in_order", True):
        raise ValueError(
            "dataloader_in_order=False would let ranks take micro-batches in different orders, and exchange rows of "
            "different ones; leave it at True"
        )


def check_trainer(trainer: Trainer) -> None:
    """Raise ValueError unless a trainer with model and accelerator can train exactly as launched."""
    if trainer.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise ValueError(
            "torch.compile of a whole model leaves out planned attention and layers in which two nano-batches take "
            "turns, which is most of it; leave torch_compile=False and accelerate's --dynamo_backend at no, and "
            "compile modules inside the layers: for layer in model.model.layers: layer.mlp.compile()"
        )
    check_parallelism(trainer)
    model: Any
    if trainer.accelerator.mixed_precision == "fp16" and trainer.args.device.type == "cpu":
        raise ValueError(
            "fp16 mixed precision needs losses that are scaled, which accelerate does on GPUs only: on the CPU it "
            "trains in float32, or under FSDP in float16 as it is; use bf16=True, or neither"
        )
    _check_optimizer(trainer)
    checkpointing: Any = trainer.args.gradient_checkpointing_kwargs or {}
    if trainer.args.gradient_checkpointing and checkpointing.get("use_reentrant"):
        model = trainer.model
        check_reentrant(model)
    if not trainer.model_accepts_loss_kwargs:
        raise ValueError(
            f"{type(trainer.model).__name__} does not take num_items_in_batch, without which ranks with different "
            "numbers of targets have no exact loss; let its forward take **kwargs and hand them to self.loss_function"
        )


def _check_optimizer(trainer: Trainer) -> None:
    """Raise if sharded weights would get a wrong optimizer, or another than the requested one."""
    if trainer.args.optim == OptimizerNames.ADAFACTOR and trainer.accelerator.is_fsdp2:
        raise ValueError(
            "optim='adafactor' fails in the first step under FSDP2: transformers' Adafactor mixes whole and divided "
            "tensors; choose another, such as adamw_torch, or train under DDP"
        )
    if not trainer.is_deepspeed_enabled:
        return
    if trainer.args.optim == OptimizerNames.ADAFACTOR:
        raise ValueError(
            "optim='adafactor' would train otherwise under DeepSpeed, without a word: its moments are of the rows and "
            "columns of a weight, and ZeRO gives it flat shares; choose another, such as adamw_torch, or train under "
            "DDP"
        )
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise ValueError(
            "optimizers would be left out under DeepSpeed, without a word: transformers makes others, of "
            f"optim={OptimizerNames(trainer.args.optim).value!r} and lr_scheduler_type; give "
            "optimizer_cls_and_kwargs, or override create_optimizer and create_scheduler"
        )

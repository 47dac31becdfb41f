"""Refuse trainings that would not be exact, before any work starts."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from accelerate.utils import DynamoBackend
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding, Trainer
from transformers.training_args import OptimizerNames

from hf_distca.models.refusals import check_reentrant
from hf_distca.trainer.arguments import DistCAArguments
from hf_distca.trainer.refused_parallelism import check_parallelism, check_rows_are_whole

NO_LOGITS = (
    "needs the logits of whole documents, but the rows of a document lie on several ranks; leave it out and call "
    "evaluate(), which reports the exact token-weighted loss"
)
REFUSED_FUNCTIONS = {
    "compute_metrics": NO_LOGITS,
    "preprocess_logits_for_metrics": NO_LOGITS,
    "compute_loss_func": (
        "would get targets that are already shifted; leave it out and use the model's own loss, which takes "
        "shift_labels"
    ),
    "model_init": (
        "would replace the model when training begins, and the new model would lack the changes for planned steps; "
        "make the model first and pass it as model"
    ),
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
            f"{init.__qualname__} takes {len(named)} positional arguments, got {len(args)}; pass the others by name"
        )
    return {**dict(zip(named, args, strict=False)), **kwargs}


def check_kind(trainer: type) -> None:
    """Raise ValueError if a trainer class is a subclass of a TRL trainer other than SFTTrainer."""
    for base in trainer.__mro__:
        if base.__module__.split(".")[0] == "trl" and base.__name__.endswith("Trainer"):
            if base.__name__ in ("SFTTrainer", "_BaseTrainer"):
                return
            raise ValueError(
                f"{base.__name__} compares whole answers, but a plan spreads the rows of packed documents over ranks. "
                f"Use {base.__name__} without DistCAMixin: attn_implementation='distca' then computes the same as "
                "'sdpa'"
            )


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise ValueError unless a trainer with these named arguments can train exactly; called before it is built."""
    args, packs = given.get("args"), given.get("data_collator") is None
    if not isinstance(args, DistCAArguments):
        raise ValueError(
            f"args must be DistCATrainingArguments, got {type(args).__name__}. For a trainer with its own arguments "
            "combine both classes in one dataclass: class MyArguments(hf_distca.DistCAArguments, SFTConfig)"
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
            f"data_collator={type(given['data_collator']).__name__} pads documents, but hf_distca packs them without "
            "padding. Leave data_collator out: each token then predicts the next, unless the data set has labels"
        )
    if packs and args.train_sampling_strategy not in ("random", "sequential"):
        raise ValueError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} would be ignored: documents are packed by "
            "their lengths, and drawn at random or in order; set 'random' or 'sequential'"
        )
    if packs:
        _check_loading(args)
    if args.parallelism_config is not None:  # before accelerate checks more
        check_rows_are_whole(args.parallelism_config.cp_size, args.parallelism_config.sp_size)
    if args.n_gpu > 1:
        raise ValueError(
            f"one process sees {args.n_gpu} GPUs, which Trainer would use with DataParallel, but a rank is one "
            "process with one GPU; start one process per GPU: accelerate launch --num_processes N script.py"
        )


def _check_loading(args: Any) -> None:
    """Raise if arguments set how batches are made and divided, which plans decide."""
    for name, values in LOADING.items():
        value = getattr(args.accelerator_config, name)
        if value not in values:
            raise ValueError(
                f"accelerator_config's {name}={value!r} would be ignored: each rank reads the rows that its plan "
                f"assigns, in an order drawn from the seed; set it to {values[0]!r}"
            )
    if not getattr(args, "dataloader_in_order", True):
        raise ValueError(
            "dataloader_in_order=False lets ranks take micro-batches in different orders, so they would exchange rows "
            "of different micro-batches; set dataloader_in_order=True"
        )


def check_trainer(trainer: Trainer) -> None:
    """Raise ValueError unless a trainer with model and accelerator can train exactly as launched."""
    if trainer.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise ValueError(
            "torch.compile of a whole model cannot compile planned attention and decoder layers under ping-pong, "
            "which are most of the model. Leave torch_compile=False and accelerate's --dynamo_backend at no; to "
            "compile modules inside the layers: for layer in model.model.layers: layer.mlp.compile()"
        )
    check_parallelism(trainer)
    model: Any
    if trainer.accelerator.mixed_precision == "fp16" and trainer.args.device.type == "cpu":
        raise ValueError(
            "fp16 mixed precision needs loss scaling, which accelerate does on GPUs only: on the CPU it would train "
            "in float32, or under FSDP in float16 without scaling; set bf16=True, or leave out fp16 and bf16"
        )
    _check_optimizer(trainer)
    checkpointing: Any = trainer.args.gradient_checkpointing_kwargs or {}
    if trainer.args.gradient_checkpointing and checkpointing.get("use_reentrant"):
        model = trainer.model
        check_reentrant(model)
    if not trainer.model_accepts_loss_kwargs:
        raise ValueError(
            f"{type(trainer.model).__name__} does not take num_items_in_batch, so ranks with different numbers of "
            "targets would have no exact loss; let its forward take **kwargs and pass them to self.loss_function"
        )


def _check_optimizer(trainer: Trainer) -> None:
    """Raise if sharded weights would get a wrong optimizer, or another than the requested one."""
    if trainer.args.optim == OptimizerNames.ADAFACTOR and trainer.accelerator.is_fsdp2:
        raise ValueError(
            "optim='adafactor' fails in the first step under FSDP2: transformers' Adafactor mixes whole and sharded "
            "tensors; set another optimizer, such as optim='adamw_torch', or train under DDP"
        )
    if not trainer.is_deepspeed_enabled:
        return
    if trainer.args.optim == OptimizerNames.ADAFACTOR:
        raise ValueError(
            "optim='adafactor' silently trains differently under DeepSpeed: its moments need the rows and columns of "
            "a weight, but ZeRO gives it flat shards; set another optimizer, such as optim='adamw_torch', or train "
            "under DDP"
        )
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise ValueError(
            "optimizers=… would silently be ignored under DeepSpeed: transformers makes its own from "
            f"optim={OptimizerNames(trainer.args.optim).value!r} and lr_scheduler_type; set optimizer_cls_and_kwargs, "
            "or override create_optimizer and create_scheduler"
        )

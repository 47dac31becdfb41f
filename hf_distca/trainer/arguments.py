"""Arguments of DistCATrainer, and the base classes that add them to any trainer's arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.utils import parse_flag_from_env
from tqdm.auto import tqdm
from transformers import TrainingArguments

from hf_distca.checks.argument_rules import ARGUMENTS, PACKED_ARGUMENTS
from hf_distca.checks.refusal import RefusedError, Rule, check, errors_of
from hf_distca.checks.setting_names import CHECKPOINTING
from hf_distca.config import DistCAConfig
from hf_distca.models.checkpointing import move_default
from hf_distca.pool.launch import Launch, on_cpu, serve_if_server, split_launch
from hf_distca.trainer.launch_facts import refused_processes
from hf_distca.trainer.parallel import join_on_cpu, share_on_cpu
from hf_distca.units import setting

LIGERS_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")
"""Liger kernels that replace the loss of a model, or of all of transformers."""

ATTENTION = "attn_implementation"
"""Argument of `from_pretrained` that hf_distca replaces."""

BY_PLAN: dict[str, tuple[Any, ...]] = {
    "per_device_train_batch_size": (1,),
    "per_device_eval_batch_size": (1,),
    "train_sampling_strategy": ("random", "sequential"),
    "dataloader_drop_last": (False,),
    "dataloader_in_order": (True,),
    "accelerator_config.split_batches": (False,),
    "accelerator_config.dispatch_batches": (None, False),
    "accelerator_config.even_batches": (True,),
    "accelerator_config.use_seedable_sampler": (True,),
}
"""Arguments that only say how documents become batches, and their values that need no word."""

if TYPE_CHECKING:
    _Arguments = TrainingArguments
else:  # a subclass names the trainer's arguments
    _Arguments = object


@dataclass
class DistCAPaddedArguments(DistCAConfig, _Arguments):
    """Settings of `DistCAConfig` for the arguments of a trainer with padded batches.

    A base class to put first.

    ```python
    @dataclass
    class MyArguments(hf_distca.DistCAPaddedArguments, OthersArguments): ...
    ```
    """

    _rules: ClassVar[tuple[Rule, ...]] = ARGUMENTS
    _done_anyway: ClassVar[Mapping[str, Any]] = {"padding_free": False}

    def __post_init__(self) -> None:
        self._accept_done_anyway()
        # Otherwise TrainingArguments refuses bf16 on the CPU, although the launch asks for the CPU.
        self.use_cpu = self.use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
        DistCAConfig.__post_init__(self)
        self.attention_server_launch: Launch | None = None
        if self.attention_servers.in_launch:
            # Before TrainingArguments looks up the world.
            launch = split_launch(self.attention_servers.in_launch, cpu=on_cpu(self.use_cpu))
            self.attention_server_launch = launch
            if launch.serves_on is not None:
                return  # a server only calls `serve_if_server` with its arguments
        join_on_cpu(self)
        move_default(self)
        parent: Any = super(DistCAConfig, self)
        parent.__post_init__()
        self._accept_other_attention()
        check(self._rules, self)

    def _refused(self) -> list[RefusedError]:
        """Return the errors of all settings and of the process, with those of arguments if any.

        Without any, arguments are checked once transformers and TRL have read them: both give some
        of them other names or values.
        """
        errors = [*DistCAConfig._refused(self), *refused_processes(self)]
        return [*errors, *errors_of(self._rules, self)] if errors else []

    def _accept_done_anyway(self) -> None:
        """Turn off arguments of TRL that ask for what hf_distca does by itself."""
        self.left_out: list[str] = []  # such as "packing=True"
        for name, off in self._done_anyway.items():
            value = getattr(self, name, off)
            if value in (off, None):
                continue
            if value != getattr(type(self), name, None):  # a default needs no word
                self.left_out.append(f"{name}={value!r}")
            setattr(self, name, off)
        if getattr(self, "activation_offloading", False):
            self.left_out.append("activation_offloading=True (offload_activations=True)")
            self.activation_offloading = False
            self.offload_activations = True

    def _accept_other_attention(self) -> None:
        """Leave out the attention of a model given by name, which gets planned attention."""
        options = getattr(self, "model_init_kwargs", None)
        if options and ATTENTION in options:
            others = {name: value for name, value in options.items() if name != ATTENTION}
            vars(self)["model_init_kwargs"] = others  # a field that some arguments do not have

    def serve_if_server(self) -> None:
        """Serve until training ends if this process is an attention server of its launch.

        Else return at once.

        Call it right after the arguments are made, so that a server loads neither data nor model.
        Nothing else of the script runs in a server: SystemExit ends it. Without this call a server
        serves when the trainer is made.
        """
        serve_if_server(
            self.attention_server_launch, self.attention_servers.timeout, self.attention_kernel
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments for JSON, from which they can be made again."""
        parent: Any = super()
        return {
            **parent.to_dict(),
            "attention_servers": self.attention_servers.plain(),
            "planning": self.planning.plain(),
        }

    @cached_property
    def _setup_devices(self) -> torch.device:
        """Device of this process.

        A server serves here, before TrainingArguments looks up the world.
        """
        self.serve_if_server()
        parent: Any = super()
        device: torch.device = parent._setup_devices
        share_on_cpu(self)
        return device

    @cached_property
    def distributed_state(self) -> Any:
        """Placeholder until TrainingArguments has looked up the world and sets the attribute."""
        self.serve_if_server()
        raise AttributeError("distributed_state is not known yet")


@dataclass
class DistCAArguments(DistCAPaddedArguments):
    """Settings of `DistCAConfig` for the arguments of a trainer with packed documents.

    A base class to put first.

    ```python
    @dataclass
    class MyArguments(hf_distca.DistCAArguments, OthersArguments): ...
    ```
    """

    _rules: ClassVar[tuple[Rule, ...]] = (*ARGUMENTS, *PACKED_ARGUMENTS)
    _done_anyway: ClassVar[Mapping[str, Any]] = {
        "packing": False,
        "eval_packing": None,
        "padding_free": False,
        "pad_to_multiple_of": None,
    }

    per_device_train_batch_size: int = setting(
        1,
        "Has no effect where documents are packed: a rank trains on one row of up to "
        "tokens_per_rank tokens. Times max_length of TRL it is the default of tokens_per_rank. "
        "With a custom data_collator it is the number of examples that the collator gets.",
    )
    per_device_eval_batch_size: int = setting(1, "Like per_device_train_batch_size, in evaluation.")
    dataloader_num_workers: int = setting(
        0,
        "Number of processes on each rank that read and plan micro-batches. 0 starts none: the "
        "rank itself reads and plans the next micro-batches while its device computes. A "
        "datasets.IterableDataset is read by at most one process for each of its shards, and any "
        "other stream by one. Processes start as Python starts them, by fork before Python 3.14, "
        "or as dataloader_multiprocessing_context says; with 'spawn' and 'forkserver' the script's "
        'code must stand under `if __name__ == "__main__":`. A batch that does not come within '
        "half of exchange_timeout ends the run.",
    )
    divided_streams: bool = setting(
        False,
        "Whether each rank's stream has documents of its own, as after "
        "datasets.distributed.split_dataset_by_node. Otherwise every rank is given the same "
        "stream, and hf_distca divides it.",
    )

    @property
    def default_tokens_per_rank(self) -> int:
        """Tokens of a batch of TRL, if its arguments say how long its rows are."""
        max_length: int | None = getattr(self, "max_length", None)
        if self.per_device_train_batch_size > 1 and max_length is not None:
            return self.per_device_train_batch_size * max_length
        return super().default_tokens_per_rank

    def __post_init__(self) -> None:
        super().__post_init__()
        options: Any = getattr(self, f"{CHECKPOINTING}_kwargs")
        if options and "selective" in options:  # TRL's: what hf_distca keeps by itself
            kept = {name: value for name, value in options.items() if name != "selective"}
            setattr(self, f"{CHECKPOINTING}_kwargs", kept)
        # Liger's kernels are applied when training starts, and only to layers.
        if getattr(self, "use_liger_kernel", False):
            self.liger_kernel_config = {
                **(self.liger_kernel_config or {}),
                **dict.fromkeys(LIGERS_LOSSES, False),
            }


def print_left_out(args: Any, collator: Any) -> None:
    """Print, in one line, which arguments have no effect on packed documents.

    Args:
        collator: what the trainer was given and does not use; None if it was given none.
    """
    left_out = list(args.left_out)
    for path, plain in BY_PLAN.items():
        value = args
        for name in path.split("."):
            value = getattr(value, name, plain[0])
        if value not in plain:
            left_out.append(f"{path}={value!r}")
    if collator is not None:
        left_out.append(f"data_collator={getattr(collator, '__name__', type(collator).__name__)}")
    if left_out:
        tokens = f"a rank trains on up to tokens_per_rank={args.tokens_per_rank} tokens at a time"
        tqdm.write(f"Documents are packed by length: {tokens}. No effect: {', '.join(left_out)}")


@dataclass
class DistCATrainingArguments(DistCAArguments, TrainingArguments):
    """`transformers.TrainingArguments` with the settings of `DistCAConfig`."""

    _VALID_DICT_FIELDS = [  # noqa: RUF012 - as there
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
    ]

    model_init_kwargs: dict[str, Any] | str | None = setting(
        None,
        "Keyword arguments of from_pretrained, for a model that is given by name. The model is "
        "loaded in float32 unless they name another dtype.",
    )
    dataset_text_field: str = setting(
        "text", "Column with the text of a data set without tokens; processing_class tokenizes it."
    )

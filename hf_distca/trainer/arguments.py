"""Arguments of DistCATrainer, and the base class that adds them to any trainer's arguments."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments

from hf_distca.config import DistCAConfig
from hf_distca.pool.launch import Launch, on_cpu, serve_if_server, split_launch
from hf_distca.trainer.cpu_processes import join_on_cpu, shard_on_cpu

if TYPE_CHECKING:
    _Arguments = TrainingArguments
else:  # a subclass names the trainer's arguments
    _Arguments = object

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "label_smoothing_factor": ((0.0,), "targets of packed documents are already shifted, and it shifts again"),
    "average_tokens_across_devices": ((True,), "ranks hold different numbers of targets"),
    "auto_find_batch_size": ((False,), "memory is set by tokens_per_rank"),
    "dataloader_drop_last": ((False,), "it would drop documents"),
    "use_cache": ((False,), "training has no use for cached keys and values"),
    "label_names": ((None, ["labels"]), "targets are the column 'labels', or every token where there is none"),
    "packing": ((False,), "documents are packed by their lengths, and stay apart"),
    "eval_packing": ((None, False), "documents are packed by their lengths, and stay apart"),
    "padding_free": ((False,), "documents are packed without padding as it is"),
    "pad_to_multiple_of": ((None,), "documents are packed without padding"),
    "activation_offloading": (
        (False,),
        "it copies what is saved for the backward on a stream that exchanges know nothing of; gradient_checkpointing "
        "saves little, and FSDP's activation_checkpointing_offload moves that to the host",
    ),
}
"""Trainer arguments with restricted values: name to (allowed values, reason).

The first allowed value is the recommended one. The last five arguments are TRL's.
"""
LIGERS_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")
"""Liger kernels that replace the loss of a model, or of all of transformers."""
LIGERS_MLPS = ("swiglu", "geglu")


@dataclass
class DistCAArguments(DistCAConfig, _Arguments):
    """Settings of `DistCAConfig` for the arguments of any trainer; a base class to put first.

    ```python
    @dataclass
    class MyArguments(hf_distca.DistCAArguments, OthersArguments): ...
    ```

    Raises:
        ValueError: A setting contradicts packed training with an exact loss.
    """

    per_device_train_batch_size: int = field(
        default=1,
        metadata={
            "help": "Must stay 1: a rank trains on one packed row of up to tokens_per_rank tokens. With a custom "
            "data_collator it is the number of examples that the collator gets."
        },
    )
    per_device_eval_batch_size: int = field(
        default=1, metadata={"help": "Like per_device_train_batch_size, in evaluation."}
    )
    dataloader_num_workers: int = field(
        default=1,
        metadata={
            "help": "Number of processes that load data. With 1 or more, these processes plan the next micro-batches "
            "while the training step runs."
        },
    )

    def __post_init__(self) -> None:
        DistCAConfig.__post_init__(self)
        # Otherwise TrainingArguments refuses bf16 on the CPU, although the launch asks for the CPU.
        self.use_cpu = self.use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
        self.attention_server_launch: Launch | None = None
        if isinstance(self.attention_servers, int) and self.attention_servers > 0:
            # Before TrainingArguments looks up the world.
            launch = split_launch(self.attention_servers, cpu=on_cpu(self.use_cpu))
            self.attention_server_launch = launch
            if launch.serves_on is not None:
                return  # a server only calls `serve_if_server` with its arguments
        join_on_cpu(self)
        behind: Any = super(DistCAConfig, self)  # the arguments of the trainer
        behind.__post_init__()
        for name, (values, why) in REFUSED.items():
            value = getattr(self, name, values[0])
            if value not in values:
                raise ValueError(f"{name}={value!r} cannot be used here: {why}; leave it at {values[0]!r}")
        if getattr(self, "use_liger_kernel", False):
            self._leave_out_ligers_loss()

    def _leave_out_ligers_loss(self) -> None:
        """Restrict Liger, which is applied when training starts, to kernels of layers."""
        wanted: dict[str, Any] = self.liger_kernel_config or {}
        for name in LIGERS_LOSSES:
            if wanted.get(name):
                raise ValueError(
                    f"liger_kernel_config={{{name!r}: True}} would put another loss in the place of that of planned "
                    "steps, which needs no whole logits either (loss_chunk_bytes); leave it out"
                )
        if self.mlp_chunk_rows and any(wanted.get(name, True) for name in LIGERS_MLPS):
            raise ValueError(
                f"mlp_chunk_rows={self.mlp_chunk_rows} would be without effect: use_liger_kernel puts MLPs of its own "
                "in the place of those that are computed in chunks; set mlp_chunk_rows=0, or "
                "liger_kernel_config={'swiglu': False, 'geglu': False}"
            )
        self.liger_kernel_config = {**wanted, **dict.fromkeys(LIGERS_LOSSES, False)}

    def serve_if_server(self) -> None:
        """Serve until training ends if this process is an attention server of its launch; else return at once.

        Call it right after the arguments are made, so that a server loads neither data nor model. Without this call
        a server starts to serve when the trainer is made.

        Raises:
            SystemExit: Training has ended. Nothing else of the script runs in a server.
        """
        serve_if_server(self.attention_server_launch, self.attention_server_timeout)

    @cached_property
    def _setup_devices(self) -> torch.device:
        """Device of this process; a server serves here, before TrainingArguments looks up the world."""
        self.serve_if_server()
        behind: Any = super()
        device: torch.device = behind._setup_devices
        shard_on_cpu(self)
        return device

    @cached_property
    def distributed_state(self) -> Any:
        """Placeholder until TrainingArguments has looked up the world and sets the attribute."""
        self.serve_if_server()
        raise AttributeError("distributed_state is not known yet")


@dataclass
class DistCATrainingArguments(DistCAArguments, TrainingArguments):
    """`transformers.TrainingArguments` with the settings of `DistCAConfig`.

    Raises:
        ValueError: A setting contradicts packed training with an exact loss.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]  # noqa: RUF012 - as there

    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Keyword arguments of AutoModelForCausalLM.from_pretrained, for a model that is given by name. "
            "The model is loaded in float32 unless they name another dtype."
        },
    )
    dataset_text_field: str = field(
        default="text",
        metadata={"help": "Column with the text of a data set without tokens; processing_class tokenizes it."},
    )

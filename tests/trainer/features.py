"""What users turn on beside planned attention: features, and what becomes of each under each strategy."""

import importlib.util
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, TrainerCallback

from tests.models_and_batches import SMALL, small_model
from tests.trainer import liger
from tests.trainer.launches import CHECKPOINTING

STRATEGIES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
ZERO = ("zero2", "zero3")
IGNORED = -100
Example = dict[str, Any]


def plain(implementation: str) -> nn.Module:
    """The model that is trained where a feature does not say otherwise."""
    return small_model(implementation=implementation)


@dataclass(frozen=True)
class Feature:
    """Something that a training has or is asked for.

    Attributes:
        arguments: of the trainer's arguments.
        model: makes the model, for an attention implementation.
        example: what becomes of an example, by its index.
        given: makes other arguments of the trainer, anew for each training, of its model.
        environment: what `accelerate launch` sets for it.
        patched: what stands in for something else while it trains.
        refused: by strategy, what the error says of the cause and of the remedy; "*" for every strategy, which is
            tried once, since no strategy has a part in it.
        only: the strategies under which it is tried.
        needs: a package without which it is not tried; or, behind a "!", one that must be missing.
        steps_without_targets: the first steps, in which nothing is to be learned: one process would divide by zero.
        rounds: it computes in bfloat16.
        note: for users.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[str], nn.Module] = plain
    example: Callable[[int, Example], Example] = lambda index, example: example
    given: Callable[[nn.Module], dict[str, Any]] = lambda model: {}
    environment: Mapping[str, str] = field(default_factory=dict)
    patched: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    needs: str = ""
    steps_without_targets: int = 0
    only: Collection[str] = tuple(STRATEGIES)
    rounds: bool = False
    note: str = ""

    def missing(self) -> str:
        """Why it cannot be tried here; empty if it can."""
        package = self.needs.removeprefix("!")
        if not package or (importlib.util.find_spec(package) is None) == self.needs.startswith("!"):
            return ""
        return f"{package} is {'' if self.needs.startswith('!') else 'not '}installed"

    def refusal(self, strategy: str) -> tuple[str, str] | None:
        """Cause and remedy that the error of a strategy is to name; None where it trains."""
        return self.refused.get(strategy, self.refused.get("*"))


def adapted(**settings: Any) -> Callable[[str], nn.Module]:
    """Makes the model with LoRA, whose B is not 0 at first: all of it gets gradients."""

    def make(implementation: str) -> nn.Module:
        return _with_lora(plain(implementation), **settings)

    return make


def _with_lora(model: nn.Module, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **settings))


def in_4_bits(**settings: Any) -> Callable[[str], nn.Module]:
    """Makes the model with LoRA on a base whose linear layers are in 4 bits, stored as FSDP2 needs it."""

    def make(implementation: str) -> nn.Module:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_quant_storage=torch.float32,
            **settings,
        )
        model: Any = plain(implementation)
        base = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=model.state_dict(),
            attn_implementation=implementation,
            quantization_config=config,
            dtype=torch.float32,
            device_map={"": "cpu"},
        )
        return _with_lora(base, target_modules="all-linear")

    return make


def in_bfloat16(implementation: str) -> nn.Module:
    """The weights themselves in bfloat16."""
    return plain(implementation).to(torch.bfloat16)


def targets_of(*documents: int) -> Callable[[int, Example], Example]:
    """Only these documents have targets."""

    def example(index: int, example: Example) -> Example:
        ids = example["input_ids"]
        return {**example, "labels": list(ids) if index in documents else [IGNORED] * len(ids)}

    return example


def answers_of_chats(index: int, example: Example) -> Example:
    """Targets are every second turn of seven tokens; a chat of fewer has none."""
    ids = example["input_ids"]
    return {**example, "labels": [token if row // 7 % 2 else IGNORED for row, token in enumerate(ids)]}


def with_column(name: str, values: Callable[[int], Any]) -> Callable[[int, Example], Example]:
    """A further column, made of the number of tokens."""
    return lambda index, example: {**example, name: values(len(example["input_ids"]))}


def with_tower(implementation: str) -> nn.Module:
    """A model that takes images too, of which nothing is trained on."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    return small_model(
        "gemma3",
        implementation,
        text_config={**SMALL, "sliding_window": 24},
        vision_config={**sizes, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )


def with_frozen_tower(implementation: str) -> nn.Module:
    """The same, of which the text model alone is trained."""
    model: Any = with_tower(implementation)
    model.requires_grad_(False)
    model.get_decoder().requires_grad_(True)
    return model


class Average(TrainerCallback):
    """An exponential moving average of the weights that are trained."""

    def __init__(self, model: nn.Module) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take the weights in."""
        for name, parameter in model.named_parameters():
            average = self.average.setdefault(name, torch.zeros_like(parameter))
            average.lerp_(parameter.detach(), 0.25)


class Pad:
    """Pads a batch of documents, as collators do for models that compute one row for each."""

    def __call__(self, examples: list[Example]) -> dict[str, torch.Tensor]:
        """The batch."""
        length = max(len(example["input_ids"]) for example in examples)
        columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
        for example in examples:
            ids = list(example["input_ids"])
            padding = length - len(ids)
            columns["input_ids"].append([*ids, *[0] * padding])
            columns["labels"].append([*example.get("labels", ids), *[IGNORED] * padding])
            columns["attention_mask"].append([1] * len(ids) + [0] * padding)
        return {name: torch.tensor(rows) for name, rows in columns.items()}


SGD = {"optim": "sgd", "learning_rate": 0.3}
BF16 = {"bf16": True}
OF_TOWERS = "Gemma 3, on text: DDP is not to wait for the tower's gradients, FSDP2 not to look for layers it lacks"

FEATURES: dict[str, Feature] = {
    # Adapters
    "LoRA on q_proj only": Feature(model=adapted(target_modules=["q_proj"])),
    "LoRA on v_proj only": Feature(model=adapted(target_modules=["v_proj"])),
    "LoRA on MLPs only": Feature(model=adapted(target_modules=["gate_proj", "up_proj", "down_proj"])),
    "LoRA on all linear layers": Feature(model=adapted(target_modules="all-linear")),
    "DoRA": Feature(model=adapted(target_modules=["q_proj", "o_proj", "up_proj"], use_dora=True)),
    "modules_to_save": Feature(
        model=adapted(target_modules=["k_proj"], modules_to_save=["embed_tokens", "lm_head", "norm"])
    ),
    "LoRA on a base in 4 bits": Feature(model=in_4_bits(), needs="bitsandbytes"),
    "LoRA on a base in 4 bits, doubly quantized": Feature(
        model=in_4_bits(bnb_4bit_use_double_quant=True), needs="bitsandbytes"
    ),
    # Precision
    "float32": Feature(),
    "bf16": Feature(BF16, rounds=True),
    "bf16 and LoRA on all linear layers": Feature(BF16, adapted(target_modules="all-linear"), rounds=True),
    "bf16 and a micro-batch without targets": Feature(
        {**BF16, "gradient_accumulation_steps": 2}, example=targets_of(5, 6, 8, 9), rounds=True
    ),
    "weights in bfloat16": Feature({"learning_rate": 30.0, "max_steps": 1}, in_bfloat16, rounds=True),
    "fp16 on the CPU": Feature({"fp16": True}, refused={"*": ("which accelerate does on GPUs only", "set bf16=True")}),
    "--mixed_precision bf16": Feature(
        environment={"ACCELERATE_MIXED_PRECISION": "bf16"},
        refused=dict.fromkeys(
            ZERO, ("mismatch TrainingArguments values", "set these DeepSpeed config values to 'auto'")
        ),
        rounds=True,
    ),
    # Steps
    "a last incomplete step": Feature({"gradient_accumulation_steps": 2}),
    "max_grad_norm": Feature({"max_grad_norm": 0.05}),
    "no checkpoints": Feature({CHECKPOINTING: False}),
    "neftune_noise_alpha": Feature(
        {"neftune_noise_alpha": 5.0}, note="the noise shrinks with the length of the rank's row, as where others pack"
    ),
    "use_liger_kernel": Feature(
        {"use_liger_kernel": True},
        patched=liger.install,
        note="the kernels of its layers; the loss stays that of planned steps. Tried with a stand-in in torch",
    ),
    "use_liger_kernel, not installed": Feature(
        {"use_liger_kernel": True}, refused={"*": ("not available", "pip install")}, needs="!liger_kernel"
    ),
    "liger_kernel_config with a loss": Feature(
        {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}},
        refused={
            "*": (
                "it would replace the loss of planned steps",
                "remove 'fused_linear_cross_entropy' from liger_kernel_config",
            )
        },
    ),
    "use_liger_kernel and mlp_chunk_rows": Feature(
        {"use_liger_kernel": True, "mlp_chunk_rows": 16},
        refused={"*": ("it would have no effect: use_liger_kernel", "liger_kernel_config={'swiglu': False")},
    ),
    "torch_compile": Feature(
        {"torch_compile": True},
        refused={"*": ("cannot compile planned attention", "compile modules inside the layers")},
    ),
    "EMA callback": Feature(
        given=lambda model: {"callbacks": [Average(model)]},
        only=("ddp", "fsdp2", "zero2"),
        note="ZeRO-3 gathers no weights for callbacks",
    ),
    "debug=underflow_overflow": Feature({"debug": "underflow_overflow"}),
    # Optimizers
    "adamw_torch": Feature({"optim": "adamw_torch", "learning_rate": 1e-2}),
    "adafactor": Feature(
        {"optim": "adafactor", "learning_rate": 1e-2},
        refused={
            "fsdp2": (
                "Adafactor mixes whole and sharded tensors",
                "set another optimizer, such as optim='adamw_torch'",
            ),
            **dict.fromkeys(ZERO, ("ZeRO gives it flat shards", "set another optimizer, such as optim='adamw_torch'")),
        },
    ),
    "optimizers": Feature(
        given=lambda model: {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), None)},
        refused={
            "fsdp2": ("Passing `optimizers` is not allowed", "You should subclass `Trainer`"),
            **dict.fromkeys(ZERO, ("transformers silently ignores it", "set optimizer_cls_and_kwargs")),
        },
    ),
    "optimizer_cls_and_kwargs": Feature(
        given=lambda model: {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9})}
    ),
    # Targets and masks
    "chats of several turns": Feature(example=answers_of_chats),
    "targets on one rank only": Feature(example=targets_of(3, 6)),
    "a micro-batch without targets": Feature({"gradient_accumulation_steps": 2}, example=targets_of(5, 6, 8, 9)),
    "a step without targets": Feature(example=targets_of(4, 5, 6, 7), steps_without_targets=1),
    "attention_mask of ones": Feature(example=with_column("attention_mask", lambda length: [1] * length)),
    "attention_mask with zeros": Feature(
        example=with_column("attention_mask", lambda length: [0] * length),
        refused={"*": ("attention_mask with zeros", "padding=False")},
    ),
    "attention_mask of rows and columns": Feature(
        example=with_column("attention_mask", lambda length: [[1] * length] * length),
        refused={"*": ("attention_mask of shape (90, 90) for 90 input_ids", "give a 1 for each token")},
    ),
    "position_ids": Feature(
        example=with_column("position_ids", lambda length: list(range(length))),
        refused={"*": ("columns that a packed batch cannot carry: ['position_ids']", "remove_columns")},
    ),
    "a collator that pads": Feature(
        given=lambda model: {"data_collator": Pad()},
        refused={"*": ("do not show where documents begin", "DataCollatorWithFlattening")},
    ),
    # Loaders
    "dataloader_num_workers": Feature(
        {
            "dataloader_num_workers": 2,
            "dataloader_persistent_workers": True,
            "dataloader_prefetch_factor": 4,
            "dataloader_multiprocessing_context": "fork",
        },
        only=("ddp",),
        note="no strategy has a part in loading",
    ),
    "dataloader_drop_last": Feature(
        {"dataloader_drop_last": True}, refused={"*": ("it would drop documents", "leave it at False")}
    ),
    "dataloader_in_order": Feature(
        {"dataloader_in_order": False},
        refused={"*": ("micro-batches in different orders", "set dataloader_in_order=True")},
    ),
    "train_sampling_strategy": Feature(
        {"train_sampling_strategy": "group_by_length"},
        refused={"*": ("documents are packed by their lengths", "set 'random' or 'sequential'")},
    ),
    "accelerator_config: dispatch_batches": Feature(
        {"accelerator_config": {"dispatch_batches": True}},
        refused={"*": ("dispatch_batches=True is set, but it would be ignored: each rank reads", "set it to None")},
    ),
    "accelerator_config: split_batches": Feature(
        {"accelerator_config": {"split_batches": True}},
        refused={"*": ("split_batches=True is set, but it would be ignored: each rank reads", "set it to False")},
    ),
    "accelerator_config: even_batches": Feature(
        {"accelerator_config": {"even_batches": False}},
        refused={"*": ("even_batches=False is set, but it would be ignored: each rank reads", "set it to True")},
    ),
    "per_device_train_batch_size": Feature(
        {"per_device_train_batch_size": 4},
        refused={"*": ("one packed row of up to", "leave it at 1")},
    ),
    "auto_find_batch_size": Feature(
        {"auto_find_batch_size": True}, refused={"*": ("memory is set by tokens_per_rank", "leave it at False")}
    ),
    # Loss
    "compute_metrics": Feature(
        given=lambda model: {"compute_metrics": print},
        refused={"*": ("the rows of a document lie on several ranks", "call evaluate()")},
    ),
    "compute_loss_func": Feature(
        given=lambda model: {"compute_loss_func": print},
        refused={"*": ("targets that are already shifted", "use the model's own loss")},
    ),
    "average_tokens_across_devices": Feature(
        {"average_tokens_across_devices": False},
        refused={"*": ("ranks hold different numbers of targets", "leave it at True")},
    ),
    "label_smoothing_factor": Feature(
        {"label_smoothing_factor": 0.1},
        refused={"*": ("targets of packed documents are already shifted", "leave it at 0.0")},
    ),
    "label_names": Feature(
        {"label_names": ["start"]}, refused={"*": ("targets are the column 'labels'", "leave it at None")}
    ),
    "use_cache": Feature(
        {"use_cache": True}, refused={"*": ("no use for cached keys and values", "leave it at False")}
    ),
    "model_init": Feature(
        given=lambda model: {"model": None, "model_init": lambda: plain("distca")},
        refused={"*": ("would replace the model when training begins", "make the model first and pass it as model")},
    ),
    # Models
    "a frozen tower for images": Feature(model=with_frozen_tower, only=("ddp", "fsdp2"), note=OF_TOWERS),
    "a tower for images": Feature(model=with_tower, only=("ddp", "fsdp2"), note=OF_TOWERS),
}


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of a weight, of which ranks have shares; in float32 where the optimizer has it so."""
    if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter).cpu().clone()
    tensor = parameter.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().clone()

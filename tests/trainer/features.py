"""Features beside planned attention, and the page of them: `python -m tests.trainer.features` writes it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, TrainerCallback

from tests.models_and_batches import SMALL, small_model
from tests.trainer import liger
from tests.trainer.launches import CHECKPOINTING, HYBRID

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
        example: changes an example, given its index.
        given: makes other arguments of the trainer, anew for each training, of its model.
        environment: variables that `accelerate launch` sets.
        patched: stands something in for the training.
        refused: strategies that refuse the feature, with a part of the error.
        only: strategies under which the feature is tried.
        needs: package without which the feature is not tried.
        steps_without_targets: number of first steps without a target: one process would divide by zero.
        rounds: whether the training computes in bfloat16.
        note: remark for users.
        planned: further arguments of hf_distca's trainer.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[str], nn.Module] = plain
    example: Callable[[int, Example], Example] = lambda index, example: example
    given: Callable[[nn.Module], dict[str, Any]] = lambda model: {}
    environment: Mapping[str, str] = field(default_factory=dict)
    patched: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    refused: Mapping[str, str] = field(default_factory=dict)
    only: Collection[str] = tuple(STRATEGIES)
    needs: str = "torch"
    steps_without_targets: int = 0
    rounds: bool = False
    note: str = ""
    planned: Mapping[str, Any] = field(default_factory=dict)


def adapted(base: Callable[[str], Any] = plain, **settings: Any) -> Callable[[str], nn.Module]:
    """Make a model with LoRA, whose B is not 0 at first, so that all of LoRA gets gradients."""
    return with_adapter(lambda: peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **settings), base)


def with_adapter(config: Callable[[], peft.PeftConfig], base: Callable[[str], Any] = plain) -> Callable[[str], Any]:
    """Make the model with an adapter of PEFT."""

    def make(implementation: str) -> Any:
        model = base(implementation)
        torch.manual_seed(0)
        return peft.get_peft_model(model, config())

    return make


def in_4_bits(implementation: str) -> nn.Module:
    """Return the model with linear layers in 4 bits, stored as FSDP2 needs it."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=torch.float32,
    )
    model: Any = plain(implementation)
    return type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        attn_implementation=implementation,
        quantization_config=config,
        dtype=torch.float32,
        device_map={"": "cpu"},
    )


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
    "LoRA on q_proj and the head": Feature(model=adapted(target_modules=["q_proj", "lm_head"])),
    "LoRA on a base in 4 bits": Feature(model=adapted(in_4_bits, target_modules="all-linear"), needs="bitsandbytes"),
    "trainable_token_indices": Feature(
        model=adapted(target_modules=["q_proj"], modules_to_save=["lm_head"], trainable_token_indices=[3, 4])
    ),
    "IA3": Feature(
        model=with_adapter(
            lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
        )
    ),
    "OFT": Feature(
        model=with_adapter(lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj", "v_proj"])),
        only=("ddp",),
    ),
    "LLaMA-Adapter": Feature(
        model=with_adapter(lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")),
        only=("ddp",),
    ),
    # Precision
    "float32": Feature(),
    "bf16": Feature(BF16, rounds=True),
    "bf16 and LoRA on all linear layers": Feature(BF16, adapted(target_modules="all-linear"), rounds=True),
    "bf16 and a micro-batch without targets": Feature(
        {**BF16, "gradient_accumulation_steps": 2}, example=targets_of(5, 6, 8, 9), rounds=True
    ),
    "weights in bfloat16": Feature({"learning_rate": 30.0, "max_steps": 1}, in_bfloat16, rounds=True),
    "--mixed_precision bf16": Feature(
        environment={"ACCELERATE_MIXED_PRECISION": "bf16"},
        refused=dict.fromkeys(ZERO, "mismatch TrainingArguments values"),
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
    "EMA callback": Feature(
        given=lambda model: {"callbacks": [Average(model)]},
        only=("ddp", "fsdp2", "zero2"),
        note="ZeRO-3 gathers no weights for callbacks",
    ),
    "debug=underflow_overflow": Feature({"debug": "underflow_overflow"}),
    "ZeRO-1": Feature(
        environment={"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, only=("zero2",), note="with `--zero_stage 1`"
    ),
    # Optimizers
    "adamw_torch": Feature({"optim": "adamw_torch", "learning_rate": 1e-2}),
    "adafactor": Feature(
        {"optim": "adafactor", "learning_rate": 1e-2},
        refused={
            **dict.fromkeys(("fsdp2", *ZERO), "its moments need the rows and columns of whole weights"),
        },
    ),
    "optimizers": Feature(
        given=lambda model: {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), None)},
        refused={
            "fsdp2": "Passing `optimizers` is not allowed",
            **dict.fromkeys(ZERO, "transformers silently ignores it"),
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
    # Models
    "experts (Mixtral)": Feature(model=lambda how: small_model("mixtral", how, num_local_experts=4)),
    "a hybrid (Qwen3-Next) with documents that are cut": Feature(
        planned={"document_layout": "joint"}, model=lambda how: small_model(implementation=how, **HYBRID)
    ),
    "tied embeddings and mlp_chunk_rows": Feature(
        planned={"mlp_chunk_rows": 16}, model=lambda how: small_model(implementation=how, tie_word_embeddings=True)
    ),
    "a frozen tower for images": Feature(model=with_frozen_tower, only=("ddp", "fsdp2"), note=OF_TOWERS),
    "a tower for images": Feature(model=with_tower, only=("ddp", "fsdp2"), note=OF_TOWERS),
}


TOGETHER: list[tuple[str, tuple[str, ...]]] = [
    ("ddp", ("DoRA", "neftune_noise_alpha", "EMA callback", "a last incomplete step", "optimizer_cls_and_kwargs")),
    ("ddp", ("OFT", "max_grad_norm", "targets on one rank only", "optimizers")),
    ("ddp", ("LLaMA-Adapter", "chats of several turns", "no checkpoints")),
    ("ddp", ("a tower for images", "a step without targets")),
    ("ddp", ("adafactor", "debug=underflow_overflow")),
    ("fsdp2", ("LoRA on a base in 4 bits",)),
    ("fsdp2", ("modules_to_save", "a micro-batch without targets", "EMA callback")),
    ("fsdp2", ("use_liger_kernel", "adamw_torch")),
    ("fsdp2", ("--mixed_precision bf16", "LoRA on v_proj only")),
    ("fsdp2", ("a frozen tower for images", "max_grad_norm")),
    ("fsdp2", ("a hybrid (Qwen3-Next) with documents that are cut",)),
    ("zero3", ("a hybrid (Qwen3-Next) with documents that are cut",)),
    ("zero2", ("trainable_token_indices", "a step without targets")),
    ("zero2", ("bf16 and a micro-batch without targets", "LoRA on MLPs only")),
    ("zero2", ("IA3", "chats of several turns", "optimizer_cls_and_kwargs")),
    ("zero2", ("ZeRO-1", "adamw_torch")),
    ("zero3", ("LoRA on q_proj only", "no checkpoints", "targets on one rank only")),
    ("zero3", ("LoRA on q_proj and the head", "a last incomplete step")),
    ("zero3", ("LoRA on all linear layers", "bf16 and LoRA on all linear layers", "bf16")),
    ("zero3", ("experts (Mixtral)", "float32")),
    ("zero3", ("tied embeddings and mlp_chunk_rows", "neftune_noise_alpha")),
    ("zero3", ("weights in bfloat16",)),
]
"""Features that are trained at once, by strategy: what `make test` tries; `make features` tries each by itself."""


def together(*names: str) -> Feature:
    """Return features as one; at most one of them has a model, or examples, of its own."""
    each = [FEATURES[name] for name in names]
    return Feature(
        arguments={name: value for one in each for name, value in one.arguments.items()},
        planned={name: value for one in each for name, value in one.planned.items()},
        model=next((one.model for one in each if one.model is not plain), plain),
        example=next((one.example for one in each if one.example is not Feature.example), Feature.example),
        given=lambda model: {name: value for one in each for name, value in one.given(model).items()},
        environment={name: value for one in each for name, value in one.environment.items()},
        patched=lambda patch: [one.patched(patch) for one in each],
        refused={strategy: text for one in each for strategy, text in one.refused.items()},
        needs=next((one.needs for one in each if one.needs != "torch"), "torch"),
        steps_without_targets=max(one.steps_without_targets for one in each),
        rounds=any(one.rounds for one in each),
    )


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of a weight, of which ranks have shares; in float32 where the optimizer has it so."""
    if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter).cpu().clone()
    tensor = parameter.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().clone()


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "features.md"
TOP = """\
# Feature compatibility

What users turn on beside planned attention, and the result. Each row is trained with a tiny LLaMA on two ranks with
ping-pong and gradient checkpointing, and compared with transformers' `Trainer` and "sdpa" in one process on the same
documents. Computation is in float32 unless the row says otherwise.

- *equal*: losses, gradient norms and the change of each weight are those of one process, within 1e-4. A bfloat16 run
  is at most twice as far from one process in float32 as one process in bfloat16 is.
- *refused*: every rank raises an error before the first step that says why and what to set.
- *–*: not tested.

[What is refused](refusals.md) has what no strategy can train.

`tests/trainer/test_features.py` trains each row, and `python -m tests.trainer.features` writes this page.

"""
ARGUMENTS_TOP = """
## Arguments of Trainer

This table has all of transformers' `TrainingArguments` that affect data, loss or model. All others work as in
`Trainer`.

| argument | result |
| --- | --- |
"""
TABLE = "see the table above"
REFUSED = "see [What is refused](refusals.md)"
METRICS = "no effect, because `compute_metrics` is refused"
UNTRIED = "forwarded to `Trainer`; not tested here"
ARGUMENTS: dict[str, tuple[str, ...]] = {
    TABLE: (
        *("bf16", "gradient_accumulation_steps", "max_grad_norm", "neftune_noise_alpha", "use_liger_kernel", "debug"),
        *("activation_checkpointing", "gradient_checkpointing", "optim"),
    ),
    REFUSED: (
        *("fp16", "liger_kernel_config", "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_cache"),
        *("average_tokens_across_devices", "label_smoothing_factor", "label_names", "auto_find_batch_size"),
        *("per_device_train_batch_size", "train_sampling_strategy", "accelerator_config"),
        *("dataloader_in_order", "dataloader_drop_last"),
    ),
    "as `per_device_train_batch_size`": ("per_device_eval_batch_size",),
    "counted over all ranks; an epoch is one pass over all documents": ("num_train_epochs", "max_steps"),
    "seed of the order of documents": ("seed", "data_seed"),
    "see [Resuming](../guides/resuming.md)": ("ignore_data_skip", "resume_from_checkpoint"),
    "columns that the model does not take are removed, or refused": ("remove_unused_columns",),
    "name of the column with document lengths": ("length_column_name",),
    "tested in launches and by other tests": (
        *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "eval_on_start", "eval_strategy"),
        *("ddp_find_unused_parameters", "ddp_backend", "fsdp", "fsdp_config", "deepspeed", "use_cpu"),
        *("parallelism_config", "dataloader_pin_memory", "logging_nan_inf_filter", "dataloader_num_workers"),
        *("dataloader_persistent_workers", "dataloader_prefetch_factor"),
    ),
    METRICS: (
        *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
        *("include_for_metrics", "batch_eval_metrics"),
    ),
    UNTRIED: (
        *("ddp_static_graph", "full_determinism", "include_num_input_tokens_seen"),
        *("bf16_full_eval", "fp16_full_eval", "tf32", "torch_empty_cache_steps", "optim_args"),
        *("optim_target_modules", "dataloader_multiprocessing_context", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
    ),
}
"""What becomes of arguments that touch data, loss or model."""
OTHERS = (
    *("output_dir", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "logging_strategy", "logging_steps", "logging_first_step"),
    *("log_on_each_node", "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project"),
    *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "eval_steps", "eval_delay"),
    *("save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit"),
    *("enable_jit_checkpoint", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"),
    *("hub_always_push", "hub_revision", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("restore_callback_states_from_checkpoint", "ddp_timeout", "skip_memory_metrics", "do_train", "do_eval"),
    *("do_predict", "local_rank"),
)
"""Arguments that touch neither data nor loss nor model: of optimizers, logs, checkpoints and the hub."""


def page() -> str:
    """The page of what is tested."""
    head = f"| feature | {' | '.join(STRATEGIES.values())} | note |\n|{' --- |' * (len(STRATEGIES) + 2)}\n"
    features = "".join(_row(name, feature) for name, feature in FEATURES.items())
    arguments = "".join(
        f"| {', '.join(f'`{name}`' for name in names)} | {what} |\n" for what, names in ARGUMENTS.items()
    )
    return TOP + head + features + ARGUMENTS_TOP + arguments


def _row(name: str, feature: Feature) -> str:
    notes = "; ".join(dict.fromkeys([*feature.refused.values(), *([feature.note] if feature.note else [])]))
    outcomes = (
        "refused" if strategy in feature.refused else "equal" if strategy in feature.only else "–"
        for strategy in STRATEGIES
    )
    return f"| {name} | {' | '.join(outcomes)} | {notes} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())

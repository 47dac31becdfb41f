"""Tables: features that users turn on beside planned attention, whole trainings, and what is
trained at once.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig
from torch import Tensor, nn
from transformers import (
    BitsAndBytesConfig,
    DataCollatorWithFlattening,
    EarlyStoppingCallback,
    TrainerCallback,
    trainer_optimizer,
)
from transformers.integrations import liger
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_distca.checks.run_rules import Run as Refused
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.plan import MicroBatchPlan
from tests.models_and_batches import SMALL, random_documents, small_model
from tests.trainer.chats import chats, prompts, tokenizer
from tests.trainer.comparison import (
    CHECKPOINTING,
    HYBRID,
    IGNORED,
    LENGTHS,
    VOCABULARY,
    Example,
    Run,
    dataset_of,
    model_of,
    plain,
)

ZERO = ("zero2", "zero3")
ON_SHARDS = "its steps on shards of weights are not its steps on whole weights"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def lora(*modules: str, **settings: Any) -> peft.LoraConfig:
    """LoRA whose B is not 0 at first, so that all of LoRA gets gradients."""
    return peft.LoraConfig(
        r=4,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        target_modules=list(modules),
        **settings,
    )


LENGTHS_OF_PODS = [96, 50, 30, 16, *LENGTHS[4:]]
"""Documents of which the first four fill two pods of two ranks, and the fifth needs four ranks."""


def noting_ranks(bind: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Dispatcher.bind` that notes the ranks of each plan."""

    def noted(self: Any, plan: MicroBatchPlan) -> Any:
        self.planned_ranks = [*getattr(self, "planned_ranks", []), plan.ranks]
        return bind(self, plan)

    return noted


def in_4_bits(implementation: str) -> nn.Module:
    """Return the model with linear layers in 4 bits, stored as FSDP2 needs it."""
    dtypes = dict.fromkeys(("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"), torch.float32)
    in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **dtypes)
    model: Any = plain(implementation)
    numbers = {
        "config": model.config,
        "state_dict": model.state_dict(),
        "quantization_config": in_4_bits,
    }
    placed = {
        "attn_implementation": implementation,
        "dtype": torch.float32,
        "device_map": {"": "cpu"},
    }
    return type(model).from_pretrained(None, **numbers, **placed)


def gpt_oss(implementation: str) -> nn.Module:
    """A model with experts and sinks, which transformers computes with its own functions only."""
    config = {"num_local_experts": 4, "layer_types": ["full_attention"] * 2}
    return small_model("gpt_oss", "eager" if implementation == "sdpa" else implementation, **config)


def without_vectors(implementation: str) -> nn.Module:
    """A model of which only matrices are trained."""
    model: Any = plain(implementation)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    return model


def with_tower(implementation: str) -> nn.Module:
    """A model that takes images too, of which nothing is trained on.

    Its class says that its loss takes no number of targets.
    """
    tower = {
        **{"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 4},
        **{"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    }
    positions = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {**SMALL, "rope_parameters": positions}
    return small_model("qwen3_vl", implementation, text_config=text, vision_config=tower)


def with_frozen_tower(implementation: str) -> nn.Module:
    """A model that takes images too, of which the text model alone is trained."""
    layers = {"num_hidden_layers": 1, "num_attention_heads": 4}
    tower = {
        **{"hidden_size": 32, "intermediate_size": 48, "image_size": 28, "patch_size": 14},
        **layers,
    }
    text = {**SMALL, "sliding_window": 24}
    model: Any = small_model(
        "gemma3", implementation, text_config=text, vision_config=tower, mm_tokens_per_image=4
    )
    model.requires_grad_(False)
    model.get_decoder().requires_grad_(True)
    return model


def targets_where(kept: Callable[[int, int], bool]) -> Callable[[int, Example], Example]:
    """Only tokens of a document and row that are kept are targets."""
    return lambda index, example: {
        **example,
        "labels": [
            token if kept(index, row) else IGNORED for row, token in enumerate(example["input_ids"])
        ],
    }


def targets_of(*documents: int) -> Callable[[int, Example], Example]:
    """Only these documents have targets."""
    return targets_where(lambda document, row: document in documents)


@dataclass(eq=False)
class Average(TrainerCallback):
    """An exponential moving average of the weights that are trained."""

    noted: dict[str, Tensor] = field(default_factory=dict)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Take the weights in."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.noted.setdefault(name, torch.zeros_like(parameter)).lerp_(
                    parameter.detach(), 0.25
                )


@dataclass(eq=False)
class Generates(TrainerCallback):
    """The most probable continuation of a few words, by the model as it is after each step."""

    noted: dict[str, Tensor] = field(default_factory=dict)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Generate on every rank."""
        prompt = torch.tensor([[5, 9, 17, 33]])
        options = {"min_new_tokens": 4, "max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
        self.noted[str(state.global_step)] = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), **options
        )


def install_liger(patch: pytest.MonkeyPatch) -> None:
    """Let transformers find a stand-in for liger-kernel, whose kernels need a GPU; it changes a
    LLaMA alike.
    """

    def norm(self: Any, x: Tensor) -> Tensor:
        # Another function than the model's own: who trains equally computes with it.
        return 0.9 * nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    def apply(model: Any, **_: Any) -> None:
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                vars(module)["forward"] = MethodType(norm, module)

    functions: Any = ModuleType("liger_kernel.transformers")
    functions._apply_liger_kernel_to_instance = apply
    patch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    patch.setitem(sys.modules, "liger_kernel.transformers", functions)
    patch.setattr(liger, "is_liger_kernel_available", lambda: True)


class OfRank(torch.optim.SGD):
    """A stand-in for GaLore's optimizer: the best approximation of a lower rank of some weights'
    gradients.
    """

    def __init__(self, groups: Any, lr: float, **_: Any) -> None:
        super().__init__(groups, lr)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"] if "rank" in group else ():
                u, s, v = torch.linalg.svd(parameter.grad, full_matrices=False)
                rank = group["rank"]
                parameter.grad = group["scale"] * (u[:, :rank] * s[:rank]) @ v[:rank]
        return super().step(closure)


def install_galore(patch: pytest.MonkeyPatch) -> None:
    """Let transformers find a stand-in for galore-torch."""
    module: Any = ModuleType("galore_torch")
    module.GaLoreAdamW = module.GaLoreAdamW8bit = module.GaLoreAdafactor = OfRank
    patch.setitem(sys.modules, "galore_torch", module)
    patch.setattr(trainer_optimizer, "is_galore_torch_available", lambda: True)


BF16 = {"bf16": True}
FEATURES: dict[str, Run] = {
    # Adapters
    "LoRA on q_proj only": Run(adapter=lora("q_proj")),
    "LoRA on v_proj only": Run(adapter=lora("v_proj")),
    "LoRA on MLPs only": Run(adapter=lora("gate_proj", "up_proj", "down_proj")),
    "LoRA on all linear layers": Run(adapter=lora(*LINEAR)),
    "DoRA": Run(adapter=lora("q_proj", "o_proj", "up_proj", use_dora=True)),
    "modules_to_save": Run(
        adapter=lora("k_proj", modules_to_save=["embed_tokens", "lm_head", "norm"])
    ),
    "LoRA on q_proj and the head": Run(adapter=lora("q_proj", "lm_head")),
    "LoRA on a base in 4 bits": Run(
        model=in_4_bits,
        adapter=lora("q_proj", "v_proj", "up_proj", "down_proj"),
        needs="bitsandbytes",
    ),
    "trainable_token_indices": Run(
        adapter=lora("q_proj", modules_to_save=["lm_head"], trainable_token_indices=[3, 4])
    ),
    "IA3": Run(
        adapter=peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
        )
    ),
    "OFT": Run(
        adapter=peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj", "v_proj"]),
        only=("ddp",),
    ),
    "LLaMA-Adapter": Run(
        adapter=peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"),
        only=("ddp",),
    ),
    # Precision
    "float32": Run(),
    "bf16": Run(BF16, rounds=True),
    "bf16 and LoRA on all linear layers": Run(BF16, adapter=lora(*LINEAR), rounds=True),
    "bf16 and a micro-batch without targets": Run(
        {**BF16, "gradient_accumulation_steps": 2}, example=targets_of(5, 6, 8, 9), rounds=True
    ),
    "weights in bfloat16": Run(
        {"learning_rate": 30.0, "max_steps": 1},
        lambda how: plain(how).to(torch.bfloat16),
        rounds=True,
    ),
    "--mixed_precision bf16": Run(
        environment={"ACCELERATE_MIXED_PRECISION": "bf16"},
        refused=dict.fromkeys(ZERO, "mismatch TrainingArguments values"),
        rounds=True,
    ),
    # Steps
    "a last incomplete step": Run({"gradient_accumulation_steps": 2}),
    "max_grad_norm": Run({"max_grad_norm": 0.05}),
    "no checkpoints": Run({CHECKPOINTING: False}),
    "neftune_noise_alpha": Run({"neftune_noise_alpha": 5.0}),
    "use_liger_kernel": Run({"use_liger_kernel": True}, patched=install_liger),
    "EMA callback": Run(
        given=lambda model: {"callbacks": [Average()]}, only=("ddp", "fsdp2", "zero2")
    ),
    "debug=underflow_overflow": Run({"debug": "underflow_overflow"}),
    "ZeRO-1": Run(environment={"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, only=("zero2",)),
    # Optimizers
    "adamw_torch": Run({"optim": "adamw_torch", "learning_rate": 1e-2}),
    "adafactor": Run(
        {"optim": "adafactor", "learning_rate": 1e-2},
        refused=dict.fromkeys(("fsdp2", *ZERO), ON_SHARDS),
    ),
    "torch.optim.Adafactor": Run(
        given=lambda model: {"optimizer_cls_and_kwargs": (torch.optim.Adafactor, {"lr": 1e-2})},
        refused=dict.fromkeys(("fsdp2", *ZERO), ON_SHARDS),
    ),
    "Muon": Run(
        given=lambda model: {
            "optimizer_cls_and_kwargs": (torch.optim.Muon, {"lr": 1e-2, "ns_steps": 1})
        },
        model=without_vectors,
        refused=dict.fromkeys(ZERO, ON_SHARDS),
        within=(1e-5, 3e-2),  # it multiplies matrices in bfloat16
    ),
    "optimizers": Run(
        given=lambda model: {
            "optimizers": (torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), None)
        },
        refused={
            "fsdp2": "Passing `optimizers` is not allowed",
            **dict.fromkeys(ZERO, "transformers silently ignores it"),
        },
    ),
    "optimizer_cls_and_kwargs": Run(
        given=lambda model: {
            "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9})
        }
    ),
    # Targets and masks
    # Turns have seven tokens; a chat of fewer has no target.
    "chats of several turns": Run(example=targets_where(lambda document, row: row // 7 % 2 == 1)),
    "targets on one rank only": Run(example=targets_of(3, 6)),
    "a micro-batch without targets": Run(
        {"gradient_accumulation_steps": 2}, example=targets_of(5, 6, 8, 9)
    ),
    "a step without targets": Run(example=targets_of(4, 5, 6, 7), steps_without_targets=1),
    # Models
    "experts (Mixtral)": Run(model=model_of(model_type="mixtral", num_local_experts=4)),
    "a hybrid (Qwen3-Next) with documents that are cut": Run(
        model=model_of(**HYBRID), planned={"document_layout": "fixed"}
    ),
    "tied embeddings and mlp_chunk_rows": Run(
        model=model_of(tie_word_embeddings=True), planned={"mlp_chunk_rows": 16}
    ),
    "a frozen tower for images": Run(model=with_frozen_tower),
    "a tower for images": Run(model=with_tower),
}
"""Rows of docs/reference/features.md."""


def save(trainer: Any) -> str:
    """Save the model; the folder."""
    folder = f"{trainer.args.output_dir}/saved"
    trainer.save_model(folder)
    return folder


SAVED = 2
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-3}
WHOLE = Run(
    {**ADAM, "max_steps": 4, "eval_on_start": True, "save_strategy": "steps", "save_steps": SAVED},
    model=model_of(vocab_size=VOCABULARY),
    calls=("train", "evaluate"),
    after=save,
)
# The more a step has lowered the loss, the worse: the first is the best, and two later ones are
# waited for.
BEST = {
    **{**ADAM, "max_steps": 8, CHECKPOINTING: False, "eval_strategy": "steps", "eval_steps": 1},
    **{
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
    },
    **{"metric_for_best_model": "eval_most_loss", "greater_is_better": True},
}
OF_DETERMINISM = {
    **dict.fromkeys(("CUDA_LAUNCH_BLOCKING", "ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC"), "1"),
    **{"CUBLAS_WORKSPACE_CONFIG": ":16:8", "FLASH_ATTENTION_DETERMINISTIC": "1"},
}
"""What full_determinism sets for the rest of the process: named here, so that it is as before after
the training."""
BY_FSDP = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}  # --fsdp_activation_checkpointing true


def on_chats(
    arguments: dict[str, Any],
    data: Any = chats,
    given: Any = None,
    planned: Any = None,
    **more: Any,
) -> Run:
    """Return a run of TRL's trainer, of which a step takes all chats, and with two data sets to
    evaluate.
    """
    batches = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 99)
    return Run(
        arguments,
        given=lambda model: {
            "train_dataset": data(),
            "eval_dataset": {"few": data().select(range(5)), "all": data()},
            "processing_class": tokenizer(),
            **(given or {}),
        },
        alone={**batches, "max_length": arguments.get("max_length")},
        planned={"tokens_per_rank": 220, "gradient_accumulation_steps": 8, **(planned or {})},
        **{"sft": True, "calls": ("train", "evaluate"), **more},
    )


LORA = {"peft_config": lora("q_proj", "v_proj")}
TRAININGS: dict[str, Run] = {
    "evaluated and saved": WHOLE,
    "resumed": replace(WHOLE, resumes=f"evaluated and saved/checkpoint-{SAVED}"),
    "evaluated before": Run(
        calls=("evaluate", "train", "evaluate"),
        refused=dict.fromkeys(("fsdp2", "zero2"), str(Refused.EARLY_EVALUATION.error())),
    ),
    "evaluated after": Run(calls=("train", "evaluate")),
    "saved": Run(after=save),
    "trained twice": Run(
        calls=("train", "train", "evaluate"),
        refused={
            "zero3": str(Refused.SECOND_TRAINING.error(SimpleNamespace(trainer="DistCATrainer")))
        },
    ),
    "trained anew": Run(calls=("train", "new trainer", "train", "evaluate")),
    "the best of several evaluations": Run(
        BEST,
        calls=("train", "evaluate"),
        given=lambda model: {
            "eval_dataset": {"few": dataset_of(LENGTHS[:5]), "most": dataset_of(LENGTHS[:10])},
            "callbacks": [EarlyStoppingCallback(2), Generates()],
        },
    ),
    "checkpointed by FSDP": Run({CHECKPOINTING: False}, environment=BY_FSDP),
    "arguments that few set": Run(
        {
            **{
                "optim": "galore_adamw",
                "optim_target_modules": ["q_proj", "up_proj"],
                "optim_args": "rank=2,scale=0.5",
            },
            **{"ddp_bucket_cap_mb": 1, "ddp_broadcast_buffers": True, "full_determinism": True},
            **{"torch_empty_cache_steps": 1, "include_num_input_tokens_seen": "non_padding"},
            **{"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "forkserver"},
        },
        patched=install_galore,
        environment=OF_DETERMINISM,
    ),
    # TRL
    "answers of assistants": on_chats(
        {"assistant_only_loss": True, CHECKPOINTING: False}, given=LORA
    ),
    "completions": on_chats({"loss_type": "dft", "max_length": 60}, prompts),
    "bf16 by default": on_chats({"bf16": None}, given=LORA, rounds=True),
    # Their own loss is of each rank's rows.
    "experts with a loss": on_chats(
        {},
        model=model_of(model_type="mixtral", num_local_experts=4, router_aux_loss_coef=0.1),
        within=(2e-4, 1e-2),
    ),
    # More micro-batches than the stream has: some are of a rank whose data has ended, or of all.
    "chats of a stream": on_chats(
        {"max_steps": 1},
        planned={"gradient_accumulation_steps": 6},
        given_planned=lambda: {"train_dataset": chats().to_iterable_dataset(num_shards=2)},
    ),
    # accelerate begins again with the first examples until all batches of a step have as many.
    "chats by a collator": on_chats(
        {"max_steps": 1},
        given={"train_dataset": chats(11).select([*range(11), *range(9)])},
        planned={"gradient_accumulation_steps": 2, "per_device_train_batch_size": 5},
        given_planned=lambda: {
            "train_dataset": chats(11),
            "data_collator": DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
        },
        calls=("train",),
    ),
    # Models that ranks share
    "norms of heads (Qwen3)": Run(model=model_of(model_type="qwen3")),
    "a key/value head for each rank": Run(model=model_of(num_key_value_heads=4)),
    "experts (gpt-oss)": Run(model=gpt_oss),
    "mlp_chunk_rows": Run(planned={"mlp_chunk_rows": 32}),
    # A step takes all documents.
    "a stream": Run(
        {"max_steps": 1, "gradient_accumulation_steps": 3},
        planned={"tokens_per_rank": 640, "gradient_accumulation_steps": 1, "loss_chunk_bytes": 0},
        given_planned=lambda: {"train_dataset": dataset_of(LENGTHS).to_iterable_dataset()},
    ),
    "a padding-free collator": Run(
        planned={"per_device_train_batch_size": 2},
        given_planned=lambda: {"data_collator": DataCollatorWithFlattening()},
    ),
    "two nodes": Run(planned={"ranks_per_node": 2, "exchange_buffer_bytes": 1024}),  # 16 rows
    "two pods": Run(
        example=lambda index, example: {
            "input_ids": random_documents(LENGTHS_OF_PODS)[index].tolist()
        },
        planned={
            "document_layout": "auto",
            "device_profile": "h100",
            "ranks_per_node": 2,
            "pod_ranks": 2,
        },
        patched=lambda patch: patch.setattr(Dispatcher, "bind", noting_ranks(Dispatcher.bind)),
        after=lambda trainer: trainer.dispatcher.planned_ranks,
    ),
    "parallelism_config": Run(
        planned={
            **{
                "fsdp": True,
                "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
            },
            "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        }
    ),
}

TOGETHER: list[tuple[str, tuple[str, ...]]] = [
    (
        "ddp",
        (
            "DoRA",
            "neftune_noise_alpha",
            "EMA callback",
            "a last incomplete step",
            "optimizer_cls_and_kwargs",
        ),
    ),
    ("ddp", ("OFT", "max_grad_norm", "targets on one rank only", "optimizers")),
    ("ddp", ("LLaMA-Adapter", "chats of several turns", "no checkpoints", "torch.optim.Adafactor")),
    ("ddp", ("a tower for images", "a step without targets")),
    ("ddp", ("adafactor", "debug=underflow_overflow", "trained twice")),
    ("ddp", ("arguments that few set",)),
    ("ddp", ("evaluated and saved",)),
    ("ddp", ("bf16 and LoRA on all linear layers", "evaluated before", "saved")),
    ("ddp", ("answers of assistants",)),
    ("ddp", ("completions",)),
    ("ddp", ("bf16 by default",)),
    ("ddp", ("experts with a loss",)),
    ("ddp", ("chats of a stream",)),
    ("ddp", ("chats by a collator",)),
    ("fsdp2", ("LoRA on a base in 4 bits",)),
    ("fsdp2", ("modules_to_save", "a micro-batch without targets", "EMA callback")),
    ("fsdp2", ("use_liger_kernel", "adamw_torch", "trained twice")),
    ("fsdp2", ("--mixed_precision bf16", "LoRA on v_proj only", "evaluated after", "saved")),
    ("fsdp2", ("a frozen tower for images", "max_grad_norm")),
    ("fsdp2", ("Muon",)),
    ("fsdp2", ("a hybrid (Qwen3-Next) with documents that are cut",)),
    ("fsdp2", ("evaluated and saved",)),
    ("fsdp2", ("evaluated before",)),
    ("fsdp2", ("the best of several evaluations",)),
    ("fsdp2", ("checkpointed by FSDP",)),
    ("fsdp2", ("no checkpoints",)),
    ("fsdp2", ("answers of assistants",)),
    ("fsdp2", ("bf16 by default",)),
    ("zero2", ("trainable_token_indices", "a step without targets")),
    ("zero2", ("bf16 and a micro-batch without targets", "LoRA on MLPs only")),
    ("zero2", ("IA3", "chats of several turns", "optimizer_cls_and_kwargs")),
    ("zero2", ("ZeRO-1", "adamw_torch")),
    ("zero2", ("evaluated and saved",)),
    ("zero2", ("evaluated before",)),
    ("zero3", ("a hybrid (Qwen3-Next) with documents that are cut",)),
    ("zero3", ("LoRA on q_proj only", "no checkpoints", "targets on one rank only")),
    ("zero3", ("LoRA on q_proj and the head", "a last incomplete step")),
    (
        *("zero3",),
        (
            "LoRA on all linear layers",
            "bf16 and LoRA on all linear layers",
            "bf16",
            "evaluated before",
            "saved",
        ),
    ),
    ("zero3", ("experts (Mixtral)", "float32", "trained anew")),
    ("zero3", ("tied embeddings and mlp_chunk_rows", "neftune_noise_alpha")),
    ("zero3", ("weights in bfloat16",)),
    ("zero3", ("evaluated and saved",)),
    ("zero3", ("trained twice",)),
    ("zero3", ("the best of several evaluations",)),
    ("zero3", ("completions",)),
    ("tp and fsdp", ("evaluated before", "saved", "max_grad_norm", "mlp_chunk_rows")),
    ("tp and fsdp", ("bf16", "norms of heads (Qwen3)", "a stream", "no checkpoints")),
    ("tp and fsdp", ("a hybrid (Qwen3-Next) with documents that are cut",)),
    ("tp, fsdp and ep", ("experts (gpt-oss)",)),
    (
        "tp and replicas",
        ("tied embeddings and mlp_chunk_rows", "a padding-free collator", "no checkpoints"),
    ),
    ("tp", ("a key/value head for each rank", "no checkpoints")),
    ("fsdp by transformers", ("LoRA on q_proj only", "evaluated before")),
    ("replicated shards", ("parallelism_config", "evaluated after")),
    ("fsdp2 on four ranks", ("two nodes", "bf16", "LoRA on v_proj only")),
    ("fsdp2 on four ranks", ("two pods",)),
]
"""What is trained at once, by strategy: what `make test` tries; `make features` tries each feature
by itself."""


def together(*names: str) -> Run:
    """Return runs as one; at most one of them has a model, an adapter, examples or calls of its
    own.
    """
    trainings = [(FEATURES | TRAININGS)[name] for name in names]
    joined: dict[str, Any] = {
        "given": lambda model: {
            name: value for run in trainings for name, value in run.given(model).items()
        },
        "patched": lambda patch: [run.patched(patch) for run in trainings],
    }
    for name in (each_field.name for each_field in fields(Run)):
        default = getattr(Run(), name)
        changed = [value for run in trainings if (value := getattr(run, name)) != default]
        if isinstance(default, dict):
            joined[name] = {key: value for changes in changed for key, value in changes.items()}
        elif changed:
            joined.setdefault(name, changed[0])
    return Run(**joined)

"""The same small model trained both ways on two CPU ranks: on the same documents in every step.

  stock    transformers' Trainer under DDP. Each rank gets whole documents in one row without
           padding; attention is transformers' sdpa, document by document.
  planned  DistCATrainer under FSDP2 with chosen plans, two nano-batches and activation
           checkpoints.

Both compute in bfloat16 under autocast, with float32 weights, AdamW and a cosine schedule. The
model is a LLaMA with random weights.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_distca

from .models import document_lengths

RANKS = 2
STOCK, PLANNED = "stock", "planned"
WAYS = {STOCK: "ddp", PLANNED: "fsdp2"}
"""The ways, with the configuration of their launches."""
BENCHMARKS = Path(__file__).parents[1]
CONFIGS = BENCHMARKS.parent / "examples" / "configs"
PACKED = "sdpa_of_each_document"
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
CLIPPED_AT = 1.0


class Document(NamedTuple):
    """A document as token ids and targets, of equal length; -100 where no loss is wanted."""

    input_ids: list[int]
    labels: list[int]


Step = list[Document]
NO_DOCUMENT = Document([0], [-100])
EVERY_LOSS_LOGGED: dict[str, Any] = {
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""Arguments of trainings on the CPU of which the losses alone are kept."""


@dataclass(frozen=True)
class Training:
    """Model and settings of a training, the same for both ways.

    Args:
        vocabulary: number of token ids.
        seed: of the weights.
        tokens_per_rank: most tokens of a rank, where they are planned.
        model: sizes of the LLaMA.
    """

    vocabulary: int
    seed: int
    tokens_per_rank: int
    model: dict[str, Any] = field(default_factory=MODEL.copy)
    learning_rate: float = 2e-3
    keeps_model: bool = False  # in the folder "model"


def small_llama(training: Training, attention: str) -> nn.Module:
    """Return the model with random weights, the same for both ways."""
    torch.manual_seed(training.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            **training.model,
            vocab_size=training.vocabulary,
            max_position_embeddings=8192,
            attn_implementation=attention,
            use_cache=False,
            dtype=torch.float32,
        )
    )


def attention_of_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Any,
    *,
    position_ids: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' sdpa document by document, in a row in which positions mark them."""
    lengths = document_lengths(position_ids[0])
    outputs = []
    for rows in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True):
        out, _ = sdpa_attention_forward(module, *rows, None, scaling=scaling, is_causal=True)
        outputs.append(out)
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(PACKED, attention_of_documents)


class RowOfDocuments:
    """Collator of a rank's documents, in one row without padding."""

    def __call__(self, examples: list[dict[str, list[Document]]]) -> dict[str, Tensor]:
        (example,) = examples
        # A rank beside one document that fills the step has a row without a target.
        documents = example["documents"] or [NO_DOCUMENT]
        flatten = DataCollatorWithFlattening()
        return flatten([Document(*document)._asdict() for document in documents])


def on_ranks(step: Step) -> list[Step]:
    """Divide a step's documents among ranks in order, with about equally many tokens."""
    total, before = sum(len(document.input_ids) for document in step), 0
    parts: list[Step] = [[] for _ in range(RANKS)]
    for document in step:
        length = len(document.input_ids)
        parts[int((before + length / 2) / total * RANKS)].append(document)
        before += length
    return parts


def trainer_of(way: str, steps: list[Step], training: Training, folder: str) -> Trainer:
    """Return the trainer of one way, with the documents of its optimizer steps in order."""
    usual: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": len(steps),
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": len(steps) // 20,
        "max_grad_norm": CLIPPED_AT,
        "bf16": True,
        **EVERY_LOSS_LOGGED,
        "ddp_find_unused_parameters": False,
        "train_sampling_strategy": "sequential",
        "seed": training.seed,
    }
    if way == STOCK:
        args = TrainingArguments(
            **usual, per_device_train_batch_size=1, remove_unused_columns=False
        )
        rows = [{"documents": part} for step in steps for part in on_ranks(step)]
        return Trainer(
            model=small_llama(training, PACKED),
            args=args,
            train_dataset=rows,
            data_collator=RowOfDocuments(),
        )
    planned = hf_distca.DistCATrainingArguments(
        **usual,
        tokens_per_rank=training.tokens_per_rank,
        gradient_checkpointing=True,
        planning={"ping_pong": True},
    )
    return hf_distca.DistCATrainer(
        model=small_llama(training, "distca"),
        args=planned,
        train_dataset=[document._asdict() for step in steps for document in step],
    )


def train_rank(folder: Path) -> None:
    """Train what the folder describes on this rank; rank 0 keeps the losses there."""
    torch.set_num_threads(1)
    way, given, described = json.loads((folder / "training.json").read_text())
    steps = [[Document(*document) for document in step] for step in given]
    training = Training(**described)
    trainer = trainer_of(way, steps, training, str(folder))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if training.keeps_model:
        trainer.save_model(str(folder / "model"))
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        (folder / "losses.json").write_text(json.dumps(losses))


def train(way: str, steps: list[Step], training: Training, folder: Path) -> list[float]:
    """Launch a training, and return the loss of each step.

    Args:
        way: "stock" or "planned".
        steps: documents of each optimizer step.
        folder: an empty one.
    """
    folder.mkdir(parents=True)
    (folder / "training.json").write_text(json.dumps((way, steps, asdict(training))))
    paths = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    environment = {**os.environ, **on_cpu, "PYTHONPATH": paths}
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    launch += ["--config_file", str(CONFIGS / f"{WAYS[way]}.yaml")]
    launch += ["--module", "harness.both_ways", str(folder)]
    with tempfile.TemporaryFile("w+") as printed:
        done = subprocess.run(launch, stdout=printed, stderr=subprocess.STDOUT, env=environment)
        if done.returncode:
            printed.seek(0)
            raise RuntimeError(f"the {way} training failed:\n{printed.read()[-4000:]}")
    return json.loads((folder / "losses.json").read_text())


if __name__ == "__main__":
    train_rank(Path(sys.argv[1]))

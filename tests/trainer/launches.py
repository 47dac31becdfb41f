"""A training under `accelerate launch`, and the same in one process with "sdpa"."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_distca.collator.lengths import fit_documents
from hf_distca.collator.sampler import GlobalBatchSampler
from tests.models_and_batches import SMALL_HYBRID, random_documents, reference_step, small_model

SCRIPT = Path(__file__).parent / "train_script.py"
LENGTHS = [150, 3, 17, 60, 1, 33, 90, 45, 7, 120, 64, 31, 28, 5, 77, 12] * 3
STEPS, ACCUMULATION, TOKENS_PER_RANK, LEARNING_RATE = 10, 2, 96, 1e-3
ARGUMENTS = {
    "max_steps": STEPS,
    "gradient_accumulation_steps": ACCUMULATION,
    "tokens_per_rank": TOKENS_PER_RANK,
    "learning_rate": LEARNING_RATE,
    "optim": "adamw_torch",
    "balance_block_size": 8,
    "dataloader_num_workers": 0,
    "save_strategy": "no",
    "loss_chunk_bytes": 4096,
}
# Older transformers know it by its first name alone.
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)
HYBRID: dict[str, Any] = {"model_type": "qwen3_next", **SMALL_HYBRID}


def reference_losses() -> list[float]:
    """The losses of `ARGUMENTS` in one process, with the global micro-batches of two ranks."""
    documents, model, losses = random_documents(LENGTHS), small_model("llama", "sdpa"), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    excerpts = fit_documents(np.array(LENGTHS), 2 * TOKENS_PER_RANK, "error", "tokens")
    sampler = GlobalBatchSampler(excerpts, 2 * TOKENS_PER_RANK, seed=42)
    while len(losses) < STEPS:
        micro_batches = [micro_batch.excerpts["document"] for (micro_batch,) in sampler]
        for first in range(0, len(micro_batches), ACCUMULATION)[: STEPS - len(losses)]:
            of_step = np.concatenate(micro_batches[first : first + ACCUMULATION])
            losses.append(_step(model, optimizer, [documents[index] for index in of_step]))
        sampler.set_epoch(sampler.epoch + 1)
    return losses


def _step(model: Any, optimizer: torch.optim.Optimizer, documents: list[Tensor]) -> float:
    model.zero_grad()
    loss, _ = reference_step(model, documents)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss

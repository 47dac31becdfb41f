"""Memory of distillation: the most bytes in forward and backward of one padded batch, on a CPU.

Two prompts of 256 tokens have two completions each, of 64 to 512 tokens. Prompts are padded on the
left and completions on the right. Student and teacher are LLaMAs with random weights in float32, of
two and four layers, a quarter of the width of a Qwen3-0.6B and a vocabulary of 8,192. Layers of
the student have activation checkpoints. The divergence is JSD with beta 0.5. There are four ways:

  GKDTrainer           TRL's loss of whole logits, generalized_jsd_loss; both models padded
  DistillationTrainer  TRL's divergence in tiles of logits; both models padded
  packed               the same divergence of packed models, as in DistCADistillationTrainer
  packed, shared       the same with prefix sharing

Each way runs in a separate process. Memory is the peak of the process in the step, less what it
held before the step; both models were loaded by then. A tile has at most 4,096 rows and 32,768
tokens of the vocabulary, so that here one tile has all rows.

Run: python benchmarks/distillation.py
"""

import argparse
from typing import Any

import torch
from harness import begin_peak, follow_tensors, peak, print_json, run_ranks
from harness.models import QUARTER_OF_600M, llama
from harness.padded import keep_only_inputs_of_layers
from torch import Tensor, nn
from trl.experimental.gkd import GKDTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from hf_distca import DistCAConfig, pack_padded

VOCABULARY = 8192
PROMPT = 256
COMPLETIONS = (64, 512, 200, 128)
COLUMNS = PROMPT + max(COMPLETIONS)
"""Columns of the batch."""
BETA = 0.5
WAYS = ("GKDTrainer", "DistillationTrainer", "packed", "packed, shared")


def batch(vocabulary: int, scale: int = 1) -> tuple[Tensor, Tensor]:
    """Return `input_ids` and `attention_mask` [B, L]."""
    generator = torch.Generator().manual_seed(0)

    def drawn(length: int) -> Tensor:
        return torch.randint(3, vocabulary, (length,), generator=generator)

    prompts = [drawn(PROMPT // scale), drawn(PROMPT * 31 // 32 // scale)]
    width = PROMPT // scale
    columns = width + max(COMPLETIONS) // scale
    input_ids_BL = torch.zeros(len(COMPLETIONS), columns, dtype=torch.long)
    mask_BL = torch.zeros_like(input_ids_BL)
    for row, length in enumerate(COMPLETIONS):
        tokens = torch.cat([prompts[row // 2], drawn(length // scale)])
        first = width - len(prompts[row // 2])
        input_ids_BL[row, first : first + len(tokens)] = tokens
        mask_BL[row, first : first + len(tokens)] = 1
    return input_ids_BL, mask_BL


def model_of(way: str, layers: int, vocabulary: int, tokens: int) -> Any:
    """Return a model that computes padded batches in this way."""
    sizes = {**QUARTER_OF_600M, "num_hidden_layers": layers, "vocab_size": vocabulary}
    packs = way.startswith("packed")
    model = llama(tokens, "distca" if packs else "sdpa", **sizes)
    if packs:
        config = DistCAConfig(
            tokens_per_rank=tokens, device_profile="cpu", share_prefixes=way.endswith("shared")
        )
        pack_padded(model, config, torch.device("cpu"))
    return model


def loss_of(way: str, student: Any, teacher: Any, input_ids: Tensor, mask: Tensor) -> Tensor:
    """Return the divergence of completions, over their tokens."""
    is_target = mask.bool()
    is_target[:, : input_ids.shape[1] * PROMPT // COLUMNS] = False
    given = {"input_ids": input_ids, "attention_mask": mask}
    with torch.no_grad():
        of_teacher = teacher(**given).logits if way == "GKDTrainer" else states(teacher, given)
    if way == "GKDTrainer":
        labels = input_ids.masked_fill(~is_target, -100)[:, 1:]
        logits = student(**given).logits[:, :-1]
        loss: Tensor = GKDTrainer.generalized_jsd_loss(logits, of_teacher[:, :-1], labels, BETA)
        return loss
    loss, _, _ = _chunked_divergence_loss(
        states(student, given)[:, :-1],
        of_teacher[:, :-1],
        student.lm_head.weight,
        teacher.lm_head.weight,
        is_target[:, 1:],
        BETA,
    )
    return loss


def states(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """Return the last hidden states."""
    hidden: Tensor = model.model(**given, use_cache=False).last_hidden_state
    return hidden


def step(way: str, vocabulary: int, scale: int) -> dict[str, float]:
    """Return the memory and the loss of a step, in a process that computes no other way."""
    follow_tensors()
    input_ids, mask = batch(vocabulary, scale)
    tokens = int(mask.sum())
    student, teacher = (model_of(way, layers, vocabulary, tokens) for layers in (2, 4))
    keep_only_inputs_of_layers(student)
    # What is made once, such as threads, and code that is loaded.
    loss_of(way, student, teacher, *batch(vocabulary, 8 * scale)).backward()
    student.zero_grad()
    before = begin_peak()
    loss = loss_of(way, student, teacher, input_ids, mask)
    loss.backward()
    return {"MiB": (peak() - before) / 2**20, "loss": loss.item()}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    ways: dict[str, dict[str, float]] = {}
    for way in WAYS:
        (ways[way],) = run_ranks(1, step, way, VOCABULARY, 1)
        print(way, ways[way])
    print_json(ways=ways)


if __name__ == "__main__":
    main()

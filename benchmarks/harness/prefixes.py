"""Sequences with equal prefixes: groups of GRPO, pairs of DPO, and sessions of agents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_distca.dispatch.padded_rows import PaddedBatch

from .padded import Batch, batch_of

EXAMPLES = 8
"""Sequences of a rank."""
SHORTEST, LONGEST = 64, 256
"""Tokens of a completion, an answer or a turn."""
PROMPT = 1024
"""Tokens of a group's prompt, and the most of a pair's."""
SYSTEM = 512
"""Tokens that all sessions begin with."""


@dataclass(frozen=True)
class Example:
    """A sequence whose first `given` tokens are no targets."""

    tokens: Tensor
    given: int


class Draw:
    """Draws tokens and lengths, the same every time for a seed."""

    def __init__(self, vocabulary: int, seed: int, scale: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._vocabulary, self._scale = vocabulary, scale

    def tokens(self, shortest: int, longest: int) -> Tensor:
        """Between `shortest` and `longest` tokens, divided by the scale."""
        low, high = (max(1, length // self._scale) for length in (shortest, longest))
        length = int(torch.randint(low, high + 1, (), generator=self._generator))
        return torch.randint(3, self._vocabulary, (length,), generator=self._generator)


def groups(
    ranks: int,
    vocabulary: int,
    seed: int,
    scale: int = 1,
    *,
    prompt_tokens: int = PROMPT,
    shortest: int = SHORTEST,
    longest: int = LONGEST,
) -> list[Example]:
    """A prompt for each rank, with eight completions."""
    draw, examples = Draw(vocabulary, seed, scale), []
    for _ in range(ranks):
        prompt = draw.tokens(prompt_tokens, prompt_tokens)
        for _ in range(EXAMPLES):
            tokens = torch.cat([prompt, draw.tokens(shortest, longest)])
            examples.append(Example(tokens, len(prompt)))
    return examples


def pairs(ranks: int, vocabulary: int, seed: int, scale: int = 1) -> list[Example]:
    """Four prompts for each rank, with two answers each."""
    draw, examples = Draw(vocabulary, seed, scale), []
    for _ in range(ranks * EXAMPLES // 2):
        prompt = draw.tokens(PROMPT // 4, PROMPT)
        for _ in range(2):
            tokens = torch.cat([prompt, draw.tokens(SHORTEST, LONGEST)])
            examples.append(Example(tokens, len(prompt)))
    return examples


def sessions(ranks: int, vocabulary: int, seed: int, scale: int = 1) -> list[Example]:
    """A session for each rank: an example for each of eight turns, with all turns before it."""
    draw, examples = Draw(vocabulary, seed, scale), []
    system = draw.tokens(SYSTEM, SYSTEM)
    for _ in range(ranks):
        history = system
        for _ in range(EXAMPLES):
            tokens = torch.cat([history, draw.tokens(SHORTEST, LONGEST)])
            examples.append(Example(tokens, len(history)))
            history = tokens
    return examples


CASES: dict[str, Callable[[int, int, int, int], list[Example]]] = {
    "groups": groups,
    "pairs": pairs,
    "sessions": sessions,
}


def batch_of_examples(examples: Sequence[Example], device: torch.device) -> Batch:
    return batch_of(
        [example.tokens for example in examples],
        device,
        given=[example.given for example in examples],
    )


def targets_of(examples: Sequence[Example]) -> int:
    return sum(len(example.tokens) - example.given for example in examples)


def rows_of(model: Any, batch: Batch) -> int:
    """Rows that all ranks compute of a batch. A collective call."""
    packed = model.base_model.batches.pack(
        lambda: PaddedBatch({"input_ids": batch.input_ids}, batch.attention_mask)
    )
    return sum(
        bound.plan.document_tokens - bound.plan.shared_rows for _, bound in packed.micro_batches
    )

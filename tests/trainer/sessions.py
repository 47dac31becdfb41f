"""Sessions of agents as documents: one document for each turn, which repeats the turns before."""

from typing import Any

import datasets
import numpy as np

IGNORED = -100
PROMPT = 150
"""Tokens of the system prompt of a session; there are three prompts."""


def turns(sizes: list[int], seed: int, prompt: list[int]) -> list[dict[str, list[int]]]:
    """One document for each turn of a session, with the labels of the turn's answer alone.

    Args:
        sizes: tokens of each turn; the last third of them is the answer.
    """
    random = np.random.default_rng(seed)
    tokens, documents = list(prompt), []
    for size in sizes:
        first = len(tokens)
        tokens = tokens + random.integers(3, 64, size).tolist()
        answer = first + size - size // 3
        labels = [IGNORED] * answer + tokens[answer:]
        documents.append({"input_ids": tokens, "labels": labels})
    return documents


def sessions(count: int = 6) -> datasets.Dataset:
    """Sessions of one to four turns, an example twice, and documents that have nothing in common.

    One document is another one up to its end, with labels of its own.
    """
    prompts = np.random.default_rng(0).integers(3, 64, (3, PROMPT)).tolist()
    documents: list[dict[str, Any]] = []
    for number in range(count):
        sizes = [40 + 61 * (number + turn) % 200 for turn in range(1 + number % 4)]
        documents += turns(sizes, number + 1, prompts[number % 3])
    documents.append(documents[-1])
    longest = documents[-1]
    documents.append(
        {"input_ids": longest["input_ids"][:256], "labels": longest["input_ids"][:256]}
    )
    documents.append({"input_ids": longest["input_ids"], "labels": longest["input_ids"]})
    for length in (30, 200):
        tokens = np.random.default_rng(length).integers(3, 64, length).tolist()
        documents.append({"input_ids": tokens, "labels": tokens})
    return datasets.Dataset.from_list(documents)

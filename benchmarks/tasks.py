"""Accuracy on tasks with long contexts that the script makes, after training both ways.

The tasks are in the style of RULER, with a vocabulary of symbols. A document has a context, a
symbol that asks, and questions with their answers. Loss is on the answers alone:

  needle  needles among noise, each a key with its value; the values of all keys are asked
  track   assignments of names among noise, in two chains; from its first name each chain is asked,
          name by name
  count   words of which three are more frequent; they are asked, the most frequent one first

A needle and an assignment are one symbol each, so that two layers learn them in a thousand steps.
Lengths grow from 32 tokens to 1,024, twice tokens_per_rank: the longest documents are cut over both
ranks. Both ways get the same documents in every step; `harness/both_ways.py` says what the ways
are. Short documents come first; all lengths come from 60 % of the steps on.

Afterwards transformers with sdpa computes held-out documents with the weights of both ways, one
document in a row. An answer counts as right if it has the greatest logit after the right answers
before it. For each seed the accuracies of the two ways are subtracted. The standard error is that
of the mean of these differences, so it counts trainings.

Run: OMP_NUM_THREADS=1 python benchmarks/tasks.py [--steps 1000] [--seeds 5] [--documents 100]
"""

import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from harness import options_parser, print_json, print_rows
from harness.both_ways import PLANNED, RANKS, STOCK, WAYS, Document, Step, Training, train
from transformers import AutoModelForCausalLM

TOKENS_PER_RANK = 512
LENGTHS = tuple(2**exponent for exponent in range(5, 11))
ALL_LENGTHS_FROM = 0.6
"""Share of the steps after which documents have all lengths."""
MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
LEARNING_RATE = 3e-3
KINDS = 10
"""Number of keys, of values and of names."""
ASK = 4
"""Symbol between a context and its questions; those before it begin the documents of a task."""
KEY = 8
VALUE = KEY + KINDS
NEEDLE = VALUE + KINDS
NAME = NEEDLE + KINDS**2
ASSIGNMENT = NAME + KINDS
NOISE = ASSIGNMENT + KINDS**2
"""First symbols of each class."""
NOISES = 18
VOCABULARY = 256
NEEDLES = 8
CHAINS = 2
WORDS = 16
FREQUENT = (0.4, 0.2, 0.1)
"""Shares of a context that its frequent words have."""
AT_ONCE = 8192
"""Tokens whose logits are computed at once."""
NO_ANSWER = -100

Questions = list[list[int]]
"""Symbols of which the first is given, and the others are asked."""


def among_noise(random: Random, symbols: list[int], length: int) -> list[int]:
    """Scatter symbols, in their order, over a context of noise."""
    context = [NOISE + random.randrange(NOISES) for _ in range(length)]
    places = sorted(random.sample(range(length), len(symbols)))
    for place, symbol in zip(places, symbols, strict=True):
        context[place] = symbol
    return context


def needle(random: Random, length: int) -> tuple[list[int], Questions]:
    count = min(NEEDLES, length // 8)
    keys = random.sample(range(KINDS), count)
    pairs = [(key, random.randrange(KINDS)) for key in keys]
    needles = [NEEDLE + key * KINDS + value for key, value in pairs]
    context = among_noise(random, needles, length - 2 - 2 * count)
    random.shuffle(pairs)
    return context, [[KEY + key, VALUE + value] for key, value in pairs]


def track(random: Random, length: int) -> tuple[list[int], Questions]:
    names = min(KINDS // CHAINS, length // 10)
    drawn = random.sample(range(KINDS), CHAINS * names)
    chains = [drawn[first : first + names] for first in range(0, len(drawn), names)]
    left = [[ASSIGNMENT + name * KINDS + to for name, to in pairwise(chain)] for chain in chains]
    order = [chain for chain in range(CHAINS) for _ in range(names - 1)]
    random.shuffle(order)
    assignments = [left[chain].pop(0) for chain in order]
    context = among_noise(random, assignments, length - 2 - len(drawn))
    random.shuffle(chains)
    return context, [[NAME + name for name in chain] for chain in chains]


def count(random: Random, length: int) -> tuple[list[int], Questions]:
    room = length - 2 - len(FREQUENT)
    words = [NOISE + word for word in random.sample(range(NOISES), WORDS)]
    counts = [int(room * share) for share in FREQUENT]
    rest = room - sum(counts)
    others = WORDS - len(FREQUENT)
    counts += [len(range(word, rest, others)) for word in range(others)]
    context = [word for word, times in zip(words, counts, strict=True) for _ in range(times)]
    random.shuffle(context)
    return context, [[ASK, *words[: len(FREQUENT)]]]


TASKS: dict[str, Callable[[Random, int], tuple[list[int], Questions]]] = {
    "needle": needle,
    "track": track,
    "count": count,
}
CHANCE = {"needle": 1 / KINDS, "track": 1 / KINDS, "count": 1 / WORDS}
"""Accuracy of a guess among the symbols that may be answers."""


def document(task: str, random: Random, length: int) -> Document:
    """Return a document of this many tokens, with targets on its answers."""
    context, questions = TASKS[task](random, length)
    tokens = [1 + list(TASKS).index(task), *context]
    targets = [NO_ANSWER] * len(tokens)
    if questions[0][0] != ASK:
        tokens.append(ASK)
        targets.append(NO_ANSWER)
    for given, *answers in questions:
        tokens += [given, *answers]
        targets += [NO_ANSWER, *answers]
    return Document(tokens, targets)


def steps_of(count: int) -> list[Step]:
    """Return the documents of each step, which fill all ranks."""
    random = Random(1)
    steps: list[Step] = []
    for number in range(count):
        known = 1 + int(number / count / ALL_LENGTHS_FROM * len(LENGTHS))
        room = RANKS * TOKENS_PER_RANK
        step: Step = []
        while room:
            length = random.choice([length for length in LENGTHS[:known] if length <= room])
            step.append(document(random.choice(list(TASKS)), random, length))
            room -= length
        steps.append(step)
    return steps


@torch.no_grad()
def right_answers(model: Any, documents: list[Document]) -> list[float]:
    """Return the share of right answers of each of some documents of one length."""
    tokens_BL, targets_BL = (torch.tensor(column) for column in zip(*documents, strict=True))
    found = []
    at_once = max(AT_ONCE // tokens_BL.shape[1], 1)
    batches = zip(tokens_BL.split(at_once), targets_BL.split(at_once), strict=True)
    for tokens, targets in batches:
        predicted = model(input_ids=tokens).logits[:, :-1].argmax(-1)
        asked = targets[:, 1:] != NO_ANSWER
        right = (predicted == targets[:, 1:]) & asked
        found += (right.sum(1) / asked.sum(1)).tolist()
    return found


def accuracies(folder: Path, documents: int) -> Iterator[tuple[str, int, list[float]]]:
    """Yield the task, the length, and the share of right answers of each held-out document."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", dtype=torch.float32
    ).eval()
    for task in TASKS:
        for length in LENGTHS:
            random = Random(f"held out, {task}, {length}")
            held_out = [document(task, random, length) for _ in range(documents)]
            yield task, length, right_answers(model, held_out)


def row_of(task: str, length: int, right: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Return the figures of a task and a length.

    Args:
        right: of each way, the shares of right answers by seed and document.
    """
    of_seeds = {way: [float(np.mean(of_seed)) for of_seed in right[way]] for way in WAYS}
    differences = np.subtract(of_seeds[PLANNED], of_seeds[STOCK])
    return {
        "task": task,
        "length": length,
        "chance": CHANCE[task],
        **{way: float(np.mean(of_seeds[way])) for way in WAYS},
        "difference": float(differences.mean()),
        "standard error of the difference": float(
            differences.std(ddof=1) / np.sqrt(differences.size)
        ),
        "seeds": of_seeds,
    }


def main() -> None:
    options = options_parser(
        __doc__,
        steps=(1000, "optimizer steps of a training"),
        seeds=(5, "seeds of the weights"),
        documents=(100, "held-out documents of each task and length"),
    ).parse_args()
    steps = steps_of(options.steps)
    right: dict[tuple[str, int], dict[str, list[list[float]]]] = {}
    losses: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            training = Training(
                VOCABULARY, seed, TOKENS_PER_RANK, MODEL, LEARNING_RATE, keeps_model=True
            )
            for way in WAYS:
                of_run = Path(folder) / f"{way}{seed}"
                losses[way].append(train(way, steps, training, of_run))
                for task, length, found in accuracies(of_run / "model", options.documents):
                    right.setdefault((task, length), {way: [] for way in WAYS})[way].append(found)
                print(f"{way}, seed {seed}: {np.mean(losses[way][-1][-100:]):.4f}", flush=True)
    rows = [row_of(task, length, found) for (task, length), found in right.items()]
    print_rows([{name: row[name] for name in row if name != "seeds"} for row in rows])
    print_json(
        steps=options.steps,
        seeds=options.seeds,
        documents=options.documents,
        tokens_per_rank=TOKENS_PER_RANK,
        difference_of_first_losses=[
            abs(stock[0] - planned[0])
            for stock, planned in zip(losses[STOCK], losses[PLANNED], strict=True)
        ],
        rows=rows,
    )


if __name__ == "__main__":
    main()

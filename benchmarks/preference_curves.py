"""Curves of preference and reinforcement training, by trainers of TRL and of hf_distca.

  dpo    margin of the rewards of pairs; a tenth of the pairs is swapped, so that it stays finite
  grpo   mean reward of completions: the share of their words that are wanted ones

Each is trained by TRL's trainer with padded batches and transformers' sdpa ("stock"), and by the
trainer of hf_distca ("planned"). That one computes the same batches packed, with shared prefixes,
with sequences cut over both ranks, and in two nano-batches. A LLaMA of two layers with random
weights trains under DDP on two CPU ranks in float32. Prompts have 128 to 256 words of 62, answers
of pairs 4 to 160, and completions at most 16.

Completions are drawn with the same random numbers both ways. As long as rounding changes no drawn
word, both ways draw the same completions, and then they go apart. The result has the number of
steps before the values of both ways differ by more than a thousandth.

Run: OMP_NUM_THREADS=1 python benchmarks/preference_curves.py [--only dpo] [--dpo 40] [--grpo 24]
    [--seeds 2] [--pictures docs/evidence]
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
import trl
from datasets import Dataset
from harness import options_parser, print_json, print_rows, run_ranks
from harness.both_ways import (
    EVERY_LOSS_LOGGED,
    PLANNED,
    RANKS,
    STOCK,
    WAYS,
    Training,
    small_llama,
)
from harness.curves import curves_picture, distances, smoothed
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback

import hf_distca

SPECIAL = ("[pad]", "[end]")
WORDS = tuple(f"w{number}" for number in range(62))
WANTED = frozenset(WORDS[:8])
"""Words for which completions are rewarded."""
CHOSEN_FROM, REJECTED_FROM = WORDS[:40], WORDS[20:]
"""Words of chosen and of rejected answers; some are in both."""
SWAPPED = 0.1
"""Share of the pairs whose chosen answer is the rejected one."""
PROMPT = (128, 256)
"""Fewest and most words of a prompt."""
SAME = 1e-3
"""Largest difference of two values that are called the same."""
SMOOTHED_OVER = 2
"""Steps over which a curve is averaged for the picture."""
LAST = 10
"""Steps at the end whose mean is compared."""
TOKENS_PER_RANK = 8192
PLANS = {
    "document_layout": "fixed",
    "planning": {"balance_tolerance": 0.01, "ping_pong": True},
}
"""Settings under which rows travel: by default, sequences as short as these stay whole."""
MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


class Kind(NamedTuple):
    """A training of which one logged figure is followed."""

    figure: str
    title: str
    data: Callable[[int], Dataset]
    arguments: dict[str, Any]
    given: dict[str, Any]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word."""
    tokens = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(tokens, unk_token=SPECIAL[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=SPECIAL[0], eos_token=SPECIAL[1]
    )


def drawn(random: Random, words: Sequence[str], shortest: int, longest: int) -> str:
    return " ".join(random.choices(words, k=random.randint(shortest, longest)))


def pairs(count: int) -> Dataset:
    """Return prompts with a chosen and a rejected answer; in every fifth pair both may be long."""
    random = Random(1)
    rows = []
    for number in range(count):
        longest = 160 if number % 5 == 0 else 40
        answers = [drawn(random, words, 4, longest) for words in (CHOSEN_FROM, REJECTED_FROM)]
        if random.random() < SWAPPED:
            answers.reverse()
        chosen, rejected = (f" {answer}" for answer in answers)
        prompt = drawn(random, WORDS, *PROMPT)
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return Dataset.from_list(rows)


def prompts(count: int) -> Dataset:
    random = Random(2)
    return Dataset.from_list([{"prompt": drawn(random, WORDS, *PROMPT)} for _ in range(count)])


def share_of_wanted(completions: list[str], **_: Any) -> list[float]:
    """Reward each completion with the share of its words that are wanted."""
    words = [completion.split() for completion in completions]
    return [sum(word in WANTED for word in each) / max(len(each), 1) for each in words]


KINDS = {
    "dpo": Kind(
        "rewards/margins",
        "Margin of rewards, DPO: TRL's trainer and that of hf_distca",
        pairs,
        {"per_device_train_batch_size": 4, "learning_rate": 1e-4},
        {},
    ),
    "grpo": Kind(
        "reward",
        "Mean reward, GRPO: TRL's trainer and that of hf_distca",
        prompts,
        {
            "per_device_train_batch_size": 16,
            "num_generations": 8,
            "max_completion_length": 16,
            "learning_rate": 2e-3,
        },
        {"reward_funcs": share_of_wanted},
    ),
}


def trainer_of(name: str, way: str, steps: int, seed: int, folder: str) -> Any:
    """Return the trainer of TRL or of hf_distca, with the model that lies in the folder."""
    kind = KINDS[name]
    arguments: dict[str, Any] = {
        **kind.arguments,
        "output_dir": folder,
        "max_steps": steps,
        "lr_scheduler_type": "constant",
        "bf16": False,
        **EVERY_LOSS_LOGGED,
        "seed": seed,
    }
    package, prefix, attention = trl, "", "sdpa"
    if way != STOCK:
        package, prefix, attention = hf_distca, "DistCA", "distca"
        arguments |= {**PLANS, "tokens_per_rank": TOKENS_PER_RANK}
    trainer_class, config_class = (
        getattr(package, f"{prefix}{name.upper()}{part}") for part in ("Trainer", "Config")
    )
    return trainer_class(
        AutoModelForCausalLM.from_pretrained(
            f"{folder}/model", attn_implementation=attention, dtype=torch.float32
        ),
        args=config_class(**arguments),
        train_dataset=kind.data(steps * RANKS * 4),
        processing_class=tokenizer(),
        **kind.given,
    )


def logged(name: str, way: str, steps: int, seed: int, folder: str) -> list[dict[str, float]]:
    """Train on this rank, and return the logged figures of each step."""
    trainer = trainer_of(name, way, steps, seed, folder)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if way != STOCK:
        trainer.close()
    log = [entry for entry in trainer.state.log_history if KINDS[name].figure in entry]
    if trainer.is_world_process_zero():
        last = np.mean([entry[KINDS[name].figure] for entry in log[-LAST:]])
        print(f"{name}, {way}, seed {seed}: {last:.4f}", flush=True)
    return log


def train_all(name: str, steps: int, seeds: int, folder: str) -> dict[str, list[Any]]:
    """Return the logs of both ways by seed; all ranks call it."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    return {
        way: [logged(name, way, steps, seed, f"{folder}/{seed}") for seed in range(seeds)]
        for way in WAYS
    }


def steps_alike(stock: np.ndarray, planned: np.ndarray) -> int:
    """Return the number of steps before the values of both ways differ."""
    differ = np.flatnonzero(np.abs(stock - planned) > SAME)
    return int(differ[0]) if len(differ) else len(stock)


def compared(curves: dict[str, list[np.ndarray]]) -> dict[str, Any]:
    """Return the figures of a kind of training: differences, ends and curves."""
    of_ways, of_seeds = distances(curves)
    return {
        "steps": len(curves[STOCK][0]),
        "steps_alike": [steps_alike(*pair) for pair in zip(*curves.values(), strict=True)],
        "difference_of_ways": of_ways,
        "difference_of_seeds": of_seeds,
        "first": {way: [float(curve[:LAST].mean()) for curve in curves[way]] for way in WAYS},
        "last": {way: [float(curve[-LAST:].mean()) for curve in curves[way]] for way in WAYS},
        "curves": {
            way: [smoothed(curve, SMOOTHED_OVER).tolist() for curve in curves[way]] for way in WAYS
        },
    }


def main() -> None:
    parser = options_parser(
        __doc__,
        dpo=(40, "optimizer steps of DPO"),
        grpo=(24, "optimizer steps of GRPO"),
        seeds=(2, "seeds of the weights and of the order of the data"),
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each kind")
    options = parser.parse_args()
    found = {}
    for name in options.only:
        kind = KINDS[name]
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(options.seeds):
                training = Training(len(SPECIAL + WORDS), seed, TOKENS_PER_RANK, MODEL)
                small_llama(training, "sdpa").save_pretrained(f"{folder}/{seed}/model")
            steps = getattr(options, name)
            logs, *_ = run_ranks(RANKS, train_all, name, steps, options.seeds, folder)
        curves = {
            way: [np.array([entry[kind.figure] for entry in log]) for log in logs[way]]
            for way in WAYS
        }
        shared = [entry["distca/shared_rows"] for log in logs[PLANNED] for entry in log]
        found[name] = {**compared(curves), "shared_rows_per_step": float(np.mean(shared))}
        if options.pictures:
            picture = curves_picture(kind.title, curves, SMOOTHED_OVER)
            (options.pictures / f"{name}_curves.svg").write_text(picture)
    print_rows(
        [
            {
                "training": name,
                "first": float(np.mean(list(figures["first"].values()))),
                "last": float(np.mean(list(figures["last"].values()))),
                "both ways differ by": max(figures["difference_of_ways"]),
                "two seeds differ by": max(figures["difference_of_seeds"], default=0.0),
                "steps alike": min(figures["steps_alike"]),
            }
            for name, figures in found.items()
        ]
    )
    print_json(seeds=options.seeds, **found)


if __name__ == "__main__":
    main()

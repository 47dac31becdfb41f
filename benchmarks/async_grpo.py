"""Micro-batches of multi-turn rollouts, made by TRL's batcher and by DistCAAsyncGRPOTrainer.

Sessions of agents are drawn: groups of four rollouts of a prompt. A rollout has turns of an answer
and of what a tool says. One of a group continues a part of another one. Rollouts have 3,000 tokens
on average, and the longest has 2.5 times tokens_per_rank. Both batchers get the same rollouts:

  trl    TokenBudgetBatcher of trl.experimental.async_grpo, with token_budget=tokens_per_rank
  here   as many rollouts as fit into all ranks together, planned over the ranks

Rows are counted over all ranks, and a prefix that rollouts share counts once. The busiest rank is
compared with the mean rank of a micro-batch, by rows and by query-key pairs. The planner uses the
costs of an H100 for a LLaMA of 8B parameters.

With --train N a model with two layers and a width of 64 also trains N steps on CPU ranks.

Run: python benchmarks/async_grpo.py [--steps 20] [--ranks 4] [--tokens_per_rank 4096] [--train 0]
"""

import queue
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
from accelerate import PartialState
from datasets import Dataset
from harness import options_parser, print_json, print_rows, run_ranks
from harness.simulated import simulated_run
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import hf_distca
from hf_distca.collator.rollouts import PlannedRollouts, fitting_micro_batches
from hf_distca.predict.shapes import LLAMA_8B

VOCABULARY = 512
MEAN = 3000
"""Mean number of tokens of a rollout."""
GROUP = 4
"""Rollouts of a prompt."""


def rollouts_of(longest: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rollouts without end; the tenth has the most tokens."""
    random = np.random.default_rng(seed)
    number = group = 0
    while True:
        prompt = random.integers(5, VOCABULARY, int(random.integers(200, 800)))
        first = prompt
        for member in range(GROUP):
            before = prompt if member < GROUP - 1 else first[: 2 * len(first) // 3]
            added = random.lognormal(np.log(0.54 * MEAN), 0.7)
            length = int(np.clip(len(before) + added, len(before) + 64, longest))
            number += 1
            if number == 10:
                length = longest
            own = random.integers(5, VOCABULARY, length - len(before))
            tokens = np.concatenate([before, own])
            if member == 0:
                first = tokens
            mask = ((np.arange(length) - len(prompt)) // 200 % 2 == 0).astype(np.int64)
            mask[: len(prompt)] = 0
            yield {
                "input_ids": tokens,
                "completion_mask": mask,
                "old_log_probs": np.full(length, -np.log(VOCABULARY), np.float32),
                "advantage": float(random.normal()),
                "group_id": group,
                "metrics": {},
            }
        group += 1


def ratio(values: Sequence[int]) -> float:
    return float(max(values) / np.mean(values))


def figures_of(
    micro_batches: Sequence[tuple[Sequence[int], Sequence[int]]], tokens: int, dropped: int
) -> dict[str, Any]:
    """Figures of micro-batches, from the rows and the pairs of each rank."""
    rows = sum(sum(rows) for rows, _ in micro_batches)
    return {
        "dropped": dropped,
        "micro_batches": len(micro_batches),
        "rows": rows,
        "rows_over_tokens": rows / tokens,
        "busiest_rows": float(np.mean([ratio(rows) for rows, _ in micro_batches])),
        "busiest_pairs": float(np.mean([ratio(pairs) for _, pairs in micro_batches])),
    }


def trl(rollouts: Sequence[dict[str, Any]], ranks: int, tokens_per_rank: int) -> dict[str, Any]:
    metrics: dict[str, list[float]] = defaultdict(list)
    batcher = TokenBudgetBatcher(rollouts, ranks, tokens_per_rank, metrics)
    found = []
    tokens = 0
    for rows in batcher:
        found.append(([len(row.tokens) for row in rows], [row.load for row in rows]))
        tokens += sum(len(sample["input_ids"]) for row in rows for sample in row.samples)
    return figures_of(found, tokens, len(metrics["batch/dropped_oversize_total"]))


def here(rollouts: Sequence[dict[str, Any]], ranks: int, tokens_per_rank: int) -> dict[str, Any]:
    settings = simulated_run(LLAMA_8B, ranks, tokens_per_rank, ranks).plans
    dropped: list[int] = []
    found = []
    tokens = 0
    seconds = 0.0
    for members in fitting_micro_batches(rollouts, settings, dropped.append, shares=True):
        begin = time.perf_counter()
        planned = PlannedRollouts.of(members, settings, shares=True)
        planned.batch(0)
        seconds += time.perf_counter() - begin
        of_ranks = planned.rows_of_ranks(ranks)
        found.append(([len(rank.tokens) for rank in of_ranks], [rank.load for rank in of_ranks]))
        tokens += sum(len(rollout["input_ids"]) for rollout in members)
    figures = figures_of(found, tokens, len(dropped))
    return {**figures, "planning_ms": 1e3 * seconds / len(found)}


# Training


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")


def train(folder: str, steps: int, ranks: int, tokens_per_rank: int) -> list[dict[str, float]]:
    """The logs of a training on recorded rollouts."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4 * tokens_per_rank,
    )
    if PartialState().is_main_process:
        LlamaForCausalLM(config).save_pretrained(folder)
    PartialState().wait_for_everyone()
    buffer: queue.Queue[RolloutSample] = queue.Queue()
    samples = rollouts_of(5 * tokens_per_rank // 2)
    for sample in islice(samples, 4 * steps * ranks * tokens_per_rank // MEAN + 10):
        buffer.put(RolloutSample(prompt=[], completion=[], model_version=0, **sample))

    def nothing(*_: Any) -> None:
        pass

    worker = SimpleNamespace(
        rollout_buffer=buffer,
        metrics_queue=queue.Queue(),
        **dict.fromkeys(("start", "stop", "update_model_version", "check_health"), nothing),
    )
    transfer = SimpleNamespace(
        send_weights=list,
        **dict.fromkeys(("init_weight_transfer", "pause", "resume", "destroy"), nothing),
    )
    args = hf_distca.DistCAAsyncGRPOConfig(
        output_dir=folder,
        max_steps=steps,
        tokens_per_rank=tokens_per_rank,
        max_staleness=steps + 1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = hf_distca.DistCAAsyncGRPOTrainer(
        folder,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "w5"}] * 1000),
        processing_class=tokenizer(),
        rollout_worker=worker,
        weight_transfer=transfer,
    )
    trainer.train()
    names = ("loss", "perf/fwd_bwd_s", "batch/row_tokens_max", "batch/row_tokens_mean")
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    trainer.close()
    # Rank 0 alone logs figures of rows.
    return [{name: entry[name] for name in names if name in entry} for entry in logs]


def main() -> None:
    options = options_parser(
        __doc__,
        steps=(20, "micro-batches"),
        ranks=(4, "ranks"),
        tokens_per_rank=(4096, "rows of a rank"),
        train=(0, "steps of a training on CPU ranks"),
    ).parse_args()
    ranks, tokens_per_rank = options.ranks, options.tokens_per_rank
    PartialState()  # TRL's logger needs it
    drawn = rollouts_of(5 * tokens_per_rank // 2)
    # 1. As many rollouts as fill the micro-batches of all ranks.
    settings = simulated_run(LLAMA_8B, ranks, tokens_per_rank, ranks).plans
    filled = fitting_micro_batches(drawn, settings, print, shares=True)
    rollouts = [rollout for members in islice(filled, options.steps) for rollout in members]
    lengths = [len(rollout["input_ids"]) for rollout in rollouts]
    rollouts.append(next(drawn))  # closes the last micro-batch
    # 2. Both batchers.
    found = [
        {"batcher": make.__name__, **make(rollouts, ranks, tokens_per_rank)} for make in (trl, here)
    ]
    print_rows([{name: row[name] for name in found[0]} for row in found])
    steps = []
    if options.train:
        with tempfile.TemporaryDirectory() as folder:
            steps = run_ranks(ranks, train, folder, options.train, ranks, tokens_per_rank)[0]
        print_rows(steps)
    print_json(
        rollouts=len(lengths),
        mean=float(np.mean(lengths)),
        longest=max(lengths),
        ranks=ranks,
        tokens_per_rank=tokens_per_rank,
        batchers=found,
        steps=steps,
    )


if __name__ == "__main__":
    main()

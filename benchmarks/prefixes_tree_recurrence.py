"""Prefix trees of a hybrid model on one CPU process, beside tree-recurrence in a row of TRL.

The cases are those of prefixes.py, for one rank: a group of GRPO, four pairs of DPO, a session of
an agent. The model is its "hybrid": a layer with a gated delta rule, and one with attention.
Three strategies compute the same loss and gradients:

  unshared          pack_padded with share_prefixes=False computes each sequence by itself
  hf_distca         pack_padded shares prefixes
  tree-recurrence   TRL's `TreeRow` lays the sequences out as one tree, and tree-recurrence lets the
                    gated delta rule follow it

TRL attends to the path of each branch with FlashAttention 3. The CPU kernel of hf_distca stands in
for it here. On CPUs tree-recurrence runs transformers' functions, which take no state: every path
from the root to a leaf is computed from its beginning, as one padded batch. On GPUs it does so,
too, unless a level of the tree saves 65,536 tokens: so `scanned` counts the tokens of all paths
there. hf_distca begins a branch with the state of its prefix, so it scans each row once.

A step reads the sequences, plans, and runs forward and backward with gradient checkpointing.
Memory is the peak of a step, without what the process held before. Each strategy has its own
process.

Install tree-recurrence into a folder of its own:

    pip install --no-deps --target FOLDER tree-recurrence==0.1.1

Run: OMP_NUM_THREADS=1 PYTHONPATH=FOLDER python benchmarks/prefixes_tree_recurrence.py [--rounds 8]
[--scale 1]
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import torch
import tree_recurrence
from harness import Ranks, Round, begin_peak, follow_tensors, over, peak, report, rounds_parser
from harness.models import VOCABULARY, KernelNode, hybrid
from harness.padded import (
    forward_backward,
    keep_only_inputs_of_layers,
    norm_of_gradients,
    sum_of_losses,
)
from harness.prefixes import CASES, Example, batch_of_examples, rows_of, targets_of
from harness.rounds import take_rounds
from torch import Tensor, nn
from transformers import AttentionInterface
from tree_recurrence.integrations.trl import tree_kwargs_from_batch
from trl.experimental.async_grpo.packing import TreeRow

from hf_distca import DistCAConfig, pack_padded
from hf_distca.kernels import AttentionParams, TaskShapes, get_kernel

CPU = torch.device("cpu")
KERNEL = get_kernel("auto", CPU)
POSITIONS = 4096
TREE = "tree_on_cpu"
"""Attention implementation for rows of TRL's trees."""
STRATEGIES = ("unshared", "hf_distca", "tree-recurrence")


def tree_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: Tensor,
    tree_cu_seqlens_k: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each branch to its path, as TRL's function for trees."""
    lengths = [cu.diff().tolist() for cu in (tree_cu_seqlens_q, tree_cu_seqlens_k)]
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query, key, value))
    o_THD = KernelNode.apply(
        KERNEL,
        TaskShapes.build(*lengths, CPU),
        AttentionParams(scale=scaling),
        q_THD,
        k_TGD[tree_kv_index],
        v_TGD[tree_kv_index],
    )
    return o_THD[None], None


AttentionInterface.register(TREE, tree_attention)


def row_of(examples: Sequence[Example]) -> dict[str, Tensor]:
    """The examples in a row of TRL; all but the given tokens are targets."""
    row = TreeRow()
    for example in examples:
        is_target = torch.arange(len(example.tokens)) >= example.given
        row.add(
            {
                "input_ids": example.tokens,
                "completion_mask": is_target.int(),
                "old_log_probs": torch.zeros(len(example.tokens)),
                "advantage": 1.0,
                "group_id": 0,
            }
        )
    return row.pack()


def step_on_a_tree(model: nn.Module, examples: Sequence[Example]) -> float:
    row = row_of(examples)
    hidden_NH = model.base_model(
        input_ids=row["input_ids"][None],
        position_ids=row["position_ids"][None],
        use_cache=False,
        **tree_kwargs_from_batch(row),
    ).last_hidden_state[0]
    at = row["token_index"]
    total = sum_of_losses(model.lm_head, hidden_NH[at], row["shift_labels"][at])
    loss = total / targets_of(examples)
    loss.backward()
    return loss.item()


def step_packed(model: nn.Module, examples: Sequence[Example]) -> float:
    return forward_backward(model, [batch_of_examples(examples, CPU)], targets_of(examples))


def model_of(strategy: str) -> tuple[nn.Module, Callable[[nn.Module, Sequence[Example]], float]]:
    """The model of a strategy, and its step."""
    model = hybrid(POSITIONS, TREE if strategy == "tree-recurrence" else "distca")
    keep_only_inputs_of_layers(model)
    if strategy == "tree-recurrence":
        support = tree_recurrence.install(model)
        assert support.mode == "tree", support.reason
        return model, step_on_a_tree
    shares = strategy == "hf_distca"
    config = DistCAConfig(tokens_per_rank=len(CASES) * 8 * POSITIONS, share_prefixes=shares)
    pack_padded(model, config, CPU)
    return model, step_packed


def rows_and_scanned(
    strategy: str, model: nn.Module, examples: Sequence[Example]
) -> tuple[int, int]:
    """Rows that all layers compute, and rows that the gated delta rule scans."""
    if strategy != "tree-recurrence":
        rows = rows_of(model, batch_of_examples(examples, CPU))
        return rows, rows
    plan = tree_recurrence.tree_plan(tree_kwargs_from_batch(row_of(examples)))
    return plan.num_tokens, plan.path_tokens


def prepare(strategy: str, scale: int) -> Callable[[], Round]:
    """Make the model, and a round: every case once. The first round measures memory instead of
    seconds, and compares loss and gradients.
    """
    follow_tensors()
    model, step = model_of(strategy)
    seeds = iter(range(1 << 30))
    warm = [Example(torch.arange(3, 11), 2), Example(torch.arange(3, 7), 2)]
    step(model, warm)
    model.zero_grad()

    def take() -> Round:
        seed = next(seeds)
        figures: dict[str, float] = {}
        for case, draw in CASES.items():
            examples = draw(1, VOCABULARY, seed, scale)
            name = f"{case}, {strategy}"
            before = begin_peak()
            begin = time.perf_counter()
            loss = step(model, examples)
            seconds = time.perf_counter() - begin
            memory = (peak() - before) / 2**20
            if seed:
                figures[f"{name}, s"] = seconds
                model.zero_grad()
                continue
            rows, scanned = rows_and_scanned(strategy, model, examples)
            figures |= {
                f"{name}, MiB": memory,
                f"{name}, rows": rows,
                f"{name}, scanned": scanned,
                f"{name}, loss": loss,
                f"{name}, norm of gradients": norm_of_gradients(model),
            }
        return figures

    return take


def largest_differences(counted: Round) -> dict[str, float]:
    """The largest relative difference of loss and norm from those of hf_distca."""
    return {
        f"{case}, {strategy}": max(
            abs(counted[f"{case}, {strategy}, {name}"] / counted[f"{case}, hf_distca, {name}"] - 1)
            for name in ("loss", "norm of gradients")
        )
        for case in CASES
        for strategy in STRATEGIES
    }


def main() -> None:
    options = rounds_parser(__doc__, rounds=8, scale=(1, "divides all lengths")).parse_args()
    order = random.Random(0)
    with ExitStack() as stack:
        pools = [
            stack.enter_context(Ranks(1, prepare, strategy, options.scale))
            for strategy in STRATEGIES
        ]

        def take() -> Round:
            of_strategies = [pool.take()[0] for pool in order.sample(pools, len(pools))]
            merged = {name: value for each in of_strategies for name, value in each.items()}
            return {**dict(sorted(merged.items())), "load average": os.getloadavg()[0]}

        counted = take()
        measured = take_rounds(options, take)
    ratios = {
        f"{case}, {other} / hf_distca": over(f"{case}, {other}, s", f"{case}, hf_distca, s")
        for case in CASES
        for other in ("unshared", "tree-recurrence")
    }
    report(
        measured,
        ratios,
        counted=counted,
        largest_difference=largest_differences(counted),
        tree_recurrence=version("tree-recurrence"),
    )


if __name__ == "__main__":
    main()

"""Beside axolotl-ringmaster: the trainings of peers.py on 2 CPU ranks, and three of its strategies.

  ringmaster, Ulysses   all ranks share every row, and each computes attention for a share of the
                        heads; the rule of ringmaster chooses this for one node
  ringmaster, ring      each rank computes attention for an equal part of the row; its default ring
  ringmaster, zigzag    the ring with load_balance="head_tail": a rank has two parts of the row

All documents of a step are packed into one row. transformers' Trainer trains a model with the hooks
of ringmaster. They give every rank its part of rank 0's row, and the number of targets of all
ranks. DDP averages the gradients. hf_distca and DeepSpeed's Ulysses train as in peers.py.

ringmaster's Ulysses calls FlashAttention for packed documents. Here it calls the CPU kernel of
hf_distca, as all strategies of peers.py do. On CPUs the rings run other code: it computes
the scores between all documents, and masks them. So their time and memory say nothing about GPUs.
`imbalance` of a ring counts the pairs of documents: those of the busiest rank over the mean.

Install ringmaster into a folder of its own:

    pip install --no-deps --target FOLDER axolotl-ringmaster==0.2.7

Run: OMP_NUM_THREADS=1 PYTHONPATH=FOLDER python benchmarks/peers_ringmaster.py [--rounds 6]
[--tokens 16384]
"""

import tempfile
from functools import partial
from importlib.metadata import version
from typing import Any

import ringmaster
from harness import options_parser
from harness.models import KernelNode
from peers import (
    KERNEL,
    MIXES,
    OURS,
    TOKENS,
    ULYSSES,
    Case,
    Comparison,
    Halted,
    Makers,
    first_row,
    measure,
    planned,
    processes_of_ulysses,
    scaled,
    shapes_of,
)
from ringmaster.strategies import ulysses
from torch import Tensor, nn
from transformers import (
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from hf_distca.kernels import AttentionParams

RANKS = 2


def varlen_on_cpu(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cu_seqlens: Tensor,
    *_: Any,
    softmax_scale: float,
    **__: Any,
) -> Tensor:
    """Causal attention within each document, as FlashAttention's function for packed rows."""
    shapes = shapes_of(tuple(cu_seqlens.diff().tolist()))
    return KernelNode.apply(
        KERNEL, shapes, AttentionParams(scale=softmax_scale), q_THD, k_TGD, v_TGD
    )


class PairsOfRank:
    """Counts the query-key pairs, of one head and layer, of this rank's tokens in `pairs`.

    Positions begin anew in each document, so a token at position p attends to p + 1 tokens.
    """

    def __init__(self) -> None:
        self.pairs = 0

    def __call__(self, _model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        """Count the pairs of a forward; a hook."""
        self.pairs += int((kwargs["position_ids"] + 1).sum())


def with_ringmaster(case: Case, ranks: int, **settings: Any) -> Halted:
    """A trainer of rows that all ranks share by ringmaster."""
    ulysses._flash_varlen_fn = lambda _: varlen_on_cpu
    config = ringmaster.RingmasterConfig(size=ranks, **settings)
    runtime = ringmaster.setup(
        config, num_kv_heads=4, device_type="cpu", inner_attn="flash_attention_2"
    )
    model = case.model(runtime.attn_implementation)
    # Trainings of one process share ringmaster's runtime, which is the process's.
    model.register_forward_pre_hook(lambda *_: ringmaster.set_runtime(runtime))
    ringmaster.ContextParallelContextManager(
        [model], runtime.cp_group, load_balance=runtime.shard_load_balance
    ).install()
    counted = None
    if config.backend == ringmaster.Backend.RING:
        counted = PairsOfRank()
        model.register_forward_pre_hook(counted, with_kwargs=True)
    args = TrainingArguments(
        **case.arguments(
            num_train_epochs=1,
            use_cpu=True,
            train_sampling_strategy="sequential",
            per_device_train_batch_size=1,
            average_tokens_across_devices=False,  # ringmaster counts the targets of all ranks
        )
    )
    row = first_row(DataCollatorWithFlattening()(case.data))
    return Halted(
        Trainer(
            model=model,
            args=args,
            train_dataset=[row] * (case.steps * ranks),
            data_collator=default_data_collator,
        ),
        counted,
    )


RINGMASTER: Makers = {
    "ringmaster, Ulysses": partial(with_ringmaster, backend=ringmaster.Backend.ULYSSES),
    "ringmaster, ring": partial(with_ringmaster, backend=ringmaster.Backend.RING),
    "ringmaster, zigzag": partial(
        with_ringmaster,
        backend=ringmaster.Backend.RING,
        load_balance=ringmaster.LoadBalance.HEAD_TAIL,
    ),
}


def main() -> None:
    options = options_parser(
        __doc__, rounds=(6, "how many"), tokens=(TOKENS, "of a step")
    ).parse_args()
    lengths = {mix: scaled(of_mix, options.tokens) for mix, of_mix in MIXES.items()}
    comparison = Comparison(options.rounds, lengths)
    processes = [
        ({OURS: planned}, tuple(lengths)),
        *processes_of_ulysses(lengths),
        (RINGMASTER, tuple(lengths)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        steps = measure(RANKS, options.rounds, lengths, folder, processes)
    comparison.add(RANKS, (OURS, ULYSSES, *RINGMASTER), steps)
    comparison.report(ringmaster=version("axolotl-ringmaster"))


if __name__ == "__main__":
    main()

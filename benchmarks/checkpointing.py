"""Time saved by keeping core attention through gradient checkpoints: one document of 16384 tokens,
one process.

A small LLaMA runs forward and backward under gradient checkpointing: with the results of core
attention kept, and with nothing kept, so that core attention is computed again. Both take turns;
and one layer's core attention forward runs alone.

Run: python benchmarks/checkpointing.py [--rounds 7] [--tokens 16384]
     python benchmarks/checkpointing.py --against OTHER_CHECKOUT      two checkouts in turns
"""

import time
from collections.abc import Callable, Hashable
from functools import partial
from statistics import median

import torch
from harness import Ranks, Round, over, report, rounds_parser, take_rounds
from harness.models import documents_of, llama, rows_of_documents, settings_of
from torch import Tensor

from hf_distca import Dispatcher
from hf_distca.dispatch.kept_results import KeptResults
from hf_distca.kernels import AttentionParams, TaskShapes
from hf_distca.models.checkpointing import enable_checkpointing
from hf_distca.planner.micro_batch import plan_placed

LAYERS, HEADS, HEAD_DIM = 2, 2, 64
SIZES = {
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 352,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": 512,
}


class NothingKept(KeptResults):
    """Results that are not kept, so that a recomputation finds none."""

    def keep(self, key: Hashable, tensors: tuple[Tensor, ...]) -> None:
        """Keep nothing."""


def prepare(tokens: int) -> Callable[[], Round]:
    device = torch.device("cpu")
    model = llama(tokens, **SIZES)
    enable_checkpointing(model, {"use_reentrant": False})
    settings = settings_of(model, 1, tokens, device)
    dispatcher = Dispatcher(settings, device)
    plan = plan_placed([[tokens]], settings)
    batch = rows_of_documents(documents_of([tokens], 512), device)
    qkv = [torch.randn(tokens, HEADS, HEAD_DIM) for _ in range(3)]
    shapes = TaskShapes.build([tokens], [tokens], device)
    params = AttentionParams(scale=HEAD_DIM**-0.5)

    def step(kept_results: KeptResults) -> None:
        bound = dispatcher.bind(plan)
        bound.kept_results = kept_results
        model(**batch, distca_plan=bound).loss.backward()
        model.zero_grad()

    variants: dict[str, Callable[[], object]] = {
        "recomputed": partial(step, NothingKept()),
        "kept": partial(step, KeptResults()),
        "one core attention forward": partial(dispatcher.kernel.forward, *qkv, shapes, params),
    }

    def take() -> Round:
        figures = {}
        for name, variant in variants.items():
            begin = time.perf_counter()
            variant()
            figures[f"{name}, s"] = time.perf_counter() - begin
        return figures

    take()  # warms up
    return take


def saved(taken: Round) -> float:
    """Time saved, in forwards of core attention of all layers."""
    return (taken["recomputed, s"] - taken["kept, s"]) / (
        LAYERS * taken["one core attention forward, s"]
    )


def main() -> None:
    options = rounds_parser(
        __doc__, rounds=7, tokens=(16384, "length of the document")
    ).parse_args()
    with Ranks(1, prepare, options.tokens) as ranks:
        measured = take_rounds(options, lambda: ranks.take()[0])
    report(
        measured,
        {"kept / recomputed": over("kept, s", "recomputed, s"), "forwards saved a layer": saved},
        step_ratio=median(taken["kept, s"] / taken["recomputed, s"] for taken in measured.ours),
        saved_fraction=median(map(saved, measured.ours)),
    )


if __name__ == "__main__":
    main()

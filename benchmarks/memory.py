"""Peak memory of what grows with long rows, each case in a process of its own.

The loss: one step (forward and backward) of a LLaMA with one layer, hidden size 256 and the
vocabulary of Llama 3, with all logits at once as the model does by itself, and over chunks of rows.
Memory is the most that the process held in the step, above what it held before.

The exchange: core attention of one document of 262144 tokens over two ranks, forward and backward,
one head of 128 numbers in float32, with K/V rows all at once and 16 MiB of them at a time. The same
rows as documents of 4096 tokens exchange nothing: what a rank holds above that is what the exchange
takes. A case takes many minutes; with --document a shorter one, and as much less of K and V at a
time.

Run: python benchmarks/memory.py --only loss [--rounds 3] [--tokens 4096 8192]
     python benchmarks/memory.py --only exchange --rounds 1 [--document 262144]
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from harness import (
    Round,
    begin_peak,
    over,
    peak,
    report,
    rounds_parser,
    run_ranks,
    spread,
    take_rounds,
)
from harness.models import documents_of, llama, rows_of_documents
from harness.one_document import OneDocument, take_one_document

from hf_distca import DistCAConfig, make_dispatcher
from hf_distca.patches.loss import LEAST_CHUNK_BYTES

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 128256,
}
VARIANTS = {"own": 0, "chunked": LEAST_CHUNK_BYTES}
"""Variants of the loss, and their loss_chunk_bytes."""
UNITS = {"memory": "MiB", "time": "s"}
COMPARED_TOKENS = 8192
"""Tokens of the ratios in the JSON object."""
EXCHANGE_BUFFER_BYTES = 64
"""For each token of the document: 16 MiB for 262144 of them."""
Case = Callable[[], Round]


def step_of_loss(tokens: int, chunk_bytes: int) -> Round:
    """Memory above the start and seconds of a step, and its loss; in a process that has done
    nothing else.
    """
    model = llama(tokens, **SIZES)
    config = DistCAConfig(
        tokens_per_rank=tokens, loss_chunk_bytes=chunk_bytes, planning={"ping_pong": False}
    )
    dispatcher = make_dispatcher(model, config, torch.device("cpu"))

    def step(length: int) -> float:
        batch = rows_of_documents(documents_of([length], SIZES["vocab_size"]), torch.device("cpu"))
        loss = model(
            **batch, distca_plan=dispatcher.bind(dispatcher.plan_lengths([[length]])[0])
        ).loss
        loss.backward()
        return loss.item()

    step(16)  # what is made once, such as threads, and code that is loaded
    model.zero_grad()
    before = begin_peak()
    begin = time.perf_counter()
    loss = step(tokens)
    return {"MiB": (peak() - before) / 2**20, "s": time.perf_counter() - begin, "loss": loss}


def loss_case(tokens: int, chunk_bytes: int) -> Round:
    (figures,) = run_ranks(1, step_of_loss, tokens, chunk_bytes)
    return figures


def loss_cases(tokens: list[int]) -> dict[str, Case]:
    return {
        f"{count} {variant}": partial(loss_case, count, chunk_bytes)
        for count in tokens
        for variant, chunk_bytes in VARIANTS.items()
    }


def exchange_case(document: OneDocument) -> Round:
    """Core attention on both ranks: the most that either takes."""
    return {
        "MiB": max(
            rank.peak_bytes for rank in run_ranks(document.ranks, take_one_document, document)
        )
        / 2**20
    }


def exchange_cases(tokens: int) -> dict[str, Case]:
    whole = OneDocument(tokens, 2, 1, 128, None)
    return {
        "document in one stage": partial(exchange_case, whole),
        "document in stages": partial(
            exchange_case, replace(whole, buffer_bytes=EXCHANGE_BUFFER_BYTES * tokens)
        ),
        "without exchange": partial(exchange_case, replace(whole, documents=tokens // 4096)),
    }


def take(cases: dict[str, Case]) -> Round:
    return {
        f"{name}, {unit}": value for name, case in cases.items() for unit, value in case().items()
    }


def in_stages(taken: Round) -> float:
    """Memory of an exchange in stages over that of one exchange."""
    names = ("document in one stage", "document in stages", "without exchange")
    one, stages, without = (taken[f"{name}, MiB"] for name in names)
    return (stages - without) / (one - without)


def main() -> None:
    parser = rounds_parser(
        __doc__, rounds=3, document=(1 << 18, "tokens of the exchange's document")
    )
    parser.add_argument(
        "--only", choices=("loss", "exchange"), required=True, help="what is measured"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[4096, 8192], help="of the loss's document"
    )
    options = parser.parse_args()
    of_loss = options.only == "loss"
    cases = loss_cases(options.tokens) if of_loss else exchange_cases(options.document)
    measured = take_rounds(options, partial(take, cases))
    if not of_loss:
        ratio = spread([in_stages(taken) for taken in measured.ours]).median
        report(measured, {"exchange in stages / in one": in_stages}, exchange_memory_ratio=ratio)
        return
    ratios = {
        f"{count} chunked / own, {unit}": over(f"{count} chunked, {unit}", f"{count} own, {unit}")
        for count in options.tokens
        for unit in ("MiB", "s", "loss")
    }
    keys = {
        f"loss_{what}_ratio": f"{COMPARED_TOKENS} chunked / own, {unit}"
        for what, unit in UNITS.items()
    }
    medians = {
        key: spread([ratios[name](taken) for taken in measured.ours]).median
        for key, name in keys.items()
        if name in ratios
    }
    report(measured, ratios, **medians)


if __name__ == "__main__":
    main()

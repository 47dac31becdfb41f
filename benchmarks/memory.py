"""Peak memory of what grows with long rows, each case in a process of its own.

The loss: one step (forward and backward) of a LLaMA with one layer, hidden size 256 and the vocabulary of Llama 3,
with all logits at once as the model does by itself, and over chunks of rows. Memory is the most that the process held
in the step, above what it held before.

Run: python benchmarks/memory.py [--rounds 3] [--tokens 4096 8192 16384]
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from harness import Round, over, report, rounds_parser, run_ranks, spread, take_rounds
from harness.models import documents_of, llama, rows_of_documents

from hf_distca import DistCAConfig, make_dispatcher

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 128256,
}
WAYS = {"own": 0, "chunked": DistCAConfig.loss_chunk_bytes}
"""Ways to compute the loss, and their loss_chunk_bytes."""
COMPARED_TOKENS = 8192
"""Of which the JSON object gives the ratios."""
OWN_LOGITS = 3.5
"""The model's own loss holds so many float32 tensors of tokens × vocabulary at most."""


def step_of_loss(tokens: int, chunk_bytes: int) -> tuple[float, float, float]:
    """MiB above the start and seconds of a step, and its loss; in a process that has done nothing else."""
    device = torch.device("cpu")
    model = llama(tokens, **SIZES)
    dispatcher = make_dispatcher(
        model, DistCAConfig(tokens_per_rank=tokens, loss_chunk_bytes=chunk_bytes, ping_pong=False), device
    )
    step = partial(_step, model, dispatcher)
    step(16)  # what is made once, such as threads, and code that is loaded
    model.zero_grad()
    before = _forget_peak()
    begin = time.perf_counter()
    loss = step(tokens)
    return (_peak_kib() - before) / 1024, time.perf_counter() - begin, loss


def _step(model: torch.nn.Module, dispatcher, tokens: int) -> float:
    batch = rows_of_documents(documents_of([tokens], SIZES["vocab_size"]), torch.device("cpu"))
    loss = model(**batch, distca_plan=dispatcher.bind(dispatcher.plan_lengths([[tokens]])[0])).loss
    loss.backward()
    return loss.item()


def _forget_peak() -> int:
    """Let the process's peak begin anew; KiB that it holds now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_kib()


def _peak_kib() -> int:
    """The most KiB of memory that the process has held since then."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


def fits(tokens: int) -> bool:
    """Whether the model's own loss of so many tokens fits into the memory that is free now."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return OWN_LOGITS * 4 * tokens * SIZES["vocab_size"] < 1024 * int(lines["MemAvailable"].split()[0])


def take(cases: dict[str, Callable[[], tuple[float, float, float]]]) -> Round:
    """Each case once."""
    figures = {}
    for name, case in cases.items():
        figures[f"{name}, MiB"], figures[f"{name}, s"], figures[f"{name}, loss"] = case()
    return figures


def main() -> None:
    """Measure, print tables and one JSON object."""
    parser = rounds_parser(__doc__, rounds=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384], help="of the document")
    options = parser.parse_args()
    cases = {
        f"{tokens} {way}": lambda tokens=tokens, chunk_bytes=chunk_bytes: run_ranks(
            1, step_of_loss, tokens, chunk_bytes
        )[0]
        for tokens in options.tokens
        for way, chunk_bytes in WAYS.items()
        if way != "own" or fits(tokens)
    }
    measured = take_rounds(options, partial(take, cases))
    compared = [tokens for tokens in options.tokens if f"{tokens} own" in cases]
    ratios = {
        f"{tokens} chunked / own, {unit}": over(f"{tokens} chunked, {unit}", f"{tokens} own, {unit}")
        for tokens in compared
        for unit in ("MiB", "s", "loss")
    }
    medians = {
        key: spread([ratios[f"{COMPARED_TOKENS} chunked / own, {unit}"](taken) for taken in measured.ours]).median
        for key, unit in (("loss_memory_ratio", "MiB"), ("loss_time_ratio", "s"))
        if COMPARED_TOKENS in compared
    }
    report(measured, ratios, **medians)


if __name__ == "__main__":
    main()

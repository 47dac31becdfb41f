"""One document of 262144 tokens over four ranks, in stages: exact, and in how much memory.

Core attention alone, one head of 16 numbers in float32, K/V rows of 2 MiB at a time. O, dQ, dK and
dV of sampled rows are compared with float64, by the definition of attention; of dO every sixteenth
row is not zero, so that a reference can be had in some minutes. Memory is the most that a rank's
process held, above what it held before q, k, v and dO, beside the estimate of hf_distca.memory.

Run: python benchmarks/long_document.py [--tokens 262144]
"""

from dataclasses import replace

import torch
from harness import options_parser, print_json, run_ranks, table
from harness.one_document import OneDocument, reference, take_one_document

from hf_distca.memory.counted_step import count_core_attention
from hf_distca.predict.shapes import LLAMA_8B
from hf_distca.run import RunSpec

RANKS = 4
HEADS = 1
HEAD_DIM = 16
BUFFER_BYTES = 1 << 21
WITH_GRADIENT = 16
SAMPLES = 64


def estimated(case: OneDocument) -> list[float]:
    """Return the MiB that each rank takes, counted from the plan alone."""
    plan = case.plan()
    # Core attention alone is the same in every model.
    run = RunSpec(replace(case.settings, kernel="cpu"), LLAMA_8B)
    return [
        sum(count_core_attention(plan, case.kind, torch.float32, rank, run).values()) / 2**20
        for rank in range(case.ranks)
    ]


def main() -> None:
    tokens = options_parser(__doc__, tokens=(1 << 18, "of the document")).parse_args().tokens
    case = OneDocument(tokens, RANKS, HEADS, HEAD_DIM, BUFFER_BYTES, WITH_GRADIENT)
    draw = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    sampled = sorted(draw[:SAMPLES].tolist())
    found = run_ranks(RANKS, take_one_document, case, sampled)
    order = torch.cat([rank.rows for rank in found]).argsort()
    errors = {}
    for name, want_SHD in reference(case, sampled).items():
        got_SHD = torch.cat([rank.results[name] for rank in found])[order].double()
        errors[name] = ((got_SHD - want_SHD).norm() / want_SHD.norm()).item()
    peaks = [rank.peak_bytes / 2**20 for rank in found]
    estimates = estimated(case)
    table(
        ["result", "relative error of sampled rows"],
        [[name, f"{error:.1e}"] for name, error in errors.items()],
    )
    print()
    of_ranks = list(zip(peaks, estimates, strict=True))
    rows = [
        [str(rank), f"{peak:.0f}", f"{estimate:.0f}"]
        for rank, (peak, estimate) in enumerate(of_ranks)
    ]
    table(["rank", "peak, MiB", "estimated"], rows)
    print_json(
        tokens=tokens,
        sampled_rows=len(order),
        stages=found[0].stages,
        relative_errors=errors,
        peak_mib=peaks,
        estimated_mib=estimates,
        estimated_over_measured=[estimate / peak for peak, estimate in of_ranks],
    )


if __name__ == "__main__":
    main()

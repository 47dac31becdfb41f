"""One document of 262144 tokens over four ranks, in stages: exact, and in how much memory.

Core attention alone, one head of 16 numbers in float32, K/V rows of 2 MiB at a time. O, dQ, dK and dV of sampled rows
are compared with float64, by the definition of attention; of dO every sixteenth row is not zero, so that a reference
can be had in some minutes. Memory is the most that a rank's process held, above what it held before q, k, v and dO,
beside the estimate of hf_distca.memory.

With --table: what plans of one document of a million tokens and more take of Llama-3-8B in bfloat16, those of 32 ranks
also with nodes of 8 known; nothing is run.

Run: python benchmarks/long_document.py [--tokens 262144]
     python benchmarks/long_document.py --table
"""

import argparse
from dataclasses import replace

import torch
from harness import print_json, run_ranks, table
from harness.one_document import OneDocument, reference, take_one_document

from hf_distca.memory.live import fake_tensors
from hf_distca.memory.micro_batch import Use, count_core_attention
from hf_distca.memory.stand_ins import counted_kernel
from hf_distca.plan import AttentionKind
from hf_distca.planner.metrics import BETWEEN, bytes_by_link
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.nodes import node_sizes, nodes_of
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.stages import rows_by_stage

RANKS, HEADS, HEAD_DIM, BUFFER_BYTES, WITH_GRADIENT = 4, 1, 16, 1 << 21, 16
SAMPLES = 64
LONG = ((8, 1 << 20, 1), (32, 1 << 22, 1), (32, 1 << 22, 8))
"""Ranks, tokens and ranks of a node that plans of the table know of."""
RANKS_PER_NODE = 8
"""By which bytes between nodes are counted for all of them."""


def run(tokens: int) -> None:
    """Run the document, compare with float64, print tables and one JSON object."""
    case = OneDocument(tokens, RANKS, HEADS, HEAD_DIM, BUFFER_BYTES, WITH_GRADIENT)
    draw = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    sampled = sorted(draw[:SAMPLES].tolist())
    found = run_ranks(RANKS, take_one_document, case, sampled)
    order = torch.cat([rank.rows for rank in found]).argsort()
    errors = {}
    for name, want_SHD in reference(case, sampled).items():
        got_SHD = torch.cat([rank.results[name] for rank in found])[order].double()
        errors[name] = ((got_SHD - want_SHD).norm() / want_SHD.norm()).item()
    peaks, estimates = [rank.peak_bytes / 2**20 for rank in found], estimated(case)
    table(["result", "relative error of sampled rows"], [[name, f"{error:.1e}"] for name, error in errors.items()])
    print()
    of_ranks = list(zip(peaks, estimates, strict=True))
    rows = [[str(rank), f"{peak:.0f}", f"{told:.0f}"] for rank, (peak, told) in enumerate(of_ranks)]
    table(["rank", "peak, MiB", "estimated"], rows)
    print_json(
        tokens=tokens,
        sampled_rows=len(order),
        stages=found[0].stages,
        relative_errors=errors,
        peak_mib=peaks,
        estimated_mib=estimates,
        estimated_over_measured=[told / peak for peak, told in of_ranks],
    )


def estimated(case: OneDocument) -> list[float]:
    """MiB that each rank takes, told from the plan alone."""
    plan, mode, use = case.plan(), fake_tensors(), Use(counted_kernel("cpu"))
    return [
        sum(count_core_attention(plan, case.kind, torch.float32, rank, use, mode).values()) / 2**20
        for rank in range(case.ranks)
    ]


def show_table() -> None:
    """Print what long documents' plans take, and one JSON object."""
    kind, found = AttentionKind(), []
    for ranks, tokens, ranks_per_node in LONG:
        settings = PlanSettings(ranks, tokens // ranks, ranks_per_node=ranks_per_node)
        (nano,) = plan_micro_batch([tokens], settings).nano_batches
        plan = nano.plans[kind]
        row_bytes = settings.row_bytes(kind)
        rows = rows_by_stage(plan)
        moved = bytes_by_link(plan, row_bytes, nodes_of(node_sizes(ranks, RANKS_PER_NODE)))
        found.append(
            {
                "ranks": ranks,
                "tokens": tokens,
                "ranks_per_node": ranks_per_node,
                "stages": len(rows),
                "stage_mib": int(rows.max()) * row_bytes.kv / 2**20,
                "one_stage_mib": int(rows_by_stage(replace(plan, stage_rows=None)).max()) * row_bytes.kv / 2**20,
                "layer_forward_gb_busiest_rank": int(moved.sum(axis=0).max()) / 1e9,
                "layer_forward_gb_between_nodes_busiest_rank": int(moved[BETWEEN].max()) / 1e9,
                "layer_forward_gb_all_ranks": int(moved[:, 0].sum()) / 1e9,
                "layer_forward_gb_between_nodes": int(moved[BETWEEN, 0].sum()) / 1e9,
            }
        )
    table(list(found[0]), [[f"{value:.4g}" for value in row.values()] for row in found])
    print_json(long_documents=found)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 18, help="of the document (default: 262144)")
    parser.add_argument("--table", action="store_true", help="show what plans of long documents take")
    options = parser.parse_args()
    show_table() if options.table else run(options.tokens)


if __name__ == "__main__":
    main()

"""Steps of Qwen3-Next on 8 and 64 H100, simulated: whole documents beside documents that span
ranks.

    PYTHONPATH=. python benchmarks/hybrid_steps.py [--batches 8]

The model has the sizes of transformers' default config, Qwen3-Next 80B-A3B: 12 layers with
attention, 36 with a gated delta rule. A rank has 32,768 tokens. Strategies:

  whole     documents balanced over ranks by their cost; a document that no rank can hold is cut,
            and loses context
  fixed     documents are packed in order and may span ranks
  chosen    the fastest plan for each micro-batch, as training chooses
"""

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from harness import options_parser, print_json, print_rows
from harness.simulated import simulated_run
from transformers import Qwen3NextConfig

from hf_distca.models.fake import model_of_config
from hf_distca.models.shape import model_shape
from hf_distca.plan.arrays import IntArray
from hf_distca.run import RunSpec
from hf_distca.sim.lengths import corpora, cut_at, micro_batches
from hf_distca.sim.strategies import StepTime, planned, whole_documents

TOKENS_PER_RANK = 32768
RANKS = (8, 64)
LONGEST = (32768, 131072)


def steps(every: list[IntArray], run: RunSpec, strategy: str) -> list[StepTime]:
    if strategy == "whole":
        return [whole_documents(lengths, run) for lengths in every]
    if strategy == "fixed":
        run = replace(run, plans=replace(run.plans, document_layout="fixed", costs=None))
    return [planned(lengths, run)[0] for lengths in every]


def main() -> None:
    count = (
        options_parser(__doc__, batches=(8, "micro-batches of each setting")).parse_args().batches
    )
    shape = model_shape(model_of_config(Qwen3NextConfig(), torch.bfloat16))
    found: list[dict[str, Any]] = []
    for corpus in ("wlbllm", "prolong"):
        for longest in LONGEST:
            for ranks in RANKS:
                run = simulated_run(shape, ranks, TOKENS_PER_RANK, 8)
                drawn = micro_batches(
                    cut_at(corpora()[corpus], longest), ranks * TOKENS_PER_RANK, seed=0
                )
                every = list(islice(drawn, count))
                whole = None
                for strategy in ("whole", "fixed", "chosen"):
                    taken = steps(every, run, strategy)
                    seconds = float(np.mean([step.seconds for step in taken]))
                    whole = whole or seconds
                    found.append(
                        {
                            "documents": corpus,
                            "longest": longest,
                            "ranks": ranks,
                            "strategy": strategy,
                            "seconds": seconds,
                            "over_whole": whole / seconds,
                            "attention": float(np.mean([step.attention.max() for step in taken])),
                            "mixing": float(np.mean([step.mixing.max() for step in taken])),
                            "waits": float(np.mean([step.waited.max() for step in taken])),
                            "runs": float(np.mean([step.mixing_runs for step in taken])),
                            "states_mb": float(np.mean([step.mixing_bytes for step in taken]))
                            / 1e6,
                            "documents_cut": sum(step.documents_cut for step in taken)
                            / sum(map(len, every)),
                        }
                    )
    print_rows(found)
    print_json(batches=count, settings=found)


if __name__ == "__main__":
    main()

"""The settings of the DistCA paper's tables, simulated: the best of all DP × CP mixes over
hf_distca's step.

    PYTHONPATH=. python benchmarks/paper_tables.py [--batches 8]

8B and 34B models, tensor parallelism of 8 inside a node, so that a rank is a node of 8 H100; as
many tokens a GPU as the paper has. Gradient synchronisation, the optimizer and pipeline parallelism
are not simulated. The paper names ranges of speed-ups over all of its settings, on H200.
"""

from collections.abc import Iterator

from harness import options_parser, print_json, print_rows
from harness.simulated import simulated_run

from hf_distca.predict.shapes import LLAMA_8B, LLAMA_34B
from hf_distca.sim.compare import simulate
from hf_distca.sim.lengths import corpora, cut_at, micro_batches
from hf_distca.sim.strategies import WHOLE

MODELS = {"8B": LLAMA_8B, "34B": LLAMA_34B}
TENSOR_PARALLEL = 8
TOKENS_PER_RANK = 131072
"""8 sequences of 128K, 4 of 256K or 2 of 512K tokens on 64 GPUs."""
LONGEST = {"128K": 131072, "256K": 262144, "512K": 524288}
GPUS = (64, 128, 256, 512)
PUBLISHED = {
    ("8B", "wlbllm"): "1.07–1.20 (3D), 1.10–1.35 (4D)",
    ("8B", "prolong"): "1.05–1.12 (3D)",
    ("34B", "wlbllm"): "up to 1.15–1.25 (4D)",
}
"""Gains on the pretraining mix and on ProLong, as the paper's text has them."""


def settings() -> Iterator[tuple[str, str, str, int]]:
    """Model, documents, longest document and GPUs."""
    for model, corpus in PUBLISHED:
        for longest in LONGEST:
            for gpus in GPUS:
                yield model, corpus, longest, gpus


def main() -> None:
    count = (
        options_parser(__doc__, batches=(8, "micro-batches of each setting")).parse_args().batches
    )
    found = []
    for model, corpus, longest, gpus in settings():
        ranks = gpus // TENSOR_PARALLEL
        run = simulated_run(MODELS[model], ranks, TOKENS_PER_RANK, tensor_parallel=TENSOR_PARALLEL)
        drawn = micro_batches(
            cut_at(corpora()[corpus], LONGEST[longest]), ranks * TOKENS_PER_RANK, seed=0
        )
        result = simulate(drawn, run, count)
        seconds = {strategy.name: strategy.step_seconds for strategy in result.strategies}
        # As in the paper: data and context parallelism, and no document loses context.
        baseline = min(
            (
                strategy
                for strategy in result.strategies
                if strategy.name == WHOLE or strategy.name.startswith("context parallel")
            ),
            key=lambda strategy: (strategy.documents_cut, strategy.step_seconds),
        )
        found.append(
            {
                "model": model,
                "documents": corpus,
                "longest": longest,
                "gpus": gpus,
                "baseline": baseline.name,
                "speed_up": baseline.step_seconds / seconds[result.best_planned],
                "fixed_speed_up": baseline.step_seconds / seconds["hf_distca, fixed"],
                "published": PUBLISHED[model, corpus],
            }
        )
    print_rows(found)
    print_json(batches=count, settings=found)


if __name__ == "__main__":
    main()

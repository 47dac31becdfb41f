"""Curves of training loss over a thousand steps, both ways, on text that every machine has.

Documents are the topics of Python's manual and the docstrings and sources of its standard library,
byte by byte; the longest are longer than a rank holds. Both ways get the same documents in every
step. `harness/both_ways.py` says what the ways are: transformers' Trainer under DDP, and
DistCATrainer under FSDP2 with cut documents, two nano-batches and activation checkpoints, both in
bfloat16 under autocast. Each of three seeds gives other weights, the same for both ways.

The difference of the two curves of a seed is compared with the difference of the curves of two
seeds of one way.

Run: OMP_NUM_THREADS=1 python benchmarks/convergence.py [--steps 1000] [--seeds 3]
    [--picture docs/evidence/convergence.svg]
"""

import sysconfig
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from random import Random

import numpy as np
from harness import options_parser, print_json, print_rows
from harness.both_ways import PLANNED, STOCK, WAYS, Document, Step, Training, train
from harness.curves import curves_picture, distances, smoothed

TOKENS_PER_RANK = 1024
RANKS = 2
END = 0
"""Byte that ends a document."""
VOCABULARY = 256
SHORTEST = 32
SMOOTHED_OVER = 25
"""Steps over which a curve is averaged for the picture."""
LAST = 100
"""Steps at the end whose mean loss is compared."""


def texts() -> list[bytes]:
    """Documents of the machine's own Python, in an order that is the same everywhere."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [
        path
        for path in (*root.glob("*.py"), *root.glob("*/*.py"))
        if "-packages" not in str(path.relative_to(root))
    ]
    found = [text.encode() for text in topics.values()]
    found += [path.read_bytes() for path in sorted(sources)]
    found = [text for text in found if len(text) >= SHORTEST]
    Random(0).shuffle(found)
    return found


def steps_of(documents: list[bytes], count: int) -> list[Step]:
    """Return the documents of each step: as many as fit into all ranks, the last one cut short."""
    lengths = Random(1)
    capacity = RANKS * TOKENS_PER_RANK
    steps: list[Step] = []
    step: Step = []
    room = capacity
    at = 0
    while len(steps) < count:
        text = documents[at % len(documents)]
        at += 1
        # A part of it, whose length has a long tail.
        length = min(int(lengths.lognormvariate(5.5, 1.0)) + SHORTEST, len(text), room - 1)
        begin = lengths.randrange(len(text) - length + 1)
        tokens = [*text[begin : begin + length], END]
        step.append(Document(tokens, tokens))
        room -= len(tokens)
        if room < SHORTEST:
            steps.append(step)
            step, room = [], capacity
    return steps


def main() -> None:
    parser = options_parser(
        __doc__, steps=(1000, "optimizer steps of a training"), seeds=(3, "seeds of the weights")
    )
    parser.add_argument("--picture", type=Path, help="file for the picture of the curves")
    options = parser.parse_args()
    steps = steps_of(texts(), options.steps)
    curves: dict[str, list[np.ndarray]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for way in WAYS:
                training = Training(VOCABULARY, seed, TOKENS_PER_RANK)
                losses = train(way, steps, training, Path(folder) / f"{way}{seed}")
                curves[way].append(np.array(losses))
                print(f"{way}, seed {seed}: {np.mean(losses[-LAST:]):.4f}", flush=True)

    of_ways, of_seeds = distances(curves)
    ends = {way: [float(np.mean(curve[-LAST:])) for curve in curves[way]] for way in WAYS}
    compared = {"both ways, one seed": of_ways, "one way, two seeds": of_seeds}
    print_rows(
        [
            {"mean difference of losses": name, "median": float(np.median(each)), "most": max(each)}
            for name, each in compared.items()
        ]
    )
    if options.picture:
        title = "Training loss of both ways, three seeds: the curves of a seed lie on each other"
        options.picture.write_text(curves_picture(title, curves, SMOOTHED_OVER))
    print_json(
        steps=options.steps,
        tokens_per_step=RANKS * TOKENS_PER_RANK,
        documents_per_step=float(np.mean([len(step) for step in steps])),
        # Rounding alone, if both ways get the same documents and weights.
        difference_of_first_losses=[
            abs(float(stock[0] - planned[0]))
            for stock, planned in zip(curves[STOCK], curves[PLANNED], strict=True)
        ],
        difference_of_ways=of_ways,
        difference_of_seeds=of_seeds,
        last_losses=ends,
        curves={
            way: [smoothed(curve, SMOOTHED_OVER).tolist() for curve in curves[way]] for way in WAYS
        },
    )


if __name__ == "__main__":
    main()

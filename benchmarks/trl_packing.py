"""TRL's own rows beside plain packing of the simulator: tokens per second on 8 and 64 H100.

`trl.pack_dataset` packs documents of five kinds into rows of 32768 tokens, with the strategy
"bfd_split": a longer document is split. Every rank takes a row at random, as a trainer that
shuffles does, and a step takes as long as its slowest row. Plain packing of the simulator gives the
ranks of a step the documents of one micro-batch in rows of about equally many tokens. Both rows
hold documents of the same kind, but not the same documents.

Run: PYTHONPATH=. python benchmarks/trl_packing.py [--batches 200]
"""

from itertools import islice

import numpy as np
import pyarrow as pa
from datasets import Dataset, disable_progress_bars
from harness import options_parser, print_json, print_rows
from harness.simulated import simulated_run
from trl import pack_dataset
from typical_data import RANKS, RANKS_PER_NODE, TOKENS_PER_RANK, data

from hf_distca.plan.arrays import IntArray
from hf_distca.predict.shapes import LLAMA_8B
from hf_distca.sim.lengths import micro_batches
from hf_distca.sim.strategies import on_ranks, plain

TOKENS = 30_000_000
"""Tokens of the documents that TRL packs, of each kind."""


def rows_of_trl(lengths: IntArray, tokens: int) -> list[list[int]]:
    """Lengths of the documents in each row of `tokens` tokens."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    documents = pa.LargeListArray.from_arrays(offsets, pa.array(np.zeros(offsets[-1], np.int8)))
    packed = pack_dataset(Dataset(pa.table({"input_ids": documents})), tokens, strategy="bfd_split")
    return [list(row) for row in packed.with_format(None)["seq_lengths"]]


def main() -> None:
    count = options_parser(__doc__, batches=(200, "steps of each setting")).parse_args().batches
    disable_progress_bars()
    found = []
    for name, draw in data():
        documents = draw(np.random.default_rng(1), TOKENS // 500)
        documents = documents[: np.searchsorted(np.cumsum(documents), TOKENS)]
        rows = rows_of_trl(documents, TOKENS_PER_RANK)
        tokens = np.array(list(map(sum, rows)))
        for ranks in RANKS:
            run = simulated_run(LLAMA_8B, ranks, TOKENS_PER_RANK, RANKS_PER_NODE)
            # 1. Rows of TRL, drawn at random.
            seconds = np.array([on_ranks([row], run).seconds for row in rows])
            random = np.random.default_rng(0)
            steps = [random.choice(len(rows), ranks, replace=False) for _ in range(count)]
            trl = sum(tokens[step].sum() for step in steps) / sum(
                seconds[step].max() for step in steps
            )
            # 2. Plain packing of the simulator.
            batches = list(islice(micro_batches(draw, ranks * TOKENS_PER_RANK, seed=0), count))
            packed = sum(int(lengths.sum()) for lengths in batches) / sum(
                plain(lengths, run).seconds for lengths in batches
            )
            found.append(
                {
                    "documents": name,
                    "ranks": ranks,
                    "rows": len(rows),
                    "filled": float(tokens.mean() / TOKENS_PER_RANK),
                    "trl_tokens_per_second": float(trl),
                    "plain_tokens_per_second": float(packed),
                    "plain_over_trl": float(packed / trl),
                }
            )
    print_rows(found)
    print_json(batches=count, settings=found)


if __name__ == "__main__":
    main()

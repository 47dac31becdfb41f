"""Targets of the busiest rank where documents share rows: the head computes each target of a row.

Documents are the turns of agents' sessions, each with all turns before it. `GlobalBatchSampler`
draws micro-batches as in training. Three kinds of tokens are targets:

  answers     the last third of the turn that ends a document
  turns       all tokens of that turn
  all tokens  all tokens of a document, so that a row has a target for each document that shares it

Sessions have as many turns as in `hf_distca.sim.trees`, or four. Targets are counted for each row
that a rank may hold, `tokens_per_rank`.

Run: python benchmarks/targets.py [--ranks 8] [--sessions 300] [--batches 12]
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from harness import print_json
from numpy.typing import NDArray

from hf_distca import PlanSettings
from hf_distca.collator.dataset_prefixes import BLOCK_HASH, DatasetPrefixes
from hf_distca.collator.sampler import GlobalBatchSampler, GlobalMicroBatch, fit_documents
from hf_distca.planner.prefixes import BLOCK, SequencePaths
from hf_distca.planner.sequences import on_rank, plan_sequences
from hf_distca.sim.lengths import corpora
from hf_distca.sim.trees import TURNS

TOKENS = 32768
"""Tokens of a rank."""
KINDS = ("answers", "turns", "all tokens")
FEW_TURNS = 4


@dataclass(frozen=True)
class Documents:
    """Turns of sessions.

    Attributes:
        lengths: [documents] tokens of each.
        targets: [documents, 2] rows [first, stop) of each that have a target.
    """

    lengths: NDArray[np.int64]
    targets: NDArray[np.int64]
    prefixes: DatasetPrefixes

    @classmethod
    def drawn(cls, kind: str, sessions: int, turns: int) -> "Documents":
        """Draw sessions, whose turns have equal lengths."""
        tokens = corpora()["agents"](np.random.default_rng(0), sessions)
        return cls.of(kind, tokens[:, None] * np.arange(1, turns + 1) // turns)

    @classmethod
    def of(cls, kind: str, stops: NDArray[np.int64]) -> "Documents":
        """Return documents with targets of a kind.

        Args:
            stops: [sessions, turns] tokens up to the end of each turn.
        """
        turns = stops.shape[1]
        lengths = stops.flatten()
        added = np.diff(stops, prepend=0).flatten()
        own = {"answers": added // 3, "turns": added, "all tokens": lengths}[kind]
        # The row before a token predicts the token.
        targets = np.stack([np.maximum(lengths - own - 1, 0), lengths - 1], 1)
        hashes = []
        counts = []
        for document, (length, (first, stop)) in enumerate(zip(lengths, targets, strict=True)):
            hashes.append(block_hashes(document // turns, int(length)))
            edges = np.append(np.arange(0, length, BLOCK), length).clip(first, stop)
            counts.append(np.diff(edges).astype(np.uint8))
        found = DatasetPrefixes.of(
            lengths,
            np.arange(len(lengths)),
            np.concatenate(hashes).tobytes(),
            np.concatenate(counts).tobytes(),
        )
        assert found is not None
        return cls(lengths, targets, found)


def block_hashes(session: int, length: int) -> NDArray[np.void]:
    """Return a hash for each block of a session's first tokens; a short block has its own."""
    hashes = np.zeros(-(-length // BLOCK), BLOCK_HASH)
    hashes["low"] = np.arange(len(hashes))
    hashes["high"] = session
    if length % BLOCK:
        hashes["low"][-1] = 2**32 + length
    return hashes


def targets_of_ranks(
    documents: Documents, batch: GlobalMicroBatch, settings: PlanSettings
) -> list[int]:
    """Return the targets that the head of each rank computes."""
    spans = batch.spans
    lengths = spans["stop"] - spans["start"]
    assert batch.trees is not None
    most_rows = settings.ranks * settings.rows_per_rank
    paths = documents.prefixes.paths(spans, batch.trees, most_rows, joins=True)
    paths = paths or SequencePaths.unshared(lengths)
    tokens = plan_sequences(paths, lengths, settings).sequence_tokens
    counts = []
    for rank in range(settings.ranks):
        entries = on_rank(tokens, rank)
        first, stop = documents.targets[spans["document"][entries["sequence"]]].T
        counted = np.minimum(entries["stop"], stop) - np.maximum(entries["start"], first)
        counts.append(int(counted.clip(0).sum()))
    return counts


def shares_of_busiest(documents: Documents, ranks: int, batches: int) -> Iterator[float]:
    """Yield the targets of the busiest rank, over the rows of a rank, of each micro-batch."""
    settings = PlanSettings(ranks, TOKENS)
    capacity = ranks * TOKENS
    spans = fit_documents(documents.lengths, capacity, "truncate", "all ranks")
    sampler = GlobalBatchSampler(spans, capacity, prefixes=documents.prefixes)
    for (batch,) in islice(sampler, batches):
        yield max(targets_of_ranks(documents, batch, settings)) / TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=300)
    parser.add_argument("--batches", type=int, default=12)
    options = parser.parse_args()
    counts = {}
    for turns in (FEW_TURNS, TURNS):
        for kind in KINDS:
            documents = Documents.drawn(kind, options.sessions, turns)
            shares = list(shares_of_busiest(documents, options.ranks, options.batches))
            counts[f"{kind}, {turns} turns"] = {
                "median": float(np.median(shares)),
                "most": max(shares),
            }
            print(kind, turns, len(shares), counts[f"{kind}, {turns} turns"])
    print_json(counts=counts)


if __name__ == "__main__":
    main()

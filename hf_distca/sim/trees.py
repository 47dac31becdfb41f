"""Sequences with equal prefixes: turns of agents' sessions, each with all turns before it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from hf_distca.plan.arrays import IntArray
from hf_distca.planner import prefixes
from hf_distca.planner.prefixes import Hashes
from hf_distca.sim.lengths import Draw, corpora

TURNS = 41
"""Turns of a session: the mean on the card of
huggingface.co/datasets/thoughtworks/agentic-coding-trajectories, 618,000 turns of 15,000 sessions.
The distribution is not published. All sessions are taken to have so many turns of equal length."""


@dataclass(frozen=True)
class DrawnBatch:
    """Sequences in the batches of all ranks."""

    lengths: list[list[int]]  # [ranks][sequences]
    hashes: list[list[Hashes]] | None = None  # of each sequence; None without prefix sharing


def turns(random: np.random.Generator) -> Iterator[tuple[int, Hashes]]:
    """Yield the length and the hashes of turn after turn of session after session, without end.

    A sequence is a turn with the session up to it.
    """
    draw_sessions = corpora()["agents"]
    session = 0
    while True:
        session_length = int(draw_sessions(random, 1)[0])
        for turn in range(1, TURNS + 1):
            length = session_length * turn // TURNS
            yield length, _hashes(session, length)
        session += 1


def _hashes(session: int, length: int) -> Hashes:
    """Return the hashes of the blocks of a session's first tokens, which stand for the tokens."""
    blocks, remainder = divmod(length, prefixes.BLOCK)
    whole_blocks = tuple(b"%d %d" % (session, block) for block in range(blocks))
    return (
        (*whole_blocks, b"%d %d %d" % (session, blocks, remainder)) if remainder else whole_blocks
    )


def turn_lengths() -> Draw:
    """Return a draw of the lengths of sequences, for figures without prefix sharing."""

    def draw(random: np.random.Generator, count: int) -> IntArray:
        return np.array([length for length, _ in islice(turns(random), count)], np.int64)

    return draw


def turns_of_ranks(seed: int, ranks: int, sequences: int) -> Iterator[DrawnBatch]:
    """Yield batches of so many sequences on each rank, which follow each other as in the data."""
    drawn = turns(np.random.default_rng(seed))
    while True:
        draws_of_ranks = [list(islice(drawn, sequences)) for _ in range(ranks)]
        lengths_of_ranks = []
        hashes_of_ranks = []
        for draws in draws_of_ranks:
            lengths, hashes = zip(*draws, strict=True)
            lengths_of_ranks.append(list(lengths))
            hashes_of_ranks.append(list(hashes))
        yield DrawnBatch(lengths_of_ranks, hashes_of_ranks)

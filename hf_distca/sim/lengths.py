"""Document lengths for a simulation, drawn from a data set or from a distribution."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from hf_distca.plan.arrays import IntArray

Draw = Callable[[np.random.Generator, int], IntArray]
"""Function that draws a number of lengths."""

CORPORA = Path(__file__).parent / "document_lengths.json"
"""Histograms of the document lengths of public data sets; `source` names their publications."""
LONGEST_MEDIAN = 1e9
WIDEST = 3.0
"""Limits of lognormal lengths; beyond them documents are longer than any text, and 64 bits
overflow."""


def of_documents(lengths: IntArray) -> Draw:
    """Return a draw from a data set's own lengths, each equally likely."""
    return lambda random, count: random.choice(lengths, count)


def of_histogram(edges: IntArray, counts: IntArray) -> Draw:
    """Return a draw from [bins] counts between [bins + 1] edges.

    Within a bin the logarithm of a length is uniform.
    """

    def draw(random: np.random.Generator, count: int) -> IntArray:
        which = random.choice(len(counts), count, p=counts / counts.sum())
        low = np.log(edges[which])
        high = np.log(edges[which + 1])
        return np.exp(low + (high - low) * random.random(count)).astype(np.int64)

    return draw


def lognormal(median: float, sigma: float) -> Draw:
    """Return a draw of lengths whose logarithms are normally distributed.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 1 <= median <= LONGEST_MEDIAN:
        raise ValueError(
            f"the median must be from 1 to {LONGEST_MEDIAN:.0f} tokens, got {median:g}"
        )
    if not 0 < sigma <= WIDEST:
        raise ValueError(f"sigma must be above 0 and at most {WIDEST:g}, got {sigma:g}")
    return lambda random, count: np.maximum(
        random.lognormal(np.log(median), sigma, count), 1
    ).astype(np.int64)


def cut_at(draw: Draw, longest: int) -> Draw:
    """Return a draw of the same lengths cut to a context of `longest` tokens."""
    return lambda random, count: np.minimum(draw(random, count), longest)


def micro_batches(
    draw: Draw,
    tokens: int,
    seed: int,
    first: IntArray | None = None,
    *,
    cut: bool = True,
    lengths: IntArray | None = None,
) -> Iterator[IntArray]:
    """Yield global micro-batches without end.

    Documents are drawn one after another as long as they fit.

    Args:
        tokens: the most tokens of a micro-batch, on all ranks together; a longer document is cut to
            these.
        first: lengths of documents that each micro-batch begins with, such as one long one.
        cut: whether lengths are those of cut documents; else a longer document comes alone, with
            its own length.
        lengths: of documents by number, where `draw` gives their numbers: numbers are yielded.
    """
    random = np.random.default_rng(seed)
    begin = np.zeros(0, np.int64) if first is None else first
    waiting = np.zeros(0, np.int64)

    def sizes() -> IntArray:
        """Return the tokens that waiting documents take."""
        return np.minimum(waiting if lengths is None else lengths[waiting], tokens)

    while True:
        # Draw until the documents cannot all fit.
        while sizes().sum() <= tokens:
            drawn = draw(random, 256)
            waiting = np.append(waiting, np.maximum(drawn, 1) if lengths is None else drawn)
        fits = int(np.searchsorted(np.cumsum(sizes()), tokens - begin.sum(), side="right"))
        yield np.append(begin, (sizes() if cut else waiting)[:fits])
        waiting = waiting[fits:]


def corpora() -> dict[str, Draw]:
    """Return the distributions of public data sets that come with the package, by name."""
    content = json.loads(CORPORA.read_text(encoding="utf-8"))
    return {
        name: of_histogram(np.array(corpus["edges"]), np.array(corpus["counts"]))
        for name, corpus in content.items()
    }


def histogram(lengths: IntArray) -> list[dict[str, float]]:
    """Count documents by length, between powers of two.

    Bins reach from the shortest to the longest document. Those between may be empty.

    Args:
        lengths: [documents] of at least one token each.

    Returns:
        Of each bin its shortest and longest length in tokens, its documents and tokens, and its
        share of both.
    """
    power = np.frexp(lengths)[1] - 1  # 2 ** power <= length < 2 ** (power + 1)
    documents = np.bincount(power)
    tokens = np.bincount(power, weights=lengths)
    return [
        {
            "shortest": 2**index,
            "longest": 2 ** (index + 1) - 1,
            "documents": int(documents[index]),
            "tokens": int(tokens[index]),
            "document_share": float(documents[index] / documents.sum()),
            "token_share": float(tokens[index] / tokens.sum()),
        }
        for index in range(int(power.min()), len(documents))
    ]

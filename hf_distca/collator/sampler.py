"""Draw global micro-batches: documents that are trained on together, the same on every rank."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from torch.utils.data import Sampler

from hf_distca.batches.limits import NO_LIMITS, Limits
from hf_distca.checks.capacity_rules import A_RANK, Capacity
from hf_distca.collator.dataset_prefixes import DatasetPrefixes
from hf_distca.collator.documents import A_DATASET
from hf_distca.plan.arrays import IntArray, Table
from hf_distca.plan.intervals import expand
from hf_distca.planner.bin_packing import (
    fits_evenly,
    largest_first,
    pack_in_order,
    place_evenly,
    place_tightly,
)
from hf_distca.predict.seconds import StepCosts

SPAN = np.dtype([(name, np.int64) for name in ("document", "start", "stop", "end")])
"""Tokens [start, stop) of a document that go into one micro-batch. `document` is an index into the
data set. Tokens before `end` may be targets."""
CLASSES_PER_OCTAVE = (1, 4, 16)
"""Length classes per doubling of length, coarsest (most random) first, for placing documents."""
SPARE_BATCHES = 200
"""Micro-batches for each spare one, which leaves room for random placement: 0.5 % at most."""


def fit_documents(
    lengths: IntArray,
    limit: int,
    policy: str,
    limit_name: str,
    *,
    name: str = A_DATASET,
    limits: Limits = NO_LIMITS,
) -> Table:
    """Return [spans] of documents by the policy for long documents, in the order of the data set.

    A document within the limit becomes one span. "truncate" keeps the first tokens. "split" cuts
    a document into spans, which do not attend to each other; the last row of a span still
    predicts the first token of the next one.

    Args:
        lengths: [documents] int64 tokens of each document.
        limit: maximum number of tokens of a span; messages call it `limit_name`.
        name: name of the data set in messages.
        limits: limits of the model, whose positions no span exceeds.
    """
    longest = int(np.argmax(lengths)) if len(lengths) else None
    if longest is not None and policy == "error":
        limits.check_length(int(lengths[longest]), f"document {longest} of {name}")
    if limits.positions is not None and limits.positions < limit:
        limit = limits.positions
        limit_name = "the positions of the model"
    too_long = lengths[lengths > limit]
    if len(too_long) and policy == "error":
        refusal = Capacity.LONG_WHOLE if limit_name == A_RANK else Capacity.LONG
        raise refusal.error(
            name=name,
            limit_name=limit_name,
            limit=limit,
            count=len(too_long),
            documents=len(lengths),
            longest=longest,
            length=lengths[longest],
        )
    if policy == "truncate":
        lengths = np.minimum(lengths, limit)
    counts = -(-lengths // limit)
    spans = np.empty(int(counts.sum()), SPAN)
    spans["document"] = np.repeat(np.arange(len(lengths)), counts)
    # The number of each span in its document, from 0 on.
    first_spans = np.cumsum(counts) - counts
    number_in_document = np.arange(len(spans)) - np.repeat(first_spans, counts)
    spans["end"] = np.repeat(lengths, counts)
    spans["start"] = number_in_document * limit
    spans["stop"] = np.minimum(spans["start"] + limit, spans["end"])
    return spans


@dataclass(frozen=True, eq=False)
class GlobalMicroBatch:
    """Spans of documents that all ranks train on in one forward and backward pass."""

    spans: Table  # [spans] of dtype SPAN
    # Costs by which the planner chooses; None for the costs in the reader's settings.
    costs: StepCosts | None = None
    # [spans] prefix tree of each; spans of a tree may share rows. None: no prefix sharing.
    trees: IntArray | None = None


class GlobalBatchSampler(Sampler[list[GlobalMicroBatch]]):
    """Sampler of the documents that all ranks train on together.

    It is the `batch_sampler` of a `DataLoader`.
    Every rank iterates over all micro-batches, so the loader must not be sharded again (accelerate:
    `num_processes=1`). The data set, such as `RankDocuments`, takes each `GlobalMicroBatch` as its
    index. There is no `batch_size`, because the number of documents varies.

    Every span, a whole document or a part of a long one, comes once per epoch. With `shuffle`,
    micro-batches are drawn anew in each epoch, with about the same number of tokens and a similar
    mix of long and short documents. Without `shuffle`, documents come in the order of the data set
    and the last micro-batch may be smaller.

    Documents with equal prefixes form prefix trees, whose shared rows count once. With `shuffle` a
    tree comes in one micro-batch. Without `shuffle` the documents of a micro-batch are the same as
    without prefix sharing.

    Args:
        spans: [spans] of dtype SPAN, from `fit_documents`.
        capacity: Maximum number of tokens of a bin: what all ranks hold, or what a rank holds
            with one bin per rank.
        shuffle: Whether to draw new micro-batches in each epoch.
        seed: Seed of the order, together with the epoch.
        bins: Number of bins of a micro-batch, whose documents come bin after bin. No document is in
            two bins.
        costs: Function that returns the costs by which the next micro-batch is planned, with
            which they travel.
        prefixes: Equal prefixes of documents; None without prefix sharing.

    Raises:
        ValueError: There is no span, or one is longer than the capacity.
    """

    def __init__(
        self,
        spans: Table,
        capacity: int,
        shuffle: bool = True,
        seed: int = 0,
        *,
        bins: int = 1,
        costs: Callable[[], StepCosts | None] = lambda: None,
        prefixes: DatasetPrefixes | None = None,
    ):
        lengths: IntArray = spans["stop"] - spans["start"]
        if len(spans) == 0 or lengths.max() > capacity:
            raise Capacity.NOT_FITTED.error(
                documents=len(spans), longest=lengths.max(initial=0), capacity=capacity
            )
        self.spans = spans
        self.capacity = capacity
        self.bins = bins
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._costs = costs
        self._prefixes = prefixes
        # A prefix tree is drawn as a whole: the rows of each tree, and the tree of each span.
        self._lengths = lengths
        self._trees: IntArray | None = None  # each span is a tree of its own
        if not shuffle:
            numbered = zip(lengths.tolist(), range(len(spans)), strict=True)
            filled_bins = list(pack_in_order(numbered, capacity))
            first_bins = range(0, len(filled_bins), bins)
            self._in_order = [
                list(chain(*filled_bins[first : first + bins])) for first in first_bins
            ]
            self._batches = len(self._in_order)
            return
        if prefixes is not None:
            self._trees, lengths = prefixes.trees(spans, capacity)
            self._lengths = lengths
        # Micro-batches are nearly full, with room for every random placement.
        longest_first = largest_first(lengths)
        fewest = -(-int(lengths.sum()) // (capacity * bins))
        self._batches = min(fewest + fewest // SPARE_BATCHES, len(lengths))
        if not fits_evenly(lengths, longest_first, self._batches * bins, capacity):
            # Few documents per bin: even filling leaves no room for the last ones.
            last_bin = int(place_tightly(lengths, longest_first, capacity).max())
            self._batches = last_bin // bins + 1

    def __len__(self) -> int:
        return self._batches

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    @property
    def sampler(self) -> "GlobalBatchSampler":
        """Itself, since accelerate forwards `set_epoch` of a resumed loader to this attribute."""
        return self

    def __iter__(self) -> Iterator[list[GlobalMicroBatch]]:
        for batch in self._batches_in_order():
            spans = self.spans[batch]
            yield [GlobalMicroBatch(spans, self._costs(), self._trees_in(batch))]

    def spans_in_order(self) -> Iterator[Table]:
        """Yield the spans of each micro-batch of this epoch."""
        for batch in self._batches_in_order():
            yield self.spans[batch]

    def _batches_in_order(self) -> Iterator[IntArray | list[int]]:
        """Yield the indices of each micro-batch's spans."""
        if not self.shuffle:
            yield from self._in_order
            return
        if self._trees is None:
            yield from self._shuffled()
            return
        order = np.argsort(self._trees, kind="stable")
        counts = np.bincount(self._trees)
        firsts = np.cumsum(counts) - counts
        for trees in self._shuffled():
            yield order[expand(firsts[trees], counts[trees])]

    def _trees_in(self, batch: IntArray | list[int]) -> IntArray | None:
        """Return the prefix trees of a micro-batch's spans."""
        if self._prefixes is None:
            return None
        if self._trees is not None:
            return self._trees[batch]
        if self.bins > 1:  # a tree may have spans of several bins
            return None
        trees, _ = self._prefixes.trees(self.spans[batch], self.capacity)
        return trees

    def _shuffled(self) -> list[IntArray]:
        """Return the prefix trees of each micro-batch of this epoch."""
        random = np.random.default_rng((self.seed, self.epoch))
        shuffled = random.permutation(len(self._lengths))
        lengths = self._lengths[shuffled]
        # 1. Divide the trees into length classes, which keep the random order inside a class.
        #    Length = mantissa · 2^exponent, the mantissa in [0.5, 1): exact, so that different
        #    processors agree.
        mantissa, exponent = np.frexp(lengths)
        classes = (
            exponent * count + np.floor((2 * mantissa - 1) * count).astype(np.int64)
            for count in CLASSES_PER_OCTAVE
        )
        # 2. Place longer classes first. Finer classes are less random, but fit more often.
        for sizes in chain(classes, (lengths,)):
            order = largest_first(sizes)  # equal sizes are still in random order
            bin_of_tree = place_evenly(lengths, order, self._batches * self.bins, self.capacity)
            if bin_of_tree is not None:
                break
        else:  # fits where even filling does not, as when counting
            bin_of_tree = place_tightly(lengths, order, self.capacity)
        # 3. Order the trees by micro-batch and bin. Placing first fills one bin of each
        #    micro-batch, so no micro-batch stays empty.
        bin_in_batch, batch_of_tree = np.divmod(bin_of_tree, self._batches)
        # Placing starts the first micro-batches with the longest documents: give them a random
        # place in the epoch.
        batch_of_tree = random.permutation(self._batches)[batch_of_tree]
        order = np.lexsort((bin_in_batch, batch_of_tree))
        counts = np.bincount(batch_of_tree, minlength=self._batches)
        return np.split(shuffled[order], np.cumsum(counts)[:-1])

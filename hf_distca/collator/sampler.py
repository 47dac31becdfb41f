"""Draw global micro-batches: documents that are trained on together, the same on every rank."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from hf_distca.planner.bin_packing import pack_in_order, place_evenly, place_tightly
from hf_distca.planner.settings import Choices

CLASSES_PER_OCTAVE = (1, 4, 16)
"""Length classes per doubling of length, coarsest (most random) first, for placing documents."""
SPARE_BATCHES = 200
"""Micro-batches for each spare one, which leaves room for random placement: 0.5 % at most."""


@dataclass(frozen=True, eq=False)
class GlobalMicroBatch:
    """Documents, [documents] of dtype EXCERPT, that all ranks train on in one forward and backward pass."""

    excerpts: NDArray[np.void]
    choices: Choices | None = None  # choices of the planner; None: the choices in the reader's settings

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[documents] int64 tokens of each document."""
        tokens: NDArray[np.int64] = self.excerpts["stop"] - self.excerpts["start"]
        return tokens


class GlobalBatchSampler(Sampler[list[GlobalMicroBatch]]):
    """Sampler of the documents that all ranks train on together: `batch_sampler` of a `DataLoader`.

    Every rank iterates over all micro-batches, so the loader must not be sharded again (accelerate:
    `num_processes=1`). The data set, such as `RankDocuments`, takes each `GlobalMicroBatch` as its index. There is no
    `batch_size`, because the number of documents varies.

    Every excerpt, a whole document or a part of a long one, comes once per epoch. With `shuffle`, micro-batches are
    drawn anew in each epoch, with about the same number of tokens and a similar mix of long and short documents.
    Without `shuffle`, documents come in the order of the data set and the last micro-batch may be smaller.

    Args:
        excerpts: [excerpts] of dtype EXCERPT, from `fit_documents`.
        capacity: Maximum number of tokens of a bin: ranks · tokens_per_rank, or tokens_per_rank with one bin per rank.
        shuffle: Whether to draw new micro-batches in each epoch.
        seed: Seed of the order, together with the epoch.
        bins: Number of bins of a micro-batch, whose documents come bin after bin. No document is in two bins.
        choices: Function that returns the planner's choices for the next micro-batch, with which they travel.

    Raises:
        ValueError: There is no excerpt, or one is longer than the capacity.
    """

    def __init__(
        self,
        excerpts: NDArray[np.void],
        capacity: int,
        shuffle: bool = True,
        seed: int = 0,
        *,
        bins: int = 1,
        choices: Callable[[], Choices | None] = lambda: None,
    ):
        lengths: NDArray[np.int64] = excerpts["stop"] - excerpts["start"]
        if len(excerpts) == 0 or lengths.max() > capacity:
            raise ValueError(
                f"there are {len(excerpts)} documents of at most {lengths.max(initial=0)} tokens, but a micro-batch "
                f"needs a document and holds at most {capacity} tokens; call fit_documents with this capacity first"
            )
        self.excerpts = excerpts
        self.capacity = capacity
        self.bins = bins
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._choices = choices
        self._lengths = lengths
        if not shuffle:
            filled = list(pack_in_order(zip(lengths.tolist(), range(len(excerpts)), strict=True), capacity))
            self._in_order = [list(chain(*filled[first : first + bins])) for first in range(0, len(filled), bins)]
            self._batches = len(self._in_order)
            return
        # Micro-batches are nearly full, with room for every random placement.
        longest_first: list[int] = np.sort(lengths)[::-1].tolist()
        fewest = -(-sum(longest_first) // (capacity * bins))
        self._batches = min(fewest + fewest // SPARE_BATCHES, len(longest_first))
        if place_evenly(longest_first, self._batches * bins, capacity) is None:
            # Few documents per bin: even filling leaves no room for the last ones.
            self._batches = max(place_tightly(longest_first, capacity)) // bins + 1

    def __len__(self) -> int:
        return self._batches

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    @property
    def sampler(self) -> "GlobalBatchSampler":
        """Itself: in a resumed loader, accelerate forwards `set_epoch` to `batch_sampler.sampler` only."""
        return self

    def __iter__(self) -> Iterator[list[GlobalMicroBatch]]:
        for batch in self._shuffled() if self.shuffle else self._in_order:
            yield [GlobalMicroBatch(self.excerpts[batch], self._choices())]

    def _shuffled(self) -> list[NDArray[np.int64]]:
        """Return the excerpts of each micro-batch of this epoch."""
        random = np.random.default_rng((self.seed, self.epoch))
        shuffled = random.permutation(len(self.excerpts))
        lengths, bins = self._lengths[shuffled], self._batches * self.bins
        # Length = mantissa · 2^exponent, the mantissa in [0.5, 1): exact, so that different processors agree.
        mantissa, exponent = np.frexp(lengths)
        for classes in CLASSES_PER_OCTAVE:
            length_class = exponent * classes + np.floor((2 * mantissa - 1) * classes).astype(np.int64)
            order = np.argsort(-length_class, kind="stable")
            chosen = place_evenly(lengths[order].tolist(), bins, self.capacity)
            if chosen is not None:
                break
        else:
            # Equal lengths are still in random order. One of these two fits in every epoch, as when counting.
            order = np.argsort(-lengths, kind="stable")
            longest_first = lengths[order].tolist()
            chosen = place_evenly(longest_first, bins, self.capacity)
            if chosen is None:
                chosen = place_tightly(longest_first, self.capacity)
        # Placing first fills one bin of each micro-batch, so no micro-batch stays empty.
        bin_of = np.empty(len(lengths), np.int64)
        bin_of[order] = chosen
        bin_in_batch, batch_of = np.divmod(bin_of, self._batches)
        # Placing starts the first micro-batches with the longest documents: give them a random place in the epoch.
        batch_of = random.permutation(self._batches)[batch_of]
        order = np.lexsort((bin_in_batch, batch_of))
        return np.split(shuffled[order], np.cumsum(np.bincount(batch_of, minlength=self._batches))[:-1])

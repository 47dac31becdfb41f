"""Equal beginnings of sequences, found by hashes of their blocks.

Every sequence is divided into blocks of tokens, and each block has a chained hash: it depends on
all tokens up to the block's end. So equal hashes mean equal tokens from the first one on.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Branches
from hf_distca.plan.arrays import IntArray

BLOCK = 128
"""Tokens of a block. A branch begins at a block, so shorter equal beginnings are not shared."""
HASH_BYTES = 16
"""128 bits: two different blocks among 2⁴⁰ have equal hashes with a probability of 2⁻⁴⁹."""
LEAST_SAVED = 0.05
"""Least share of a tree's rows that its root has to save. A root that saves less is computed once
for each of its branches, which then need not stay together."""

Hashes = tuple[Hashable, ...]
"""Chained hashes of the blocks of a sequence. Its last block goes up to its end: the block may be
shorter than others, or longer where no other sequence has its hash."""


def hashes_of(tokens_NC: NDArray[np.int64]) -> tuple[bytes, ...]:
    """Return the chained hashes of a sequence's blocks.

    Args:
        tokens_NC: [tokens, C] all integers that the model is given for each token.
    """
    hashes: list[bytes] = []
    before = b""
    for start in range(0, len(tokens_NC), BLOCK):
        block = np.ascontiguousarray(tokens_NC[start : start + BLOCK])
        before = blake2b(before + block.tobytes(), digest_size=HASH_BYTES).digest()
        hashes.append(before)
    return tuple(hashes)


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Sequences as paths through documents, each of which is computed once.

    Attributes:
        lengths: [documents] one past the last row of each document, along its path.
        branches: which document each one continues; parents come before their branches.
        owners: [documents] a sequence that has all rows of the document.
        ends: [sequences] the document that has the last row of each sequence.
    """

    lengths: IntArray
    branches: Branches
    owners: IntArray
    ends: IntArray

    @property
    def rows(self) -> int:
        """Rows of all documents."""
        return int((self.lengths - self.branches.starts).sum())

    @property
    def trees(self) -> int:
        """Number of documents that continue no other."""
        return int((self.branches.parents < 0).sum())

    @cached_property
    def trees_of_sequences(self) -> IntArray:
        """Return [sequences] the tree of each, numbered in the order of their roots."""
        parents = self.branches.parents
        root = np.arange(len(parents))
        for branch in np.flatnonzero(parents >= 0).tolist():
            root[branch] = root[parents[branch]]
        number = np.cumsum(parents < 0) - 1
        return np.asarray(number[root[self.ends]])

    @classmethod
    def of_none(cls, lengths: IntArray) -> "SharedPrefixes":
        """Return sequences that share nothing."""
        documents = np.arange(len(lengths))
        branches = Branches(np.full(len(lengths), -1), np.zeros(len(lengths), np.int64))
        return cls(lengths, branches, documents, documents)

    def owners_of(self, documents: IntArray) -> IntArray:
        """Return the owner of each document; -1 where the document is -1."""
        return np.append(self.owners, -1)[documents]


def share_prefixes(
    lengths: Sequence[int], hashes: Sequence[Hashes], most_rows: int
) -> SharedPrefixes:
    """Find what sequences have in common.

    Args:
        lengths: [sequences] tokens of each sequence, at least 1.
        hashes: of each sequence, see `hashes_of`.
        most_rows: rows of a tree that fit; larger trees are divided at their roots.
    """
    followers: dict[Hashable, set[Hashable]] = {}  # of each block, the blocks that follow it
    for blocks in hashes:
        for block, following in pairwise(blocks):
            followers.setdefault(block, set()).add(following)

    # A block begins a document if no block is before it, or if it has siblings. Other blocks
    # continue the document of the block before them.
    document_of: dict[Hashable, int] = {}
    stops: list[int] = []
    starts: list[int] = []
    parents: list[int] = []
    owners: list[int] = []
    ends: list[int] = []
    for sequence, (length, blocks) in enumerate(zip(lengths, hashes, strict=True)):
        before = None
        last = len(blocks) - 1
        for number, block in enumerate(blocks):
            if block not in document_of:
                if before is not None and len(followers[before]) == 1:
                    document_of[block] = document_of[before]
                else:
                    document_of[block] = len(stops)
                    stops.append(0)
                    starts.append(number * BLOCK)
                    parents.append(-1 if before is None else document_of[before])
                    owners.append(sequence)
                stops[document_of[block]] = length if number == last else (number + 1) * BLOCK
                owners[document_of[block]] = sequence
            before = block
        ends.append(document_of[blocks[-1]])
    prefixes = SharedPrefixes(
        np.array(stops, np.int64),
        Branches(np.array(parents, np.int64), np.array(starts, np.int64)),
        np.array(owners, np.int64),
        np.array(ends, np.int64),
    )
    return _without_poor_roots(prefixes, most_rows)


def _without_poor_roots(prefixes: SharedPrefixes, most_rows: int) -> SharedPrefixes:
    """Divide trees at roots that save too little, and trees that do not fit.

    Each branch of such a root then has the root's rows itself.
    """
    parents, starts = prefixes.branches.parents.copy(), prefixes.branches.starts.copy()
    documents = np.arange(len(parents))
    replaced = documents.copy()  # a document that is divided is replaced by its first branch
    # 1. Divide trees until none is poor: a branch that is freed is the root of a smaller tree.
    while True:
        own_rows = prefixes.lengths - starts
        root_of = documents.copy()
        for document in np.flatnonzero(parents >= 0).tolist():
            root_of[document] = root_of[parents[document]]
        tree_rows = np.bincount(root_of, own_rows, len(documents))
        branches_of = np.bincount(parents[parents >= 0], minlength=len(documents))
        # A root is computed once instead of once for each branch.
        is_poor = own_rows * (branches_of - 1) < LEAST_SAVED * tree_rows
        is_divided = (branches_of > 0) & (parents < 0) & (is_poor | (tree_rows > most_rows))
        if not is_divided.any():
            break
        freed = np.flatnonzero((parents >= 0) & is_divided[parents])
        # The first branch of each root comes last, and stays.
        replaced[parents[freed[::-1]]] = freed[::-1]
        parents[freed] = -1
        starts[freed] = 0

    # 2. Sequences that ended in a divided root end in its first branch, at the end of a chain of
    #    replacements. Number the documents that are left.
    ends = prefixes.ends
    while not np.array_equal(ends, replaced[ends]):
        ends = replaced[ends]
    is_kept = replaced == documents
    number = np.cumsum(is_kept) - 1
    kept_parents = parents[is_kept]
    return SharedPrefixes(
        prefixes.lengths[is_kept],
        Branches(np.where(kept_parents < 0, -1, number[kept_parents]), starts[is_kept]),
        prefixes.owners[is_kept],
        number[ends],
    )

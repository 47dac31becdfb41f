"""Prefix sharing: find equal prefixes of sequences by hashes of their blocks.

Every sequence is divided into blocks of tokens, and each block has a chained hash: it depends on
all tokens up to the block's end. So equal hashes mean equal tokens from the first one on.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from hf_distca.plan import Branches
from hf_distca.plan.arrays import IntArray
from hf_distca.planner.prefix_trees import PrefixTrees

BLOCK = 128
"""Tokens of a block. A branch begins at a block, so shorter equal prefixes are not shared."""
HASH_BYTES = 16
"""128 bits: two different blocks among 2⁴⁰ have equal hashes with a probability of 2⁻⁴⁹."""
LEAST_SAVED = 0.05
"""Least share of a tree's rows that sharing its root has to save. Where it saves less, each branch
gets a copy of the root's rows, and becomes a tree of its own."""

Hashes = tuple[Hashable, ...]
"""Chained hashes of the blocks of a sequence. Its last block goes up to its end: the block may be
shorter than others, or longer where no other sequence has its hash."""


def hashes_of(tokens_NC: IntArray) -> tuple[bytes, ...]:
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
class SequencePaths:
    """Sequences as paths in prefix trees, whose rows are each computed once.

    Attributes:
        trees: the prefix trees of all sequences.
        owners: [documents of the trees] a sequence that has all rows of the document.
        ends: [sequences] the document that has the last row of each sequence.
    """

    trees: PrefixTrees
    owners: IntArray
    ends: IntArray

    @property
    def tree_of_sequences(self) -> IntArray:
        """[sequences] the tree of each sequence."""
        return self.trees.tree_of_documents[self.ends]

    @classmethod
    def unshared(cls, lengths: IntArray) -> "SequencePaths":
        """Return the paths of sequences that share no prefix, from the length of each."""
        documents = np.arange(len(lengths))
        branches = Branches(np.full(len(lengths), -1), np.zeros(len(lengths), np.int64))
        return cls(PrefixTrees.of(lengths, branches), documents, documents)

    def owners_of(self, documents: IntArray) -> IntArray:
        """Return the owner of each document; -1 where the document is -1."""
        return np.append(self.owners, -1)[documents]


def share_prefixes(
    lengths: Sequence[int], hashes: Sequence[Hashes], most_rows: int
) -> SequencePaths:
    """Return the paths of sequences in prefix trees, in which equal prefixes come once.

    Args:
        lengths: [sequences] tokens of each sequence, at least 1.
        hashes: of each sequence, see `hashes_of`.
        most_rows: most rows of a tree; larger trees are divided at their roots.
    """
    sequences_with = Counter(blocks[0] for blocks in hashes)  # by their first block
    followers: dict[Hashable, set[Hashable]] = {}  # of each block, the blocks that follow it
    for blocks in hashes:
        if sequences_with[blocks[0]] > 1:
            for block, following in pairwise(blocks):
                followers.setdefault(block, set()).add(following)

    # A block begins a document if it is the first of a sequence, or if several blocks follow the
    # block before it. Other blocks continue the document of the block before them.
    document_of: dict[Hashable, int] = {}
    stops: list[int] = []
    starts: list[int] = []
    parents: list[int] = []
    owners: list[int] = []
    ends: list[int] = []
    for sequence, (length, blocks) in enumerate(zip(lengths, hashes, strict=True)):
        if sequences_with[blocks[0]] == 1:  # it shares nothing
            ends.append(len(stops))
            stops.append(length)
            starts.append(0)
            parents.append(-1)
            owners.append(sequence)
            continue
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
    return _without_poor_roots(
        np.array(stops, np.int64),
        Branches(np.array(parents, np.int64), np.array(starts, np.int64)),
        np.array(owners, np.int64),
        np.array(ends, np.int64),
        most_rows,
    )


def _without_poor_roots(
    lengths: IntArray, branches: Branches, owners: IntArray, ends: IntArray, most_rows: int
) -> SequencePaths:
    """Divide trees at roots that save too few rows, and trees of more than `most_rows` rows.

    Each branch of such a root then has a copy of the root's rows.
    """
    parents, starts = branches.parents.copy(), branches.starts.copy()
    documents = np.arange(len(parents))
    replaced = documents.copy()  # a document that is divided is replaced by its first branch
    # 1. Divide trees until no root is poor: each branch of a divided root is itself a root then.
    while True:
        own_rows = lengths - starts
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
    while not np.array_equal(ends, replaced[ends]):
        ends = replaced[ends]
    is_kept = replaced == documents
    number = np.cumsum(is_kept) - 1
    kept_parents = parents[is_kept]
    kept_branches = Branches(np.where(kept_parents < 0, -1, number[kept_parents]), starts[is_kept])
    return SequencePaths(
        PrefixTrees.of(lengths[is_kept], kept_branches), owners[is_kept], number[ends]
    )

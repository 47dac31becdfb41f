"""Equal beginnings of the documents of a data set, and groups of documents that share them.

Sessions of agents give one document for each turn, and each document repeats the turns before.
Documents are divided into blocks of tokens with chained hashes, as in `planner.prefixes`. Only
blocks that several documents have are kept: as nodes of a tree, in which each document has a path.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_distca.batches.limits import IGNORED_TARGET
from hf_distca.collator.documents import READ_BATCH, Columns, token_document
from hf_distca.plan.arrays import IntArray
from hf_distca.planner.branches import Forest
from hf_distca.planner.prefixes import BLOCK, SharedPrefixes, hashes_of, share_prefixes

MOST_TARGETS = 2
"""Most targets of shared rows, for each row of a tree. The head computes each target of a row, and
the rank that holds the row does all of them."""
FIRST_HASH = np.dtype("<u8")
"""Part of the hash of a first block: two documents may have it in common by chance."""
BLOCK_HASH = np.dtype([("low", "<u8"), ("high", "<u8")])
NO_NODE = -1


def first_hashes(dataset: Any, share: tuple[int, int]) -> bytes:
    """Return a hash of dtype FIRST_HASH for the first block of each document.

    Args:
        dataset: a stored data set, see `is_stored`.
        share: part of the documents to read, and the number of parts.
    """
    part, parts = share
    documents = range(len(dataset) * part // parts, len(dataset) * (part + 1) // parts)
    tables = dataset.select_columns(["input_ids"]).select(documents).with_format("arrow")
    hashes: list[bytes] = []
    for table in tables.iter(batch_size=READ_BATCH):
        for tokens in table["input_ids"]:
            first_block = np.asarray(tokens.values[:BLOCK].to_numpy(), np.int64)
            (first_hash,) = hashes_of(first_block[:, None])
            hashes.append(first_hash[: FIRST_HASH.itemsize])
    return b"".join(hashes)


def repeated(first_hashes_of_all: bytes) -> IntArray:
    """Return the documents whose first block may be that of another document, in order."""
    hashes = np.frombuffer(first_hashes_of_all, FIRST_HASH)
    _, kind, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    return np.flatnonzero(counts[kind] > 1)


def block_hashes(
    dataset: Any, documents: IntArray, columns: Columns, name: str
) -> tuple[bytes, bytes]:
    """Return the hashes of all blocks of some documents, and the number of targets in each block.

    Args:
        dataset: a stored data set.
        name: its name in errors.

    Returns:
        A hash of dtype BLOCK_HASH for each block, and one byte for each block.
    """
    rows = dataset.select_columns(columns.used(dataset.column_names, name)).with_format("numpy")
    hashes: list[bytes] = []
    targets: list[NDArray[np.uint8]] = []
    for first in range(0, len(documents), READ_BATCH):
        indices = documents[first : first + READ_BATCH].tolist()
        for index, example in zip(indices, rows.__getitems__(indices), strict=True):
            tokens_L, targets_L = token_document(example, f"document {index} of {name}", columns)
            hashes.extend(hashes_of(tokens_L[:, None]))
            is_target_L = targets_L != IGNORED_TARGET
            counts = np.add.reduceat(is_target_L, range(0, len(tokens_L), BLOCK), dtype=np.uint8)
            targets.append(counts)
    return b"".join(hashes), b"".join(counts.tobytes() for counts in targets)


@dataclass(frozen=True, eq=False)
class SharedBeginnings:
    """What documents of a data set have in common with other documents.

    Attributes:
        parents: [nodes] node before each node; NO_NODE for a first block.
        ends: [documents] last node of each document; NO_NODE if no other document has its first
            block.
        targets: [documents] targets of each document in the rows of its nodes.
        lengths: [documents] tokens of each document.
    """

    parents: IntArray
    ends: IntArray
    targets: IntArray
    lengths: IntArray

    @classmethod
    def of(
        cls, lengths: IntArray, documents: IntArray, hashes: bytes, targets: bytes
    ) -> "SharedBeginnings | None":
        """Return what documents have in common; None if nothing.

        Args:
            lengths: [documents of the data set] tokens of each one.
            documents: documents with hashes.
            hashes, targets: of their blocks, from `block_hashes`.
        """
        counts = -(-lengths[documents] // BLOCK)
        firsts = np.cumsum(counts) - counts  # first block of each document
        # 1. Number the different hashes, and count how often each one comes.
        values = np.frombuffer(hashes, BLOCK_HASH)
        order = np.lexsort((values["high"], values["low"]))
        ordered = values[order]
        kinds = np.empty(len(values), np.int64)
        kinds[order] = np.cumsum(np.append(False, ordered[1:] != ordered[:-1]))[: len(values)]
        is_shared = np.bincount(kinds) > 1
        if not is_shared.any():
            return None
        # 2. Nodes are hashes of several blocks. A hash includes all earlier tokens, so the block
        #    before a node is the same in all documents.
        node_of_kind = np.where(is_shared, np.cumsum(is_shared) - 1, NO_NODE)
        nodes = node_of_kind[kinds]
        before = np.append(NO_NODE, nodes[:-1])
        before[firsts] = NO_NODE
        parents = np.empty(int(is_shared.sum()), np.int64)
        parents[nodes[nodes >= 0]] = before[nodes >= 0]
        # 3. The path of a document is as long as it has nodes.
        depths = np.add.reduceat(nodes >= 0, firsts, dtype=np.int64)
        ends = np.full(len(lengths), NO_NODE)
        ends[documents] = np.where(depths > 0, nodes[firsts + np.maximum(depths, 1) - 1], NO_NODE)
        node_targets = np.where(nodes >= 0, np.frombuffer(targets, np.uint8), 0)
        shared_targets = np.zeros(len(lengths), np.int64)
        shared_targets[documents] = np.add.reduceat(node_targets, firsts, dtype=np.int64)
        return cls(parents, ends, shared_targets, lengths)

    def groups(self, excerpts: NDArray[np.void], most_rows: int) -> tuple[IntArray, IntArray]:
        """Group excerpts that share rows.

        Args:
            excerpts: [excerpts] of dtype EXCERPT.
            most_rows: most rows of a group.

        Returns:
            [excerpts] the group of each, numbered in the order of their first excerpts; and
            [groups] the rows of each group, in which shared rows count once.
        """
        rows_of = excerpts["stop"] - excerpts["start"]
        first_members = np.arange(len(excerpts))
        families: dict[int, list[int]] = defaultdict(list)
        for excerpt in np.flatnonzero(self.ends[excerpts["document"]] >= 0).tolist():
            path = self._path(excerpts[excerpt])
            if path:
                families[path[0]].append(excerpt)
        for family in families.values():
            for group, rows in self._divided(np.array(family), excerpts, most_rows):
                first_members[group] = group.min()
                rows_of[group.min()] = rows
        firsts, groups = np.unique(first_members, return_inverse=True)
        return groups, rows_of[firsts]

    def shared(
        self, excerpts: NDArray[np.void], groups: IntArray, most_rows: int, *, joins: bool
    ) -> SharedPrefixes | None:
        """Return what the excerpts of a micro-batch share; None if nothing.

        Args:
            groups: [excerpts] group of each. Excerpts of a group share rows.
            most_rows: rows of a micro-batch.
            joins: whether groups may share rows too.
        """
        if (self.ends[excerpts["document"]] < 0).all():
            return None
        prefixes = self._prefixes_of(excerpts, groups, most_rows)
        if joins:
            joined = self._prefixes_of(excerpts, None, most_rows)
            if joined.rows < prefixes.rows and self._have_few_targets(joined, excerpts).all():
                prefixes = joined
        rows_alone = int((excerpts["stop"] - excerpts["start"]).sum())
        return prefixes if prefixes.rows < rows_alone else None

    def _path(self, excerpt: np.void) -> list[int]:
        """Return the nodes of an excerpt, from the first block on."""
        document, start, stop, _ = excerpt.item()
        if start > 0:
            return []
        path = []
        node = int(self.ends[document])
        while node >= 0:
            path.append(node)
            node = int(self.parents[node])
        # A block of a document that is cut is another block.
        whole_blocks = len(path) if stop == self.lengths[document] else stop // BLOCK
        return path[::-1][:whole_blocks]

    def _prefixes_of(
        self, excerpts: NDArray[np.void], groups: IntArray | None, most_rows: int
    ) -> SharedPrefixes:
        """Return what excerpts share, inside their groups alone if there are groups."""
        lengths = (excerpts["stop"] - excerpts["start"]).tolist()
        numbers = [0] * len(excerpts) if groups is None else groups.tolist()
        hashes: list[tuple[Hashable, ...]] = []
        for index, excerpt in enumerate(excerpts):
            path = self._path(excerpt)
            blocks: list[Hashable] = [(numbers[index], node) for node in path]
            if len(path) * BLOCK < lengths[index]:
                blocks.append(index)  # the rest is its own
            hashes.append(tuple(blocks))
        return share_prefixes(lengths, hashes, most_rows)

    def _have_few_targets(
        self, prefixes: SharedPrefixes, excerpts: NDArray[np.void]
    ) -> NDArray[np.bool_]:
        """Return [trees] whether each tree has few enough targets."""
        trees, tree_rows = _trees_of(prefixes)
        targets = np.bincount(trees, self.targets[excerpts["document"]], len(tree_rows))
        is_alone = np.bincount(trees, minlength=len(tree_rows)) == 1
        return np.asarray(is_alone | (targets <= MOST_TARGETS * tree_rows))

    def _divided(
        self, family: IntArray, excerpts: NDArray[np.void], most_rows: int
    ) -> list[tuple[IntArray, int]]:
        """Divide excerpts with the same first block into groups that fit and have few targets.

        Return each group with its rows. Excerpts that stay alone are left out.
        """
        prefixes = self._prefixes_of(excerpts[family], None, most_rows)
        have_few_targets = self._have_few_targets(prefixes, excerpts[family])
        trees, _ = _trees_of(prefixes)
        members_of = np.bincount(trees)
        # A tree that does not fit was divided at its root. Some of the members that are then alone
        # fit together.
        alone = family[members_of[trees] == 1]
        groups = self._runs(alone, excerpts, most_rows)
        for tree in np.flatnonzero(members_of > 1).tolist():
            members = family[trees == tree]
            if have_few_targets[tree]:
                groups.append(members)
            else:
                groups += self._runs(members, excerpts, most_rows)
        with_rows = []
        for group in groups:
            tokens = int((excerpts["stop"][group] - excerpts["start"][group]).sum())
            rows = self._prefixes_of(excerpts[group], None, most_rows).rows
            if rows < tokens and rows <= most_rows:
                with_rows.append((group, rows))
        return with_rows

    def _runs(
        self, members: IntArray, excerpts: NDArray[np.void], most_rows: int
    ) -> list[IntArray]:
        """Divide excerpts in the order of their paths; each run fits and has few targets."""
        paths = {member: self._path(excerpts[member]) for member in members.tolist()}
        lengths = excerpts["stop"] - excerpts["start"]
        runs: list[list[int]] = []
        rows = 0
        targets = 0
        for member in sorted(paths, key=paths.__getitem__):
            length = int(lengths[member])
            own_targets = int(self.targets[excerpts["document"][member]])
            added = 0
            if runs:
                # In this order no earlier excerpt has more rows in common than the one before.
                common = _common(paths[runs[-1][-1]], paths[member])
                added = max(length - common * BLOCK, 0)
            fits = rows + added <= most_rows
            if runs and fits and targets + own_targets <= MOST_TARGETS * (rows + added):
                runs[-1].append(member)
                rows += added
                targets += own_targets
            else:
                runs.append([member])
                rows = length
                targets = own_targets
        return [np.array(sorted(run)) for run in runs]


def _common(path: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of first nodes that two paths have in common."""
    pairs = zip(path, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _trees_of(prefixes: SharedPrefixes) -> tuple[IntArray, IntArray]:
    """Return [sequences] the tree of each sequence, and [trees] the rows of each tree."""
    forest = Forest.of(prefixes.lengths, prefixes.branches)
    tree_of_document = np.empty(len(prefixes.lengths), np.int64)
    tree_of_document[forest.order] = forest.placed["document"]
    return tree_of_document[prefixes.ends], forest.tree_lengths

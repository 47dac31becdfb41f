"""Equal prefixes of the documents of a data set, and the prefix trees of a micro-batch's documents.

Sessions of agents give one document for each turn, and each document repeats the turns before.
Documents are divided into blocks of tokens with chained hashes, as in `planner.prefixes`. Blocks
that several documents have are kept, with the block before each of them.
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
from hf_distca.plan.arrays import BoolArray, IntArray, Table
from hf_distca.planner.prefixes import BLOCK, SequencePaths, hashes_of, share_prefixes

MOST_TARGETS = 2
"""Most targets of a prefix tree's documents in their shared blocks, for each row of the tree. The
rank that holds a row computes the logits of all targets of the row."""
FIRST_HASH = np.dtype("<u8")
"""Part of the hash of a first block. Different blocks may have equal parts by chance."""
BLOCK_HASH = np.dtype([("low", "<u8"), ("high", "<u8")])
NO_BLOCK = -1


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
    """Return the documents whose first block is likely to be another document's too."""
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
class DatasetPrefixes:
    """Blocks that several documents of a data set have.

    Attributes:
        parents: [shared blocks] the block before each one; NO_BLOCK for a first block.
        ends: [documents] last shared block of each document; NO_BLOCK if no other document has its
            first block.
        targets: [documents] targets of each document in its shared blocks.
        lengths: [documents] tokens of each document.
    """

    parents: IntArray
    ends: IntArray
    targets: IntArray
    lengths: IntArray

    @classmethod
    def of(
        cls, lengths: IntArray, documents: IntArray, hashes: bytes, targets: bytes
    ) -> "DatasetPrefixes | None":
        """Return the blocks that several documents have; None if there are none.

        Args:
            lengths: [documents of the data set] tokens of each one.
            documents: the documents that `hashes` and `targets` are of.
            hashes, targets: of the documents' blocks, from `block_hashes`.
        """
        counts = -(-lengths[documents] // BLOCK)
        firsts = np.cumsum(counts) - counts  # first block of each document
        # 1. Number the different hashes, and count the blocks with each hash.
        values = np.frombuffer(hashes, BLOCK_HASH)
        order = np.lexsort((values["high"], values["low"]))
        ordered = values[order]
        kinds = np.empty(len(values), np.int64)
        kinds[order] = np.cumsum(np.append(False, ordered[1:] != ordered[:-1]))[: len(values)]
        is_shared = np.bincount(kinds) > 1
        if not is_shared.any():
            return None
        # 2. Number the shared blocks. A hash includes all earlier tokens, so the block before a
        #    shared block is the same in all documents.
        number_of_kind = np.where(is_shared, np.cumsum(is_shared) - 1, NO_BLOCK)
        blocks = number_of_kind[kinds]
        before = np.append(NO_BLOCK, blocks[:-1])
        before[firsts] = NO_BLOCK
        parents = np.empty(int(is_shared.sum()), np.int64)
        parents[blocks[blocks >= 0]] = before[blocks >= 0]
        # 3. The shared blocks of a document are its first ones.
        counts = np.add.reduceat(blocks >= 0, firsts, dtype=np.int64)
        ends = np.full(len(lengths), NO_BLOCK)
        ends[documents] = np.where(counts > 0, blocks[firsts + np.maximum(counts, 1) - 1], NO_BLOCK)
        block_targets = np.where(blocks >= 0, np.frombuffer(targets, np.uint8), 0)
        shared_targets = np.zeros(len(lengths), np.int64)
        shared_targets[documents] = np.add.reduceat(block_targets, firsts, dtype=np.int64)
        return cls(parents, ends, shared_targets, lengths)

    def trees(self, spans: Table, most_rows: int) -> tuple[IntArray, IntArray]:
        """Divide spans among prefix trees; a span that shares no row is a tree of its own.

        Args:
            spans: [spans] of dtype SPAN.
            most_rows: most rows of a tree.

        Returns:
            [spans] the tree of each, numbered in the order of their first spans; and [trees] the
            rows of each tree, in which shared rows count once.
        """
        rows_of = spans["stop"] - spans["start"]
        first_spans = np.arange(len(spans))
        spans_of_block: dict[int, list[int]] = defaultdict(list)
        for span in np.flatnonzero(self.ends[spans["document"]] >= 0).tolist():
            blocks = self._blocks(spans[span])
            if blocks:
                spans_of_block[blocks[0]].append(span)
        for alike in spans_of_block.values():
            for tree, rows in self._trees_of(np.array(alike), spans, most_rows):
                first_spans[tree] = tree.min()
                rows_of[tree.min()] = rows
        firsts, trees = np.unique(first_spans, return_inverse=True)
        return trees, rows_of[firsts]

    def paths(
        self, spans: Table, trees: IntArray, most_rows: int, *, joins: bool
    ) -> SequencePaths | None:
        """Return the paths of a micro-batch's spans; None if the spans share no row.

        Args:
            trees: [spans] prefix tree of each, as `trees` returns.
            most_rows: rows of a micro-batch.
            joins: whether trees with the same first block may become one tree.
        """
        if (self.ends[spans["document"]] < 0).all():
            return None
        paths = self._paths(spans, trees, most_rows)
        if joins:
            joined = self._paths(spans, None, most_rows)
            if joined.trees.rows < paths.trees.rows and self._have_few_targets(joined, spans).all():
                paths = joined
        tokens = int((spans["stop"] - spans["start"]).sum())
        return paths if paths.trees.rows < tokens else None

    def _blocks(self, span: np.void) -> list[int]:
        """Return the shared blocks of a span, from the first one on."""
        document, start, stop, _ = span.item()
        if start > 0:
            return []
        blocks = []
        block = int(self.ends[document])
        while block >= 0:
            blocks.append(block)
            block = int(self.parents[block])
        # A block that is cut is another block.
        whole_blocks = len(blocks) if stop == self.lengths[document] else stop // BLOCK
        return blocks[::-1][:whole_blocks]

    def _paths(self, spans: Table, trees: IntArray | None, most_rows: int) -> SequencePaths:
        """Return the paths of spans, which share rows inside `trees` only if these are given."""
        lengths = (spans["stop"] - spans["start"]).tolist()
        tree_of_spans = [0] * len(spans) if trees is None else trees.tolist()
        hashes: list[tuple[Hashable, ...]] = []
        for index, span in enumerate(spans):
            shared_blocks = self._blocks(span)
            blocks: list[Hashable] = [(tree_of_spans[index], block) for block in shared_blocks]
            if len(shared_blocks) * BLOCK < lengths[index]:
                blocks.append(index)  # the rows after the shared blocks
            hashes.append(tuple(blocks))
        return share_prefixes(lengths, hashes, most_rows)

    def _have_few_targets(self, paths: SequencePaths, spans: Table) -> BoolArray:
        """Return [trees] whether each tree has few enough targets, or a single span."""
        tree_rows = paths.trees.tree_lengths
        trees = paths.tree_of_sequences
        targets = np.bincount(trees, self.targets[spans["document"]], len(tree_rows))
        is_single = np.bincount(trees, minlength=len(tree_rows)) == 1
        return np.asarray(is_single | (targets <= MOST_TARGETS * tree_rows))

    def _trees_of(
        self, alike: IntArray, spans: Table, most_rows: int
    ) -> list[tuple[IntArray, int]]:
        """Divide spans with the same first block into trees that fit and have few targets.

        Return the spans and the rows of each tree. Spans that share no row are left out.
        """
        paths = self._paths(spans[alike], None, most_rows)
        have_few_targets = self._have_few_targets(paths, spans[alike])
        tree_of_spans = paths.tree_of_sequences
        spans_of_trees = np.bincount(tree_of_spans)
        # A tree that does not fit was divided at its root. Some of the spans that are then trees of
        # their own fit together.
        single = alike[spans_of_trees[tree_of_spans] == 1]
        trees = self._runs(single, spans, most_rows)
        for tree in np.flatnonzero(spans_of_trees > 1).tolist():
            members = alike[tree_of_spans == tree]
            if have_few_targets[tree]:
                trees.append(members)
            else:
                trees += self._runs(members, spans, most_rows)
        with_rows = []
        for members in trees:
            tokens = int((spans["stop"][members] - spans["start"][members]).sum())
            rows = self._paths(spans[members], None, most_rows).trees.rows
            if rows < tokens and rows <= most_rows:
                with_rows.append((members, rows))
        return with_rows

    def _runs(self, members: IntArray, spans: Table, most_rows: int) -> list[IntArray]:
        """Divide spans in the order of their blocks into runs that fit and have few targets."""
        blocks = {member: self._blocks(spans[member]) for member in members.tolist()}
        lengths = spans["stop"] - spans["start"]
        runs: list[list[int]] = []
        rows = 0
        targets = 0
        for member in sorted(blocks, key=blocks.__getitem__):
            length = int(lengths[member])
            own_targets = int(self.targets[spans["document"][member]])
            added = 0
            if runs:
                # In this order the span before shares the most blocks with this one.
                common = _common(blocks[runs[-1][-1]], blocks[member])
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


def _common(blocks: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of first blocks that two spans have in common."""
    pairs = zip(blocks, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

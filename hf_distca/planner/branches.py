"""Prefix trees: documents that continue others, laid out as if each tree were one document.

Sequences that begin alike share a prefix tree. Each of its branches is a document of the plan; a
path leads from the root to the end of a branch. Layouts are searched with whole trees, whose rows
are numbered branch after branch, depth first. So a tree stays together where it fits, and where it
is cut, neighbouring branches stay together.
"""

from dataclasses import dataclass

import numpy as np

from hf_distca.plan import AttentionKind, Branches, Layout
from hf_distca.plan.arrays import FloatArray, IntArray
from hf_distca.plan.intervals import ROWS, Table, overlaps
from hf_distca.predict.seconds import StepCosts
from hf_distca.predict.walk import document_seconds


@dataclass(frozen=True, eq=False)
class Forest:
    """The documents of a micro-batch as prefix trees, each of which is laid out as one document."""

    lengths: IntArray  # [documents] one past the last row of each document, along its path
    branches: Branches
    tree_lengths: IntArray  # [trees] rows of all branches of each tree
    order: IntArray  # [documents] all documents, tree after tree, depth first
    placed: Table  # [documents] of dtype ROWS in this order: tree, and rows of the tree

    @classmethod
    def of(cls, lengths: IntArray, branches: Branches) -> "Forest":
        """Return the trees in the order of their roots, with rows numbered depth first."""
        children: list[list[int]] = [[] for _ in lengths]
        roots: list[int] = []
        for document, parent in enumerate(branches.parents.tolist()):
            (roots if parent < 0 else children[parent]).append(document)
        own_lengths = (lengths - branches.starts).tolist()
        order, placed, tree_lengths = [], [], []
        for tree, root in enumerate(roots):
            # Depth first: the rows of a branch follow the rows that they continue.
            row = 0
            waiting = [root]
            while waiting:
                document = waiting.pop()
                order.append(document)
                placed.append((tree, row, row + own_lengths[document]))
                row += own_lengths[document]
                waiting.extend(reversed(children[document]))
            tree_lengths.append(row)
        return cls(
            lengths,
            branches,
            np.array(tree_lengths, np.int64),
            np.array(order, np.int64),
            np.array(placed, ROWS),
        )

    def branched(self, trees: IntArray, layout: Layout) -> tuple[IntArray, Layout]:
        """Return the layout of branches, and [documents] the document that each of them is.

        Args:
            trees: [documents] tree that each document of `layout` is.
            layout: its documents are whole trees.
        """
        # 1. The branches of these trees, tree after tree.
        number_of_tree = np.full(len(self.tree_lengths), -1)
        number_of_tree[trees] = np.arange(len(trees))
        placed = self.placed.take(np.arange(len(self.placed)))
        placed["document"] = number_of_tree[placed["document"]]
        is_here = placed["document"] >= 0
        by_tree = np.flatnonzero(is_here)[np.argsort(placed["document"][is_here], kind="stable")]
        placed = placed.take(by_tree)
        documents = self.order[by_tree]

        # 2. Segments of trees are cut where a branch begins; rows are counted along paths.
        segment, branch, start, stop = overlaps(layout.segments, placed)
        segments = layout.segments.take(segment)
        segments["offset"] += start - segments["start"]
        segments["document"] = branch
        to_path = self.branches.starts[documents] - placed["start"]
        segments["start"] = start + to_path[branch]
        segments["stop"] = stop + to_path[branch]

        # 3. Parents by their numbers in this layout.
        number = np.full(len(self.lengths) + 1, -1)  # the last one is for documents without parent
        number[documents] = np.arange(len(documents))
        parents = number[self.branches.parents[documents]]
        branches = Branches(parents, self.branches.starts[documents])
        has_branches = bool((parents >= 0).any())
        return documents, Layout(
            self.lengths[documents], segments, layout.ranks, branches if has_branches else None
        )

    def documents_of(self, trees: IntArray) -> IntArray:
        """Return the documents of some trees, tree after tree, depth first."""
        place = np.full(len(self.tree_lengths), -1)
        place[trees] = np.arange(len(trees))
        place_of_documents = place[self.placed["document"]]
        order = np.argsort(place_of_documents, kind="stable")
        chosen = order[place_of_documents[order] >= 0]
        return np.asarray(self.order[chosen])

    def tree_seconds(self, costs: StepCosts) -> FloatArray:
        """Return [trees] seconds of computing each tree, as `document_seconds` of documents."""
        starts = self.branches.starts
        before = np.where(starts > 0, document_seconds(starts, costs), 0.0)
        seconds = document_seconds(self.lengths, costs) - before
        tree_seconds = np.bincount(
            self.placed["document"], seconds[self.order], len(self.tree_lengths)
        )
        return tree_seconds.astype(np.float64)


def with_branches(
    documents: IntArray, layout: Layout, forest: Forest | None
) -> tuple[IntArray, Layout]:
    """Return the documents and the layout of branches, if the documents are a forest's trees."""
    return (documents, layout) if forest is None else forest.branched(documents, layout)


def seconds_of(lengths: IntArray, costs: StepCosts, forest: Forest | None) -> FloatArray:
    """Return [documents] seconds of computing each document, or each tree of a forest."""
    return document_seconds(lengths, costs) if forest is None else forest.tree_seconds(costs)


def reach(kind: AttentionKind, forest: Forest | None) -> int | None:
    """Return how many rows a row attends to at most; None if to all rows of its document.

    Rows of a tree attend to rows of their path alone, of which there are fewer than of the tree.
    """
    window = kind.window or kind.chunk
    if forest is None:
        return window
    longest = int(forest.lengths.max())
    return longest if window is None else min(window, longest)

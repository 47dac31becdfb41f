"""Prefix trees of a micro-batch, each laid out as if it were one document.

Each branch of a prefix tree is a document of the plan. The planner searches layouts of whole trees.
The rows of a tree are numbered branch after branch, depth first: a tree stays together where it
fits, and neighbouring branches stay together where it is cut.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hf_distca.plan import AttentionKind, Branches, Layout
from hf_distca.plan.arrays import FloatArray, IntArray, Table
from hf_distca.plan.intervals import ROWS, overlaps
from hf_distca.predict.seconds import StepCosts
from hf_distca.predict.walk import document_seconds


@dataclass(frozen=True, eq=False)
class PrefixTrees:
    """Prefix trees of documents; a document that shares no prefix is a tree of its own."""

    lengths: IntArray  # [documents] one past the last row of each document, along its path
    branches: Branches
    tree_lengths: IntArray  # [trees] rows of all branches of each tree
    order: IntArray  # [documents] all documents, tree after tree, depth first
    placed: Table  # [documents] of dtype ROWS, by `order`: the tree as document, and its rows

    @classmethod
    def of(cls, lengths: IntArray, branches: Branches) -> "PrefixTrees":
        """Return the trees of documents, in the order of the trees' roots."""
        children: list[list[int]] = [[] for _ in lengths]
        roots: list[int] = []
        for document, parent in enumerate(branches.parents.tolist()):
            (roots if parent < 0 else children[parent]).append(document)
        own_lengths = (lengths - branches.starts).tolist()
        order, placed, tree_lengths = [], [], []
        for tree, root in enumerate(roots):
            # Depth first: the rows of a branch come after the rows of its parent.
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

    @property
    def rows(self) -> int:
        """Rows of all trees."""
        return int(self.tree_lengths.sum())

    @cached_property
    def tree_of_documents(self) -> IntArray:
        """[documents] the tree of each document."""
        trees = np.empty_like(self.order)
        trees[self.order] = self.placed["document"]
        return trees

    def layout_of_branches(self, trees: IntArray, layout: Layout) -> tuple[IntArray, Layout]:
        """Return the documents of some trees, and the layout in which each branch is a document.

        Args:
            trees: the tree of each document of `layout`.
            layout: its documents are whole trees.
        """
        # 1. List the branches of these trees, tree after tree.
        number_of_tree = np.full(len(self.tree_lengths), -1)
        number_of_tree[trees] = np.arange(len(trees))
        placed = self.placed.take(np.arange(len(self.placed)))
        placed["document"] = number_of_tree[placed["document"]]
        is_chosen = placed["document"] >= 0
        by_tree = np.flatnonzero(is_chosen)[
            np.argsort(placed["document"][is_chosen], kind="stable")
        ]
        placed = placed.take(by_tree)
        documents = self.order[by_tree]

        # 2. Cut segments of trees where a branch begins, and count rows along paths.
        segment, branch, start, stop = overlaps(layout.segments, placed)
        segments = layout.segments.take(segment)
        segments["offset"] += start - segments["start"]
        segments["document"] = branch
        to_path = self.branches.starts[documents] - placed["start"]
        segments["start"] = start + to_path[branch]
        segments["stop"] = stop + to_path[branch]

        branches = self.branches_of(documents)
        has_branches = bool((branches.parents >= 0).any())
        return documents, Layout(
            self.lengths[documents], segments, layout.ranks, branches if has_branches else None
        )

    def branches_of(self, documents: IntArray) -> Branches:
        """Return the branches of the documents of whole trees, whose parents are numbered anew."""
        number = np.full(len(self.lengths) + 1, -1)  # the last one is for roots
        number[documents] = np.arange(len(documents))
        return Branches(number[self.branches.parents[documents]], self.branches.starts[documents])

    def documents_of(self, trees: IntArray) -> IntArray:
        """Return the documents of some trees, tree after tree, depth first."""
        place = np.full(len(self.tree_lengths), -1)
        place[trees] = np.arange(len(trees))
        place_of_documents = place[self.placed["document"]]
        order = np.argsort(place_of_documents, kind="stable")
        chosen = order[place_of_documents[order] >= 0]
        return np.asarray(self.order[chosen])

    def tree_seconds(self, costs: StepCosts) -> FloatArray:
        """Return [trees] predicted seconds of computing each tree."""
        starts = self.branches.starts
        before = np.where(starts > 0, document_seconds(starts, costs), 0.0)
        seconds = document_seconds(self.lengths, costs) - before
        tree_seconds = np.bincount(
            self.placed["document"], seconds[self.order], len(self.tree_lengths)
        )
        return tree_seconds.astype(np.float64)


def with_branches(
    documents: IntArray, layout: Layout, trees: PrefixTrees | None
) -> tuple[IntArray, Layout]:
    """Return documents and their layout, in which each branch of a tree is a document.

    Args:
        documents: the document, or with `trees` the tree, of each document of `layout`.
    """
    return (documents, layout) if trees is None else trees.layout_of_branches(documents, layout)


def seconds_of(lengths: IntArray, costs: StepCosts, trees: PrefixTrees | None) -> FloatArray:
    """Return the seconds of computing each document, or with `trees` each tree."""
    return document_seconds(lengths, costs) if trees is None else trees.tree_seconds(costs)


def reach(kind: AttentionKind, trees: PrefixTrees | None) -> int | None:
    """Return the most rows that a row attends to; None if a row attends to its whole document.

    A row of a tree attends to the rows of its path only. A path is no longer than its tree.
    """
    window = kind.window or kind.chunk
    if trees is None:
        return window
    longest = int(trees.lengths.max())
    return longest if window is None else min(window, longest)

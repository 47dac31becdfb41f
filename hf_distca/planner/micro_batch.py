"""Plans of global micro-batches, from document lengths: the planner's entry points."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hf_distca.plan import Branches, MicroBatchPlan
from hf_distca.plan.arrays import IntArray
from hf_distca.plan.cost import as_lengths
from hf_distca.planner.build import (
    balanced,
    finished,
    lay_out_as_set,
    lay_out_placed,
    left_in_place,
    packed_in_order,
)
from hf_distca.planner.choose import choose, choose_placed
from hf_distca.planner.layout import check_capacity
from hf_distca.planner.pods import deal, first_ranks, pod_of
from hf_distca.planner.prefix_trees import PrefixTrees, seconds_of
from hf_distca.planner.rank_groups import Placing
from hf_distca.planner.settings import PlanSettings


def plan_micro_batch(
    lengths: Sequence[int], settings: PlanSettings, branches: Branches | None = None
) -> MicroBatchPlan:
    """Lay out the documents of a global micro-batch on all ranks and balance core attention.

    With `settings.costs` the fastest of several plans is taken.

    Args:
        lengths: one past the last row of each document.
        branches: branches of prefix trees; None without prefix sharing.

    Raises:
        ValueError: the ranks cannot hold the documents, or document_layout="whole" would have to
            cut one.
    """
    array, trees = _in_trees(lengths, branches)
    return _planned(array, settings, trees)


def plan_pod(
    lengths: Sequence[int], settings: PlanSettings, rank: int, branches: Branches | None = None
) -> MicroBatchPlan:
    """Plan the documents of a global micro-batch that are dealt to the pod of a rank.

    Args:
        lengths, branches: as in `plan_micro_batch`, of all documents of the micro-batch.
        rank: any of the ranks of the pod.
    """
    array, trees = _in_trees(lengths, branches)
    placing = _dealt(array, settings, trees)
    return _pod_planned(placing, pod_of(placing, rank), array, settings, trees)


def plan_pods(
    lengths: Sequence[int], settings: PlanSettings, branches: Branches | None = None
) -> list[MicroBatchPlan]:
    """Return the plans of all pods of a global micro-batch, in the order of their ranks.

    Args:
        lengths, branches: as in `plan_micro_batch`.
    """
    array, trees = _in_trees(lengths, branches)
    placing = _dealt(array, settings, trees)
    pods = range(len(placing.sizes))
    return [_pod_planned(placing, pod, array, settings, trees) for pod in pods]


def _in_trees(
    lengths: Sequence[int], branches: Branches | None
) -> tuple[IntArray, PrefixTrees | None]:
    """Return the lengths of documents, or of whole prefix trees with these trees."""
    array = as_lengths(lengths)
    if branches is None or not (branches.parents >= 0).any():
        return array, None
    trees = PrefixTrees.of(array, branches)
    return trees.tree_lengths, trees


def _planned(array: IntArray, settings: PlanSettings, trees: PrefixTrees | None) -> MicroBatchPlan:
    """Plan documents, or trees, together."""
    if settings.costs is None:
        nano_batches = balanced(lay_out_as_set(array, settings, trees), settings)
        return finished(nano_batches, packed_in_order(array, settings, trees), settings)
    return choose(array, settings, trees)


def _dealt(array: IntArray, settings: PlanSettings, trees: PrefixTrees | None) -> Placing:
    """Return the pods, and the documents or trees that are dealt to each."""
    if len(settings.block_sizes) == 1 or settings.costs is None:
        return Placing.of_all(np.zeros(len(array)), np.ones(settings.ranks))
    check_capacity(array, settings.ranks, settings.rows_per_rank)
    return deal(array, seconds_of(array, settings.costs, trees), settings)


def _pod_planned(
    placing: Placing,
    pod: int,
    array: IntArray,
    settings: PlanSettings,
    trees: PrefixTrees | None,
) -> MicroBatchPlan:
    """Plan the documents, or trees, of one pod."""
    if len(placing.sizes) == 1:
        return _planned(array, settings, trees)
    members = placing.documents[pod]
    first_rank = first_ranks(placing.sizes)[pod]
    pod_settings = settings.of_pod(range(first_rank, first_rank + placing.sizes[pod]))
    if trees is None:
        documents, plan = members, _planned(array[members], pod_settings, None)
    else:
        documents = trees.documents_of(members)
        in_trees = _in_trees(trees.lengths[documents].tolist(), trees.branches_of(documents))
        plan = _planned(in_trees[0], pod_settings, in_trees[1])
    nano_batches = tuple(
        replace(nano, documents=documents[nano.documents]) for nano in plan.nano_batches
    )
    return replace(
        plan,
        nano_batches=nano_batches,
        first_rank=first_rank,
        rows_of_other_pods=int(array.sum() - array[members].sum()),
    )


def plan_placed(placed: Sequence[Sequence[int]], settings: PlanSettings) -> MicroBatchPlan:
    """Plan documents that stay on their ranks.

    `placed` has the lengths of each rank's documents, in order.
    """
    if settings.costs is None:
        nano_batches = balanced(lay_out_placed(placed, settings), settings)
        return finished(nano_batches, left_in_place(placed, settings), settings)
    return choose_placed(placed, settings)

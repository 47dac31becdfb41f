"""Plans of global micro-batches, from document lengths: the planner's entry points."""

from collections.abc import Sequence

from hf_distca.plan import Branches, MicroBatchPlan
from hf_distca.plan.cost import as_lengths
from hf_distca.planner.build import (
    finished,
    left_in_place,
    nano_batches_as_set,
    nano_batches_placed,
    packed_in_order,
)
from hf_distca.planner.choose import choose, choose_placed
from hf_distca.planner.prefix_trees import PrefixTrees
from hf_distca.planner.settings import PlanSettings


def plan_micro_batch(
    lengths: Sequence[int], settings: PlanSettings, branches: Branches | None = None
) -> MicroBatchPlan:
    """Lay out the documents of one global micro-batch and balance their core attention.

    With `settings.costs` the fastest of several plans is taken.

    Args:
        lengths: one past the last row of each document.
        branches: branches of prefix trees; None without prefix sharing.

    Raises:
        ValueError: the ranks cannot hold the documents, or document_layout="whole" would have to
            cut one.
    """
    array = as_lengths(lengths)
    trees = None
    if branches is not None and (branches.parents >= 0).any():
        trees = PrefixTrees.of(array, branches)
        array = trees.tree_lengths
    if settings.costs is None:
        nano_batches = nano_batches_as_set(array, settings, trees)
        return finished(nano_batches, packed_in_order(array, settings, trees), settings)
    return choose(array, settings, trees)


def plan_placed(placed: Sequence[Sequence[int]], settings: PlanSettings) -> MicroBatchPlan:
    """Plan documents that stay on their ranks.

    `placed` has the lengths of each rank's documents, in order.
    """
    if settings.costs is None:
        nano_batches = nano_batches_placed(placed, settings)
        return finished(nano_batches, left_in_place(placed, settings), settings)
    return choose_placed(placed, settings)

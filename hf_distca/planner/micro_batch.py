"""From the document lengths of a global micro-batch to its plan: the planner's front door."""

from collections.abc import Sequence

import numpy as np

from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.build import plan_as_set, plan_placed
from hf_distca.planner.choose import choose, choose_placed
from hf_distca.planner.settings import PlanSettings


def plan_micro_batch(lengths: Sequence[int], settings: PlanSettings) -> MicroBatchPlan:
    """Lay out the documents of one global micro-batch and balance their core attention.

    Args:
        lengths: tokens of each document, at most ranks · tokens_per_rank in all.
        settings: see PlanSettings; with choices the fastest of several plans is taken.

    Raises:
        ValueError: the ranks cannot hold the documents, or with document_layout="whole" not without cutting one.
    """
    array = np.asarray(lengths, np.int64)
    return plan_as_set(array, settings) if settings.choices is None else choose(array, settings, settings.choices)


def plan_placed_documents(placed: Sequence[Sequence[int]], settings: PlanSettings) -> MicroBatchPlan:
    """Balance the core attention of documents that already lie on ranks and stay there.

    Args:
        placed: lengths of the documents of each rank, in the order of its rows.
        settings: see PlanSettings; with choices the fastest of several plans is taken.
    """
    return (
        plan_placed(placed, settings)
        if settings.choices is None
        else choose_placed(placed, settings, settings.choices)
    )

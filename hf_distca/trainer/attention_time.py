"""What core attention of the busiest rank should take by the plans, to be logged beside what it took."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from hf_distca.patches.model import layers_by_kind
from hf_distca.plan import AttentionKind, MicroBatchPlan, Plan
from hf_distca.planner.counted import grouped_tasks
from hf_distca.planner.metrics import loads_of
from hf_distca.planner.seconds import KernelCost, Tasks
from hf_distca.sim.costs import DeviceProfile

FloatArray = NDArray[np.float64]


class AttentionTime:
    """Predicts from the plans of micro-batches that have run.

    Without a profile nothing is known of the device but what its kernels were seen to take: all ranks together took
    so long for all pairs, and the busiest one should take as long as its share of them. Where it takes longer, it is
    slower than the others, or its tasks are of worse shapes. With a profile the prediction owes nothing to the run.

    Args:
        model: as it will be trained.
        profile: of the device; None where the user names none.
        forwards: how often the forward of core attention runs: twice where checkpoints compute it again.
    """

    def __init__(self, model: nn.Module, profile: DeviceProfile | None, *, forwards: int) -> None:
        self._layers, self._profile, self._forwards = layers_by_kind(model), profile, forwards

    def predicted(self, plans: Sequence[MicroBatchPlan], stages: Sequence[int], seen: Sequence[float]) -> float:
        """Seconds of the rank with the most to compute in all of these micro-batches.

        Args:
            plans: of the micro-batches.
            stages: of each, in how many stages K/V rows travelled.
            seen: [ranks] seconds that the kernels of each rank were seen to take for them.
        """
        ranks = len(seen)
        if self._profile is not None:
            counted = zip(plans, stages, strict=True)
            each = [self._by_profile(plan, count, self._profile)[:ranks] for plan, count in counted]
            return float(np.sum(each, axis=0).max())
        # Workers beyond the ranks are servers, which come and go.
        pairs = np.sum([self._pairs(plan)[:ranks] for plan in plans], axis=0)
        return float(sum(seen) * pairs.max() / max(pairs.sum(), 1.0))

    def _pairs(self, plan: MicroBatchPlan) -> FloatArray:
        """[workers] query-key pairs of all layers, by the width of their heads."""
        every: list[FloatArray] = [
            loads_of(of_kind).astype(np.float64) * (self._layers[kind] * kind.q_heads * (kind.dim_qk + kind.dim_v))
            for nano in plan.nano_batches
            for kind, of_kind in nano.plans.items()
        ]
        summed: FloatArray = np.sum(every, axis=0)
        return summed

    def _by_profile(self, plan: MicroBatchPlan, stages: int, profile: DeviceProfile) -> FloatArray:
        """[workers] seconds of all layers, forward and backward."""
        every = [
            self._layers[kind] * _seconds(of_kind, self._cost(kind, profile), stages)
            for nano in plan.nano_batches
            for kind, of_kind in nano.plans.items()
        ]
        summed: FloatArray = np.sum(every, axis=0)
        return summed

    def _cost(self, kind: AttentionKind, profile: DeviceProfile) -> KernelCost:
        """Of a task, forward and backward."""
        forward, backward = profile.kernel(kind, "forward"), profile.kernel(kind, "backward")
        sides = zip(vars(forward).values(), vars(backward).values(), strict=True)
        return KernelCost(*(self._forwards * there + back for there, back in sides))


def _seconds(plan: Plan, cost: KernelCost, stages: int) -> FloatArray:
    """[workers] seconds of a plan's tasks; those on keys of others are computed in so many stages, and each reads
    all queries."""
    own, *others = grouped_tasks(plan)
    staged = [Tasks(each.rows * stages, each.keys, each.pairs, each.calls * stages) for each in others]
    summed: FloatArray = np.sum([cost.seconds(each) for each in (own, *staged)], axis=0)
    return summed

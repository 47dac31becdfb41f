"""Figures of each rank for a report on a plan."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.build import loads_as_packed
from hf_distca.planner.cost import RowBytes
from hf_distca.planner.metrics import bytes_moved, loads_of
from hf_distca.planner.settings import PlanSettings
from hf_distca.sim.lengths import histogram


def figures_of_ranks(documents: Sequence[int], plan: MicroBatchPlan, settings: PlanSettings) -> dict[str, Any]:
    """Return a histogram of document lengths, and lists with one number per rank, summed over nano-batches."""
    kind = settings.dominant_kind
    plans = [nano.plans[kind] for nano in plan.nano_batches]
    tasks = np.concatenate([each.tasks for each in plans])
    lengths = np.array(documents, np.int64)
    packed, planned = loads_as_packed(lengths, settings), np.sum([loads_of(each) for each in plans], axis=0)
    sent, received = np.sum(
        [bytes_moved(each, RowBytes.of_kind(kind, settings.bytes_per_value)) for each in plans], axis=0
    )
    return {
        "histogram": [vars(each) for each in histogram(lengths)],
        "packed_max_over_mean": float(packed.max() / packed.mean()),
        "attention_speed_up": float(packed.max() / planned.max()),
        "by_rank": {
            "pairs_packed": packed.tolist(),
            "pairs": planned.tolist(),
            "tokens": plan.tokens.tolist(),
            "tasks": np.bincount(tasks["worker"], minlength=settings.ranks).tolist(),
            "bytes_sent": sent.tolist(),
            "bytes_received": received.tolist(),
        },
        "task_rows": [
            {"shortest": each.shortest, "longest": each.longest, "tasks": each.documents, "rows": each.tokens}
            for each in histogram(tasks["stop"] - tasks["start"])
        ],
    }

"""Plans whose documents are cut where a test says."""

from collections.abc import Sequence

import numpy as np

from hf_distca.plan import MicroBatchPlan, NanoBatch
from hf_distca.planner.balance import balance
from hf_distca.planner.build import finished
from hf_distca.planner.layout import assemble
from hf_distca.planner.settings import PlanSettings

Ranks = Sequence[Sequence[tuple[int, int, int]]]
"""(document, start, stop) of each segment, in row order, for each rank."""


def cut_plan(lengths: Sequence[int], nano_batches: Sequence[Ranks], settings: PlanSettings) -> MicroBatchPlan:
    """The plan of a micro-batch whose nano-batches lie on the ranks as given; documents are numbered over all."""
    every = np.array(lengths, np.int64)
    nanos = []
    for ranks in nano_batches:
        documents = np.array(sorted({document for segments in ranks for document, *_ in segments}))
        columns = np.array(
            [
                (np.searchsorted(documents, document), start, stop, rank)
                for rank, segments in enumerate(ranks)
                for document, start, stop in segments
            ]
        )
        layout = assemble(every[documents], tuple(columns.T), len(ranks))
        nanos.append(NanoBatch(documents, layout, {kind: balance(layout, kind, settings) for kind in settings.kinds}))
    return finished(every, nanos, settings, stages=1)

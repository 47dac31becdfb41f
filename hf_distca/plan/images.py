"""Travel of features between the ranks that encode images and those that hold placeholders."""

from typing import NamedTuple

import numpy as np

from hf_distca.plan import PlannedImages
from hf_distca.plan.arrays import IntArray
from hf_distca.plan.intervals import expand, row_counts


class FeatureRoute(NamedTuple):
    """Rows of features that one rank sends to each rank of its pod, and receives from each."""

    sent: IntArray  # rows of the features that the rank encodes, by the rank that they go to
    sent_counts: IntArray  # [ranks of the pod]
    placed: IntArray  # placeholders of the rank, by the rank that their features come from
    received_counts: IntArray  # [ranks of the pod]


def travelling_rows(planned: PlannedImages) -> int:
    """Return how many rows of features another rank holds than the one that encodes them."""
    travels = planned.encoders[planned.features["image"]] != planned.features["rank"]
    return int(row_counts(planned.features.compress(travels)).sum())


def feature_route(planned: PlannedImages, rank: int, pod: range) -> FeatureRoute:
    """Return the route of one rank of a pod."""
    encoders = planned.encoders[planned.features["image"]]
    # 1. Rows that leave, in the order of (rank that holds them, placeholder).
    leaving = planned.features.compress(encoders == rank)
    rows_encoded = np.where(planned.encoders == rank, planned.rows, 0)
    first_rows = np.cumsum(rows_encoded) - rows_encoded
    sent = expand(first_rows[leaving["image"]] + leaving["start"], row_counts(leaving))
    # 2. Rows that arrive, in the order of (rank that encodes them, placeholder).
    is_held = planned.features["rank"] == rank
    held = planned.features.compress(is_held)
    order = np.argsort(encoders[is_held], kind="stable")
    arriving = held.take(order)
    placed = expand(arriving["offset"], row_counts(arriving))
    return FeatureRoute(
        sent,
        _rows_of_ranks(leaving["rank"], row_counts(leaving), pod),
        placed,
        _rows_of_ranks(encoders[is_held][order], row_counts(arriving), pod),
    )


def _rows_of_ranks(ranks_of_entries: IntArray, rows: IntArray, pod: range) -> IntArray:
    return np.bincount(ranks_of_entries - pod.start, rows, len(pod)).astype(np.int64)

"""Division of images over the ranks that encode them.

All ranks wait for features before the first layer of the text model, so encoders are balanced among
themselves: the rank with the most work in its encoder decides how long all ranks wait.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from hf_distca.plan import FEATURES, PlannedImages
from hf_distca.plan.arrays import FloatArray, IntArray, Table
from hf_distca.plan.intervals import row_counts, rows_before_in

IMAGE = np.dtype(
    [(name, np.int64) for name in ("document", "modality", "index", "rows", "patches", "pairs")]
    + [("cost", np.float64)]
)
"""An image of a document. `index` is its number among the document's images of a modality, `pairs`
are those of patches in the encoder's attention without windows, and `cost` is the work of its
encoder."""
PLACEHOLDERS = np.dtype([(name, np.int64) for name in ("image", "start", "stop", "offset")])
"""Rows [start, stop) of a document that are placeholders of an image, one after another. `offset`
is the row of the image's features for `start`."""

TOLERANCE = 0.01
"""Work of an encoder above the mean that is accepted."""


def joined_images(parts: Iterable[tuple[Table, Table]]) -> tuple[Table, Table]:
    """Join images, of dtype IMAGE, and placeholders, of dtype PLACEHOLDERS, of several parts.

    Placeholders have the number of their image in the part, and get its number in the whole.
    """
    images = [np.zeros(0, IMAGE)]
    placeholders = [np.zeros(0, PLACEHOLDERS)]
    count = 0
    for images_of_part, placeholders_of_part in parts:
        runs = placeholders_of_part.copy()
        runs["image"] += count
        count += len(images_of_part)
        images.append(images_of_part)
        placeholders.append(runs)
    return np.concatenate(images), np.concatenate(placeholders)


def plan_images(
    images: Table,
    placeholders: Table,
    held: Table,
    pod: range,
    modalities: Sequence[str],
    always: Collection[str] = (),
) -> dict[str, PlannedImages]:
    """Choose the rank that encodes each image of a pod, and where its features go.

    Args:
        images: of dtype IMAGE, with the number of the document in the micro-batch.
        placeholders: of dtype PLACEHOLDERS, with the number of the image in `images`, by document
            and row.
        held: rows of documents that ranks hold, of dtype TOKENS, by rank and row.
        pod: ranks that hold these rows.
        modalities: names of the modalities, by their number in `images`.
        always: modalities that are planned in a micro-batch without them, too.

    Returns:
        The planned images of each modality.
    """
    features = held_features(images, placeholders, held)
    encoders = choose_encoders(images["cost"], features, pod)
    return by_modality(images, features, encoders, modalities, always)


def by_modality(
    images: Table,
    features: Table,
    encoders: IntArray,
    modalities: Sequence[str],
    always: Collection[str],
) -> dict[str, PlannedImages]:
    """Return the planned images of each modality.

    Args:
        images: of dtype IMAGE.
        features: of dtype FEATURES, by rank and row, with the number of the image in `images`.
        encoders: [images] rank that encodes each.
        modalities: names of the modalities, by their number in `images`.
        always: modalities that are planned in a micro-batch without them, too.
    """
    planned: dict[str, PlannedImages] = {}
    for number, modality in enumerate(modalities):
        members = np.flatnonzero(images["modality"] == number)
        if not len(members) and modality not in always:
            continue
        number_in_modality = np.full(len(images), -1)
        number_in_modality[members] = np.arange(len(members))
        own = features.compress(images["modality"][features["image"]] == number)
        own["image"] = number_in_modality[own["image"]]
        own["offset"] = rows_before_in(own, "rank")
        planned[modality] = PlannedImages(images["rows"][members], encoders[members], own)
    return planned


def choose_encoders(costs: FloatArray, features: Table, pod: range) -> IntArray:
    """Return [images] the rank of a pod that encodes each.

    An image stays with the rank that holds most of its placeholders, unless that rank has too much
    work. Such a rank gives its costliest images first, to the rank with the least work. Images that
    stay need no travel, and no other rank reads their document.

    Args:
        costs: [images] work of the encoder.
        features: of dtype FEATURES.
    """
    ranks = len(pod)
    rows_of_ranks = np.zeros((len(costs), ranks), np.int64)
    rank_in_pod = features["rank"] - pod.start
    np.add.at(rows_of_ranks, (features["image"], rank_in_pod), row_counts(features))
    encoders: IntArray = rows_of_ranks.argmax(1)
    loads = np.bincount(encoders, costs, ranks)
    mean = float(costs.sum()) / ranks
    limit = max(mean * (1 + TOLERANCE), float(costs.max(initial=0.0)))
    by_cost = np.argsort(-costs, kind="stable")
    # First where no rank gets too much work, then wherever the larger of two loads shrinks.
    for fits in (True, False):
        for rank in np.argsort(-loads, kind="stable").tolist():
            for image in by_cost[encoders[by_cost] == rank].tolist():
                if loads[rank] <= limit:
                    break
                other = int(loads.argmin())
                load = loads[other] + costs[image]
                if load <= limit if fits else load < loads[rank]:
                    encoders[image] = other
                    loads[rank] -= costs[image]
                    loads[other] = load
    return encoders + pod.start


def held_features(images: Table, placeholders: Table, held: Table) -> Table:
    """Return the features of each rank's placeholders in the order of its rows; offsets are 0."""
    documents = images["document"][placeholders["image"]]
    firsts = np.searchsorted(documents, held["sequence"], side="left")
    lasts = np.searchsorted(documents, held["sequence"], side="right")
    parts: list[Table] = []
    for entry, first, last in zip(held, firsts.tolist(), lasts.tolist(), strict=True):
        runs = placeholders[first:last]
        starts = np.maximum(runs["start"], entry["start"])
        stops = np.minimum(runs["stop"], entry["stop"])
        is_held = starts < stops
        part = np.zeros(int(is_held.sum()), FEATURES)
        part["image"] = runs["image"][is_held]
        part["start"] = (runs["offset"] + starts - runs["start"])[is_held]
        part["stop"] = part["start"] + (stops - starts)[is_held]
        part["rank"] = entry["rank"]
        parts.append(part)
    return np.concatenate(parts) if parts else np.zeros(0, FEATURES)

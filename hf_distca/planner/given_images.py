"""Images of padded batches: the rank that is given an image encodes it.

An image whose features no rank needs is left out, since sequences with equal prefixes share rows.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.arrays import IntArray, Table
from hf_distca.planner.images import IMAGE, PLACEHOLDERS, by_modality, held_features, joined_images
from hf_distca.planner.sequences import PlannedSequences


class GivenImages(NamedTuple):
    """Images of one rank's padded batch, as bytes that ranks exchange."""

    modalities: tuple[str, ...]  # names, by their number in `images`
    images: bytes  # of dtype IMAGE; `document` is the sequence's index in the batch
    placeholders: bytes  # of dtype PLACEHOLDERS, by sequence and row

    @property
    def present(self) -> frozenset[str]:
        """Names of the modalities that the batch has images of."""
        numbers = np.unique(np.frombuffer(self.images, IMAGE)["modality"]).tolist()
        return frozenset(self.modalities[number] for number in numbers)


def plan_given_images(
    sequences: PlannedSequences,
    sources: IntArray,
    indices: IntArray,
    images_of_ranks: Sequence[GivenImages],
    always: Collection[str],
) -> tuple[PlannedSequences, tuple[Table, ...]]:
    """Plan the images of padded batches of a pod.

    Args:
        sources: [sequences] the rank that was given each one.
        indices: [sequences] its index in the batch of that rank.
        images_of_ranks: images of each rank of the pod.
        always: modalities that are planned in a micro-batch without them, too.

    Returns:
        The micro-batches with planned images, and of each the images that ranks encode, of dtype
        IMAGE: `index` is the image's number in the batch of the rank that encodes it.
    """
    first_rank = sequences.plans[0].first_rank
    images, placeholders, encoders = _joined(sources, indices, images_of_ranks, first_rank)
    plans: list[MicroBatchPlan] = []
    encoded: list[Table] = []
    for number, plan in enumerate(sequences.plans):
        held = sequences.rank_rows.compress(sequences.rank_rows["micro_batch"] == number)
        features = held_features(images, placeholders, held)
        needed = np.unique(features["image"])
        features["image"] = np.searchsorted(needed, features["image"])
        own = images.take(needed)
        planned = by_modality(
            own,
            features,
            encoders[needed],
            images_of_ranks[0].modalities,
            always,
        )
        plans.append(replace(plan, images=planned))
        encoded.append(own)
    return replace(sequences, plans=tuple(plans)), tuple(encoded)


def _joined(
    sources: IntArray, indices: IntArray, images_of_ranks: Sequence[GivenImages], first_rank: int
) -> tuple[Table, Table, IntArray]:
    """Return the images of a pod's ranks, their placeholders, and the rank of each image.

    Planned sequences are in the order of ranks and indices, and so are placeholders.
    """
    parts: list[tuple[Table, Table]] = []
    for rank, given in enumerate(images_of_ranks, first_rank):
        own = np.frombuffer(given.images, IMAGE).copy()
        of_rank = np.flatnonzero(sources == rank)
        own["document"] = of_rank[np.searchsorted(indices[of_rank], own["document"])]
        parts.append((own, np.frombuffer(given.placeholders, PLACEHOLDERS)))
    counts = [len(own) for own, _ in parts]
    encoders = np.repeat(first_rank + np.arange(len(parts)), counts)
    images, placeholders = joined_images(parts)
    return images, placeholders, encoders

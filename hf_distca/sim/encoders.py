"""Encoders of images in simulated steps: their seconds on each rank, planned and in place."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_distca.plan import FEATURES, MicroBatchPlan
from hf_distca.plan.arrays import FloatArray, IntArray, Table
from hf_distca.plan.intervals import row_counts
from hf_distca.planner.images import choose_encoders, held_features
from hf_distca.planner.sequences import TOKENS
from hf_distca.run import RunSpec
from hf_distca.sim.strategies import StepTime


@dataclass(frozen=True, eq=False)
class SimulatedImages:
    """Images of the documents of one micro-batch.

    Attributes:
        images: of dtype IMAGE, by document; their costs are seconds.
        placeholders: of dtype PLACEHOLDERS, by document and row.
        row_bytes: bytes of the features of a placeholder, of all layers of the text model.
    """

    images: Table
    placeholders: Table
    row_bytes: int

    def of_first(self, documents: int) -> "SimulatedImages":
        """Return the images of the first documents."""
        images = self.images.compress(self.images["document"] < documents)
        runs = self.placeholders.compress(self.placeholders["image"] < len(images))
        return replace(self, images=images, placeholders=runs)

    def encoders(self, plans: Sequence[MicroBatchPlan]) -> tuple[IntArray, Table]:
        """Return [images] the rank that encodes each, and where features go, of dtype FEATURES.

        Args:
            plans: of each pod, whose ranks encode the images of its documents.
        """
        encoders = np.zeros(len(self.images), np.int64)
        parts = [np.zeros(0, FEATURES)]
        for plan in plans:
            entries = [
                (rank, 0, document, start, stop, 0)
                for rank in plan.ranks
                for document, start, stop in plan.held_by(rank)
            ]
            features = held_features(self.images, self.placeholders, np.array(entries, TOKENS))
            of_pod = np.unique(features["image"])
            own = features.copy()
            own["image"] = np.searchsorted(of_pod, features["image"])
            encoders[of_pod] = choose_encoders(self.images["cost"][of_pod], own, plan.ranks)
            parts.append(features)
        return encoders, np.concatenate(parts)


def with_encoders(
    step: StepTime,
    plans: Sequence[MicroBatchPlan],
    batch: SimulatedImages,
    lengths: IntArray,
    run: RunSpec,
) -> StepTime:
    """Return a step with the seconds of encoders.

    A plan divides images evenly, and all ranks wait for features before the text model. Without a
    plan a rank encodes the images of its documents, and computes on. Ranks of a group that share
    documents share their images evenly. Where a document is cut, its images are cut in proportion.

    Args:
        plans: of each pod; none for strategies without plans.
        lengths: [documents] tokens of each.
    """
    if not plans:
        seconds, patches = (
            _in_place(values, batch.images["document"], step, lengths)
            for values in (batch.images["cost"], batch.images["patches"])
        )
        slowest = float((step.attention + step.other + step.waited + seconds).max())
        return replace(step, seconds=slowest, encoder=seconds, encoder_patches=int(patches.max()))
    encoders, features = batch.encoders(plans)
    encoder_seconds = np.bincount(encoders, batch.images["cost"], run.plans.ranks).astype(float)
    encoded_patches = np.bincount(encoders, batch.images["patches"], run.plans.ranks)
    travel = _travel_seconds(encoders, features, batch.row_bytes, run)
    return replace(
        step,
        seconds=step.seconds + float(encoder_seconds.max()) + travel,
        waited=step.waited + travel,
        encoder=encoder_seconds,
        encoder_patches=int(encoded_patches.max()),
    )


def _in_place(
    values: FloatArray, document_of_image: IntArray, step: StepTime, lengths: IntArray
) -> FloatArray:
    """Return [ranks] the sums of [images] values that the ranks with their documents have."""
    held = step.held
    assert held is not None
    groups = len(step.attention) // step.group_ranks
    of_documents = np.bincount(document_of_image, values, len(lengths))
    shares = of_documents[held["document"]] * held["tokens"] / lengths[held["document"]]
    of_groups = np.bincount(held["group"], shares, groups) / step.group_ranks
    return np.repeat(of_groups, step.group_ranks)


def _travel_seconds(encoders: IntArray, features: Table, row_bytes: int, run: RunSpec) -> float:
    """Return the seconds in which features travel to their placeholders, and gradients back."""
    ranks = run.plans.ranks
    senders = encoders[features["image"]]
    travels = senders != features["rank"]
    rows = row_counts(features) * travels
    sent = np.bincount(senders, rows, ranks)
    received = np.bincount(features["rank"], rows, ranks)
    links = run.device.exchange
    link = links.between if len(set(run.plans.node_of_ranks)) > 1 else links.within
    size = np.maximum(sent, received) * row_bytes
    return 2 * float(link.seconds(size).max())

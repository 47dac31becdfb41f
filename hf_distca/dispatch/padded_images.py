"""Images of a rank's padded batch. They stay on the rank; features of its encoders travel."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hf_distca.batches.images import ImageModel
from hf_distca.plan import PlannedImages
from hf_distca.plan.arrays import IntArray
from hf_distca.plan.intervals import Table
from hf_distca.planner.given_images import GivenImages


@dataclass(frozen=True, eq=False)
class PaddedImages:
    """Images of a padded batch of a rank.

    Attributes:
        fields: inputs of the encoders by name; none for a batch of text.
        images: of dtype IMAGE, by modality; `document` is the sequence.
        placeholders: of dtype PLACEHOLDERS, by sequence and row.
    """

    model: ImageModel
    rank: int
    fields: Mapping[str, Tensor]
    images: Table
    placeholders: Table

    @property
    def summary(self) -> GivenImages:
        """What all ranks know of the images."""
        names = tuple(modality.name for modality in self.model.modalities)
        always = self.model.always_encodes
        return GivenImages(names, always, self.images.tobytes(), self.placeholders.tobytes())

    def marks(self, sequence: int, tokens: int) -> IntArray:
        """Return [tokens] of a sequence: for placeholders the number of their image, else 0.

        Images have the same number only if they are equal and on the same rank.
        """
        marks = np.zeros(tokens, np.int64)
        is_own = self.images["document"][self.placeholders["image"]] == sequence
        for run in self.placeholders.compress(is_own):
            first_equal = self._first_equal[run["image"]]
            marks[run["start"] : run["stop"]] = (self.rank + 1 << 32) + first_equal
        return marks

    def inputs(
        self, encoded: Table, planned: Mapping[str, PlannedImages], device: torch.device
    ) -> dict[str, Tensor]:
        """Return the inputs of this rank's encoders in a micro-batch: its images, or a filler.

        Args:
            encoded: images that ranks encode in the micro-batch, of dtype IMAGE.
            planned: the same by modality.
        """
        inputs: dict[str, Tensor] = {}
        for number, modality in enumerate(self.model.modalities):
            if modality.name not in planned:
                continue
            own = encoded.compress(encoded["modality"] == number)
            chosen = own["index"][planned[modality.name].encoded_by(self.rank)]
            parts = [self._apart[number][index] for index in chosen.tolist()]
            # Every rank runs its encoder: DDP, FSDP2 and ZeRO-3 wait for all ranks in it.
            parts = parts or [
                {field: torch.from_numpy(array).to(device) for field, array in filler.items()}
                for filler in [modality.filler_image()]
            ]
            inputs |= {
                field: torch.cat([part[field] for part in parts]) for field in modality.fields
            }
        return inputs

    @cached_property
    def _apart(self) -> list[list[dict[str, Tensor]]]:
        """Fields of each image, by modality."""
        apart: list[list[dict[str, Tensor]]] = []
        for modality in self.model.modalities:
            if modality.values not in self.fields:
                apart.append([])
                continue
            pixels = self.fields[modality.values]
            patches: list[int] | int = 1
            if modality.kind == "grid":
                patches = self.fields[modality.sizes].prod(1).tolist()
            columns = {modality.values: pixels.split(patches)}
            if modality.sizes:
                columns[modality.sizes] = self.fields[modality.sizes].split(1)
            apart.append(
                [
                    dict(zip(columns, values, strict=True))
                    for values in zip(*columns.values(), strict=True)
                ]
            )
        return apart

    @cached_property
    def _first_equal(self) -> list[int]:
        """For each image the first of the batch that is equal to it."""
        firsts: list[int] = []
        alike: dict[float, list[int]] = {}  # by the sum of pixels
        fields = [fields for images in self._apart for fields in images]
        modalities = self.images["modality"].tolist()
        values = [self.model.modalities[number].values for number in modalities]
        sums = [image[name].sum() for image, name in zip(fields, values, strict=True)]
        for number, total in enumerate(torch.stack(sums).tolist() if sums else []):
            others = alike.setdefault(total, [])
            first = next((n for n in others if _are_equal(fields[n], fields[number])), number)
            if first == number:
                others.append(number)
            firsts.append(first)
        return firsts


def _are_equal(image: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return image.keys() == other.keys() and all(
        torch.equal(values, other[name]) for name, values in image.items()
    )

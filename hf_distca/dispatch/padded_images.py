"""Images of a rank's padded batch. They stay on the rank; features of its encoder travel."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_distca.batches.images import ImageModel
from hf_distca.plan import PlannedImages
from hf_distca.plan.arrays import IntArray, Table
from hf_distca.planner.given_images import GivenImages


@dataclass(frozen=True, eq=False)
class PaddedImages:
    """Images of a padded batch of a rank.

    Attributes:
        fields: inputs of the encoders by name, on the host; none for a batch of text.
        images: of dtype IMAGE, by modality; `document` is the sequence.
        placeholders: of dtype PLACEHOLDERS, by sequence and row.
    """

    model: ImageModel
    rank: int
    fields: Mapping[str, NDArray[Any]]
    images: Table
    placeholders: Table

    @property
    def summary(self) -> GivenImages:
        """What all ranks know of the images."""
        names = tuple(modality.name for modality in self.model.modalities)
        return GivenImages(names, self.images.tobytes(), self.placeholders.tobytes())

    def marks(self, sequence: int, tokens: int) -> IntArray:
        """Return [tokens, 2] of a sequence: for placeholders the hash of their image, else 0."""
        marks = np.zeros((tokens, 2), np.int64)
        is_own = self.images["document"][self.placeholders["image"]] == sequence
        for run in self.placeholders.compress(is_own):
            marks[run["start"] : run["stop"]] = self._hashes[run["image"]]
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
            chosen = own["index"][planned[modality.name].encoded_by(self.rank)].tolist()
            # Every rank runs its encoder: DDP, FSDP2 and ZeRO-3 wait for all ranks in it.
            part = modality.select(self.fields, chosen) if chosen else modality.filler_image()
            joined = modality.joined([part])
            inputs |= {name: values.to(device) for name, values in joined.items()}
        return inputs

    @cached_property
    def _hashes(self) -> list[IntArray]:
        """Hash of each image, which depends on all of its fields."""
        hashes: list[IntArray] = []
        for image in self.images:
            modality = self.model.modalities[image["modality"]]
            fields = modality.select(self.fields, [int(image["index"])])
            digest = blake2b(digest_size=16)
            for values in fields.values():
                digest.update(np.ascontiguousarray(values).tobytes())
            hashes.append(np.frombuffer(digest.digest(), np.int64))
        return hashes

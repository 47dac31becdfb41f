"""Images and videos of documents: fields of the encoder, their placeholders and positions.

A document has token ids and, for its images, the fields that a processor of transformers makes:
pixels, and for some models the sizes of images. Everything here needs the model's config alone, so
that processes that load data can have it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedConfig

from hf_distca.checks.data_rules import Data
from hf_distca.plan.arrays import FloatArray, IntArray

Fields = Mapping[str, NDArray[Any]]
"""Fields of a document's images, by the name of the encoder's argument."""


class ImageFigures(NamedTuple):
    """Figures of a document's images, [images] each."""

    rows: IntArray  # of features, and placeholders
    patches: IntArray  # that the encoder reads
    pairs: IntArray  # of patches in the encoder's attention without windows


@dataclass(frozen=True)
class Modality:
    """Inputs of one encoder.

    Attributes:
        name: "image" or "video".
        token_id: token of a placeholder.
        values: field of the pixels.
        sizes: field of the sizes of images; empty if all images have one size.
        kind: "grid" has [patches of all images, numbers of a patch] pixels, and [images, 3] frames,
            rows and columns of patches. "size" has [images, ...] pixels, and [images, 2] height and
            width in pixels. "even" has [images, ...] pixels alone.
        patch: height of a patch in pixels.
        merge: patches along each side of what becomes one row of features.
        filler: shape of the smallest pixels.
    """

    name: str
    token_id: int
    values: str
    sizes: str
    kind: Literal["grid", "size", "even"]
    patch: int
    merge: int
    filler: tuple[int, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields."""
        return (self.values, self.sizes) if self.sizes else (self.values,)

    def count(self, example: Mapping[str, Any]) -> int:
        """Return the number of images of an example; one without the fields has none."""
        name = self.sizes or self.values
        given = example.get(name)
        return 0 if given is None else len(given)

    def figures(self, example: Mapping[str, Any], tokens: IntArray, name: str) -> ImageFigures:
        """Return figures of a document's images.

        Raise ValueError if their rows are not as many as the placeholders among the tokens.

        Args:
            example: has the sizes of images, or their number as the length of the pixels.
            tokens: [L] token ids of the document.
            name: name of the document in errors.
        """
        images = self.count(example)
        placeholders = int(np.count_nonzero(tokens == self.token_id))
        if self.kind == "grid":
            grids = np.asarray(example[self.sizes], np.int64).reshape(-1, 3) if images else _NONE_3
            patches = grids.prod(1)
            rows = patches // self.merge**2
            pairs = grids[:, 0] * (grids[:, 1] * grids[:, 2]) ** 2
        elif self.kind == "size":
            sides = np.asarray(example[self.sizes], np.int64).reshape(-1, 2) if images else _NONE_2
            patches = (sides // self.patch).prod(1)
            rows = (sides // (self.patch * self.merge)).prod(1)
            pairs = patches**2
        else:
            rows = np.full(images, placeholders // max(images, 1), np.int64)
            patches = np.full(images, prod(self.filler[-2:]) // self.patch**2, np.int64)
            pairs = patches**2
        if int(rows.sum()) != placeholders:
            raise Data.PLACEHOLDERS.error(
                name=name,
                images=images,
                modality=self.name,
                rows=int(rows.sum()),
                placeholders=placeholders,
                token=self.token_id,
            )
        return ImageFigures(rows, patches, pairs)

    def select(self, example: Fields, images: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Return the fields of some images of a document."""
        if self.kind != "grid":
            return {field: np.asarray(example[field])[list(images)] for field in self.fields}
        grids = np.asarray(example[self.sizes], np.int64).reshape(-1, 3)
        stops = np.cumsum(grids.prod(1))
        pixels = np.asarray(example[self.values])
        parts = [pixels[stops[image] - grids[image].prod() : stops[image]] for image in images]
        return {self.values: np.concatenate(parts), self.sizes: grids[list(images)]}

    def filler_image(self) -> dict[str, NDArray[Any]]:
        """Return the fields of a small black image, for a rank that has no image to encode."""
        fields: dict[str, NDArray[Any]] = {self.values: np.zeros(self.filler, np.float32)}
        if self.kind == "grid":
            fields[self.sizes] = np.array([[1, self.merge, self.merge]])
        elif self.kind == "size":
            fields[self.sizes] = np.array([self.filler[-2:]])
        return fields

    def joined(self, parts: Sequence[Fields]) -> dict[str, torch.Tensor]:
        """Return the fields of several documents' images as the encoder takes them."""
        joined: dict[str, torch.Tensor] = {}
        for field in self.fields:
            arrays = [np.asarray(part[field]) for part in parts]
            if self.kind == "size" and field == self.values:
                arrays = _padded_to_largest(arrays)
            joined[field] = torch.from_numpy(np.concatenate(arrays))
        return joined


_NONE_2 = np.zeros((0, 2), np.int64)
_NONE_3 = np.zeros((0, 3), np.int64)


def _padded_to_largest(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Pad [images, channels, height, width] pixels below and to the right, to one size."""
    height, width = np.max([array.shape[-2:] for array in arrays], axis=0).tolist()
    return [
        np.pad(array, ((0, 0), (0, 0), (0, height - array.shape[-2]), (0, width - array.shape[-1])))
        for array in arrays
    ]


@dataclass(frozen=True)
class ImageModel:
    """How a model takes images and videos.

    Attributes:
        linear, quadratic: work of the encoder for a patch, and for a pair of patches.
    """

    modalities: tuple[Modality, ...]
    config: PreTrainedConfig
    positions_of: type[nn.Module] | None  # class with `get_rope_index`; None: rows are counted
    linear: float
    quadratic: float

    @property
    def fields(self) -> frozenset[str]:
        """Names of the fields of all modalities."""
        return frozenset(field for modality in self.modalities for field in modality.fields)

    def costs(self, figures: ImageFigures) -> FloatArray:
        """Return [images] the work of the encoder."""
        costs: FloatArray = self.linear * figures.patches + self.quadratic * figures.pairs
        return costs

    def positions(self, tokens: IntArray, example: Fields) -> IntArray:
        """Return [3, L] positions of a document, by the model's own rule, or [L] row numbers."""
        if self.positions_of is None:
            return np.arange(len(tokens))
        kinds = np.zeros(len(tokens), np.int64)
        sizes: dict[str, torch.Tensor] = {}
        for number, modality in enumerate(self.modalities, start=1):
            kinds[tokens == modality.token_id] = number
            if modality.sizes and modality.count(example):
                sizes[modality.sizes] = torch.from_numpy(
                    np.asarray(example[modality.sizes], np.int64).reshape(-1, 3)
                )
        if not kinds.any():
            return np.broadcast_to(np.arange(len(tokens)), (3, len(tokens)))
        # The rule needs a config, not weights.
        rule = self.positions_of.__new__(self.positions_of)
        nn.Module.__init__(rule)
        rule.config = self.config  # type: ignore[assignment]
        ids = torch.from_numpy(tokens)[None]
        positions, _ = rule.get_rope_index(  # type: ignore[operator]
            ids,
            mm_token_type_ids=torch.from_numpy(kinds)[None].int(),
            attention_mask=torch.ones_like(ids),
            **sizes,
        )
        return np.asarray(positions[:, 0].numpy())

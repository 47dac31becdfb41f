"""Images and videos of documents: fields of the encoder, their placeholders and positions.

A document has token ids and, for its images, the fields that a processor of transformers makes:
pixels, and for some models the sizes of images. Everything here needs the model's config alone, so
that processes that load data can have it.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedConfig

from hf_distca.batches.encoder_shape import EncoderShape
from hf_distca.checks.data_rules import Data
from hf_distca.plan.arrays import FloatArray, IntArray

Fields = Mapping[str, NDArray[Any]]
"""Fields of a document's images, by the name of the encoder's argument."""


class ImageFigures(NamedTuple):
    """Figures of a document's images, [images] each."""

    rows: IntArray  # of features, and placeholders
    patches: IntArray  # that the encoder reads
    pairs: IntArray  # of patches in the encoder's attention without windows


class Field(NamedTuple):
    """A field of a document's images, which the encoder takes as an argument.

    Attributes:
        shape: of a filler image's field, which is filled with `filler`.
        axis: along which images lie, or their parts.
    """

    name: str
    shape: tuple[int, ...]
    filler: float | int | bool | tuple[int, ...]
    axis: int = 0


@dataclass(frozen=True)
class Modality:
    """Inputs of one encoder.

    Attributes:
        name: "image" or "video".
        token_id: token of a placeholder.
        kind: "grid" has [patches of all images, numbers of a patch] pixels, and [images, 2 or 3]
            rows and columns of patches, for 3 after the frames. "size" has [images, ...] pixels,
            and [images, 2] height and width in pixels. "even" has images with the same number of
            rows of features. "document" has images whose rows are not known: those of a document
            are encoded together, as if they were one image.
        inputs: first the pixels; the sizes of images follow for "grid" and "size".
        patch: height of a patch in pixels.
        merge: patches along each side of what becomes one row of features.
        channels: numbers of a pixel.
        merges: field with the [images] `merge` of each; empty if all have the same.
        padded: whether documents may have pixels of different shapes, padded with zeros in a batch.
        of_positions: fields that positions depend on, where a document has them.
    """

    name: str
    token_id: int
    kind: Literal["grid", "size", "even", "document"]
    inputs: tuple[Field, ...]
    patch: int
    merge: int = 1
    channels: int = 3
    merges: str = ""
    padded: bool = False
    of_positions: tuple[str, ...] = ()

    @property
    def values(self) -> str:
        """Name of the field of the pixels."""
        return self.inputs[0].name

    @property
    def sizes(self) -> str:
        """Name of the field of the sizes of images; empty if there is none."""
        return self.inputs[1].name if self.kind in ("grid", "size") else ""

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields."""
        return tuple(dict.fromkeys((*(field.name for field in self.inputs), *self.of_positions)))

    def count(self, example: Mapping[str, Any]) -> int:
        """Return the number of images of an example; one without the fields has none."""
        if self.sizes:
            sizes = example.get(self.sizes)
            return 0 if sizes is None else len(sizes)
        pixels = example.get(self.values)
        if pixels is None:
            return 0
        images: int = np.shape(pixels)[self.inputs[0].axis]
        return min(images, 1) if self.kind == "document" else images

    def figures(self, example: Mapping[str, Any], tokens: IntArray, name: str) -> ImageFigures:
        """Return figures of a document's images.

        Raise ValueError if a field is missing, or if their rows are not as many as the placeholders
        among the tokens.

        Args:
            example: has the sizes of images, or their number as the length of the pixels.
            tokens: [L] token ids of the document.
            name: name of the document in errors.
        """
        images = self.count(example)
        missing = [
            field.name for field in self.inputs if images and example.get(field.name) is None
        ]
        if missing:
            present = sorted(field for field in self.fields if example.get(field) is not None)
            raise Data.MISSING_IMAGE_FIELD.error(name=name, given=present, missing=missing)
        placeholders = int(np.count_nonzero(tokens == self.token_id))
        if self.kind == "grid":
            grids = self._grids(example) if images else np.zeros((0, 3), np.int64)
            patches = grids.prod(1)
            merge = np.asarray(example[self.merges]) if self.merges and images else self.merge
            rows = patches // merge**2
            pairs = grids[:, :-2].prod(1) * grids[:, -2:].prod(1) ** 2
        elif self.kind == "size":
            sides = np.asarray(example[self.sizes] if images else [], np.int64).reshape(-1, 2)
            patches = (sides // self.patch).prod(1)
            rows = (sides // (self.patch * self.merge)).prod(1)
            pairs = patches**2
        else:
            rows = np.full(images, placeholders // max(images, 1), np.int64)
            numbers = np.size(example[self.values]) if images else 0
            patches = np.full(images, numbers // max(images, 1) // (self.channels * self.patch**2))
            pairs = patches**2
            if self.kind == "document" and images:
                pairs //= max(1, len(example[self.inputs[1].name]))  # images of the document
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
        if self.kind == "document":
            return {field.name: np.asarray(example[field.name]) for field in self.inputs}
        selected = {
            field.name: np.take(np.asarray(example[field.name]), list(images), field.axis)
            for field in self.inputs
            if self.kind != "grid" or field.name != self.values
        }
        if self.kind == "grid":
            grids = self._grids(example)
            stops = np.cumsum(grids.prod(1))
            pixels = np.asarray(example[self.values])
            parts = [pixels[stops[image] - grids[image].prod() : stops[image]] for image in images]
            selected[self.values] = np.concatenate(parts)
        return selected

    def filler_image(self) -> dict[str, NDArray[Any]]:
        """Return the fields of a small image, for a rank that has no image to encode."""
        return {
            field.name: np.full(
                field.shape, field.filler, np.float32 if isinstance(field.filler, float) else None
            )
            for field in self.inputs
        }

    def joined(self, parts: Sequence[Fields]) -> dict[str, torch.Tensor]:
        """Return the fields of several documents' images as the encoder takes them."""
        joined: dict[str, torch.Tensor] = {}
        for field in self.inputs:
            arrays = [np.asarray(part[field.name]) for part in parts]
            if self.padded:
                arrays = _padded_to_largest(arrays, field.axis)
            joined[field.name] = torch.from_numpy(np.concatenate(arrays, field.axis))
        return joined

    def _grids(self, example: Mapping[str, Any]) -> IntArray:
        """Return [images, 2 or 3] patches."""
        return np.asarray(example[self.sizes], np.int64).reshape(-1, self.inputs[1].shape[1])


def _padded_to_largest(arrays: Sequence[NDArray[Any]], axis: int) -> list[NDArray[Any]]:
    """Pad arrays with zeros at the end of all dimensions but one, to one size."""
    largest = np.max([array.shape for array in arrays], axis=0)
    padded: list[NDArray[Any]] = []
    for array in arrays:
        missing = largest - array.shape
        missing[axis] = 0
        padded.append(np.pad(array, [(0, count) for count in missing.tolist()]))
    return padded


@dataclass(frozen=True)
class ImageModel:
    """How a model takes images and videos.

    Attributes:
        positions_of: class with `get_rope_index`; None if positions are numbers of rows.
        attributes: of that class, which the rule reads besides the config.
        encoder: shape of the encoder.
    """

    modalities: tuple[Modality, ...]
    config: PreTrainedConfig
    positions_of: type[nn.Module] | None
    attributes: Mapping[str, int]
    encoder: EncoderShape

    @property
    def fields(self) -> frozenset[str]:
        """Names of the fields of all modalities."""
        return frozenset(field for modality in self.modalities for field in modality.fields)

    def costs(self, figures: ImageFigures) -> FloatArray:
        """Return [images] the work of the encoder, in multiplications."""
        linear, quadratic = self.encoder.operations
        costs: FloatArray = linear * figures.patches + quadratic * figures.pairs
        return costs

    def positions(self, tokens: IntArray, example: Fields) -> IntArray:
        """Return [axes, L] positions of a document, by the model's rule, or [L] row numbers."""
        if self.positions_of is None:
            return np.arange(len(tokens))
        is_placeholder = np.isin(tokens, [modality.token_id for modality in self.modalities])
        if is_placeholder.any():
            return self._positions_by_rule(tokens, example)
        axes = len(self._positions_by_rule(tokens[:1], {}))
        return np.broadcast_to(np.arange(len(tokens)), (axes, len(tokens)))

    def _positions_by_rule(self, tokens: IntArray, example: Fields) -> IntArray:
        kinds = np.zeros(len(tokens), np.int64)
        given: dict[str, torch.Tensor] = {}
        for number, modality in enumerate(self.modalities, start=1):
            kinds[tokens == modality.token_id] = number
            if not modality.count(example):
                continue
            for name in modality.of_positions:
                if example.get(name) is not None:
                    given[name] = torch.from_numpy(np.asarray(example[name]))
        # The rule needs a config, not weights.
        assert self.positions_of is not None
        rule: Any = self.positions_of.__new__(self.positions_of)
        nn.Module.__init__(rule)
        rule.config = self.config
        for name, value in self.attributes.items():
            setattr(rule, name, value)
        ids = torch.from_numpy(tokens)[None]
        given["attention_mask"] = torch.ones_like(ids)
        given["mm_token_type_ids"] = torch.from_numpy(kinds)[None].int()
        taken = inspect.signature(rule.get_rope_index).parameters
        positions, _ = rule.get_rope_index(
            ids, **{name: value for name, value in given.items() if name in taken}
        )
        return np.asarray(positions[:, 0].long().numpy())

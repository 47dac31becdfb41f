"""Documents made from the sizes of pictures, which the head of a file says without its pixels."""

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import BatchFeature, ProcessorMixin
from transformers.image_utils import make_flat_list_of_images

from hf_distca.batches.images import ImageModel, Modality

Collate = Callable[[list[dict[str, Any]]], Any]
"""Function that makes a batch of examples."""
PICTURES = ("images", "image")
"""Columns of pictures."""


def collator_of_sizes(
    collate: Any, model: ImageModel
) -> Callable[[list[dict[str, Any]]], Any] | None:
    """Return a collator that takes blank pictures for others of their size, and makes no pixels.

    Its documents have the tokens of those of `collate`, and grids with as many patches. None where
    TRL's collator does not make the documents, where the model's images have no grids of patches,
    or where the processor does not count patches.

    Args:
        collate: makes a batch of examples.
        model: of the processor.
    """
    modality = model.modalities[0]
    processor = getattr(collate, "processor", None)
    if (
        not type(collate).__module__.startswith("trl.")
        or not isinstance(processor, ProcessorMixin)
        or not hasattr(processor, "_get_num_multimodal_tokens")
        or not hasattr(processor, "image_processor")
        or modality.kind != "grid"
        or modality.merges
    ):
        return None
    counting: Any = copy.copy(processor)
    counting.image_processor = _CountedPatches(processor, modality)
    collate_sizes = copy.copy(collate)
    collate_sizes.processor = counting
    made: Collate = collate_sizes
    return made


class _CountedPatches:
    """Stand-in for a processor's image processor, which counts patches and makes none."""

    def __init__(self, processor: Any, modality: Modality) -> None:
        self._processor = processor
        self._modality = modality

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor.image_processor, name)

    def __call__(self, images: Any, return_tensors: Any = None, **_options: Any) -> BatchFeature:
        pictures: Any = make_flat_list_of_images(images)
        sizes = [(picture.height, picture.width) for picture in pictures]
        # A file may say that its picture is turned.
        turned = [(width, height) for height, width in sizes]
        count = self._processor._get_num_multimodal_tokens
        counted = count(image_sizes=sizes)
        merge, axes = self._modality.merge, self._modality.inputs[1].shape[1]
        rows = np.array(counted["num_image_tokens"])
        if (
            counted["num_image_tokens"] != count(image_sizes=turned)["num_image_tokens"]
            or (rows * merge**2).tolist() != counted["num_image_patches"]
        ):
            raise ValueError("sizes alone do not give the rows of features")
        grids = np.ones((len(rows), axes), np.int64)
        grids[:, -2] = merge
        grids[:, -1] = rows * merge
        fields = {self._modality.sizes: grids, self._modality.values: np.zeros((0, 1), np.float32)}
        return BatchFeature(fields, tensor_type=return_tensors)


def with_blank_pictures(example: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an example with blank pictures of the same sizes; None if a size is not known.

    Raise what Pillow raises for files that are no pictures.

    Args:
        example: pictures are bytes or paths as `datasets` stores them.
    """
    from PIL import Image

    blank = dict(example)
    for column in PICTURES:
        given = example.get(column)
        if given is None:
            continue
        stored = given if isinstance(given, Sequence) else [given]
        sizes = [_size_of(picture) for picture in stored]
        if None in sizes:
            return None
        pictures = [Image.new("L", size) for size in sizes if size is not None]
        blank[column] = pictures if isinstance(given, Sequence) else pictures[0]
    return blank


def _size_of(stored: Any) -> tuple[int, int] | None:
    """Return width and height of a stored picture; None if they are not known."""
    if not isinstance(stored, Mapping):
        return None
    from PIL import Image

    content, path = stored.get("bytes"), stored.get("path") or ""
    with Image.open(io.BytesIO(content) if content is not None else path) as picture:
        return picture.size

"""Images of a data set's documents: where their placeholders are, and their inputs by rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_distca.batches.images import ImageFigures, ImageModel, Modality
from hf_distca.collator.documents import Columns, is_stored, token_document
from hf_distca.plan import PlannedImages
from hf_distca.plan.arrays import IntArray
from hf_distca.plan.intervals import Table
from hf_distca.planner.images import IMAGE, PLACEHOLDERS

READ_BATCH = 100
"""Number of documents read at once to find their images."""


@dataclass(frozen=True, eq=False)
class DocumentImages:
    """Images of documents: of a data set, or of one micro-batch.

    Attributes:
        images: of dtype IMAGE, by document.
        placeholders: of dtype PLACEHOLDERS, by document and row.
    """

    model: ImageModel
    images: Table
    placeholders: Table

    @classmethod
    def of_parts(cls, model: ImageModel, parts: Sequence[tuple[bytes, bytes]]) -> "DocumentImages":
        """Return the images of a data set whose parts `read_images` read, in order."""
        images = [np.frombuffer(part, IMAGE) for part, _ in parts]
        placeholders = [np.frombuffer(part, PLACEHOLDERS).copy() for _, part in parts]
        before = 0
        for images_of_part, placeholders_of_part in zip(images, placeholders, strict=True):
            placeholders_of_part["image"] += before
            before += len(images_of_part)
        return cls(model, np.concatenate(images), np.concatenate(placeholders))

    @property
    def documents(self) -> IntArray:
        """Documents that have images, in order."""
        return np.unique(self.images["document"])

    def of_documents(self, documents: IntArray) -> "DocumentImages":
        """Return the images of some documents, which get new numbers: their order here."""
        images: list[Table] = []
        placeholders: list[Table] = []
        count = 0
        for number, document in enumerate(documents.tolist()):
            first, last = np.searchsorted(self.images["document"], [document, document + 1])
            if first == last:
                continue
            own = self.images[first:last].copy()
            own["document"] = number
            begin, end = np.searchsorted(self._documents_of_placeholders, [document, document + 1])
            runs = self.placeholders[begin:end].copy()
            runs["image"] += count - first
            count += len(own)
            images.append(own)
            placeholders.append(runs)
        return DocumentImages(
            self.model,
            np.concatenate(images) if images else np.zeros(0, IMAGE),
            np.concatenate(placeholders) if placeholders else np.zeros(0, PLACEHOLDERS),
        )

    def encoded_by(self, planned: Mapping[str, PlannedImages], rank: int) -> IntArray:
        """Return the documents of whose images a rank encodes some, in order."""
        documents = [
            self._of_modality(modality.name)["document"][planned[modality.name].encoded_by(rank)]
            for modality in self.model.modalities
            if modality.name in planned
        ]
        return np.unique(np.concatenate(documents)) if documents else np.zeros(0, np.int64)

    def _of_modality(self, name: str) -> Table:
        """Return the images of one modality in order."""
        number = [modality.name for modality in self.model.modalities].index(name)
        return self.images.compress(self.images["modality"] == number)

    @cached_property
    def _documents_of_placeholders(self) -> IntArray:
        return np.asarray(self.images["document"][self.placeholders["image"]])


def read_images(
    dataset: Any, model: ImageModel, columns: Columns, name: str, share: tuple[int, int]
) -> tuple[bytes, bytes]:
    """Return the images of a part of a data set's documents, of dtype IMAGE and PLACEHOLDERS.

    Raise ValueError for a document whose placeholders are not as many as its images' rows.

    Args:
        share: part of the documents to read, and the number of parts.
    """
    part, parts = share
    documents = range(len(dataset) * part // parts, len(dataset) * (part + 1) // parts)
    if is_stored(dataset):
        dataset = dataset.select_columns(columns.used(dataset.column_names, name))
        dataset = dataset.with_format("numpy")
    images: list[Table] = []
    placeholders: list[Table] = []
    count = 0
    for document in documents:
        example = dataset[document]
        in_errors = f"document {document} of {name}"
        tokens = token_document(example, in_errors, columns)[0]
        own, runs = _images_of(example, tokens, model, in_errors)
        own["document"] = document
        runs["image"] += count
        count += len(own)
        images.append(own)
        placeholders.append(runs)
    no_images, no_runs = np.zeros(0, IMAGE), np.zeros(0, PLACEHOLDERS)
    return (
        np.concatenate([no_images, *images]).tobytes(),
        np.concatenate([no_runs, *placeholders]).tobytes(),
    )


def _images_of(
    example: Mapping[str, Any], tokens: IntArray, model: ImageModel, name: str
) -> tuple[Table, Table]:
    """Return the images of one document, and their placeholders by row."""
    images: list[Table] = []
    placeholders: list[Table] = []
    count = 0
    for number, modality in enumerate(model.modalities):
        figures = modality.figures(example, tokens, name)
        own = np.zeros(len(figures.rows), IMAGE)
        own["modality"] = number
        own["index"] = np.arange(len(own))
        own["rows"] = figures.rows
        own["cost"] = model.costs(figures)
        runs = _placeholder_runs(figures, np.flatnonzero(tokens == modality.token_id))
        runs["image"] += count
        count += len(own)
        images.append(own)
        placeholders.append(runs)
    runs = np.concatenate(placeholders)
    return np.concatenate(images), runs[np.argsort(runs["start"], kind="stable")]


def _placeholder_runs(figures: ImageFigures, rows: IntArray) -> Table:
    """Return the placeholders of one modality as runs of rows that follow each other."""
    image = np.repeat(np.arange(len(figures.rows)), figures.rows)
    first_of_image = np.repeat(np.cumsum(figures.rows) - figures.rows, figures.rows)
    begins = np.ones(len(rows), bool)
    begins[1:] = (rows[1:] != rows[:-1] + 1) | (image[1:] != image[:-1])
    first = np.flatnonzero(begins)
    runs = np.zeros(len(first), PLACEHOLDERS)
    runs["image"] = image[first]
    runs["start"] = rows[first]
    runs["stop"] = rows[first] + np.diff(np.append(first, len(rows)))
    runs["offset"] = first - first_of_image[first]
    return runs


def encoded_inputs(
    images: DocumentImages,
    planned: Mapping[str, PlannedImages],
    rank: int,
    examples: Mapping[int, Mapping[str, NDArray[Any]]],
) -> dict[str, torch.Tensor]:
    """Return the inputs of the encoders on a rank: its images of a micro-batch, or a filler.

    Args:
        images: of the micro-batch.
        examples: fields of documents with images that the rank encodes, by their number in the
            micro-batch.
    """
    inputs: dict[str, torch.Tensor] = {}
    for modality in images.model.modalities:
        if modality.name not in planned:
            continue
        encoded = images._of_modality(modality.name)[planned[modality.name].encoded_by(rank)]
        parts = [
            _of_document(modality, encoded, document, examples[document])
            for document in np.unique(encoded["document"]).tolist()
        ]
        # Every rank runs its encoder: DDP, FSDP2 and ZeRO-3 wait for all ranks in it.
        inputs |= modality.joined(parts or [modality.filler_image()])
    return inputs


def _of_document(
    modality: Modality, encoded: Table, document: int, example: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    indices = encoded["index"][encoded["document"] == document].tolist()
    return modality.select(example, indices)

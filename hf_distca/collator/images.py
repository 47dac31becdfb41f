"""Images of a data set's documents: where their placeholders are, and their inputs by rank."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from hf_distca.batches.images import ImageFigures, ImageModel, Modality
from hf_distca.batches.limits import NO_LIMITS, Limits
from hf_distca.checks.capacity_rules import Capacity
from hf_distca.checks.data_rules import Data
from hf_distca.collator.documents import Columns, check_dataset, is_stored, token_document
from hf_distca.collator.picture_sizes import collator_of_sizes, with_blank_pictures
from hf_distca.plan import PlannedImages
from hf_distca.plan.arrays import IntArray, Table
from hf_distca.plan.intervals import expand
from hf_distca.planner.images import IMAGE, PLACEHOLDERS, joined_images

TOKEN_COLUMNS = ("input_ids", "labels", "attention_mask")
"""Columns with one number for each token."""


@dataclass(frozen=True, eq=False)
class DocumentImages:
    """Images of documents: of a data set, or of one micro-batch.

    Attributes:
        images: of dtype IMAGE, by document.
        placeholders: of dtype PLACEHOLDERS, by document and row.
        always: modalities whose encoders run in every micro-batch.
    """

    model: ImageModel
    images: Table
    placeholders: Table
    always: frozenset[str] = frozenset()

    @classmethod
    def of_parts(
        cls, model: ImageModel, parts: Sequence["PartOfDataset"]
    ) -> "DocumentImages | None":
        """Return the images of a data set whose parts `read_images` read; None without images."""
        images, placeholders = joined_images(
            (np.frombuffer(part.images, IMAGE), np.frombuffer(part.placeholders, PLACEHOLDERS))
            for part in parts
        )
        return cls(model, images, placeholders) if len(images) else None

    @property
    def documents(self) -> IntArray:
        """Documents that have images, in order."""
        return np.unique(self.images["document"])

    @property
    def modalities(self) -> frozenset[str]:
        """Names of the modalities that documents have."""
        numbers = np.unique(self.images["modality"]).tolist()
        return frozenset(self.model.modalities[number].name for number in numbers)

    def of_documents(
        self, documents: IntArray, numbers: IntArray | None = None
    ) -> "DocumentImages":
        """Return the images of some documents, whose number is their place in `documents`.

        Args:
            numbers: places of the documents, in ascending order; None for all.
        """
        if numbers is None:
            numbers = np.arange(len(documents))
        chosen = documents[numbers]
        # 1. Images of each document, one document after another.
        firsts, counts = _entries_of(self.images["document"], chosen)
        images = self.images.take(expand(firsts, counts))
        images["document"] = np.repeat(numbers, counts)
        # 2. Placeholders of each document, with the new numbers of their images.
        begins, runs_of_documents = _entries_of(self._documents_of_placeholders, chosen)
        placeholders = self.placeholders.take(expand(begins, runs_of_documents))
        moved = np.cumsum(counts) - counts - firsts
        placeholders["image"] += np.repeat(moved, runs_of_documents)
        return DocumentImages(self.model, images, placeholders, self.always)

    def check_whole(
        self, spans: Table, lengths: IntArray, name: str, limit: str, capacity: int
    ) -> None:
        """Raise ValueError if a document with images is cut.

        Args:
            spans: of dtype SPAN.
            lengths: [documents] tokens of each.
            name: name of the data set in errors.
            limit: name of what a document must fit into.
            capacity: tokens of that.
        """
        is_cut = spans["stop"] - spans["start"] < lengths[spans["document"]]
        cut = np.intersect1d(spans["document"][is_cut], self.documents)
        for document in cut[:1].tolist():
            raise Capacity.CUT_IMAGES.error(
                name=f"document {document} of {name}",
                length=int(lengths[document]),
                limit=limit,
                capacity=capacity,
            )

    def encoded_by(self, planned: Mapping[str, PlannedImages], rank: int) -> IntArray:
        """Return the documents of whose images a rank encodes some, in order."""
        documents = [
            self.of_modality(modality.name)["document"][planned[modality.name].encoded_by(rank)]
            for modality in self.model.modalities
            if modality.name in planned
        ]
        return np.unique(np.concatenate(documents)) if documents else np.zeros(0, np.int64)

    def of_modality(self, name: str) -> Table:
        """Return the images of one modality in order."""
        number = [modality.name for modality in self.model.modalities].index(name)
        return self.images.compress(self.images["modality"] == number)

    @cached_property
    def _documents_of_placeholders(self) -> IntArray:
        return np.asarray(self.images["document"][self.placeholders["image"]])


def _entries_of(documents_of_entries: IntArray, documents: IntArray) -> tuple[IntArray, IntArray]:
    """Return the first entry and the number of entries of each document.

    Args:
        documents_of_entries: [entries] in ascending order.
    """
    firsts = np.searchsorted(documents_of_entries, documents)
    return firsts, np.searchsorted(documents_of_entries, documents, side="right") - firsts


def may_have_images(dataset: Any, model: ImageModel) -> bool:
    """Return whether documents of a data set may have images: its columns say so, if it has any."""
    return not is_stored(dataset) or bool(model.fields & set(dataset.column_names))


class PartOfDataset(NamedTuple):
    """Figures of some documents of a data set, as bytes that ranks exchange."""

    lengths: bytes  # int64 of each document
    images: bytes  # of dtype IMAGE
    placeholders: bytes  # of dtype PLACEHOLDERS, with the number of the image in `images`


def read_images(
    dataset: Any,
    model: ImageModel,
    columns: Columns,
    name: str,
    share: tuple[int, int],
    limits: Limits = NO_LIMITS,
) -> PartOfDataset:
    """Read the lengths and the images of a part of a data set's documents, each document once.

    `datasets` keeps on disk what it has read of a stored data set that is processed when it is
    read, and a later run with the same data and processor does not process it for this.

    Raise ValueError for a document that cannot be trained on, such as one whose placeholders are
    not as many as the rows of its images.

    Args:
        share: part of the documents to read, and the number of parts.
    """
    check_dataset(dataset, name)
    if len(dataset) == 0:
        raise Data.EMPTY.error(name=name)
    part, count = share
    documents = range(len(dataset) * part // count, len(dataset) * (part + 1) // count)
    if is_stored(dataset):
        dataset = dataset.select_columns(columns.used(dataset.column_names, name))
        dataset = dataset.with_format("numpy")
    read = partial(_figures_of, columns=columns, model=model, name=name, limits=limits)
    if isinstance(dataset, ProcessedDocuments):
        figures = dataset.map(read, documents, model)
    else:
        figures = (read(dataset[document], document) for document in documents)
    lengths: list[int] = []
    parts: list[tuple[Table, Table]] = []
    for row in figures:
        lengths.append(row["length"])
        runs = np.frombuffer(row["placeholders"], PLACEHOLDERS)
        parts.append((np.frombuffer(row["images"], IMAGE), runs))
    images, placeholders = joined_images(parts)
    return PartOfDataset(
        np.array(lengths, np.int64).tobytes(), images.tobytes(), placeholders.tobytes()
    )


def _figures_of(
    example: Mapping[str, Any],
    document: int,
    *,
    columns: Columns,
    model: ImageModel,
    name: str,
    limits: Limits,
) -> dict[str, Any]:
    """Return the length of a document, and its images and placeholders as bytes."""
    in_errors = f"document {document} of {name}"
    rows = token_document(example, in_errors, columns)
    limits.check_document(rows, in_errors)
    images, placeholders = images_of(example, rows[0], model, in_errors)
    images["document"] = document
    return {
        "length": rows.shape[1],
        "images": images.tobytes(),
        "placeholders": placeholders.tobytes(),
    }


def images_of(
    example: Mapping[str, Any], tokens: IntArray, model: ImageModel, name: str
) -> tuple[Table, Table]:
    """Return the images of one document, by modality, and their placeholders by row.

    Raise ValueError if the placeholders are not as many as the rows of features.

    Args:
        example: has the fields of the images.
        tokens: [L] token ids of the document.
        name: name of the document in errors.
    """
    parts: list[tuple[Table, Table]] = []
    for number, modality in enumerate(model.modalities):
        figures = modality.figures(example, tokens, name)
        own = np.zeros(len(figures.rows), IMAGE)
        own["modality"] = number
        own["index"] = np.arange(len(own))
        own["rows"] = figures.rows
        own["patches"] = figures.patches
        own["pairs"] = figures.pairs
        own["cost"] = model.costs(figures)
        runs = _placeholder_runs(figures, np.flatnonzero(tokens == modality.token_id))
        parts.append((own, runs))
    images, placeholders = joined_images(parts)
    return images, placeholders[np.argsort(placeholders["start"], kind="stable")]


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
        encoded = images.of_modality(modality.name)[planned[modality.name].encoded_by(rank)]
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


class ProcessedDocuments(Dataset[dict[str, Any]]):
    """Documents that a collator of images makes when they are read, one at a time.

    Args:
        dataset: gives examples by index, with texts and images.
        collate: makes a batch of one example: tokens [1, L], and fields of its images.
        name: name of the data set in errors.
        processes: processes in which `map` reads documents; None for this one.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[dict[str, Any]]], Any],
        name: str,
        processes: int | None = None,
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._name = name
        self._processes = processes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _processed(lambda: self.dataset[index], self._collate, self._name, index)

    def map(
        self,
        read: Callable[[dict[str, Any], int], dict[str, Any]],
        documents: range,
        model: ImageModel,
    ) -> Iterable[dict[str, Any]]:
        """Return what a function makes of some documents and their numbers.

        The function needs the sizes of images, not their pixels, and pictures are not decoded where
        `collator_of_sizes` has a collator. `datasets.Dataset.map` keeps the results on disk.
        """
        if not isinstance(self.dataset, datasets.Dataset):
            return (read(self[document], document) for document in documents)
        part = self.dataset.select(documents)
        # Pictures are decoded inside the function, where an error names their document.
        function = partial(
            _read_row,
            read=read,
            collate=self._collate,
            name=self._name,
            first=documents.start,
            features=part.features,
            model=model,
        )
        if part.format["type"] != "custom":  # the user's own transform
            part = part.with_format("arrow")
        rows: Iterable[dict[str, Any]] = part.map(
            function,
            with_indices=True,
            remove_columns=part.column_names,
            num_proc=self._processes,
            desc="Sizes of images",
        ).with_format(None)
        return rows


def _read_row(
    row: Any,
    index: int,
    *,
    read: Callable[[dict[str, Any], int], dict[str, Any]],
    collate: Callable[[list[dict[str, Any]]], Any],
    name: str,
    first: int,
    features: datasets.Features,
    model: ImageModel,
) -> dict[str, Any]:
    """Return what a function makes of a row of a part of a data set that begins at `first`.

    Args:
        row: table of the one row as it is stored, or what the user's transform makes of it.
    """
    document = first + index
    if isinstance(row, Mapping):
        return read(_processed(lambda: row, collate, name, document), document)
    (stored,) = row.to_pylist()
    collate_sizes = collator_of_sizes(collate, model)
    if collate_sizes is not None:
        # An error is raised again where the document is processed.
        with suppress(Exception):
            blank = with_blank_pictures(stored)
            if blank is not None:
                return read(_processed(lambda: blank, collate_sizes, name, document), document)
    example = _processed(lambda: features.decode_example(stored), collate, name, document)
    return read(example, document)


def _processed(
    example: Callable[[], Mapping[str, Any]],
    collate: Callable[[list[dict[str, Any]]], Any],
    name: str,
    index: int,
) -> dict[str, Any]:
    """Return the document that a collator makes of an example, which is read here."""
    try:
        # Collators take images out of the example that they get.
        batch = collate([dict(example())])
    # Files, decoders and processors raise anything.
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise Data.NOT_PROCESSED.error(index=index, name=name, why=why) from error
    return {
        column: value[0].numpy() if column in TOKEN_COLUMNS else np.asarray(value)
        for column, value in batch.items()
    }

"""What is read of documents that are processed when they are read."""

from pathlib import Path

import datasets
import numpy as np
import pytest
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from hf_distca.checks.data_rules import Data
from hf_distca.collator import images as images_module
from hf_distca.collator.documents import Columns
from hf_distca.collator.images import PartOfDataset, ProcessedDocuments, read_images
from hf_distca.models.images import image_model
from hf_distca.planner.images import PLACEHOLDERS
from tests.images.families import IMAGE, tiny_model
from tests.images.pictures import chats, processor
from tests.refused import refused

COUNTS = [1, 0, 2, 1]


def documents_of(dataset: datasets.Dataset) -> ProcessedDocuments:
    """The documents that TRL's collator makes of chats."""
    collate = DataCollatorForVisionLanguageModeling(processor())
    return ProcessedDocuments(dataset, collate, "train_dataset")


def read(dataset: datasets.Dataset, share: tuple[int, int] = (0, 1)) -> PartOfDataset:
    """Read the images of chats, as a trainer does before training."""
    model = image_model(tiny_model("qwen3_vl", "distca"))
    assert model is not None
    columns = Columns(images=model.fields)
    return read_images(documents_of(dataset), model, columns, "train_dataset", share)


def test_a_later_run_does_not_process_documents_again(tmp_path, monkeypatch):
    chats(COUNTS).save_to_disk(tmp_path)
    processed = []
    process = images_module._processed

    def noted(example, collate, name, index):
        processed.append(index)
        return process(example, collate, name, index)

    monkeypatch.setattr(images_module, "_processed", noted)
    first = read(datasets.load_from_disk(tmp_path))
    assert sorted(set(processed)) == [0, 1, 2, 3]
    processed.clear()
    assert read(datasets.load_from_disk(tmp_path)) == first
    assert processed == []
    documents = documents_of(chats(COUNTS))
    lengths = [len(documents[index]["input_ids"]) for index in range(len(documents))]
    assert np.frombuffer(first.lengths, np.int64).tolist() == lengths


def test_shares_make_the_whole():
    whole = read(chats(COUNTS))
    halves = [read(chats(COUNTS), (part, 2)) for part in range(2)]
    assert b"".join(half.lengths for half in halves) == whole.lengths
    assert b"".join(half.images for half in halves) == whole.images


def test_an_error_names_the_document_of_the_data_set(tmp_path: Path):
    sound = chats(COUNTS)
    rows = list(sound.cast_column("images", [datasets.Image(decode=False)]))
    rows[2]["images"][1] = {"bytes": b"no picture", "path": None}
    broken = datasets.Dataset.from_list(rows, features=sound.features)
    for share in ((0, 1), (1, 2)):
        with refused(Data.NOT_PROCESSED, index=2, name="train_dataset"):
            read(broken, share)
    with pytest.raises(ValueError, match="document 2 of train_dataset"):
        documents_of(broken)[2]


def test_images_that_follow_each_other_at_once():
    """Two images without a token between them, and the second one in two lines."""
    model = image_model(tiny_model("qwen3_vl", "distca"))
    assert model is not None
    example = {
        "input_ids": [5, IMAGE, IMAGE, IMAGE, 6, IMAGE],
        "pixel_values": np.zeros((16, 384), np.float32),
        "image_grid_thw": [[1, 4, 2], [1, 2, 4]],
    }
    part = read_images([example], model, Columns(images=model.fields), "train_dataset", (0, 1))
    runs = np.frombuffer(part.placeholders, PLACEHOLDERS)
    assert runs.tolist() == [(0, 1, 3, 0), (1, 3, 4, 0), (1, 5, 6, 1)]

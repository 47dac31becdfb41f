"""What is read of documents that are processed when they are read."""

import io
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import ExifTags, Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile
from transformers import Glm4vImageProcessorPil, Qwen2VLImageProcessorPil
from transformers.image_processing_utils import BaseImageProcessor
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from hf_distca.checks.data_rules import Data
from hf_distca.collator import images as images_module
from hf_distca.collator.documents import Columns
from hf_distca.collator.images import PartOfDataset, ProcessedDocuments, read_images
from hf_distca.collator.picture_sizes import collator_of_sizes
from hf_distca.models.images import image_model
from hf_distca.planner.images import PLACEHOLDERS
from tests.images.families import IMAGE, tiny_model
from tests.images.pictures import chats, processor
from tests.refused import refused

COUNTS = [1, 0, 2, 1]


def documents_of(
    dataset: datasets.Dataset, image_processor: Any = Qwen2VLImageProcessorPil
) -> ProcessedDocuments:
    """The documents that TRL's collator makes of chats."""
    collate = DataCollatorForVisionLanguageModeling(processor(image_processor))
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


def saved(picture: Image.Image, form: str, **options: Any) -> dict[str, Any]:
    """A stored picture."""
    file = io.BytesIO()
    picture.save(file, form, **options)
    return {"bytes": file.getvalue(), "path": None}


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif.tobytes()


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """Pictures that are decoded, and calls of image processors."""
    noted: list[str] = []

    def note(owner: type, method: str) -> None:
        original = getattr(owner, method)

        def noting(*args: Any, **kwargs: Any) -> Any:
            noted.append(owner.__name__)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, method, noting)

    for opened in (JpegImageFile, PngImageFile, WebPImageFile):
        note(opened, "load")
    note(BaseImageProcessor, "__call__")
    return noted


def with_pictures(pictures: list[list[dict[str, Any]]]) -> datasets.Dataset:
    """Chats with stored pictures."""
    turns = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6 w7"}]
    rows = [{"messages": turns, "images": own} for own in pictures]
    return datasets.Dataset.from_list(rows, features=chats(COUNTS).features)


def both_ways(
    dataset: datasets.Dataset, image_processor: Any, decoded: list[str]
) -> tuple[PartOfDataset, PartOfDataset, set[str]]:
    """What is read of chats, and of the documents that the processor makes of them.

    The last value has what is decoded for the first.
    """
    documents = documents_of(dataset, image_processor)
    model = image_model(tiny_model("qwen3_vl", "distca"))
    assert model is not None
    columns = Columns(images=model.fields)
    decoded.clear()
    found = read_images(documents, model, columns, "", (0, 1))
    decoded_for_found = set(decoded)
    processed = [documents[index] for index in range(len(documents))]
    return found, read_images(processed, model, columns, "", (0, 1)), decoded_for_found


@pytest.mark.parametrize("image_processor", [Qwen2VLImageProcessorPil, Glm4vImageProcessorPil])
def test_sizes_are_read_without_pixels(decoded, image_processor):
    draw = np.random.default_rng(0)
    wide = Image.new("RGB", (97, 41))
    kinds = [
        saved(wide, "PNG"),
        saved(wide, "JPEG"),
        *(saved(wide, "JPEG", exif=turned(orientation)) for orientation in (1, 3, 6)),
        saved(wide, "WEBP", exif=turned(8)),
        saved(wide, "PNG", exif=turned(6)),
        *(saved(Image.new("L", tuple(draw.integers(9, 300, 2))), "PNG") for _ in range(40)),
    ]
    dataset = with_pictures([[], kinds[:3], *([picture] for picture in kinds)])
    found, expected, formats = both_ways(dataset, image_processor, decoded)
    assert found == expected
    assert formats == set()
    opened = {"PngImageFile", "JpegImageFile", "WebPImageFile"}
    assert set(decoded) == {*opened, "BaseImageProcessor"}  # for the documents


def test_a_picture_by_its_path_is_not_decoded(decoded, tmp_path):
    Image.new("RGB", (97, 41)).save(tmp_path / "wide.png")
    sides = [{"bytes": None, "path": str(tmp_path / "wide.png")}]
    found, expected, formats = both_ways(with_pictures([sides]), Qwen2VLImageProcessorPil, decoded)
    assert found == expected
    assert formats == set()


def test_documents_of_a_users_collator_are_processed(decoded):
    """Their images may not be those of the data set's columns."""
    collate = DataCollatorForVisionLanguageModeling(processor())

    class Collator(DataCollatorForVisionLanguageModeling):
        """A subclass of TRL's."""

    model = image_model(tiny_model("qwen3_vl", "distca"))
    assert model is not None
    assert collator_of_sizes(collate, model) is not None
    assert collator_of_sizes(Collator(processor()), model) is None
    of_tiles = image_model(tiny_model("internvl", "distca"))
    assert of_tiles is not None
    assert collator_of_sizes(collate, of_tiles) is None

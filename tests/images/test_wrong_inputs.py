"""Documents with images that cannot be trained on: one sentence before the first step."""

from typing import Any

import datasets
import numpy as np
import pytest

import hf_distca
from hf_distca.checks.capacity_rules import Capacity
from hf_distca.checks.data_rules import Data
from tests.images.families import IMAGE, documents, tiny_model
from tests.images.pictures import chats, processor
from tests.refused import refused
from tests.trainer.comparison import QUIET

COUNTS = [1, 0, 2]


def start(folder: Any, examples: Any, **arguments: Any) -> None:
    """Train one step on examples with DistCATrainer."""
    args = hf_distca.DistCATrainingArguments(
        str(folder), **QUIET, use_cpu=True, max_steps=1, **{"tokens_per_rank": 256, **arguments}
    )
    model = tiny_model("qwen3_vl", "distca")
    hf_distca.DistCATrainer(model=model, args=args, train_dataset=examples).train()


def test_placeholders_that_do_not_fit_the_images(tmp_path):
    examples = documents("qwen3_vl", COUNTS)
    examples[2]["input_ids"].remove(IMAGE)
    rows = int(np.prod(examples[2]["image_grid_thw"], axis=1).sum()) // 4
    values = {"images": 2, "rows": rows, "placeholders": rows - 1}
    with refused(Data.PLACEHOLDERS, name="document 2 of train_dataset", **values):
        start(tmp_path, examples)


def test_an_image_that_is_missing(tmp_path):
    examples = documents("qwen3_vl", COUNTS)
    del examples[0]["pixel_values"], examples[0]["image_grid_thw"]
    with refused(Data.PLACEHOLDERS, name="document 0 of train_dataset", images=0, rows=0):
        start(tmp_path, examples)


@pytest.mark.parametrize("treatment", ["truncate", "split"])
def test_a_document_with_images_is_not_cut(tmp_path, treatment):
    examples = documents("qwen3_vl", COUNTS, [30, 20, 50])
    with refused(Capacity.CUT_IMAGES, name="document 2 of train_dataset", length=50, capacity=40):
        start(tmp_path, examples, tokens_per_rank=40, long_documents=treatment)


def test_a_picture_that_cannot_be_read(tmp_path):
    sound = chats(COUNTS)
    rows = list(sound.cast_column("images", [datasets.Image(decode=False)]))
    rows[2]["images"][1] = {"bytes": b"no picture", "path": None}
    broken = datasets.Dataset.from_list(rows, features=sound.features)
    with refused(Data.NOT_PROCESSED, index=2, name="train_dataset"):
        train_chats(tmp_path, broken)


def test_a_stream_of_pictures(tmp_path):
    with refused(Data.STREAM_OF_IMAGES, name="train_dataset"):
        train_chats(tmp_path, chats(COUNTS).to_iterable_dataset())


def test_a_model_without_an_encoder(tmp_path):
    from tests.models_and_batches import small_model

    examples = documents("qwen3_vl", COUNTS)
    args = hf_distca.DistCATrainingArguments(
        str(tmp_path), **QUIET, use_cpu=True, max_steps=1, remove_unused_columns=False
    )
    trainer = hf_distca.DistCATrainer(model=small_model(), args=args, train_dataset=examples)
    with refused(Data.UNKNOWN_COLUMNS, unknown=["image_grid_thw", "pixel_values"]):
        trainer.train()


def train_chats(folder: Any, dataset: Any) -> None:
    """Train one step on chats with DistCASFTTrainer."""
    args = hf_distca.DistCASFTConfig(
        str(folder), **QUIET, use_cpu=True, max_steps=1, tokens_per_rank=256
    )
    given = {"processing_class": processor(), "train_dataset": dataset}
    hf_distca.DistCASFTTrainer(tiny_model("qwen3_vl", "distca"), args, **given).train()

"""Data sets with images for `plan` and `simulate`: tokens and patches of each document."""

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hf_distca.cli import InputError
from hf_distca.cli.model import fake_model
from hf_distca.cli.options import READING_MODEL
from hf_distca.collator.documents import Columns
from hf_distca.collator.images import DocumentImages, ProcessedDocuments, read_images
from hf_distca.collator.picture_sizes import PICTURES
from hf_distca.collator.sources import load_documents
from hf_distca.models.images import image_model, why_no_images
from hf_distca.plan.arrays import IntArray
from hf_distca.predict.encoders import encoder_costs
from hf_distca.progress import terminal_status
from hf_distca.run import RunSpec
from hf_distca.sim.encoders import SimulatedImages
from hf_distca.sim.lengths import micro_batches, of_documents


class ImageDocuments(NamedTuple):
    """Documents of a data set with images."""

    lengths: IntArray
    images: DocumentImages

    def drawn(self, tokens: int) -> Iterator[IntArray]:
        """Yield the documents of micro-batches without end, as `drawn_micro_batches` draws them."""
        numbers = of_documents(np.arange(len(self.lengths)))
        return micro_batches(numbers, tokens, 0, cut=False, lengths=self.lengths)

    def simulated(self, documents: IntArray, run: RunSpec) -> SimulatedImages:
        """Return the images of a micro-batch, with predicted seconds."""
        costs = encoder_costs(
            self.images.model.encoder, run.device, checkpointing=run.checkpointing is not None
        )
        drawn = self.images.of_documents(documents)
        images = drawn.images.copy()
        images["cost"] = costs.seconds(images["patches"], images["pairs"])
        vision = drawn.model.config.vision_config
        layers = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
        width = drawn.model.config.get_text_config(decoder=True).hidden_size
        return SimulatedImages(
            images, drawn.placeholders, layers * width * run.device.bytes_per_value
        )


def image_documents(options: argparse.Namespace) -> ImageDocuments | None:
    """Return the documents of a data set with images; None for one without images."""
    source: str = options.lengths
    try:
        data: Any = load_documents(source, split=options.split, sample_by=options.sample_by)
    except ValueError:
        return None  # the source of lengths says what is wrong
    has_pictures = not {*PICTURES}.isdisjoint(data.column_names)
    with terminal_status(READING_MODEL):
        model = fake_model(options.model)
    images = image_model(model)
    fields = frozenset() if images is None else images.fields
    if not has_pictures and fields.isdisjoint(data.column_names):
        return None
    if images is None:
        raise InputError(
            f"{source} has images, but the images of {options.model} cannot be trained on: "
            f"{why_no_images(model)}; set --column to a column of lengths or of text"
        )
    if has_pictures:
        data = _processed(data, options)
    part = read_images(data, images, Columns(images=fields), source, (0, 1))
    found = DocumentImages.of_parts(images, [part])
    return None if found is None else ImageDocuments(np.frombuffer(part.lengths, np.int64), found)


def _processed(data: Any, options: argparse.Namespace) -> ProcessedDocuments:
    """Return the documents that TRL's collator makes of chats with pictures."""
    try:
        from transformers import AutoProcessor
        from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
    except ModuleNotFoundError as error:
        raise InputError(
            f"{options.lengths} has pictures, which TRL's collator counts; run pip install "
            "'hf_distca[trl]' pillow"
        ) from error
    name = options.tokenizer or options.model
    try:
        processor = AutoProcessor.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{options.lengths} has pictures, but there is no processor at {name!r}: {reason}; set "
            "--tokenizer to the name of a processor"
        ) from error
    tokenizer = processor.tokenizer
    if tokenizer.pad_token is None:  # as TRL's trainer does; a document alone has no padding
        tokenizer.pad_token = tokenizer.eos_token
    return ProcessedDocuments(
        data, DataCollatorForVisionLanguageModeling(processor), options.lengths
    )

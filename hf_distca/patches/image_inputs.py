"""Images among the arguments of a model: of which sequence each one is, and positions of tokens.

Shape suffixes: B sequences, L columns of a padded batch.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_distca.batches.images import ImageModel
from hf_distca.checks.batch_rules import Batch
from hf_distca.collator.images import images_of
from hf_distca.dispatch.padded_images import PaddedImages
from hf_distca.plan.arrays import IntArray, Table
from hf_distca.planner.images import IMAGE, PLACEHOLDERS


def read_padded_images(
    arguments: Mapping[str, Any],
    model: ImageModel,
    mask_BL: Tensor,
    numbers_BL: Tensor,
    rank: int,
) -> tuple[PaddedImages, Tensor | None]:
    """Read the images of a padded batch; this waits for the device.

    Args:
        arguments: arguments of the model, by name.
        numbers_BL: positions of tokens in sequences without images.

    Returns:
        The images; and [axes, B, L] positions of tokens, or None where `numbers_BL` are theirs.

    Raises:
        ValueError: The placeholders among the tokens do not fit the images.
    """
    fields = {
        # NumPy has no bfloat16.
        name: values.float().cpu().numpy() if values.is_floating_point() else values.cpu().numpy()
        for name in sorted(model.fields)
        if (values := arguments.get(name)) is not None
    }
    text_positions = model.positions(np.zeros(1, np.int64), {})
    axes = len(text_positions) if text_positions.ndim == 2 else 0
    positions_ABL = numbers_BL.expand(axes, *mask_BL.shape) if axes else None
    if not fields:
        none = np.zeros(0, IMAGE), np.zeros(0, PLACEHOLDERS)
        return PaddedImages(model, rank, {}, *none), positions_ABL
    is_token_BL = mask_BL.cpu().numpy() != 0
    ids_BL = arguments["input_ids"].long().cpu().numpy()
    for modality in model.modalities:
        if modality.kind == "document" and len(mask_BL) > 1 and modality.values in fields:
            raise Batch.IMAGES_TOGETHER.error(sequences=len(mask_BL))
    images, placeholders = images_of(fields, ids_BL[is_token_BL], model, "a padded batch")
    _count_in_sequences(images, placeholders, is_token_BL.sum(1))
    padded = PaddedImages(model, rank, fields, images, placeholders)
    if positions_ABL is None:
        return padded, None
    positions = positions_ABL.cpu().numpy().copy()
    for sequence in np.unique(images["document"]).tolist():
        tokens = ids_BL[sequence][is_token_BL[sequence]]
        own = _fields_of(fields, model, images.compress(images["document"] == sequence))
        positions[:, sequence, is_token_BL[sequence]] = model.positions(tokens, own)
    return padded, torch.from_numpy(positions).to(mask_BL.device)


def _count_in_sequences(images: Table, placeholders: Table, lengths: IntArray) -> None:
    """Give images their sequence, and placeholders their rows in it, in place.

    Args:
        lengths: [B] tokens of each sequence.
    """
    stops = np.cumsum(lengths)
    sequences = np.searchsorted(stops, placeholders["start"], side="right")
    last = np.searchsorted(stops, placeholders["stop"] - 1, side="right")
    images["document"][placeholders["image"]] = sequences
    is_cut = (images["document"][placeholders["image"]] != sequences) | (last != sequences)
    for first in sequences[is_cut][:1].tolist():
        raise Batch.CUT_IMAGE.error(sequence=first)
    for bound in ("start", "stop"):
        placeholders[bound] -= (stops - lengths)[sequences]


def _fields_of(
    fields: Mapping[str, NDArray[Any]], model: ImageModel, images: Table
) -> dict[str, NDArray[Any]]:
    """Return the fields of some images of a batch."""
    selected: dict[str, NDArray[Any]] = {}
    for number, modality in enumerate(model.modalities):
        own = images["index"][images["modality"] == number].tolist()
        if own:
            selected |= modality.select(fields, own)
            selected |= {
                name: fields[name][own] for name in modality.of_positions if name in fields
            }
    return selected

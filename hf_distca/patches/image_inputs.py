"""Images among the arguments of a model: of which sequence each one is, and positions of tokens.

Shape suffixes: B sequences, L columns of a padded batch.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_distca.batches.images import ImageModel
from hf_distca.checks.batch_rules import Batch
from hf_distca.collator.images import images_of
from hf_distca.dispatch.padded_images import PaddedImages
from hf_distca.plan.arrays import IntArray
from hf_distca.plan.intervals import Table
from hf_distca.planner.images import IMAGE, PLACEHOLDERS


def read_padded_images(
    arguments: Mapping[str, Any], model: ImageModel, mask_BL: Tensor, rank: int
) -> tuple[PaddedImages, Tensor | None]:
    """Read the images of a padded batch; this waits for the device.

    Args:
        arguments: arguments of the model, by name.

    Returns:
        The images; and [3, B, L] positions of tokens, or None where these are numbers of columns.

    Raises:
        ValueError: The placeholders among the tokens do not fit the images.
    """
    fields = {
        name: arguments[name] for name in sorted(model.fields) if arguments.get(name) is not None
    }
    positions_3BL: Tensor | None = None
    if model.positions_of is not None:
        numbers_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
        positions_3BL = numbers_L.expand(3, *mask_BL.shape)
    if not fields:
        none = np.zeros(0, IMAGE), np.zeros(0, PLACEHOLDERS)
        return PaddedImages(model, rank, {}, *none), positions_3BL
    is_token_BL = mask_BL.cpu().numpy() != 0
    ids_BL = arguments["input_ids"].long().cpu().numpy()
    lengths = is_token_BL.sum(1)
    # Sizes are read here, and pixels stay on the device.
    example: dict[str, Any] = {
        name: fields[name].cpu().numpy() if name == modality.sizes else fields[name]
        for modality in model.modalities
        for name in modality.fields
        if name in fields
    }
    images, placeholders = images_of(example, ids_BL[is_token_BL], model, "a padded batch")
    _count_in_sequences(images, placeholders, lengths)
    padded = PaddedImages(model, rank, fields, images, placeholders)
    if positions_3BL is None:
        return padded, None
    positions = positions_3BL.cpu().numpy().copy()
    for sequence in np.unique(images["document"]).tolist():
        tokens = ids_BL[sequence][is_token_BL[sequence]]
        own = _sizes_of(example, model, images.compress(images["document"] == sequence))
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


def _sizes_of(example: Mapping[str, Any], model: ImageModel, images: Table) -> dict[str, Any]:
    """Return the sizes of some images of a batch, by the name of their field."""
    return {
        modality.sizes: example[modality.sizes][images["index"][images["modality"] == number]]
        for number, modality in enumerate(model.modalities)
        if modality.sizes in example
    }

"""Memory that an encoder of images takes on a rank, counted on fake tensors.

The encoder runs before the text model, and what its backward needs is kept through the step of the
text model. Its backward runs after that of the text model.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from hf_distca.batches.images import Modality
from hf_distca.memory.counted_step import HOST, set_checkpointing
from hf_distca.memory.launches import without_launches
from hf_distca.memory.live import LiveMemory, Part
from hf_distca.models.decoder import base_model
from hf_distca.models.images import ENCODES, encoding_module, feature_fields, image_model
from hf_distca.run import RunSpec

MOST_IMAGES = 64
"""Images that are encoded for a count; the memory of more is in proportion to their patches."""


class Encoded(NamedTuple):
    """Images that a rank encodes in a micro-batch."""

    images: int
    patches: int  # of all of them


class EncoderPeaks(NamedTuple):
    """Bytes of an encoder, without weights and gradients of weights."""

    kept: int  # while the text model runs: pixels, features, and what the backward needs
    peak: int  # the most of the encoder's forward and backward


class _RealNumbers(TorchDispatchMode):
    """Mode that computes what depends on no fake tensor, such as the sizes of images."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, FakeTensor) for value in tree_iter((args, kwargs))):
            return func(*args, **kwargs)
        with _disable_current_modes():
            return func(*args, **kwargs)


def count_encoder(model: nn.Module, run: RunSpec, encoded: Encoded) -> EncoderPeaks:
    """Return the bytes that an encoder takes for images of equal size.

    Args:
        model: a model of fake tensors, which sees images; `run` sets its checkpointing.
    """
    found = image_model(model)
    base = base_model(model)
    encoder: Any = encoding_module(base)
    if found is None or encoder is None:
        raise ValueError(f"{type(base).__name__} has no encoder of images whose memory is counted")
    set_checkpointing(base, run.checkpointing)
    live = LiveMemory()
    live.belong([*model.parameters(), *model.buffers()], "weights")
    first: Any = next(model.parameters())
    mode: FakeTensorMode = first.fake_mode
    modality = found.modalities[0]
    shape, given, patches = _inputs(modality, encoded)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with without_launches(), mode, live:
        pixels = torch.empty(shape)
        with live.making("gradients"):
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
        live.begin()
        real: Any = _RealNumbers
        with real():
            with torch.autocast(HOST.type, torch.bfloat16, enabled=run.autocasts):
                output = getattr(encoder, ENCODES["image"])(**{modality.values: pixels}, **given)
            features = list(_tensors([getattr(output, name) for name in feature_fields(encoder)]))
            del output
            kept = _bytes(live.alive)
            ends = [feature for feature in features if feature.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.empty_like(feature) for feature in ends])
    for parameter in trained:
        parameter.grad = None
    scale = encoded.patches / patches
    return EncoderPeaks(round(kept * scale), round(_bytes(live.peak) * scale))


def _inputs(modality: Modality, encoded: Encoded) -> tuple[tuple[int, ...], dict[str, Tensor], int]:
    """Return the shape of the pixels of images of equal size, other inputs, and all patches."""
    pixels, *others = modality.inputs
    merge, patch = modality.merge, modality.patch
    images = min(encoded.images, MOST_IMAGES)
    if modality.kind not in ("grid", "size"):
        patches = math.prod(pixels.shape) // (modality.channels * patch**2)
        images = min(-(-encoded.patches // patches), MOST_IMAGES)
        shapes = [
            tuple(np.where(np.arange(len(field.shape)) == field.axis, images, 1) * field.shape)
            for field in modality.inputs
        ]
        given = {
            field.name: torch.as_tensor(field.filler).expand(shape)
            for field, shape in zip(others, shapes[1:], strict=True)
        }
        return shapes[0], given, images * patches
    # A square as nearly as possible.
    features = max(round(encoded.patches / encoded.images / merge**2), 1)
    rows = math.isqrt(features)
    sides = [rows * merge, features // rows * merge]
    patches = math.prod(sides)
    sizes, *further = others
    given = {field.name: torch.as_tensor(field.filler).expand((images,)) for field in further}
    if modality.kind == "size":
        sides = [side * patch for side in sides]
        shape = (images, modality.channels, *sides)
    else:
        shape = (images * patches, *pixels.shape[1:])
    frames = [1] * (sizes.shape[1] - 2)
    given[sizes.name] = torch.tensor([[*frames, *sides]] * images)
    return shape, given, images * patches


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output, which may be in lists."""
    return (value for value in tree_iter(output) if isinstance(value, Tensor))


def _bytes(parts: Mapping[Part, int]) -> int:
    """Return the bytes beside weights and gradients of weights."""
    return sum(size for part, size in parts.items() if part not in ("weights", "gradients"))

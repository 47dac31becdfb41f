"""Encoders of images in a planned step: a rank encodes its share of all images of the micro-batch.

The forward of a model encodes the pixels that it is given, and puts the features in place of
placeholders. In a planned step a rank is given the pixels that it encodes, and it has the
placeholders that it holds. `plan_encoders` gives the model a subclass whose methods
`get_image_features` and `get_video_features` return the features of the held placeholders.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.models.decoder import base_model
from hf_distca.models.images import encoding_module, feature_fields
from hf_distca.patches.modules import KnowsPlan, running_plan, subclass
from hf_distca.plan import PLAN_KEY

BY_LAYER = "deepstack_features"
"""Output of an encoder that has features for several layers."""


def plan_encoders(model: PreTrainedModel) -> None:
    """Let a model encode a rank's share of images in planned steps, in place."""
    encoder = encoding_module(base_model(model))
    if encoder is not None and not isinstance(encoder, _PlannedEncoders):
        encoder.__class__ = subclass(type(encoder), _PlannedEncoders)


class _PlannedEncoders(KnowsPlan):
    """Base that precedes the class of a model with encoders."""

    def get_image_features(self, *args: Any, **kwargs: Any) -> Any:
        """Return the features of images; in a planned step those of the held placeholders."""
        return self._features("image", args, kwargs)

    def get_video_features(self, *args: Any, **kwargs: Any) -> Any:
        """Return the features of videos; in a planned step those of the held placeholders."""
        return self._features("video", args, kwargs)

    def _features(self, modality: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        encode: Any = getattr(super(), f"get_{modality}_features")
        plan = running_plan.get()
        if plan is None or modality not in plan.images:
            return encode(*args, **kwargs)
        # The encoder's own attention is not planned.
        kwargs.pop(PLAN_KEY, None)
        # Some models encode videos by their method for images.
        token = running_plan.set(None)
        try:
            output = encode(*args, **kwargs)
        finally:
            running_plan.reset(token)
        return _of_placeholders(output, plan, modality, feature_fields(self))


def _of_placeholders(output: Any, plan: BoundPlan, modality: str, fields: tuple[str, ...]) -> Any:
    """Replace the features of encoded images by those of the placeholders that a rank holds.

    Args:
        fields: of the output, which have features, or a list of features by layer.
    """
    features: dict[str, Any] = {name: getattr(output, name, None) for name in fields}
    features = {name: value for name, value in features.items() if value is not None}
    by_layer = [_of_layer(entry) for entry in features.get(BY_LAYER, ())]
    of_all_layers = [value for name, value in features.items() if name != BY_LAYER]
    encoded = [_rows_of(value) for value in (*of_all_layers, *by_layer)]
    # One exchange for all of them.
    widths = [rows.shape[1] for rows in encoded]
    placed = iter(plan.images[modality].to_placeholders(torch.cat(encoded, 1)).split(widths, 1))
    for name, value in features.items():
        if name != BY_LAYER:
            setattr(output, name, _as_given(value, next(placed)))
    if BY_LAYER in features:
        output.deepstack_features = [
            _with_layer(entry, next(placed)) for entry in features[BY_LAYER]
        ]
    return output


def _of_layer(entry: Any) -> Any:
    """Return the features of an entry by layer: features, or a layer's number and features."""
    return entry[1] if isinstance(entry[0], int) else entry


def _with_layer(entry: Any, rows: Tensor) -> Any:
    """Return an entry by layer with other rows."""
    placed = _as_given(_of_layer(entry), rows)
    return (entry[0], placed) if isinstance(entry[0], int) else placed


def _rows_of(features: Any) -> Tensor:
    """Return features [rows, D], given a tensor [..., D] or a list of them for each image."""
    tensors = [features] if isinstance(features, Tensor) else list(features)
    return torch.cat([tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors])


def _as_given(given: Any, rows: Tensor) -> Any:
    """Return rows as a tensor of as many dimensions, or in a list, as the features were given."""
    return rows[(None,) * (given.dim() - 2)] if isinstance(given, Tensor) else [rows]

"""How a model takes images and videos, read from its config and its encoders' arguments."""

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_distca.batches.images import ImageModel, Modality
from hf_distca.models.decoder import base_model

ENCODES = {"image": "get_image_features", "video": "get_video_features"}
"""Method of a model that encodes inputs of each modality."""
_EVEN_ARGUMENTS = {
    *("self", "pixel_values", "vision_feature_layer", "vision_feature_select_strategy"),
    *("image_sizes", "kwargs"),
}
"""Arguments of encoders that make the same number of rows for each image."""


def image_model(model: nn.Module) -> ImageModel | None:
    """Return how a model takes images and videos; None if it takes none, or none that is known."""
    base = base_model(model)
    encoder = encoding_module(base)
    if encoder is None:
        return None
    config: Any = base.config
    modalities = [
        modality for name in ENCODES if (modality := _modality(name, encoder, config)) is not None
    ]
    if not modalities or modalities[0].name != "image":
        return None
    linear, quadratic = _encoder_work(config.vision_config)
    return ImageModel(
        tuple(modalities),
        config,
        _own_class(encoder) if hasattr(encoder, "get_rope_index") else None,
        linear,
        quadratic,
    )


def encoding_module(base: PreTrainedModel) -> nn.Module | None:
    """Return the module whose forward encodes images, or None."""
    inner = getattr(base, base.base_model_prefix, base)
    encoder: nn.Module = inner if hasattr(inner, ENCODES["image"]) else base
    takes = inspect.signature(_own_class(encoder).forward).parameters
    # Tokens of an image attend to later ones where the model takes their types.
    if "token_type_ids" in takes or "pixel_values" not in takes:
        return None
    return encoder if hasattr(encoder, ENCODES["image"]) else None


def _modality(name: str, encoder: nn.Module, config: Any) -> Modality | None:
    """Return the inputs of a model's encoder, or None if their rows are not known."""
    vision = getattr(config, "vision_config", None)
    token_id = getattr(config, f"{name}_token_id", getattr(config, f"{name}_token_index", None))
    if vision is None or token_id is None or not hasattr(encoder, ENCODES[name]):
        return None
    arguments = set(inspect.signature(getattr(_own_class(encoder), ENCODES[name])).parameters)
    channels = next(
        (
            getattr(vision, key)
            for key in ("in_channels", "in_chans", "num_channels")
            if hasattr(vision, key)
        ),
        3,
    )
    patch = _first(vision.patch_size)
    merge = getattr(vision, "spatial_merge_size", getattr(config, "spatial_merge_size", 1))
    values = "pixel_values" if name == "image" else f"pixel_values_{name}s"
    if f"{name}_grid_thw" in arguments:
        frames = _first(getattr(vision, "temporal_patch_size", 1))
        shape: tuple[int, ...] = (merge**2, channels * frames * patch**2)
        return Modality(name, token_id, values, f"{name}_grid_thw", "grid", patch, merge, shape)
    if name != "image":
        return None
    if vision.model_type == "pixtral":
        # Mistral 3 cannot encode a single row of features.
        shape = (1, channels, patch * merge, 2 * patch * merge)
        return Modality(name, token_id, values, "image_sizes", "size", patch, merge, shape)
    if arguments <= _EVEN_ARGUMENTS:
        side = vision.image_size
        sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
        return Modality(name, token_id, values, "", "even", patch, 1, (1, channels, *sides))
    return None


def _own_class(module: nn.Module) -> Any:
    """Return a module's class as it was before hf_distca changed it."""
    return getattr(module, "own_class", type(module))


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)


def _encoder_work(vision: Any) -> tuple[float, float]:
    """Return the multiplications of an encoder for a patch, and for a pair of patches.

    A layer has four projections of attention and an MLP with two matrices, or three where it is
    gated. Layers with windows have pairs inside a window only, which are left out.
    """
    hidden = getattr(vision, "hidden_size", None) or vision.embed_dim
    layers = getattr(vision, "num_hidden_layers", None) or vision.depth
    inner = getattr(vision, "intermediate_size", None) or hidden * getattr(vision, "mlp_ratio", 4)
    matrices = 3 if getattr(vision, "hidden_act", "") == "silu" else 2
    whole = getattr(vision, "fullatt_block_indexes", None)
    full_layers = layers if whole is None else len(whole)
    return float(layers * (4 * hidden**2 + matrices * hidden * inner)), 2.0 * full_layers * hidden

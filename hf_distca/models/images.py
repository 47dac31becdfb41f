"""How a model takes images and videos, read from its config and its encoders' arguments."""

import inspect
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PreTrainedModel

from hf_distca.batches.images import ImageModel, Modality
from hf_distca.models.decoder import base_model
from hf_distca.models.encoder_inputs import encoder_inputs, encoder_shape

ENCODES = {"image": "get_image_features", "video": "get_video_features"}
"""Method of a model that encodes inputs of each modality."""


def image_model(model: nn.Module) -> ImageModel | None:
    """Return how a model takes images and videos; None if it takes none, or none that is known."""
    model_or_reason = _read(model)
    return model_or_reason if isinstance(model_or_reason, ImageModel) else None


def why_no_images(model: nn.Module) -> str:
    """Return why a model's images cannot be trained on; "" if they can."""
    model_or_reason = _read(model)
    return model_or_reason if isinstance(model_or_reason, str) else ""


def encoding_module(base: PreTrainedModel) -> nn.Module | None:
    """Return the module whose forward encodes images, or None."""
    inner = getattr(base, base.base_model_prefix, base)
    encoder: nn.Module = inner if hasattr(inner, ENCODES["image"]) else base
    takes = inspect.signature(_own_class(encoder).forward).parameters
    is_encoder = hasattr(encoder, ENCODES["image"]) and "pixel_values" in takes
    return encoder if is_encoder else None


def feature_fields(encoder: nn.Module) -> tuple[str, ...]:
    """Return the outputs of an encoder that a model's forward puts among tokens."""
    names = inspect.unwrap(_own_class(encoder).forward).__code__.co_names
    fields = tuple(name for name in ("pooler_output", "deepstack_features") if name in names)
    # Llama 4 projects the last hidden state.
    return fields or ("last_hidden_state",)


def _read(model: nn.Module) -> ImageModel | str:
    """Return how a model takes images and videos, or why that is not known."""
    base = base_model(model)
    encoder = encoding_module(base)
    if encoder is None:
        return "it has no method get_image_features, or its text attends to images by other layers"
    config: Any = base.config
    reason = _why_not_by_rows(encoder, config)
    if reason:
        return reason
    image = _modality("image", encoder, config)
    if isinstance(image, str):
        return image
    modalities = [image]
    video = (
        _modality("video", encoder, config)
        if hasattr(_own_class(encoder), ENCODES["video"])
        else ""
    )
    if isinstance(video, Modality) and video.kind == "grid":
        modalities.append(video)
    has_rule = hasattr(encoder, "get_rope_index")
    merge = getattr(encoder, "spatial_merge_size", None)
    return ImageModel(
        tuple(modalities),
        config,
        _own_class(encoder) if has_rule else None,
        {"spatial_merge_size": merge} if has_rule and isinstance(merge, int) else {},
        encoder_shape(config.vision_config),
    )


def _why_not_by_rows(encoder: nn.Module, config: Any) -> str:
    """Return why rows of images are not computed as other rows of the text model; "" if they are.

    Their features must also be those of each image alone.
    """
    forward = _own_class(encoder).forward
    takes = inspect.signature(forward).parameters
    code = inspect.unwrap(forward).__code__
    names = {*code.co_names, *code.co_varnames, *code.co_consts}
    text = config.get_text_config()
    if "token_type_ids" in takes or (
        "block_sequence_ids" in names
        and getattr(text, "use_bidirectional_attention", "vision") == "vision"
    ):
        return "tokens of an image may attend to later ones of the image, and a plan is causal"
    if takes["pixel_values"].default is inspect.Parameter.empty:
        return "it computes no text without images"
    if "moe_mm_token_type_ids" in takes:
        return "its experts depend on the types of tokens"
    if getattr(config, "vision_config", None) is None:
        return "its config has no vision_config"
    if any(
        isinstance(module, _BatchNorm) and "audio" not in name
        for name, module in encoder.named_modules()
    ):
        return "its encoder normalizes over all images of a batch (batch norm)"
    return ""


def _modality(name: str, encoder: nn.Module, config: Any) -> Modality | str:
    """Return the inputs of a model's encoder, or why they are not known."""
    token_id = getattr(config, f"{name}_token_id", getattr(config, f"{name}_token_index", None))
    if token_id is None:
        return f"its config has no {name}_token_id"
    encode = getattr(_own_class(encoder), ENCODES[name])
    return encoder_inputs(name, token_id, inspect.signature(encode).parameters, config)


def _own_class(module: nn.Module) -> Any:
    """Return a module's class as it was before hf_distca changed it."""
    return getattr(module, "own_class", type(module))

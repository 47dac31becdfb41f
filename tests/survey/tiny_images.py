"""Tiny models of the survey that see images, and documents with images for them."""

import inspect
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from hf_distca.batches.images import Modality
from hf_distca.models.decoder import base_model
from hf_distca.models.images import ENCODES, encoding_module, feature_fields
from tests.survey.tiny import MULTIMODAL, OF_TIMM, tiny_config

OF_IMAGES: dict[str, str] = {
    name if name in MULTIMODAL else model_type: model_type
    for model_type, name in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items(), reverse=True)
}
"""Types of models that take images and text, by their name in the survey."""
PLACEHOLDER = {"image": 60, "video": 61}
BEGIN, END = 62, 63
TOKENS = {
    **dict.fromkeys(("image_token_id", "image_token_index", "img_context_token_id"), 60),
    **dict.fromkeys(("video_token_id", "video_token_index"), 61),
    **dict.fromkeys(("vision_start_token_id", "image_start_token_id", "video_start_token_id"), 62),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id", "video_end_token_id"), 63),
}
"""Fields of configs with the tokens of placeholders, and around images."""
SIDE, ALONG = 8, 4
"""Height of a patch in pixels, and patches along a side of images that have one size."""
VISION = {"patch_size": SIDE, "image_size": ALONG * SIDE}
GRIDS = [[2 * ALONG * SIDE, ALONG * SIDE], [ALONG * SIDE, 2 * ALONG * SIDE]]
_IN_WINDOWS = {"vision_config": {"window_size": 4 * SIDE}}
MORE_WITH_IMAGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_omni_thinker", "exaone4_5"), _IN_WINDOWS),
    "hyperclovax_vision_v2": _IN_WINDOWS,
    "aria": {"projector_patch_to_query_dict": {ALONG**2: 4}},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0]}},
    "llama4": {"vision_config": {"intermediate_size": 128}},
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {"out_hidden_size": 128},
    "nemotron_h_omni": {
        "vision_hidden_size": 32,
        "vision_config": {"patch_dim": 3 * SIDE**2, "video_patch_dim": 6 * SIDE**2},
    },
    "kimi_k25": {"projection_hidden_size": 32},
    "minicpmv4_6": {"insert_layer_id": 0},
    "minicpmv4_7": {"insert_layer_id": 0},
    "vipllava": {"vision_feature_layers": [-1, -2]},
}
"""What a type of model needs to see images, besides that for text."""


def config_with_images(name: str) -> PreTrainedConfig:
    """The tiny config of a model, with an encoder of tiny images."""
    default = CONFIG_MAPPING[OF_IMAGES[name]]()
    more: dict[str, Any] = {key: token for key, token in TOKENS.items() if hasattr(default, key)}
    if hasattr(default, "image_grid_pinpoints"):
        more["image_grid_pinpoints"] = GRIDS
    for key in ("vision_config", "high_res_vision_config"):
        vision = getattr(default, key, None)
        if vision is not None:
            more[key] = {
                field: [value, value] if isinstance(getattr(vision, field), list | tuple) else value
                for field, value in VISION.items()
                # Florence 2 has a height of patches for each stage.
                if isinstance(old := getattr(vision, field, None), int) or len(old or ()) == 2
            }
    for key, value in MORE_WITH_IMAGES.get(OF_IMAGES[name], {}).items():
        more[key] = {**more.get(key, {}), **value} if isinstance(value, dict) else value
    return tiny_config(name, more)


def is_of_timm(name: str) -> bool:
    """Whether the encoder of a model is one of the package timm."""
    vision = getattr(CONFIG_MAPPING[OF_IMAGES[name]](), "vision_config", None)
    return getattr(vision, "model_type", "") in OF_TIMM


def documents_with_images(
    model: Any, modality: Modality, counts: Sequence[int]
) -> list[dict[str, Any]]:
    """Documents with these numbers of images of different sizes, as a processor makes them.

    Args:
        model: stock model, whose encoder says how many placeholders an image has.
    """
    return [_document(model, modality, count, number) for number, count in enumerate(counts)]


def stock_inputs(model: Any, modality: Modality, document: dict[str, Any]) -> dict[str, Tensor]:
    """The document as a batch for the stock model."""
    ids = torch.tensor([document["input_ids"]])
    batch = {name: torch.as_tensor(value) for name, value in document.items()}
    batch |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    encoder: Any = encoding_module(base_model(model))
    if "mm_token_type_ids" in inspect.signature(type(encoder).forward).parameters:
        number = 1 + list(PLACEHOLDER).index(modality.name)
        batch["mm_token_type_ids"] = (ids == modality.token_id).int() * number
    return batch


def _document(model: Any, modality: Modality, images: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)

    def text(most: int) -> list[int]:
        return [draw.randint(3, 50) for _ in range(draw.randint(1, most))]

    tokens = text(9)
    fields = _fields(modality, images, seed) if images else {}
    for rows, frames in _rows(model, modality, fields) if images else ():
        for _ in range(frames):
            tokens += [BEGIN, *[modality.token_id] * (rows // frames), END, *text(9)]
    encoder: Any = encoding_module(base_model(model))
    taken = inspect.signature(type(encoder).forward).parameters
    for name in set(modality.of_positions) - set(fields) if images else ():
        if name in taken:  # seconds of each step of a video
            fields[name] = np.array([draw.choice([0.5, 1.0, 2.0]) for _ in range(images)])
    return {"input_ids": tokens + text(30), **fields}


def _rows(model: Any, modality: Modality, fields: dict[str, Any]) -> list[tuple[int, int]]:
    """Rows of features of each image, and the number of parts into which text divides them."""
    rows = _rows_of_features(model, modality, fields)
    encoder = type(encoding_module(base_model(model)))
    rule = getattr(encoder, "get_rope_index", None)
    # Qwen3-VL, for one, has a time before each frame.
    in_frames = modality.name == "video" and rule and "repeat_interleave" in rule.__code__.co_names
    frames = fields[modality.sizes][:, 0].tolist() if in_frames else [1] * len(rows)
    return list(zip(rows, frames, strict=True))


def _rows_of_features(model: Any, modality: Modality, fields: dict[str, Any]) -> list[int]:
    encoder: Any = encoding_module(base_model(model))
    inputs = {name: torch.as_tensor(value) for name, value in fields.items()}
    options = {
        name: value
        for name in ("vision_feature_layer", "vision_feature_select_strategy")
        if (value := getattr(model.config, name, None)) is not None
        and name in inspect.signature(getattr(type(encoder), ENCODES[modality.name])).parameters
    }
    with torch.no_grad():
        output = getattr(encoder, ENCODES[modality.name])(**inputs, **options, return_dict=True)
    features = getattr(output, feature_fields(encoder)[0])
    if isinstance(features[0], tuple):  # Granite 4 Vision's, by layer
        features = features[0][1]
    rows = [part.numel() // part.shape[-1] for part in features]
    images = len(next(reversed(inputs.values()))) if modality.inputs[0].axis == 0 else 0
    if len(rows) == images or modality.inputs[0].axis == 3:
        return rows
    count = modality.count(fields)
    return [sum(rows) // count] * count


def _fields(modality: Modality, images: int, seed: int) -> dict[str, Any]:
    """Fields of images of one document: of different sizes if the encoder takes those."""
    draw = random.Random(seed)
    names = [field.name for field in modality.inputs]
    shapes = [list(field.shape) for field in modality.inputs]
    sides = [[draw.randint(1, 3), draw.randint(2, 3)] for _ in range(images)]
    if "_grid_" in "".join(names):
        merge = 2 if modality.merges else modality.merge
        frames = [[draw.randint(1, 2) if modality.name == "video" else 1] for _ in sides]
        grids = [[merge * rows, merge * columns] for rows, columns in sides]
        if shapes[1][1] == 3:
            grids = [[*frame, *grid] for frame, grid in zip(frames, grids, strict=True)]
        patches = int(np.prod(grids, 1).sum())
        fields = [_normal((patches, *shapes[0][1:]), seed), np.array(grids)]
        fields += [np.full(images, merge)] if modality.merges else []
    elif modality.kind == "size":
        step = modality.patch * modality.merge
        pixels = _normal((images, shapes[0][1], 3 * step, 3 * step), seed)
        fields = [pixels, np.array(sides) * step]
    elif "target_sizes" in names:
        step = shapes[1][0] * 4
        patches = sum(step**2 * rows * columns for rows, columns in sides)
        strip = _normal((*shapes[0][:3], patches * modality.patch), seed)
        fields = [strip, step * np.array(sides)]
    elif "spatial_shapes" in names:
        merge = modality.inputs[1].filler
        patches = [merge**2 * rows * columns for rows, columns in sides]
        mask = (np.arange(max(patches)) < np.array(patches)[:, None]).astype(int)
        pixels = _normal((images, max(patches), shapes[0][2]), seed) * mask[..., None]
        fields = [pixels, merge * np.array(sides), mask]
    elif "image_sizes" in names:
        height, width = shapes[0][-2:]
        pixels = _normal((images, *shapes[0][1:]), seed)
        fields = [pixels, np.array([[rows * height, columns * width] for rows, columns in sides])]
        fields += [np.array([images])] if len(names) > 2 else []
    else:
        fields = []
        for field in modality.inputs:
            shape = list(field.shape)
            shape[field.axis] = images
            is_mask = "mask" in field.name
            fields.append(np.full(shape, field.filler) if is_mask else _normal(shape, seed))
    return dict(zip(names, fields, strict=True))


def _normal(shape: Sequence[int], seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

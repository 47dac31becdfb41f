"""Tiny models that see images, one of each family, and documents with images for them."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from tests.models_and_batches import SMALL

IMAGE, VIDEO, BEGIN, END = 98, 97, 96, 95
"""Tokens of placeholders, and around an image."""
SIDE = 8
"""Height of a patch in pixels."""
TEXT = {**SMALL, "vocab_size": 100, "max_position_embeddings": 512}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SECTIONS = {"mrope_section": [1, 1, 2], **ROPE}
INTERLEAVED = {**SECTIONS, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
VISION = {"hidden_size": 32, "intermediate_size": 32, "patch_size": SIDE}
QWEN = {**VISION, "num_heads": 2, "out_hidden_size": 32, "depth": 2, "num_hidden_layers": 2}
HEADS = {**VISION, "num_hidden_layers": 2, "num_attention_heads": 2}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}
QWEN3 = {**QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
LLAMA = {"model_type": "llama", **TEXT}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": SECTIONS},
        "vision_config": {**QWEN, "fullatt_block_indexes": [0], "window_size": 4 * SIDE},
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "rope_parameters": INTERLEAVED},
        "vision_config": QWEN3,
    },
    "qwen3_5": {
        "text_config": {**TEXT, **HYBRID, "rope_parameters": INTERLEAVED},
        "vision_config": QWEN3,
    },
    "glm4v": {
        "text_config": {**TEXT, "rope_parameters": {**SECTIONS, "partial_rotary_factor": 1.0}},
        "vision_config": {**QWEN, "image_size": 4 * SIDE},
        **{"image_start_token_id": BEGIN, "image_end_token_id": END},
    },
    "internvl": {
        "text_config": LLAMA,
        "vision_config": {**HEADS, "image_size": [4 * SIDE] * 2, "patch_size": [SIDE] * 2},
        "image_seq_length": 4,
    },
    "llava": {
        "text_config": LLAMA,
        "vision_config": {"model_type": "clip_vision_model", **HEADS, "image_size": 3 * SIDE},
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {
            "model_type": "pixtral",
            **HEADS,
            "head_dim": 16,
            "image_size": 16 * SIDE,
        },
        "spatial_merge_size": 2,
    },
}
GRIDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")
"""Families whose images have grids of patches."""


def tiny_model(family: str, implementation: str, layers: int = 2) -> PreTrainedModel:
    """A randomly initialised model, the same every time.

    Args:
        layers: of the text model.
    """
    given = CONFIGS[family]
    text = {**given["text_config"], "num_hidden_layers": layers}
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"] * (layers // 2)
    tokens = {"image_token_id": IMAGE, "image_token_index": IMAGE}
    if family in GRIDS:
        tokens |= {"video_token_id": VIDEO, "vision_start_token_id": BEGIN}
        tokens |= {"vision_end_token_id": END}
    config = AutoConfig.for_model(family, **{**given, "text_config": text}, **tokens)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=implementation)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:  # larger than usual, so that errors show
            torch.nn.init.normal_(parameter, std=0.08)
        assert parameter.requires_grad, name
    return model


def documents(
    family: str, counts: Sequence[int], lengths: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Documents with these numbers of images of different sizes, as a processor makes them.

    Args:
        lengths: tokens of each document; None for a random number of tokens around images.
    """
    return [
        _document(
            family, images, random.Random(number), None if lengths is None else lengths[number]
        )
        for number, images in enumerate(counts)
    ]


def _document(family: str, images: int, draw: random.Random, length: int | None) -> dict[str, Any]:
    numbers = np.random.default_rng(draw.randrange(10**6))
    tokens: list[int] = []
    pixels: list[Any] = []
    sizes: list[list[int]] = []
    for _ in range(images):
        tokens += [draw.randint(3, 90) for _ in range(draw.randint(1, 12))]
        rows, columns = 2 * draw.randint(1, 3), 2 * draw.randint(2, 3)
        if family in GRIDS:
            pixels.append(numbers.standard_normal((rows * columns, 3 * 2 * SIDE**2)))
            sizes.append([1, rows, columns])
            placeholders = [[IMAGE] * (rows * columns // 4)]
        elif family == "mistral3":  # each row of patches ends with a token
            pixels.append(numbers.standard_normal((1, 3, 6 * SIDE, 6 * SIDE)))
            sizes.append([rows * SIDE, columns * SIDE])
            placeholders = [[IMAGE] * (columns // 2) + [END]] * (rows // 2)
        else:
            side = 4 if family == "internvl" else 3
            pixels.append(numbers.standard_normal((1, 3, side * SIDE, side * SIDE)))
            placeholders = [[IMAGE] * (4 if family == "internvl" else 9)]
        tokens += [BEGIN, *(token for row in placeholders for token in row), END]
    text = draw.randint(2, 30) if length is None else length - len(tokens)
    tokens += [draw.randint(3, 90) for _ in range(text)]
    document: dict[str, Any] = {"input_ids": tokens}
    if images:
        document["pixel_values"] = np.concatenate(pixels).astype(np.float32)
        if sizes:
            document["image_grid_thw" if family in GRIDS else "image_sizes"] = sizes
    return document


def stock_inputs(model: Any, document: dict[str, Any]) -> dict[str, Tensor]:
    """The document as a batch for the stock model."""
    ids = torch.tensor([document["input_ids"]])
    fields = {
        name: torch.as_tensor(value) for name, value in document.items() if name != "input_ids"
    }
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), **fields}
    if hasattr(model.model, "get_rope_index"):
        batch["mm_token_type_ids"] = (ids == IMAGE).int()
    return batch

"""Inputs of a model's encoder of images, read from its config and its arguments."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from transformers.image_processing_utils import select_best_resolution

from hf_distca.batches.encoder_shape import EncoderShape
from hf_distca.batches.images import Field, Modality

_OPTIONS = {
    *("self", "kwargs", "vision_feature_layer", "vision_feature_select_strategy"),
    *(
        "output_hidden_states",
        "vision_aspect_ratio",
        "downsample_mode",
        "pixel_values_images",
        "interpolate_pos_encoding",
    ),
}
"""Arguments of encoders that hold no input of an image, or another name of the pixels."""
_ROWS_UNKNOWN = {"hunyuan_vl_vision"}
"""Encoders that add rows of features to those of the grid of an image, such as ends of lines."""
_IN_SQUARES = {"kimi_k25_vision", "paddleocr_vl_vision"}
"""Encoders whose patches are [channels, rows, columns]; those of others are flat."""
_IMAGES_ALONE = {"kimi_k25_vision", "glm4v_vision", "glm4v_moe_vision", "glm_ocr_vision"}
"""Encoders whose videos are not known: GLM-V marks frames by placeholders of images, and Kimi K2.5
merges frames."""


@dataclass(frozen=True)
class _Encoder:
    """An encoder of images or videos."""

    name: str  # of the modality
    token_id: int
    config: Any  # of the model

    @property
    def vision(self) -> Any:
        return self.config.vision_config

    @property
    def pixels(self) -> str:
        return "pixel_values" if self.name == "image" else f"pixel_values_{self.name}s"

    @property
    def channels(self) -> int:
        return _first_of(self.vision, ("in_channels", "in_chans", "num_channels")) or 3

    @property
    def patch(self) -> int:
        return _first_of(self.vision, ("patch_size",))

    @property
    def merge(self) -> int:
        names = ("spatial_merge_size", "merge_size", "merge_kernel_size")
        return _first_of(self.vision, names) or _first_of(self.config, names[:1]) or 1

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of an image in pixels."""
        side = self.vision.image_size
        height, width = side if isinstance(side, list | tuple) else (side, side)
        return int(height), int(width)

    def modality(self, kind: Any, *inputs: Field, **more: Any) -> Modality:
        return Modality(
            self.name, self.token_id, kind, inputs, self.patch, channels=self.channels, **more
        )


def encoder_inputs(
    name: str, token_id: int, arguments: Mapping[str, Parameter], config: Any
) -> Modality | str:
    """Return the inputs of an encoder, or why they are not known.

    Args:
        name: "image" or "video".
        token_id: token of a placeholder.
        arguments: of the method that returns the features.
        config: of the model.
    """
    encoder = _Encoder(name, token_id, config)
    inputs = {
        argument: parameter
        for argument, parameter in arguments.items()
        if argument not in (*_OPTIONS, encoder.pixels)
    }
    if name == "video" and encoder.vision.model_type in _IMAGES_ALONE:
        return "its videos are not known"
    if encoder.patch == 0:
        return "its vision_config has no patch_size"
    if encoder.vision.model_type == "pixtral":
        return _pixtral(encoder)
    # LLaVA has them for Pixtral alone.
    has_tiles = hasattr(config, "image_grid_pinpoints")
    if "image_sizes" in inputs and inputs["image_sizes"].default is None and not has_tiles:
        del inputs["image_sizes"]
    make = _INPUTS.get(frozenset(argument.replace(name, "*", 1) for argument in inputs))
    if make is None:
        return f"its encoder takes {', '.join([encoder.pixels, *inputs])}"
    if make in _OF_ONE_SIZE and not hasattr(encoder.vision, "image_size"):
        return "its vision_config has no image_size"
    return make(encoder)


def encoder_shape(vision: Any) -> EncoderShape:
    """Return the shape of an encoder.

    A layer has four projections of attention and an MLP with two matrices, or three where it is
    gated.

    Args:
        vision: config of the encoder.
    """
    hidden = _first_of(vision, ("hidden_size", "embed_dim")) or 1024
    layers = _first_of(vision, ("num_hidden_layers", "depth")) or 24
    inner = _first_of(vision, ("intermediate_size",))
    inner = inner or int(hidden * (getattr(vision, "mlp_ratio", None) or 4))
    matrices = 3 if getattr(vision, "hidden_act", "") == "silu" else 2
    layers_without_windows = getattr(vision, "fullatt_block_indexes", None)
    side = _first_of(vision, ("window_size",)) // max(_first_of(vision, ("patch_size",)), 1)
    return EncoderShape(
        layers,
        hidden,
        _first_of(vision, ("num_attention_heads", "num_heads")) or 1,
        4 * hidden**2 + matrices * hidden * inner,
        layers if layers_without_windows is None else len(layers_without_windows),
        side**2,
    )


def _first_of(config: Any, names: tuple[str, ...]) -> int:
    """Return the first field of a config, or the first element of a list; 0 without one."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return int(value[0] if isinstance(value, list | tuple) else value)
    return 0


def _patches_thw(encoder: _Encoder) -> Modality:
    """Return patches of all images, and [images, 3] frames, rows and columns of patches."""
    frames = _first_of(encoder.vision, ("temporal_patch_size", "patch_temporal")) or 1
    return _patches(encoder, f"{encoder.name}_grid_thw", frames, (1, encoder.merge, encoder.merge))


def _patches_hw(encoder: _Encoder) -> Modality:
    """Return patches of all images, and [images, 2] rows and columns of patches."""
    merge = round(1 / getattr(encoder.config, "downsample_ratio", 1 / encoder.merge))
    return _patches(encoder, f"{encoder.name}_grid_hw", 1, (merge, merge))


def _patches(encoder: _Encoder, grids: str, frames: int, grid: tuple[int, ...]) -> Modality:
    merge = grid[-1]
    model_type = encoder.vision.model_type
    numbers: tuple[int, ...] = (encoder.channels * frames * encoder.patch**2,)
    if model_type in _IN_SQUARES:
        numbers = (encoder.channels, encoder.patch, encoder.patch)
    return encoder.modality(
        "document" if model_type in _ROWS_UNKNOWN else "grid",
        Field(encoder.pixels, (merge**2, *numbers), 0.0),
        Field(grids, (1, len(grid)), grid),
        merge=merge,
        of_positions=(grids, "second_per_grid_ts") if encoder.name == "video" else (grids,),
    )


def _patches_with_merges(encoder: _Encoder) -> Modality:
    """Return patches of all images, [images, 3] grids and the [images] merge of each."""
    grids, merges = f"{encoder.name}_grid_thw", f"{encoder.name}_merge_sizes"
    numbers = encoder.channels * encoder.patch**2
    return encoder.modality(
        "grid",
        Field(encoder.pixels, (1, numbers), 0.0),
        Field(grids, (1, 3), 1),
        Field(merges, (1,), 1),
        merges=merges,
        of_positions=(grids,),
    )


def _pixtral(encoder: _Encoder) -> Modality:
    """Return images padded to one size, and [images, 2] height and width in pixels."""
    # Mistral 3 cannot encode a single row of features.
    sides = encoder.patch * encoder.merge, 2 * encoder.patch * encoder.merge
    return encoder.modality(
        "size",
        Field(encoder.pixels, (1, encoder.channels, *sides), 0.0),
        Field("image_sizes", (1, 2), sides),
        merge=encoder.merge,
        padded=True,
    )


def _one_size(encoder: _Encoder) -> Modality:
    """Return images of one size."""
    return encoder.modality("even", Field(encoder.pixels, _image(encoder), 0.0))


def _two_sizes(encoder: _Encoder) -> Modality:
    """Return images of one size, and the same images of another."""
    side = encoder.config.high_res_vision_config.image_size
    return encoder.modality(
        "even",
        Field(encoder.pixels, _image(encoder), 0.0),
        Field("high_res_pixel_values", (1, encoder.channels, side, side), 0.0),
    )


def _masked(encoder: _Encoder) -> Modality:
    """Return padded images, and masks of their pixels."""
    image = Field(encoder.pixels, _image(encoder), 0.0)
    mask = Field("pixel_mask", (1, *encoder.sides), True)
    return encoder.modality("even", image, mask, padded=True)


def _masked_images_of_rows(encoder: _Encoder) -> Modality:
    """Return padded images [rows of the batch, images, ...], and their masks."""
    # An image of zeros counts as padding.
    image = Field(encoder.pixels, (1, *_image(encoder)), 1.0, axis=1)
    mask = Field("pixel_attention_mask", (1, 1, *encoder.sides), 1, axis=1)
    return encoder.modality("even", image, mask, padded=True)


def _tiles(encoder: _Encoder) -> Modality:
    """Return padded tiles [images, tiles, ...] of images, and their sizes in pixels."""
    height, width = encoder.sides
    tiled_height, tiled_width = select_best_resolution(
        encoder.sides, encoder.config.image_grid_pinpoints
    )
    # Beside the tiles there is the whole image.
    count = 1 + math.ceil(tiled_height / height) * math.ceil(tiled_width / width)
    tiles = Field(encoder.pixels, (1, count, *_image(encoder)[1:]), 0.0)
    sizes = Field("image_sizes", (1, 2), (height, width))
    return encoder.modality("document", tiles, sizes, padded=True)


def _tiles_by_number(encoder: _Encoder) -> Modality:
    """Return padded tiles and sizes, where a document with several images has no tiles."""
    tiles, sizes = _tiles(encoder).inputs
    numbers = Field("batch_num_images", (1,), 1)
    return encoder.modality("document", tiles, sizes, numbers, padded=True)


def _masked_patches(encoder: _Encoder) -> Modality:
    """Return padded patches [images, patches, numbers], their grids and their masks."""
    side = _first_of(encoder.config, ("downsample_factor",)) or 1
    return encoder.modality(
        "document",
        Field(encoder.pixels, (1, side**2, encoder.channels * encoder.patch**2), 0.0),
        Field("spatial_shapes", (1, 2), side),
        Field("pixel_attention_mask", (1, side**2), 1),
        padded=True,
    )


def _strip(encoder: _Encoder) -> Modality:
    """Return patches of all images side by side, and [images, 2] rows and columns of patches."""
    side = 4  # of patches that become one row of features
    strip = (1, encoder.channels, encoder.patch, side**2 * encoder.patch)
    return encoder.modality(
        "document",
        Field(encoder.pixels, strip, 0.0, axis=3),
        Field("target_sizes", (1, 2), side),
        of_positions=("target_sizes",),
    )


def _image(encoder: _Encoder) -> tuple[int, int, int, int]:
    """Return the shape of one image."""
    return (1, encoder.channels, *encoder.sides)


_INPUTS: dict[frozenset[str], Callable[[_Encoder], Modality]] = {
    frozenset({"*_grid_thw"}): _patches_thw,
    frozenset({"*_grid_hw"}): _patches_hw,
    frozenset({"*_grid_thw", "*_merge_sizes"}): _patches_with_merges,
    frozenset(): _one_size,
    frozenset({"high_res_pixel_values"}): _two_sizes,
    frozenset({"pixel_mask"}): _masked,
    frozenset({"pixel_attention_mask"}): _masked_images_of_rows,
    frozenset({"*_sizes"}): _tiles,
    frozenset({"*_sizes", "batch_num_*s"}): _tiles_by_number,
    frozenset({"spatial_shapes", "pixel_attention_mask"}): _masked_patches,
    frozenset({"target_sizes"}): _strip,
}
"""By the arguments of an encoder besides the pixels, * for the modality: its inputs."""
_OF_ONE_SIZE = {_one_size, _two_sizes, _masked, _masked_images_of_rows, _tiles, _tiles_by_number}
"""Inputs that are read from the size of an image."""

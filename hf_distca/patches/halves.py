"""Splitting a decoder layer's arguments into the rows of two nano-batches, and joining what comes back."""

from typing import Any

import torch
from torch import Tensor

from hf_distca.patches.masks import DeferredMask

PLAIN = (bool, int, float, str, type(None), DeferredMask)
"""Types of arguments that say the same to both halves."""


def split_argument(name: str, value: Any, part: slice, rows: int) -> Any:
    """One half's share of an argument of a decoder layer.

    A tensor is taken to have a row per token where its shape says so beyond doubt: [1, T, ...], or [T] as
    positions in a row have it. Tuples, lists and dicts are taken apart.

    Args:
        name: of the argument, for errors.
        value: the argument.
        part: rows of the half.
        rows: T, rows of both halves.

    Raises:
        ValueError: nothing says how the argument is to be divided.
    """
    if isinstance(value, Tensor):
        if value.dim() >= 2 and value.shape[0] == 1 and value.shape[1] == rows:
            return value[:, part]
        if value.dim() == 1 and value.shape[0] == rows:
            return value[part]
        if value.dim() == 0:
            return value
    elif isinstance(value, dict):
        return {key: split_argument(f"{name}[{key!r}]", item, part, rows) for key, item in value.items()}
    elif type(value) in (tuple, list):
        return type(value)(split_argument(f"{name}[{i}]", item, part, rows) for i, item in enumerate(value))
    elif isinstance(value, PLAIN):
        return value
    described = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise ValueError(
        f"ping-pong cannot divide the decoder layer's {name} ({described}) into nano-batches of its {rows} rows; "
        "set ping_pong=False for this model"
    )


def join_halves(name: str, halves: tuple[Any, ...], sizes: tuple[int, int]) -> Any:
    """What a layer returns, or a module inside it, for the rows of both halves.

    Args:
        name: of the value, for errors.
        halves: what either half returned.
        sizes: rows of either half.

    Raises:
        ValueError: nothing says how the two belong together.
    """
    first, second = halves
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        for dim in (1, 0):  # [1, T, ...], or [T, ...] as MoE routers have it
            leading_one = dim == 0 or first.shape[0] == 1
            if first.dim() > dim and leading_one and (first.shape[dim], second.shape[dim]) == sizes:
                return torch.cat(halves, dim)
    elif type(first) in (tuple, list) and len(first) == len(second):
        return type(first)(
            join_halves(f"{name}[{i}]", pair, sizes) for i, pair in enumerate(zip(first, second, strict=True))
        )
    elif first is None and second is None:
        return None
    raise ValueError(
        f"ping-pong cannot join the decoder layer's {name} of two nano-batches of {sizes} rows: got "
        f"{_described(first)} and {_described(second)}; set ping_pong=False for this model"
    )


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

"""Splitting a decoder layer's arguments into the rows of two nano-batches, and joining what comes back."""

from collections import UserDict
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from hf_distca.patches.masks import DeferredMask

PLAIN = (bool, int, float, str, type(None), DeferredMask)
"""Types of arguments that say the same to both nano-batches."""


def split_argument(name: str, value: Any, sizes: tuple[int, int]) -> tuple[Any, Any]:
    """Both nano-batches' shares of an argument of a decoder layer.

    A tensor is taken to have a row per token where its shape says so beyond doubt: [1, T, ...], [N, 1, T, ...] as
    Gemma 3n stacks hidden states, or [T] as positions in a row have it. Tuples, lists and dicts are taken apart.

    Args:
        name: of the argument, for errors.
        value: the argument.
        sizes: rows of each nano-batch, T together.

    Raises:
        ValueError: nothing says how the argument is to be divided.
    """
    rows = sum(sizes)
    if isinstance(value, Tensor):
        dim = _row_dim(value, rows)
        if dim is not None:  # the backward of two slices would copy each into zeros of all rows, and add
            first, second = torch.split(value, list(sizes), dim)
            return first, second
        if value.dim() == 0:
            return value, value
    elif isinstance(value, dict):
        pairs = {key: split_argument(f"{name}[{key!r}]", item, sizes) for key, item in value.items()}
        return {key: pair[0] for key, pair in pairs.items()}, {key: pair[1] for key, pair in pairs.items()}
    elif type(value) in (tuple, list):
        both = [split_argument(f"{name}[{i}]", item, sizes) for i, item in enumerate(value)]
        return type(value)(pair[0] for pair in both), type(value)(pair[1] for pair in both)
    elif isinstance(value, UserDict):
        return PartStates(value, slice(0, sizes[0])), PartStates(value, slice(sizes[0], rows))
    elif isinstance(value, PLAIN):
        return value, value
    elif isinstance(value, Cache):
        raise ValueError("a planned step has no use for cached keys and values; set model.config.use_cache = False")
    described = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise ValueError(
        f"ping-pong cannot divide the decoder layer's {name} ({described}) into nano-batches of its {rows} rows; "
        "set ping_pong=False for this model"
    )


def _row_dim(value: Tensor, rows: int) -> int | None:
    """The dimension that counts tokens, None where the shape does not say."""
    if value.dim() >= 2 and value.shape[0] == 1 and value.shape[1] == rows:
        return 1
    if _is_stacked(value) and value.shape[2] == rows:
        return 2
    return 0 if value.dim() == 1 and value.shape[0] == rows else None


def join_results(name: str, results: tuple[Any, ...], sizes: tuple[int, int]) -> Any:
    """What a layer returns, or a module inside it, for the rows of both nano-batches.

    Args:
        name: of the value, for errors.
        results: what it returned for each.
        sizes: rows of each.

    Raises:
        ValueError: nothing says how the two belong together.
    """
    first, second = results
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if _is_stacked(first) and (first.shape[2], second.shape[2]) == sizes:
            return torch.cat(results, 2)
        for dim in (1, 0):  # [1, T, ...], or [T, ...] as MoE routers have it
            leading_one = dim == 0 or first.shape[0] == 1
            if first.dim() > dim and leading_one and (first.shape[dim], second.shape[dim]) == sizes:
                return torch.cat(results, dim)
    elif type(first) in (tuple, list) and len(first) == len(second):
        return type(first)(
            join_results(f"{name}[{i}]", pair, sizes) for i, pair in enumerate(zip(first, second, strict=True))
        )
    elif first is None and second is None:
        return None
    raise ValueError(
        f"ping-pong cannot join the decoder layer's {name} of two nano-batches of {sizes} rows: got "
        f"{_described(first)} and {_described(second)}; set ping_pong=False for this model"
    )


def _is_stacked(value: Tensor) -> bool:
    """Whether it is several batches of one row of tokens, [N, 1, T, D]; a mask or a bias would be [1, N, T, T]."""
    return value.dim() == 4 and value.shape[0] > 1 and value.shape[1] == 1


class PartStates(UserDict[str, tuple[Tensor, ...]]):
    """What a layer sees for one nano-batch of the keys and values that layers leave to later ones, and what it leaves.

    Args:
        whole: of all rows, each tensor [1, heads, T, head dim] (transformers' KVSharingDict).
        part: rows of the nano-batch.
    """

    def __init__(self, whole: UserDict[str, tuple[Tensor, ...]], part: slice) -> None:
        super().__init__()
        self._whole, self._part = whole, part

    def __missing__(self, key: str) -> tuple[Tensor, ...]:
        return tuple(state[:, :, self._part] for state in self._whole[key])


def join_states(value: Any, parts: tuple[Any, ...]) -> None:
    """Leave to later layers what a layer left of both nano-batches, where the argument is for that.

    Args:
        value: an argument of the layer.
        parts: what `split_argument` made of it for each.
    """
    if isinstance(value, UserDict):
        first, second = parts
        for key, states in first.data.items():
            value[key] = tuple(torch.cat(pair, 2) for pair in zip(states, second.data[key], strict=True))


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

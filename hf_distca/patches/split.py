"""Splitting a module's arguments into consecutive rows, and joining what comes back.

Of a decoder layer they are the rows of two nano-batches; of a module that mixes along the row those of each document.
"""

from collections import UserDict
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from hf_distca.patches.masks import DeferredMask

Sizes = tuple[int, ...]
"""Rows of each part, one after another."""


class Refusal(NamedTuple):
    """What an error says of an argument that cannot be divided, and of a result that cannot be joined."""

    divide: str
    join: str


NANO_BATCHES = Refusal(
    "ping-pong cannot divide the decoder layer's {name} ({described}) into nano-batches of its {rows} rows; set "
    "ping_pong=False for this model",
    "ping-pong cannot join the decoder layer's {name} of two nano-batches of {sizes} rows: got {described}; set "
    "ping_pong=False for this model",
)

PLAIN = (bool, int, float, str, type(None), DeferredMask)
"""Types of arguments that say the same to all parts."""


def split_argument(name: str, value: Any, sizes: Sizes, refusal: Refusal = NANO_BATCHES) -> tuple[Any, ...]:
    """Each part's share of an argument of a module.

    A tensor is taken to have a row per token where its shape says so beyond doubt: [1, T, ...], [N, 1, T, ...] as
    Gemma 3n stacks hidden states, [1, 1, T, 1] as factors on attention, or [T] as positions in a row have it. Tuples,
    lists and dicts are taken apart.

    Args:
        name: of the argument, for errors.
        value: the argument.
        sizes: rows of each part, T together.
        refusal: what the error says.

    Raises:
        ValueError: nothing says how the argument is to be divided.
    """
    rows = sum(sizes)
    if isinstance(value, Tensor):
        dim = _row_dim(value, rows)
        if dim is not None:  # the backward of slices would copy each into zeros of all rows, and add
            return torch.split(value, list(sizes), dim)
        if value.dim() == 0:
            return (value,) * len(sizes)
    elif isinstance(value, dict):
        shares = {key: split_argument(f"{name}[{key!r}]", item, sizes, refusal) for key, item in value.items()}
        return tuple({key: share[i] for key, share in shares.items()} for i in range(len(sizes)))
    elif type(value) in (tuple, list):
        items = [split_argument(f"{name}[{i}]", item, sizes, refusal) for i, item in enumerate(value)]
        return tuple(type(value)(item[i] for item in items) for i in range(len(sizes)))
    elif isinstance(value, UserDict):
        stops = list(accumulate(sizes))
        return tuple(PartStates(value, slice(stop - size, stop)) for size, stop in zip(sizes, stops, strict=True))
    elif isinstance(value, PLAIN):
        return (value,) * len(sizes)
    elif isinstance(value, Cache):
        raise ValueError("a planned step cannot use cached keys and values; set model.config.use_cache = False")
    raise ValueError(refusal.divide.format(name=name, described=_described(value), rows=rows))


def _row_dim(value: Tensor, rows: int) -> int | None:
    """The dimension that counts tokens, None where the shape does not say."""
    if value.dim() >= 2 and value.shape[0] == 1 and value.shape[1] == rows:
        return 1
    if value.dim() == 4 and value.shape[2] == rows and (_is_stacked(value) or value.shape == (1, 1, rows, 1)):
        return 2
    return 0 if value.dim() == 1 and value.shape[0] == rows else None


def join_results(name: str, results: tuple[Any, ...], sizes: Sizes, refusal: Refusal = NANO_BATCHES) -> Any:
    """What a module returns for the rows of all parts.

    Args:
        name: of the value, for errors.
        results: what it returned for each.
        sizes: rows of each.
        refusal: what the error says.

    Raises:
        ValueError: nothing says how they belong together.
    """
    first = results[0]
    if all(isinstance(result, Tensor) for result in results):
        if _is_stacked(first) and tuple(result.shape[2] for result in results) == sizes:
            return torch.cat(results, 2)
        for dim in (1, 0):  # [1, T, ...], or [T, ...] as MoE routers have it
            leading_one = dim == 0 or first.shape[0] == 1
            if first.dim() > dim and leading_one and tuple(result.shape[dim] for result in results) == sizes:
                return torch.cat(results, dim)
    elif type(first) in (tuple, list) and all(len(result) == len(first) for result in results):
        return type(first)(
            join_results(f"{name}[{i}]", each, sizes, refusal) for i, each in enumerate(zip(*results, strict=True))
        )
    elif all(result is None for result in results):
        return None
    described = " and ".join(dict.fromkeys(map(_described, results)))
    raise ValueError(refusal.join.format(name=name, sizes=sizes, described=described))


def _is_stacked(value: Tensor) -> bool:
    """Whether it is several batches of one row of tokens, [N, 1, T, D]; a mask or a bias would be [1, N, T, T]."""
    return value.dim() == 4 and value.shape[0] > 1 and value.shape[1] == 1


class PartStates(UserDict[str, tuple[Tensor, ...]]):
    """What a layer sees for its part of the keys and values that layers leave to later ones, and what it leaves.

    Args:
        whole: of all rows, each tensor [1, heads, T, head dim] (transformers' KVSharingDict).
        part: its rows.
    """

    def __init__(self, whole: UserDict[str, tuple[Tensor, ...]], part: slice) -> None:
        super().__init__()
        self._whole, self._part = whole, part

    def __missing__(self, key: str) -> tuple[Tensor, ...]:
        return tuple(state[:, :, self._part] for state in self._whole[key])


def join_states(value: Any, parts: tuple[Any, ...]) -> None:
    """Leave to later layers what a layer left of all parts, where the argument is for that.

    Args:
        value: an argument of the layer.
        parts: what `split_argument` made of it for each.
    """
    if isinstance(value, UserDict):
        for key in parts[0].data:
            value[key] = tuple(torch.cat(each, 2) for each in zip(*(part.data[key] for part in parts), strict=True))


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

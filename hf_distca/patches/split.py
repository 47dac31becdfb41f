"""Splitting of a module's arguments by rows, joining of its results, and the thread's state of each part.

The parts of a decoder layer's rows are two nano-batches; the parts of a mixing module's rows are
documents.
"""

from collections import UserDict
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from hf_distca.patches.attention import DeferredMask

Sizes = tuple[int, ...]
"""Rows of each part, in row order."""
Parts = tuple[str, str]
"""Whose arguments are divided, and the remedy if they cannot be divided, for error messages."""
NANO_BATCHES: Parts = ("the decoder layer's", "set ping_pong=False for this model")
CACHED = "a planned step cannot use cached keys and values; set model.config.use_cache = False"

PLAIN = (bool, int, float, str, type(None), DeferredMask)
"""Types of arguments that are the same for all parts."""


def split_argument(
    name: str, value: Any, sizes: Sizes, parts: Parts = NANO_BATCHES
) -> tuple[Any, ...]:
    """Return each part's share of a module's argument.

    A tensor has a row per token if its shape is [1, T, ...], [1, 1, T, 1] (factors on attention) or
    [T] (positions). So has Gemma 3n's stack of hidden states, [N, 1, T, ...]. Tuples, lists and
    dicts are split item by item.

    Args:
        sizes: rows of each part, with sum T.

    Raises:
        ValueError: the argument's type or shape does not say how to divide it.
    """
    rows, (owner, remedy) = sum(sizes), parts
    if isinstance(value, Tensor):
        shape = value.shape
        counts_rows = {
            0: shape == (rows,),
            1: shape[:2] == (1, rows),
            2: shape[2:3] == (rows,) and (_is_stacked(value) or shape == (1, 1, rows, 1)),
        }
        dim = next((dim for dim, counts in counts_rows.items() if counts), None)
        if dim is not None:  # the backward of slices would copy each slice into zeros of all rows
            return torch.split(value, list(sizes), dim)
        if value.dim() == 0:
            return (value,) * len(sizes)
    elif isinstance(value, dict):
        shares = {
            key: split_argument(f"{name}[{key!r}]", item, sizes, parts)
            for key, item in value.items()
        }
        return tuple({key: share[i] for key, share in shares.items()} for i in range(len(sizes)))
    elif type(value) in (tuple, list):
        items = [split_argument(f"{name}[{i}]", item, sizes, parts) for i, item in enumerate(value)]
        return tuple(type(value)(item[i] for item in items) for i in range(len(sizes)))
    elif isinstance(value, UserDict):
        stops = list(accumulate(sizes))
        return tuple(
            PartStates(value, slice(stop - size, stop))
            for size, stop in zip(sizes, stops, strict=True)
        )
    elif isinstance(value, PLAIN):
        return (value,) * len(sizes)
    elif isinstance(value, Cache):
        raise ValueError(CACHED)
    raise ValueError(
        f"a planned step cannot divide {owner} {name} ({_described(value)}) into parts of its "
        f"{rows} rows; {remedy}"
    )


def join_results(
    name: str, results: tuple[Any, ...], sizes: Sizes, parts: Parts = NANO_BATCHES
) -> Any:
    """Join the results of a module for all parts.

    Raise ValueError if types or shapes do not say how.
    """
    first, (owner, remedy) = results[0], parts
    if all(isinstance(result, Tensor) for result in results):
        # [N, 1, T, D], [1, T, ...], or [T, ...] as MoE routers have it
        for dim, may_count_rows in (
            (2, _is_stacked(first)),
            (1, first.shape[:1] == (1,)),
            (0, True),
        ):
            if (
                may_count_rows
                and tuple(size for result in results for size in result.shape[dim : dim + 1])
                == sizes
            ):
                return torch.cat(results, dim)
    elif type(first) in (tuple, list) and all(len(result) == len(first) for result in results):
        return type(first)(
            join_results(f"{name}[{i}]", each, sizes, parts)
            for i, each in enumerate(zip(*results, strict=True))
        )
    elif all(result is None for result in results):
        return None
    described = " and ".join(dict.fromkeys(map(_described, results)))
    raise ValueError(
        f"a planned step cannot join {owner} {name} of parts of {sizes} rows: got {described}; "
        f"{remedy}"
    )


def _is_stacked(value: Tensor) -> bool:
    """Return whether a tensor stacks hidden states [N, 1, T, D], unlike a mask [1, N, T, T]."""
    return value.dim() == 4 and value.shape[0] > 1 and value.shape[1] == 1


class PartStates(UserDict[str, tuple[Tensor, ...]]):
    """One part's view of keys and values [1, heads, T, head dim] that layers leave to later layers.

    And new states.
    """

    def __init__(self, whole: UserDict[str, tuple[Tensor, ...]], part: slice) -> None:
        super().__init__()
        self._whole, self._part = whole, part

    def __missing__(self, key: str) -> tuple[Tensor, ...]:
        return tuple(state[:, :, self._part] for state in self._whole[key])


def join_states(value: Any, parts: tuple[Any, ...]) -> None:
    """Join the states that a layer left for each part of an argument, if the argument holds such states."""
    if isinstance(value, UserDict):
        for key in parts[0].data:
            value[key] = tuple(
                torch.cat(each, 2) for each in zip(*(part.data[key] for part in parts), strict=True)
            )


class ThreadState:
    """Settings that contexts such as `torch.autocast` and `torch.no_grad` make for a thread.

    Two nano-batches of a layer share a thread: each restores its own settings when it goes on.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        getters_and_setters: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
            (
                partial(torch.is_autocast_enabled, device_type),
                partial(torch.set_autocast_enabled, device_type),
            ),
            (
                partial(torch.get_autocast_dtype, device_type),
                partial(torch.set_autocast_dtype, device_type),
            ),
            (torch.is_grad_enabled, torch.set_grad_enabled),
            (torch.get_default_dtype, torch.set_default_dtype),
        )
        self._settings = [(get, set_to, get()) for get, set_to in getters_and_setters]
        self._saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def inside(self) -> "ThreadState":
        """Return the state of a nano-batch that is about to pause.

        Self is the state around its layer.

        Raises:
            ValueError: a checkpoint or offloading context inside the layer is open: it would also
                take the other nano-batch's saved tensors.
        """
        inside = ThreadState(self._device_type)
        if inside._saved_tensors != self._saved_tensors:
            raise ValueError(
                "a decoder layer has a checkpoint, or a context that handles saved tensors, around "
                "its attention, and ping-pong cannot pause inside it; put it around the whole "
                "layer, or set ping_pong=False"
            )
        return inside

    def restore(self) -> None:
        """Restore the thread's state, except for saved-tensor hooks, which are the same across a pause."""
        for get, set_to, value in self._settings:
            if get() != value:
                set_to(value)


def _described(value: Any) -> str:
    return (
        f"a tensor of shape {list(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
    )

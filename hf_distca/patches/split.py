"""Division of a module's arguments by rows, and joining of its results.

The parts of a decoder layer's rows are two nano-batches. The parts of a mixing module's rows are
documents. `ThreadState` keeps the settings of a nano-batch's thread.

Shapes: T rows of all parts, D hidden dimension, N any number.
"""

from collections import UserDict
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from hf_distca.checks.step_rules import PlannedStep
from hf_distca.patches.attention import DeferredMask

Sizes = tuple[int, ...]
"""Rows of each part, in row order."""
Parts = tuple[str, str]
"""Whose arguments are divided, and the remedy if they cannot be divided, for error messages."""
NANO_BATCHES: Parts = ("the decoder layer", "set planning={'ping_pong': False} for this model")

PLAIN = (bool, int, float, str, type(None), DeferredMask)
"""Types of arguments that are the same for all parts."""


def split_argument(
    name: str, value: Any, sizes: Sizes, parts: Parts = NANO_BATCHES
) -> tuple[Any, ...]:
    """Return each part's share of a module's argument.

    A tensor has a row per token if its shape is [1, T, ...], [1, 1, T, 1] (factors on attention) or
    [T] (positions). So have Gemma 3n's stack of hidden states, [N, 1, T, ...], and positions in
    time, height and width, [N, 1, T]. Tuples, lists and dicts are split item by item.

    Args:
        sizes: rows of each part, with sum T.

    Raises:
        ValueError: the argument's type or shape does not say how to divide it.
    """
    rows = sum(sizes)
    if isinstance(value, Tensor):
        dim = _row_dimension(value, rows)
        if dim is not None:  # the backward of slices would copy each slice into zeros of all rows
            return torch.split(value, list(sizes), dim)
        if value.dim() == 0:
            return (value,) * len(sizes)
    elif isinstance(value, dict):
        return _split_dict(name, value, sizes, parts)
    elif type(value) in (tuple, list):
        return _split_sequence(name, value, sizes, parts)
    elif isinstance(value, UserDict):
        stops = accumulate(sizes)
        return tuple(
            PartStates(value, slice(stop - size, stop))
            for size, stop in zip(sizes, stops, strict=True)
        )
    elif isinstance(value, PLAIN):
        return (value,) * len(sizes)
    elif isinstance(value, Cache):
        raise PlannedStep.CACHE.error_here()
    owner, remedy = parts
    raise PlannedStep.NOT_DIVIDED.error_here(
        name=name, owner=owner, found=_described(value), rows=rows, remedy=remedy
    )


def _row_dimension(value: Tensor, rows: int) -> int | None:
    """Return the dimension of a tensor that counts the rows; None if none is known to do so."""
    shape = value.shape
    if shape == (rows,):
        return 0
    if shape[:2] == (1, rows):
        return 1
    are_positions = shape[1:] == (1, rows) and not value.is_floating_point()
    if are_positions or shape == (1, 1, rows, 1):
        return 2
    if shape[2:3] == (rows,) and _is_stacked(value):
        return 2
    return None


def _split_dict(
    name: str, value: dict[Any, Any], sizes: Sizes, parts: Parts
) -> tuple[dict[Any, Any], ...]:
    """Return a dict for each part, with the part's shares of the items."""
    dicts: tuple[dict[Any, Any], ...] = tuple({} for _ in sizes)
    for key, item in value.items():
        shares = split_argument(f"{name}[{key!r}]", item, sizes, parts)
        for part_dict, share in zip(dicts, shares, strict=True):
            part_dict[key] = share
    return dicts


def _split_sequence(
    name: str, value: tuple[Any, ...] | list[Any], sizes: Sizes, parts: Parts
) -> tuple[Any, ...]:
    """Return a tuple or list for each part, with the part's shares of the items."""
    lists: list[list[Any]] = [[] for _ in sizes]
    for index, item in enumerate(value):
        shares = split_argument(f"{name}[{index}]", item, sizes, parts)
        for part_list, share in zip(lists, shares, strict=True):
            part_list.append(share)
    return tuple(type(value)(part_list) for part_list in lists)


def join_results(
    name: str, results: tuple[Any, ...], sizes: Sizes, parts: Parts = NANO_BATCHES
) -> Any:
    """Join the results of a module for all parts.

    Raise ValueError if types or shapes do not say how.
    """
    first = results[0]
    if all(isinstance(result, Tensor) for result in results):
        dim = _joined_dimension(results, sizes)
        if dim is not None:
            return torch.cat(results, dim)
    elif type(first) in (tuple, list) and all(len(result) == len(first) for result in results):
        return type(first)(
            join_results(f"{name}[{index}]", items, sizes, parts)
            for index, items in enumerate(zip(*results, strict=True))
        )
    elif all(result is None for result in results):
        return None
    owner, remedy = parts
    described = " and ".join(dict.fromkeys(map(_described, results)))
    raise PlannedStep.NOT_JOINED.error_here(
        name=name, owner=owner, found=described, sizes=sizes, remedy=remedy
    )


def _joined_dimension(results: tuple[Tensor, ...], sizes: Sizes) -> int | None:
    """Return the dimension in which tensors have the rows of their parts; None if none is known."""
    dimensions = [0]  # [T, ...], as MoE routers have it
    if results[0].shape[:1] == (1,):
        dimensions.insert(0, 1)  # [1, T, ...]
    if _is_stacked(results[0]):
        dimensions.insert(0, 2)  # [N, 1, T, D]
    for dim in dimensions:
        have_dimension = all(result.dim() > dim for result in results)
        if have_dimension and tuple(result.shape[dim] for result in results) == sizes:
            return dim
    return None


def _is_stacked(value: Tensor) -> bool:
    """Return whether a tensor stacks hidden states [N, 1, T, D], unlike a mask [1, N, T, T]."""
    return value.dim() == 4 and value.shape[0] > 1 and value.shape[1] == 1


class PartStates(UserDict[str, tuple[Tensor, ...]]):
    """One part's view of keys and values that layers leave to later layers.

    They are [1, heads, T, head dim]. A layer that runs on the part adds its own keys and values.

    Args:
        states: keys and values of all rows.
        rows: rows of the part.
    """

    def __init__(self, states: UserDict[str, tuple[Tensor, ...]], rows: slice) -> None:
        super().__init__()
        self._states = states
        self._rows = rows

    def __missing__(self, key: str) -> tuple[Tensor, ...]:
        return tuple(state[:, :, self._rows] for state in self._states[key])


def join_states(value: Any, parts: tuple[Any, ...]) -> None:
    """Join the states that a layer added for each part of an argument.

    An argument that holds no such states stays as it is.
    """
    if isinstance(value, UserDict):
        for key in parts[0].data:
            states_of_parts = [part.data[key] for part in parts]
            value[key] = tuple(
                torch.cat(states, 2) for states in zip(*states_of_parts, strict=True)
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
        self._settings = [(getter, setter, getter()) for getter, setter in getters_and_setters]
        self._saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def inside(self) -> "ThreadState":
        """Return the state of a nano-batch that is about to pause.

        Self is the state around its layer.

        Raises:
            ValueError: an activation checkpoint or offloading context inside the layer is open: it
                would also take the other nano-batch's saved tensors.
        """
        state_inside = ThreadState(self._device_type)
        if state_inside._saved_tensors != self._saved_tensors:
            raise PlannedStep.OPEN_CONTEXT.error_here()
        return state_inside

    def restore(self) -> None:
        """Restore the thread's settings.

        Hooks of saved tensors need no restoring: they are the same across a pause.
        """
        for getter, setter, value in self._settings:
            if getter() != value:
                setter(value)


def _described(value: Any) -> str:
    """Return how an error names a value."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return type(value).__name__

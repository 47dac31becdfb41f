"""Results of core attention, kept under activation checkpointing for the recomputation.

Activation checkpointing runs a forward twice. Without kept results the recomputation would exchange
all rows and compute all tasks again. Checkpointing by transformers, FSDP and torch is recognised.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Pack and unpack a tensor that autograd saves."""
Checkpoints = tuple[int, bool]
"""Number of activation checkpoints around a place in a forward, and whether gradients are on:
reentrant ones turn them off."""


class KeptResults:
    """Tensors of checkpointed forwards, kept from the first forward to the recomputation.

    Hooks outside the checkpoint that offload its inputs, such as `save_on_cpu`, offload these
    tensors too.
    """

    def __init__(self) -> None:
        # By key: hooks that pack and unpack, if any, and packed tensors; None if several were kept.
        self._kept: dict[Hashable, tuple[Hooks | None, list[Any]] | None] = {}

    def __len__(self) -> int:
        return sum(entry is not None for entry in self._kept.values())

    def keep(self, key: Hashable, tensors: tuple[Tensor, ...]) -> None:
        """Keep tensors under a key until `take`; the tensors must not change until then.

        If a module attends several times in a forward (DiffLlama), none are kept: a recomputation
        could not tell its calls apart.
        """
        if key in self._kept:
            self._kept[key] = None
            return
        hooks = next((hooks for hooks in _hooks() if not _belong_to_checkpoint(hooks)), None)
        packed = list(tensors) if hooks is None else [hooks[0](tensor) for tensor in tensors]
        self._kept[key] = hooks, packed

    def take(self, key: Hashable) -> tuple[Tensor, ...] | None:
        """Remove and return the tensors kept under a key; None if there are none."""
        entry = self._kept.get(key)
        if entry is None:
            return None
        del self._kept[key]
        hooks, packed = entry
        return tuple(packed if hooks is None else map(hooks[1], packed))


class ForwardResults:
    """What is kept of a module's results on a nano-batch, as one forward sees it.

    Attributes:
        known: tensors that the first forward kept for this recomputation; None if there are none.
        keeps: whether this is a first forward, and a recomputation will need tensors of it.
    """

    def __init__(self, kept: KeptResults, key: Hashable, *, training: bool) -> None:
        recomputes = is_recomputation()
        self.known = kept.take(key) if recomputes else None
        self.keeps = not recomputes and is_checkpointed(training)
        self._kept = kept
        self._key = key

    def keep(self, *tensors: Tensor) -> None:
        """Keep tensors without gradients; they must not change until the recomputation."""
        self._kept.keep(self._key, tensors)


def is_recomputation() -> bool:
    """Return whether this forward is the recomputation of activation checkpointing.

    It is the only forward inside a backward.
    """
    return torch._C._current_graph_task_id() != -1


def is_checkpointed(training: bool) -> bool:
    """Return whether this first forward of a module will be recomputed for the backward.

    Args:
        training: whether the module is in training mode.
    """
    # A reentrant checkpoint shows only as training without gradients.
    return any(map(_belong_to_checkpoint, _hooks())) or (training and not torch.is_grad_enabled())


def checkpoints_around() -> Checkpoints:
    """Return the activation checkpoints around this place in a forward, to compare with another."""
    return sum(map(_belong_to_checkpoint, _hooks())), torch.is_grad_enabled()


def _belong_to_checkpoint(hooks: Hooks) -> bool:
    return hooks[0].__module__ == "torch.utils.checkpoint"


def _hooks() -> list[Hooks]:
    """Return the saved-tensor hooks in force, innermost first."""
    hooks: list[Hooks] = []
    # Autograd shows only the innermost hooks: remove hooks to see the next, then restore all.
    while (innermost := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(innermost)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(hooks):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return hooks

"""What core attention found, kept through a gradient checkpoint for its recomputation.

A checkpoint runs a forward twice: its recomputation would exchange all rows and compute all tasks again. It is noticed
whoever made it: transformers' gradient checkpointing, FSDP's activation checkpointing, or torch's own function.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What puts a tensor away that autograd saves, and what brings it back."""

Checkpoints = tuple[int, bool]
"""How many checkpoints are around a place in a forward; whether gradients are on, which reentrant ones turn off."""


class KeptResults:
    """Tensors of checkpointed forwards, from the first forward to the recomputation.

    They go where the checkpoint's own inputs go: where hooks outside of it offload what is saved (`save_on_cpu`,
    accelerate's `activation_checkpointing_offload`), they are offloaded too.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Hooks | None, list[Any]] | None] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        """Whether tensors were kept under a key, even if they cannot be told apart."""
        return key in self._kept

    def keep(self, key: Hashable, tensors: tuple[Tensor, ...]) -> None:
        """Keep tensors under a key until `take`; nobody may change them until then.

        Where a module attends several times in a forward (DiffLlama), none are kept: a recomputation does not tell
        which of the calls it repeats.
        """
        if key in self._kept:
            self._kept[key] = None
            return
        hooks = _outer_hooks()
        self._kept[key] = hooks, [x if hooks is None else hooks[0](x) for x in tensors]

    def take(self, key: Hashable) -> tuple[Tensor, ...] | None:
        """The tensors that were kept under a key, from now on the caller's; None if there are none."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        hooks, packed = kept
        del self._kept[key]
        return tuple(packed if hooks is None else map(hooks[1], packed))


def is_recomputation() -> bool:
    """Whether this forward is a checkpoint's second one: nothing else runs a forward inside a backward."""
    return torch._C._current_graph_task_id() != -1


def is_checkpointed(training: bool) -> bool:
    """Whether this forward, not a recomputation, will be recomputed for the backward.

    Args:
        training: whether the module is in training mode. A reentrant checkpoint is a forward without gradients in
            training: nothing else tells of it.
    """
    return any(map(_of_checkpoint, _hooks())) or (training and not torch.is_grad_enabled())


def checkpoints_around() -> Checkpoints:
    """The checkpoints around this place in a forward: others than around another place where one begins between."""
    return sum(map(_of_checkpoint, _hooks())), torch.is_grad_enabled()


def _outer_hooks() -> Hooks | None:
    """The hooks that put away what is saved outside of the checkpoints around this forward."""
    return next((hooks for hooks in _hooks() if not _of_checkpoint(hooks)), None)


def _of_checkpoint(hooks: Hooks) -> bool:
    return hooks[0].__module__ == "torch.utils.checkpoint"


def _hooks() -> list[Hooks]:
    """The hooks for saved tensors that are in force, innermost first."""
    found: list[Hooks] = []
    # Autograd shows the innermost only: take them off to see the next, and put them back.
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(found):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return found

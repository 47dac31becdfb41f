"""Watches a step for tensors of tokens × vocabulary."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class WholeLogits(TorchDispatchMode):
    """While inside, notes in `shapes` every tensor with the vocabulary as a dimension and more rows
    than a chunk.

    Args:
        rows: of a chunk, or of weights if they have more.
    """

    def __init__(self, vocabulary: int, rows: int) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._rows = rows
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in tree_iter(result):
            if (
                isinstance(x, torch.Tensor)
                and x.is_floating_point()
                and self._vocabulary in x.shape
            ):
                takes_memory = 0 not in x.stride()  # not expanded
                if x.numel() > self._rows * self._vocabulary and takes_memory:
                    self.shapes.append(tuple(x.shape))
        return result

"""Watches a step for tensors of tokens × vocabulary."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class WholeLogits(TorchDispatchMode):
    """While inside, notes every tensor that has the vocabulary as a dimension, and more rows besides.

    Args:
        rows: of a chunk, or of weights if they have more.

    Attributes:
        shapes: of those tensors.
    """

    def __init__(self, vocabulary: int, rows: int) -> None:
        super().__init__()
        self._vocabulary, self._rows = vocabulary, rows
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = (x for x in tree_iter(result) if isinstance(x, torch.Tensor) and x.is_floating_point())
        for tensor in tensors:
            takes_memory = 0 not in tensor.stride()  # not expanded
            if self._vocabulary in tensor.shape and tensor.numel() > self._rows * self._vocabulary and takes_memory:
                self.shapes.append(tuple(tensor.shape))
        return result

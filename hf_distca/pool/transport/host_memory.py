"""Tensors as the columns of messages between ranks and servers: memory on the host, seen as bytes.

Shape suffixes: N rows; what follows a row's N is free.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_distca.pool.messages.tensor_spec import TensorSpec


def empty_rows(spec: TensorSpec, rows: int, pinned: bool) -> Tensor:
    """[rows, *spec.shape] on the host, with undefined contents; pinned where it will be copied to a GPU."""
    return torch.empty((rows, *spec.shape), dtype=getattr(torch, spec.dtype), pin_memory=pinned)


def to_host(rows_N: Tensor) -> Tensor:
    """The tensor itself where it is a dense one on the host, else a copy; from a GPU in pinned memory, on its way."""
    return rows_N.detach().contiguous().to("cpu", non_blocking=True)


def as_bytes(rows_N: Tensor) -> NDArray[np.uint8]:
    """The memory of a contiguous tensor on the host; NumPy itself has no bfloat16."""
    flat: NDArray[np.uint8] = rows_N.view(-1).view(torch.uint8).numpy()
    return flat

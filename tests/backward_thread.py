"""Every backward in a thread of its own, as autograd has one for each CUDA device."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import torch

_backward = torch.Tensor.backward


def backward_in_a_thread(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
    """`Tensor.backward`, waited for; what is raised is raised here."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_backward, tensor, *args, **options).result()


def with_backward_in_a_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; every backward in it runs in a thread of its own."""
    with patch.object(torch.Tensor, "backward", backward_in_a_thread):
        return function(*args)

"""Fused kernels as operators of torch's, under `torch.ops.hf_distca`.

Whatever looks at operators (fake tensors, profilers) sees each as one.
"""

from collections.abc import Callable

import torch

_library = torch.library.Library("hf_distca", "FRAGMENT")


def define_operator(schema: str, on_cuda: Callable[..., None], on_cpu: Callable[..., None] | None = None) -> None:
    """Make an operator that writes into its arguments and returns nothing.

    Args:
        schema: its name, arguments and which of them it writes, as torch writes schemas.
        on_cuda: computes it. It imports Triton when it runs and not before: Triton comes with torch for CUDA only.
        on_cpu: computes it there, where it is used there.
    """
    name = _library.define(schema)
    _library.impl(name, on_cuda, "CUDA")
    if on_cpu is not None:
        _library.impl(name, on_cpu, "CPU")
    _library.impl(name, lambda *_: None, "Meta")

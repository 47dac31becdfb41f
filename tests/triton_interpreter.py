"""Triton's interpreter: it runs the fused kernels on the CPU, statement by statement."""

import importlib
from types import ModuleType

import triton


def interpreted(module: str) -> ModuleType:
    """A module of the library whose Triton kernels take tensors of the CPU."""
    before = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = True  # read when a kernel is defined
    try:
        return importlib.reload(importlib.import_module(module))
    finally:
        triton.knobs.runtime.interpret = before

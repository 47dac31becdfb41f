"""Triton's compiler: it makes machine code for a GPU that is not there."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

AMPERE, HOPPER, BLACKWELL = 80, 90, 100
"""Compute capabilities."""


def compiled(kernel: Any, capability: int, types: dict[str, Any], constants: dict[str, Any]) -> str:
    """A kernel's PTX, assembled for a capability; pointers and strides are multiples of 16, as they
    usually are.
    """
    signature = types | dict.fromkeys(constants, "constexpr")
    divisible = {}
    for name, kind in types.items():
        index = kernel.arg_names.index(name)
        for path in (
            [(index, i) for i in range(len(kind))] if isinstance(kind, tuple) else [(index,)]
        ):
            divisible[path] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, divisible)
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert result.asm["cubin"]
    return str(result.asm["ptx"])

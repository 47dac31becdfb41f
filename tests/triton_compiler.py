"""Triton's compiler: it makes machine code for a GPU that is not there."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

AMPERE, HOPPER, BLACKWELL = 80, 90, 100
"""Compute capabilities."""


def compiled(kernel: Any, capability: int, types: dict[str, str], constants: dict[str, Any]) -> str:
    """A kernel's PTX, assembled for a capability; pointers and strides are multiples of 16, as they usually are."""
    signature = types | dict.fromkeys(constants, "constexpr")
    divisible = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in types}
    source = ASTSource(kernel, signature, constants, divisible)
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert result.asm["cubin"]
    return str(result.asm["ptx"])

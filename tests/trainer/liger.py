"""A stand-in for liger-kernel, whose kernels need a GPU: it changes a LLaMA as Liger 0.8 does, in torch."""

import sys
from types import MethodType, ModuleType
from typing import Any

import pytest
from torch import Tensor, nn
from transformers.integrations import liger


def install(patch: pytest.MonkeyPatch) -> None:
    """Let transformers find the stand-in while the patch lasts."""
    package, transformers = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    transformers._apply_liger_kernel_to_instance = _apply
    patch.setitem(sys.modules, "liger_kernel", package)
    patch.setitem(sys.modules, "liger_kernel.transformers", transformers)
    patch.setattr(liger, "is_liger_kernel_available", lambda: True)


def _apply(
    model: Any,
    rms_norm: bool = True,
    swiglu: bool = True,
    **_: Any,
) -> None:
    for module in model.modules():
        if rms_norm and type(module).__name__ == "LlamaRMSNorm":
            vars(module)["forward"] = MethodType(_norm, module)
        if swiglu and type(module).__name__ == "LlamaMLP":
            vars(module)["forward"] = MethodType(_mlp, module)


def _norm(self: Any, x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.variance_epsilon).to(x.dtype)


def _mlp(self: Any, x: Tensor) -> Tensor:
    """Another function than the model's own: who trains equally computes with it."""
    return self.down_proj(nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))

"""A stand-in for liger-kernel, whose kernels need a GPU: it changes a LLaMA as Liger 0.8 does, in torch."""

import sys
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations import liger
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama


def install(patch: pytest.MonkeyPatch) -> None:
    """Let transformers find the stand-in while the patch lasts."""
    package, transformers = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    transformers._apply_liger_kernel_to_instance = _apply
    patch.setitem(sys.modules, "liger_kernel", package)
    patch.setitem(sys.modules, "liger_kernel.transformers", transformers)
    patch.setattr(liger, "is_liger_kernel_available", lambda: True)
    patch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)


def _apply(
    model: Any,
    rope: bool = True,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    **_: Any,
) -> None:
    if rope:
        modeling_llama.apply_rotary_pos_emb = _rope
    if fused_linear_cross_entropy:
        model.forward = MethodType(_with_fused_loss, model)
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


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Of [1, H, T, D] with cos and sin [1, T, D]."""
    half = q.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]

    def turned(x: Tensor) -> Tensor:
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return turned(q), turned(k)


def _with_fused_loss(
    self: Any, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any
) -> Any:
    """The loss from the head's weight; there are no logits."""
    hidden = self.model(input_ids=input_ids, **kwargs)[0]
    targets = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    logits = nn.functional.linear(hidden, self.lm_head.weight).flatten(0, 1).float()
    return CausalLMOutputWithPast(
        loss=nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch
    )

"""FlashAttention-4, on GPUs of the Hopper and Blackwell kinds.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, P padded head dim of
queries and keys, R padded head dim of values.
"""

from typing import Any

import torch
from torch import Tensor

from .flash_varlen import FlashVarlenKernel
from .packages import PACKAGES
from .params import AttentionParams
from .varlen_call import VarlenCall


class FlashAttn4Kernel(FlashVarlenKernel):
    """`_flash_attn_fwd` and `_flash_attn_bwd` of the flash-attn-4 package.

    The first kernel call of each kind compiles its kernel, which takes some seconds.

    Raises:
        ImportError: the package is missing or broken.
    """

    name = "flash_attn_4"
    majors = (9, 10)
    gpus = "9.0 (Hopper) or 10.x (Blackwell)"
    softcap_supported = True
    # Blocks are numbered through the tasks in both directions, so that empty ones are few.
    forward_grid = None
    backward_grid = None

    def __init__(self) -> None:
        self._package = PACKAGES["flash_attn_4"].load()

    def _padded(self, head_dim_qk: int, head_dim_v: int, device: torch.device) -> tuple[int, int]:
        return padded_head_dims(head_dim_qk, head_dim_v, torch.cuda.get_device_capability(device)[0])

    def _refusal(
        self, capability: tuple[int, int], head_dim_qk: int, head_dim_v: int, params: AttentionParams
    ) -> str | None:
        if capability[0] == 10 and padded_head_dims(head_dim_qk, head_dim_v, 10) == (256, 256):
            for option, value in {"softcap": params.softcap, "window": params.window}.items():
                if value is not None:
                    return (
                        f"kernel {self.name!r} has no {option} for head dims of {head_dim_qk} and {head_dim_v} on "
                        f"Blackwell, got {value}; 'flash_attn' has"
                    )
        return None

    def _call_forward(self, q_QHP: Tensor, k_KGP: Tensor, v_KGR: Tensor, call: VarlenCall) -> tuple[Tensor, Tensor]:
        o_QHR, lse_HQ, *_ = self._package._flash_attn_fwd(
            q_QHP, k_KGP, v_KGR, return_lse=True, softcap=call.softcap or None, **_options(call)
        )
        return o_QHR, lse_HQ

    def _call_backward(
        self,
        do_QHR: Tensor,
        q_QHP: Tensor,
        k_KGP: Tensor,
        v_KGR: Tensor,
        o_QHR: Tensor,
        lse_HQ: Tensor,
        call: VarlenCall,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq_QHP, dk_KGP, dv_KGR, *_ = self._package._flash_attn_bwd(
            q_QHP,
            k_KGP,
            v_KGR,
            o_QHR,
            do_QHR,
            lse_HQ,
            softcap=call.softcap,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_options(call),
        )
        return dq_QHP, dk_KGP, dv_KGR


def padded_head_dims(head_dim_qk: int, head_dim_v: int, major: int) -> tuple[int, int]:
    """The least head dims of FlashAttention-4 that hold these.

    Hopper takes any multiples of 8 up to 256; Blackwell those up to 128, (192, 128) and (256, 256).

    Args:
        head_dim_qk: of queries and keys, at most 256.
        head_dim_v: of values, at most 256.
        major: major compute capability of the GPU.
    """
    dim_qk, dim_v = -(-head_dim_qk // 8) * 8, -(-head_dim_v // 8) * 8
    if major == 9 or max(dim_qk, dim_v) <= 128:
        return dim_qk, dim_v
    return (192, 128) if dim_qk <= 192 and dim_v <= 128 else (256, 256)


def _options(call: VarlenCall) -> dict[str, Any]:
    """What both directions are told of a kernel call. A window that sees all is None here, and not -1."""
    return {
        "cu_seqlens_q": call.cu_q,
        "cu_seqlens_k": call.cu_k,
        "max_seqlen_q": call.max_q,
        "max_seqlen_k": call.max_k,
        "softmax_scale": call.scale,
        "causal": call.causal,
        "window_size_left": call.window_left,
        "window_size_right": call.window_right,
    }

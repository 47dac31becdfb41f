"""FlashAttention-2 from the flash-attn package (2.7 or later), on CUDA.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, P padded head
dim.
"""

from types import ModuleType

import torch
from torch import Tensor

from .flash_varlen import FlashVarlenKernel
from .packages import PACKAGES
from .packed import empty_gradients
from .split import Grid
from .varlen_call import VarlenCall


class FlashAttnKernel(FlashVarlenKernel):
    """`_flash_attn_varlen_forward` and `_backward` of the package, which has softcap.

    Raises:
        ImportError: the package is missing, broken, or older than 2.7.
    """

    name = "flash_attn"
    majors = range(8, 100)
    gpus = "8.0 (Ampere) or later"
    softcap_supported = True
    forward_grid = Grid(by_q=1, by_k=0)
    backward_grid = Grid(by_q=2, by_k=1)

    def __init__(self) -> None:
        self._package = _package()

    def _call_forward(self, q_QHP: Tensor, k_KGP: Tensor, v_KGP: Tensor, call: VarlenCall) -> tuple[Tensor, Tensor]:
        o_QHP, lse_HQ, *_ = self._package._flash_attn_varlen_forward(
            q_QHP,
            k_KGP,
            v_KGP,
            call.cu_q,
            call.cu_k,
            call.max_q,
            call.max_k,
            dropout_p=0.0,
            softmax_scale=call.scale,
            causal=call.causal,
            **call.window(),
            softcap=call.softcap,
        )
        return o_QHP, lse_HQ

    def _call_backward(
        self,
        do_QHP: Tensor,
        q_QHP: Tensor,
        k_KGP: Tensor,
        v_KGP: Tensor,
        o_QHP: Tensor,
        lse_HQ: Tensor,
        call: VarlenCall,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq_QHP, dk_KGP, dv_KGP = empty_gradients(q_QHP, k_KGP, v_KGP)
        self._package._flash_attn_varlen_backward(
            do_QHP,
            q_QHP,
            k_KGP,
            v_KGP,
            o_QHP,
            lse_HQ,
            dq_QHP,
            dk_KGP,
            dv_KGP,
            call.cu_q,
            call.cu_k,
            call.max_q,
            call.max_k,
            dropout_p=0.0,
            softmax_scale=call.scale,
            causal=call.causal,
            **call.window(),
            softcap=call.softcap,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq_QHP, dk_KGP, dv_KGP


def _package() -> ModuleType:
    package = PACKAGES["flash_attn"].load()
    if not hasattr(package, "_wrapped_flash_attn_varlen_forward"):
        # 2.7 made them custom ops, with the window as two numbers.
        raise ImportError("kernel 'flash_attn' needs flash-attn 2.7 or later: pip install -U flash-attn")
    return package

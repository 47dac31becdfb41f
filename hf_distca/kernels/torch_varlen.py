"""The FlashAttention that comes with torch, on CUDA.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, P padded head
dim.
"""

import torch
from torch import Tensor

from .flash_varlen import FlashVarlenKernel, VarlenCall


class TorchVarlenKernel(FlashVarlenKernel):
    """`aten::_flash_attention_forward` and `_backward`, which return and take the log-sum-exp."""

    name = "torch_varlen"
    # Half a tile of 128 keys.
    row_overhead = 64
    # A GPU's memory is tens of times as fast as its links.
    gather_cost = 0.0
    softcap_supported = False

    def _call_forward(self, q_QHP: Tensor, k_KGP: Tensor, v_KGP: Tensor, call: VarlenCall) -> tuple[Tensor, Tensor]:
        o_QHP, lse_HQ, *_ = torch.ops.aten._flash_attention_forward.default(
            q_QHP,
            k_KGP,
            v_KGP,
            call.cu_q,
            call.cu_k,
            call.max_q,
            call.max_k,
            0.0,  # dropout_p
            call.causal,
            False,  # return_debug_mask
            scale=call.scale,
            window_size_left=call.window_left,
            window_size_right=call.window_right,
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
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward.default(
            do_QHP,
            q_QHP,
            k_KGP,
            v_KGP,
            o_QHP,
            lse_HQ,
            call.cu_q,
            call.cu_k,
            call.max_q,
            call.max_k,
            0.0,  # dropout_p
            call.causal,
            # The state of a random number generator that nothing draws from without dropout.
            torch.zeros(2, dtype=torch.uint64, device=q_QHP.device),
            torch.empty(0, device=q_QHP.device),
            scale=call.scale,
            window_size_left=call.window_left,
            window_size_right=call.window_right,
        )
        return grads

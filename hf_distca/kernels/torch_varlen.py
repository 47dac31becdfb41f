"""The FlashAttention that comes with torch, on CUDA.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, P padded head
dim.
"""

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from .flash_attn_3 import not_deterministic
from .flash_attn_4 import padded_head_dims
from .flash_varlen import FlashVarlenKernel
from .params import AttentionParams
from .split import Grid
from .varlen_call import VarlenCall

FIRST_WITH_FA4_WINDOWS = (2, 13)


class TorchVarlenKernel(FlashVarlenKernel):
    """`aten::_flash_attention_forward` and `_backward`, which return and take the log-sum-exp.

    That is FlashAttention-2, unless torch.nn.attention.activate_flash_attention_impl has put FlashAttention-3 or 4
    in its place, for the whole process. It is left as it is found, and has its limits then.
    """

    name = "torch_varlen"
    majors = range(8, 100)
    gpus = "8.0 (Ampere) or later"
    softcap_supported = False
    forward_grid = Grid(by_q=1, by_k=0)
    backward_grid = Grid(by_q=2, by_k=1)

    def _refusal(
        self, capability: tuple[int, int], head_dim_qk: int, head_dim_v: int, params: AttentionParams
    ) -> str | None:
        active = current_flash_attention_impl()
        if active is None:
            return None
        gpu = f"a GPU of compute capability {capability[0]}.{capability[1]}"
        undo = "call torch.nn.attention.restore_flash_attention_impl(), or use a kernel of another name"
        if (active, capability[0]) not in (("FA3", 9), ("FA4", 9), ("FA4", 10)):
            return f"{active} is activated in torch, which does not run on {gpu} so; {undo}"
        if active == "FA3":
            return not_deterministic(self.name, head_dim_qk, head_dim_v)
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        if params.window is not None and version < FIRST_WITH_FA4_WINDOWS:
            return (
                f"FA4 is activated in torch, and torch {torch.__version__} gives it no windows, got {params.window}; "
                f"{undo}"
            )
        head_dim = -(-max(head_dim_qk, head_dim_v) // 8) * 8
        if padded_head_dims(head_dim, head_dim, capability[0]) != (head_dim, head_dim):
            return f"FA4 is activated in torch, and has no head dim of {head_dim} on {gpu}; {undo}"
        return None

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
        # The state of a random number generator that nothing draws from without dropout.
        rng_state, unused = call.shapes.once(
            "random numbers",
            lambda: (torch.zeros(2, dtype=torch.uint64, device=q_QHP.device), torch.empty(0, device=q_QHP.device)),
        )
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
            rng_state,
            unused,
            scale=call.scale,
            window_size_left=call.window_left,
            window_size_right=call.window_right,
        )
        return grads

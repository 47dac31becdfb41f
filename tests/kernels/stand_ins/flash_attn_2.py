"""FlashAttention-2 of the flash-attn package."""

from types import ModuleType

import torch
from torch import Tensor

from tests.kernels.stand_ins.asked import backward, called, forward


class FlashAttn2(ModuleType):
    """`flash_attn.flash_attn_interface`, 2.7.0 to 2.8.3."""

    def __init__(self) -> None:
        super().__init__("flash_attn.flash_attn_interface")
        self.calls = {"forward": 0, "backward": 0}
        self.deterministic: bool

    def _wrapped_flash_attn_varlen_forward(self) -> None:
        """Its presence says that the version is new enough."""

    def _flash_attn_varlen_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
        block_table: Tensor | None = None,
        leftpad_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
        zero_tensors: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert dropout_p == 0
        self.calls["forward"] += 1
        asked = called(
            (q, k, v),
            (cu_seqlens_q, cu_seqlens_k),
            (max_seqlen_q, max_seqlen_k),
            scale=softmax_scale,
            causal=causal,
            window=as_integers(window_size_left, window_size_right),
            softcap=softcap,
        )
        return *forward(q, k, v, *asked), torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
        zero_tensors: bool = False,
    ) -> Tensor:
        assert dropout_p == 0
        assert alibi_slopes is None
        self.calls["backward"] += 1
        self.deterministic = deterministic
        asked = called(
            (q, k, v, dout, out),
            (cu_seqlens_q, cu_seqlens_k),
            (max_seqlen_q, max_seqlen_k),
            scale=softmax_scale,
            causal=causal,
            window=as_integers(window_size_left, window_size_right),
            softcap=softcap,
        )
        grads = backward(dout, q, k, v, out, softmax_lse, *asked)
        for given, grad in zip((dq, dk, dv), grads, strict=True):
            given.copy_(grad)
        return torch.empty(0)


def as_integers(left: int, right: int) -> tuple[int, int]:
    assert isinstance(left, int)
    assert isinstance(right, int)
    return left, right

"""FlashAttention-2 of the flash-attn package."""

from types import ModuleType

import torch
from torch import Tensor

from tests.kernels.stand_ins.asked import backward, called, forward, signature

FORWARD = signature(
    "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, "
    "window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
    "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False"
)
BACKWARD = signature(
    "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, "
    "softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, "
    "rng_state=None, zero_tensors=False"
)


class FlashAttn2(ModuleType):
    """`flash_attn.flash_attn_interface`, 2.7.0 to 2.8.3."""

    def __init__(self) -> None:
        super().__init__("flash_attn.flash_attn_interface")
        self.calls = {"forward": 0, "backward": 0}
        self.deterministic: bool

    def _wrapped_flash_attn_varlen_forward(self) -> None:
        """Its presence says that the version is new enough."""

    def _flash_attn_varlen_forward(self, *args, **kwargs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self.calls["forward"] += 1
        given = FORWARD(*args, **kwargs)
        q, k, v = (given[name] for name in ("q", "k", "v"))
        return *forward(q, k, v, *self._asked((q, k, v), given)), torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_backward(self, *args, **kwargs) -> Tensor:
        self.calls["backward"] += 1
        given = BACKWARD(*args, **kwargs)
        self.deterministic = given["deterministic"]
        do, q, k, v, o = (given[name] for name in ("dout", "q", "k", "v", "out"))
        grads = backward(do, q, k, v, o, given["softmax_lse"], *self._asked((q, k, v, do, o), given))
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            given[name].copy_(grad)
        return torch.empty(0)

    def _asked(self, tensors, given):
        window = (given["window_size_left"], given["window_size_right"])
        assert all(isinstance(side, int) for side in window)
        assert given["dropout_p"] == 0
        assert given["alibi_slopes"] is None
        return called(
            tensors,
            (given["cu_seqlens_q"], given["cu_seqlens_k"]),
            (given["max_seqlen_q"], given["max_seqlen_k"]),
            scale=given["softmax_scale"],
            causal=given["causal"],
            window=window,
            softcap=given["softcap"],
        )

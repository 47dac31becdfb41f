"""FlashAttention-4 of the flash-attn-4 package."""

from types import ModuleType

import torch
from torch import Tensor

from tests.kernels.stand_ins.asked import backward, called, forward, signature

FORWARD = signature(
    "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, "
    "window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, "
    "intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, "
    "mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, "
    "aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, "
    "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
    "gather_bwd_recompute_p=False"
)
BACKWARD = signature(
    "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
    "window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2, "
    "num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, "
    "AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, "
    "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, "
    "learnable_sink=None"
)


class FlashAttn4(ModuleType):
    """`flash_attn.cute.interface` of flash-attn-4 4.0.0b36."""

    def __init__(self) -> None:
        super().__init__("flash_attn.cute.interface")
        self.calls = {"forward": 0, "backward": 0}
        self.deterministic: bool
        self.head_dims: set[tuple[int, int]] = set()

    def _flash_attn_fwd(self, *args, **kwargs) -> tuple[Tensor, Tensor | None, None, None, None]:
        self.calls["forward"] += 1
        given = FORWARD(*args, **kwargs)
        assert given["return_lse"]
        assert given["softcap"] != 0
        q, k, v = (given[name] for name in ("q", "k", "v"))
        return *forward(q, k, v, *self._asked((q, k, v), given)), None, None, None

    def _flash_attn_bwd(self, *args, **kwargs) -> tuple[Tensor, ...]:
        self.calls["backward"] += 1
        given = BACKWARD(*args, **kwargs)
        self.deterministic = given["deterministic"]
        assert isinstance(given["softcap"], float)
        do, q, k, v, o = (given[name] for name in ("dout", "q", "k", "v", "out"))
        return backward(do, q, k, v, o, given["lse"], *self._asked((q, k, v, do, o), given))

    def _asked(self, tensors, given):
        """Of both directions, after the checks that they make on head dims and windows."""
        dims, window = (
            (tensors[0].shape[2], tensors[2].shape[2]),
            (given["window_size_left"], given["window_size_right"]),
        )
        major = torch.cuda.get_device_capability(tensors[0].device)[0]
        assert major == 9 or max(dims) <= 128 or dims in ((192, 128), (256, 256))
        assert -1 not in window
        self.head_dims.add(dims)
        return called(
            tensors,
            (given["cu_seqlens_q"], given["cu_seqlens_k"]),
            (given["max_seqlen_q"], given["max_seqlen_k"]),
            scale=given["softmax_scale"],
            causal=given["causal"],
            window=window,
            softcap=given["softcap"],
            one_head_dim=False,
        )

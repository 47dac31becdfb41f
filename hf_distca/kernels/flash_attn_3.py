"""FlashAttention-3, on GPUs of the Hopper kind.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, P padded head dim of
queries and keys, R padded head dim of values.
"""

from typing import Any

import torch
from torch import Tensor

from .flash_varlen import FlashVarlenKernel
from .packages import PACKAGES, MissingPackageError
from .packed import empty_gradients
from .params import AttentionParams
from .split import Grid
from .varlen_call import VarlenCall

HUB_BUILD, HUB_VERSION = "kernels-community/flash-attn3", 1


class FlashAttn3Kernel(FlashVarlenKernel):
    """The operators `fwd` and `bwd` of the flash_attn_3 package, or of its build on the Hugging Face hub.

    Args:
        sm_margin: streaming multiprocessors that a forward leaves to what else runs on the GPU, the exchange of rows
            above all. Its blocks stay for the whole kernel call, so that nothing else starts on a GPU full of them.
            Blocks of a backward end one by one and leave room as they do; the operator takes the number there too.
        hub: where the package is not installed, take the hub's build by the `kernels` package, which downloads it.

    Raises:
        ImportError: neither is there, or what is there is broken or too old.
    """

    name = "flash_attn_3"
    majors = (9,)
    gpus = "9.0 (Hopper)"
    softcap_supported = True
    forward_grid = None  # as many blocks as the GPU holds, which fetch tasks
    backward_grid = Grid(by_q=2, by_k=1)

    def __init__(self, sm_margin: int = 0, *, hub: bool = True) -> None:
        self._sm_margin = sm_margin
        self._operators = _operators(hub)

    def _padded(self, head_dim_qk: int, head_dim_v: int, device: torch.device) -> tuple[int, int]:
        if 128 < head_dim_qk <= 192 and 96 < head_dim_v <= 128:  # it was made for the 192 and 128 of latent attention
            return -(-head_dim_qk // 8) * 8, -(-head_dim_v // 8) * 8
        return super()._padded(head_dim_qk, head_dim_v, device)

    def _refusal(
        self, capability: tuple[int, int], head_dim_qk: int, head_dim_v: int, params: AttentionParams
    ) -> str | None:
        return not_deterministic(self.name, head_dim_qk, head_dim_v)

    def _call_forward(self, q_QHP: Tensor, k_KGP: Tensor, v_KGR: Tensor, call: VarlenCall) -> tuple[Tensor, Tensor]:
        o_QHR, lse_HQ, *_ = self._operators.fwd(
            q_QHP,
            k_KGP,
            v_KGR,
            num_splits=1,  # splits are for queries of few rows
            **self._options(call),
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
        dq_QHP, dk_KGP, dv_KGR = empty_gradients(q_QHP, k_KGP, v_KGR)
        self._operators.bwd(
            do_QHR,
            q_QHP,
            k_KGP,
            v_KGR,
            o_QHR,
            lse_HQ,
            dq=dq_QHP,
            dk=dk_KGP,
            dv=dv_KGR,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._options(call),
        )
        return dq_QHP, dk_KGP, dv_KGR

    def _options(self, call: VarlenCall) -> dict[str, Any]:
        """What both operators are told of a kernel call."""
        return {
            "cu_seqlens_q": call.cu_q,
            "cu_seqlens_k": call.cu_k,
            "max_seqlen_q": call.max_q,
            "max_seqlen_k": call.max_k,
            "softmax_scale": call.scale,
            "is_causal": call.causal,
            **call.window(),
            "softcap": call.softcap,
            "sm_margin": self._sm_margin,
        }


def not_deterministic(name: str, head_dim_qk: int, head_dim_v: int) -> str | None:
    """What to say where a deterministic backward is asked for, and FlashAttention-3 has none."""
    if max(head_dim_qk, head_dim_v) <= 192 or not torch.are_deterministic_algorithms_enabled():
        return None
    return (
        f"kernel {name!r} has no deterministic backward for head dims above 192, got {head_dim_qk} for queries and "
        f"keys and {head_dim_v} for values; leave torch.use_deterministic_algorithms(False), or use 'flash_attn'"
    )


def _operators(hub: bool) -> Any:
    """The namespace of operators of the package; where it is not installed, of the hub's build."""
    package = PACKAGES["flash_attn_3"]
    try:
        package.load()  # registers the operators
    except MissingPackageError:
        operators = _hub_operators() if hub else None
        if operators is None:
            raise
    else:
        operators = torch.ops.flash_attn_3
    if not hasattr(operators, "fwd") or not hasattr(operators, "bwd"):
        raise ImportError(
            f"the flash_attn_3 package has no operators fwd and bwd; install a newer one: {package.install}"
        )
    return operators


def _hub_operators() -> Any:
    """The operators of the hub's build; None without the `kernels` package."""
    try:
        from kernels import get_kernel
    except ModuleNotFoundError as error:
        if error.name != "kernels":  # it is there, and what it needs is not
            raise
        return None
    return get_kernel(HUB_BUILD, version=HUB_VERSION).ops

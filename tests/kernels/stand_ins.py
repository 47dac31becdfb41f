"""Stand-ins for FlashAttention in its versions, on CPU tensors, around the reference.

They have the signatures of the real ones and behave as their sources have it, at their least friendly: head dims that
are multiples of 8 and mostly equal, aligned rows, [H, Q] log-sum-exp, +inf for rows without keys, results unset where
no pair is.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_distca.kernels import AttentionParams, TaskShapes
from hf_distca.kernels.reference import ReferenceKernel


def signature(arguments: str) -> Callable[..., dict[str, Any]]:
    """Return a function with these arguments, which returns them by name and refuses others."""
    return eval(f"lambda {arguments}: locals()")


class StandIn:
    """What all versions do with their arguments, once they have them by name.

    Attributes:
        calls: how many there were.
        deterministic: of the last backward.
        head_dims: of Q and K, and of V.
    """

    names = ("dout", "out", "softmax_lse", "causal")

    def __init__(self) -> None:
        self.calls = {"forward": 0, "backward": 0}
        self.deterministic: bool
        self.head_dims: set[tuple[int, int]] = set()

    def check(self, dim_qk: int, dim_v: int, given: dict[str, Any]) -> None:
        """What only this version asks for."""
        assert dim_qk == dim_v

    def forward(self, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """o [Q, H, R] and lse [H, Q]."""
        self.calls["forward"] += 1
        rows = [given[name] for name in ("q", "k", "v")]
        o, lse = ReferenceKernel().forward(*rows, *self._asked(rows, given))
        o[lse == -torch.inf] = torch.nan
        return o, lse.masked_fill(lse == -torch.inf, torch.inf).T.contiguous()

    def backward(self, given: dict[str, Any]) -> tuple[Tensor, ...]:
        """dq, dk and dv, also in the tensors that are given for them."""
        self.calls["backward"] += 1
        self.deterministic = given.get("deterministic", False)
        do, o, lse, q, k, v = (given[name] for name in (*self.names[:3], "q", "k", "v"))
        assert lse.shape == (q.shape[1], q.shape[0])
        assert lse.is_contiguous()
        shapes, params = self._asked([q, k, v, do, o], given)
        gradients = ReferenceKernel().backward(do, q, k, v, o, lse.T, shapes, params)
        dq, dk, dv = gradients
        for q_rows, k_rows in zip(
            torch.arange(len(q)).split(shapes.q_lens), torch.arange(len(k)).split(shapes.k_lens), strict=True
        ):
            if not len(q_rows) or not len(k_rows):
                dq[q_rows] = dk[k_rows] = dv[k_rows] = torch.nan
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            if given.get(name) is not None:
                given[name].copy_(gradient)
        return gradients

    def _asked(self, tensors: list[Tensor], given: dict[str, Any]) -> tuple[TaskShapes, AttentionParams]:
        """What a call asks for, after the checks that the kernels make; q, k and v are the first tensors."""
        q, k, v = tensors[:3]
        cumulative = given["cu_seqlens_q"], given["cu_seqlens_k"]
        longest = given["max_seqlen_q"], given["max_seqlen_k"]
        assert q.shape[2] == k.shape[2] <= 256
        assert v.shape[2] <= 256
        self.check(q.shape[2], v.shape[2], given)
        self.head_dims.add((q.shape[2], v.shape[2]))
        for x in tensors:
            assert x.shape[2] % 8 == 0
            assert x.stride(-1) == 1
            assert not any(stride % 8 for stride in x.stride()[:-1])
            assert x.data_ptr() % 16 == 0
        shapes = TaskShapes.build(*(x.diff().tolist() for x in cumulative), "cpu")
        assert shapes.q_lens
        assert [x[0].item() for x in cumulative] == [0, 0]
        assert (sum(shapes.q_lens), sum(shapes.k_lens)) == (len(q), len(k))
        assert longest[0] >= shapes.max_q > 0
        assert longest[1] >= shapes.max_k > 0
        # With longest[0] == 1 they mean decoding: one row in every task.
        assert longest[0] > 1 or set(shapes.q_lens) == {1}
        left, right = (None if (side := given[f"window_size_{name}"]) == -1 else side for name in ("left", "right"))
        assert right == (None if left is None else 0)
        window = None if left is None else left + 1
        causal = given[self.names[3]]
        return shapes, AttentionParams(given["softmax_scale"], window, given["softcap"] or None, causal)


FORWARD_OF_ATEN = signature(
    "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal, return_debug_mask, *, "
    "scale, window_size_left=None, window_size_right=None"
)
BACKWARD_OF_ATEN = signature(
    "dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, causal, "
    "rng_state, unused, *, scale, window_size_left=None, window_size_right=None"
)


class Aten(StandIn):
    """`aten::_flash_attention_forward` and `_backward` for CPU tensors, behind torch's own schemas."""

    def __init__(self) -> None:
        super().__init__()
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("_flash_attention_forward", self._forward, "CPU")
        self.library.impl("_flash_attention_backward", self._backward, "CPU")

    def check(self, dim_qk: int, dim_v: int, given: dict[str, Any]) -> None:
        super().check(dim_qk, dim_v, given)
        assert given["dropout_p"] == 0

    def _forward(self, *args, **options) -> tuple[Tensor, ...]:
        given = FORWARD_OF_ATEN(*args, **options)
        results = self.forward({**given, "softmax_scale": given["scale"], "softcap": None})
        return *results, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def _backward(self, *args, **options) -> tuple[Tensor, ...]:
        given = BACKWARD_OF_ATEN(*args, **options)
        return self.backward({**given, "softmax_scale": given["scale"], "softcap": None})


FORWARD_OF_2 = signature(
    "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, "
    "window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
    "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False"
)
BACKWARD_OF_2 = signature(
    "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, "
    "softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, "
    "rng_state=None, zero_tensors=False"
)


class FlashAttn2(StandIn):
    """`flash_attn.flash_attn_interface`, 2.7.0 to 2.8.3."""

    def _wrapped_flash_attn_varlen_forward(self) -> None:
        """Its presence says that the version is new enough."""

    def check(self, dim_qk: int, dim_v: int, given: dict[str, Any]) -> None:
        super().check(dim_qk, dim_v, given)
        assert all(isinstance(given[f"window_size_{side}"], int) for side in ("left", "right"))
        assert given["dropout_p"] == 0
        assert given["alibi_slopes"] is None

    def _flash_attn_varlen_forward(self, *args, **kwargs) -> tuple[Tensor, ...]:
        return *self.forward(FORWARD_OF_2(*args, **kwargs)), torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_backward(self, *args, **kwargs) -> Tensor:
        self.backward(BACKWARD_OF_2(*args, **kwargs))
        return torch.empty(0)


FWD_SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
    "Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, "
    "int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, "
    "Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
BWD_SCHEMA = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "float softcap = 0.0, bool deterministic = False, int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class FlashAttn3(StandIn):
    """The operators of flash_attn_3, behind the schemas of its sources, in a namespace of torch.ops."""

    names = ("dout", "out", "softmax_lse", "is_causal")

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.sm_margins: set[int] = set()
        self.library = torch.library.Library(namespace, "FRAGMENT")
        for schema, operator in ((FWD_SCHEMA, self._fwd), (BWD_SCHEMA, self._bwd)):
            self.library.impl(self.library.define(schema), operator, "CPU")
        self.operators = getattr(torch.ops, namespace)

    def check(self, dim_qk: int, dim_v: int, given: dict[str, Any]) -> None:
        assert dim_qk == dim_v or (128 < dim_qk <= 192 and 96 < dim_v <= 128)
        assert given.get("num_splits", 1) == 1
        self.sm_margins.add(given["sm_margin"])

    def _fwd(self, *args) -> tuple[Tensor, ...]:
        return *self.forward(by_name(self.operators.fwd, args)), torch.empty(0), torch.empty(0)

    def _bwd(self, *args) -> tuple[Tensor, ...]:
        self.backward(by_name(self.operators.bwd, args))
        return tuple(torch.empty(0) for _ in range(5))


def by_name(operator: torch._ops.OpOverloadPacket, args: tuple) -> dict:
    """The arguments of an operator, of which those at the end that have their defaults are not handed over."""
    arguments = operator.default._schema.arguments
    return {argument.name: argument.default_value for argument in arguments} | {
        argument.name: given for argument, given in zip(arguments, args, strict=False)
    }


def hub(operators: SimpleNamespace) -> ModuleType:
    """The `kernels` package, whose hub has a build with these operators."""
    package = ModuleType("kernels")

    def get_kernel(repo_id: str, *, revision: str | None = None, version: int | None = None) -> ModuleType:
        assert (repo_id, revision, version) == ("kernels-community/flash-attn3", None, 1)
        build = ModuleType("flash_attn3")
        build.ops = operators
        return build

    package.get_kernel = get_kernel
    return package


FORWARD_OF_4 = signature(
    "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, "
    "window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, "
    "intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, "
    "mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, "
    "aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, "
    "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
    "gather_bwd_recompute_p=False"
)
BACKWARD_OF_4 = signature(
    "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
    "window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2, "
    "num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, "
    "AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, "
    "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, "
    "learnable_sink=None"
)


class FlashAttn4(StandIn):
    """`flash_attn.cute.interface` of flash-attn-4 4.0.0b36."""

    names = ("dout", "out", "lse", "causal")

    def check(self, dim_qk: int, dim_v: int, given: dict[str, Any]) -> None:
        """A forward without softcap has None, a backward 0.0."""
        major = torch.cuda.get_device_capability(given["q"].device)[0]
        assert major == 9 or max(dim_qk, dim_v) <= 128 or (dim_qk, dim_v) in ((192, 128), (256, 256))
        assert -1 not in (given["window_size_left"], given["window_size_right"])
        assert given["softcap"] != 0 if "return_lse" in given else isinstance(given["softcap"], float)

    def _flash_attn_fwd(self, *args, **kwargs) -> tuple[Tensor | None, ...]:
        given = FORWARD_OF_4(*args, **kwargs)
        assert given["return_lse"]
        return *self.forward(given), None, None, None

    def _flash_attn_bwd(self, *args, **kwargs) -> tuple[Tensor, ...]:
        return self.backward(BACKWARD_OF_4(*args, **kwargs))

"""Stand-ins for FlashAttention in its versions, on CPU tensors, around the reference.

They take what the real ones take, without optional arguments that are never given, and behave as their sources have
it, at their least friendly: head dims that are multiples of 8 and mostly equal, aligned rows, [H, Q] log-sum-exp, +inf
for rows without keys, results unset where no pair is.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_distca.kernels import AttentionParams, TaskShapes
from hf_distca.kernels.reference import ReferenceKernel

LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
OF_FORWARD = {
    # torch 2.8 to 2.13, `aten::_flash_attention_forward`
    "torch_varlen": f"q, k, v, {LENGTHS}, dropout_p, causal, return_debug_mask, *, scale, window_size_left=None, "
    "window_size_right=None",
    # 2.7.0 to 2.8.3, `flash_attn.flash_attn_interface`
    "flash_attn": f"q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, "
    "softcap=0.0, alibi_slopes=None",
    # `torch.ops.flash_attn_3`
    "flash_attn_3": f"q, k, v, *, {LENGTHS}, softmax_scale=None, is_causal=False, window_size_left=-1, "
    "window_size_right=-1, softcap=0.0, num_splits=0, sm_margin=0",
    # 4.0.0b36, `flash_attn.cute.interface`
    "flash_attn_4": f"q, k, v, *, {LENGTHS}, softmax_scale=None, causal=False, softcap=None, window_size_left=None, "
    "window_size_right=None, return_lse=False",
}
OF_BACKWARD = {
    "torch_varlen": f"dout, q, k, v, out, lse, {LENGTHS}, dropout_p, causal, rng_state, unused, *, scale, "
    "window_size_left=None, window_size_right=None",
    "flash_attn": f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {LENGTHS}, dropout_p, softmax_scale, causal, "
    "window_size_left, window_size_right, softcap, alibi_slopes, deterministic",
    "flash_attn_3": f"dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, *, {LENGTHS}, softmax_scale=None, "
    "is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0",
    "flash_attn_4": f"q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, *, {LENGTHS}, "
    "window_size_left=None, window_size_right=None, deterministic=False",
}
FUNCTIONS = {
    "torch_varlen": ("_flash_attention_forward", "_flash_attention_backward"),
    "flash_attn": ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
    "flash_attn_3": ("fwd", "bwd"),
    "flash_attn_4": ("_flash_attn_fwd", "_flash_attn_bwd"),
}


class StandIn:
    """One version.

    Attributes:
        module: where its functions are found by name.
        calls: how many there were of either function.
        given: the arguments of the last call.
        head_dims: of Q and K, and of V.
        sm_margins: numbers of multiprocessors that calls left to others.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = {"forward": 0, "backward": 0}
        self.given: dict[str, Any] = {}
        self.head_dims: set[tuple[int, int]] = set()
        self.sm_margins: set[int] = set()
        forward, backward = FUNCTIONS[name]
        self.module = SimpleNamespace(**{forward: self._forward, backward: self._backward})
        if name == "flash_attn":  # as versions that are new enough have it
            self.module._wrapped_flash_attn_varlen_forward = None

    def _forward(self, *args: Any, **options: Any) -> tuple[Tensor | None, ...]:
        """o [Q, H, R], lse [H, Q] and something else."""
        self.calls["forward"] += 1
        self.given = given = eval(f"lambda {OF_FORWARD[self.name]}: locals()")(*args, **options)
        assert given.get("return_lse", True)
        assert given.get("num_splits", 1) == 1
        if self.name == "flash_attn_4":  # None is no softcap here, 0.0 in its backward
            assert given["softcap"] != 0
        rows = [given[name] for name in ("q", "k", "v")]
        o, lse = ReferenceKernel().forward(*rows, *self._asked(rows))
        o[lse == -torch.inf] = torch.nan
        return o, lse.masked_fill(lse == -torch.inf, torch.inf).T.contiguous(), None, None

    def _backward(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """dq, dk and dv, or these in the tensors that are given for them."""
        self.calls["backward"] += 1
        self.given = given = eval(f"lambda {OF_BACKWARD[self.name]}: locals()")(*args, **options)
        do, o, q, k, v = (given[name] for name in ("dout", "out", "q", "k", "v"))
        lse = given["lse" if "lse" in given else "softmax_lse"]
        assert lse.shape == (q.shape[1], q.shape[0])
        assert lse.is_contiguous()
        assert isinstance(given.get("softcap", 0.0), float)
        shapes, params = self._asked([q, k, v, do, o])
        gradients = ReferenceKernel().backward(do, q, k, v, o, lse.T, shapes, params)
        dq, dk, dv = gradients
        for q_rows, k_rows in zip(
            torch.arange(len(q)).split(shapes.q_lens), torch.arange(len(k)).split(shapes.k_lens), strict=True
        ):
            if not len(q_rows) or not len(k_rows):
                dq[q_rows] = dk[k_rows] = dv[k_rows] = torch.nan
        if "dq" not in given:
            return gradients
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            given[name].copy_(gradient)
        return ()

    def _asked(self, tensors: list[Tensor]) -> tuple[TaskShapes, AttentionParams]:
        """What the last call asks for, after the checks that the kernels make; q, k and v are the first tensors."""
        (q, k, v), given = tensors[:3], self.given
        dims = q.shape[2], v.shape[2]
        assert k.shape[2] == dims[0] <= 256 >= dims[1]
        if self.name == "flash_attn_4":
            major = torch.cuda.get_device_capability(q.device)[0]
            assert major == 9 or max(dims) <= 128 or dims in ((192, 128), (256, 256))
        elif self.name != "flash_attn_3" or not (128 < dims[0] <= 192 and 96 < dims[1] <= 128):
            assert dims[0] == dims[1]
        self.head_dims.add(dims)
        self.sm_margins.add(given.get("sm_margin", 0))
        assert not given.get("dropout_p")
        for x in tensors:
            assert x.shape[2] % 8 == 0
            assert x.stride(-1) == 1
            assert not any(stride % 8 for stride in x.stride()[:-1])
            assert x.data_ptr() % 16 == 0
        cumulative = given["cu_seqlens_q"], given["cu_seqlens_k"]
        longest = given["max_seqlen_q"], given["max_seqlen_k"]
        shapes = TaskShapes.build(*(x.diff().tolist() for x in cumulative), "cpu")
        assert shapes.q_lens
        assert [x[0].item() for x in cumulative] == [0, 0]
        assert (sum(shapes.q_lens), sum(shapes.k_lens)) == (len(q), len(k))
        assert longest[0] >= shapes.max_q > 0
        assert longest[1] >= shapes.max_k > 0
        # With longest[0] == 1 they mean decoding: one row in every task.
        assert longest[0] > 1 or set(shapes.q_lens) == {1}
        left, right = given["window_size_left"], given["window_size_right"]
        if left == (-1 if self.name in ("flash_attn", "flash_attn_3") else None):
            assert right == left
            window = None
        else:
            assert right == 0 <= left
            window = left + 1
        scale = given["scale" if self.name == "torch_varlen" else "softmax_scale"]
        causal = given["is_causal" if self.name == "flash_attn_3" else "causal"]
        return shapes, AttentionParams(scale, window, given.get("softcap") or None, causal)

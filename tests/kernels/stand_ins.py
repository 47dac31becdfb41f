"""Stand-ins for FlashAttention in its versions, on CPU tensors, around the reference.

They take what the real ones take, without optional arguments that are never given, and behave as
their sources have it, at their least friendly: head dims that are multiples of 8 and mostly equal,
aligned rows, [H, Q] log-sum-exp, +inf for rows without keys, results unset where no pair is.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_distca.kernels import AttentionParams, TaskShapes
from hf_distca.kernels.reference import ReferenceKernel

LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
OF_TORCH = "cum_seq_q, cum_seq_k, max_q, max_k"
NO_WINDOW = "window_size_left=None, window_size_right=None"
WINDOW = "window_size_left=-1, window_size_right=-1, softcap=0.0"
SIGNATURES = {
    # torch 2.8 to 2.13, `aten`
    "torch_varlen": {
        "_flash_attention_forward": (
            f"q, k, v, {OF_TORCH}, dropout_p, is_causal, return_debug_mask, *, scale=None, "
            f"{NO_WINDOW}"
        ),
        "_flash_attention_backward": (
            f"dout, q, k, v, out, lse, {OF_TORCH}, dropout_p, is_causal, rng_state, unused, "
            f"*, scale=None, {NO_WINDOW}"
        ),
    },
    # 2.7.0 to 2.8.3, `flash_attn.flash_attn_interface`; versions that are new enough have the third
    "flash_attn": {
        "_flash_attn_varlen_forward": (
            f"q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, {WINDOW}, alibi_slopes=None"
        ),
        "_flash_attn_varlen_backward": (
            f"dout, q, k, v, out, lse, dq, dk, dv, {LENGTHS}, dropout_p, softmax_scale, "
            "causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic"
        ),
        "_wrapped_flash_attn_varlen_forward": "",
    },
    # `torch.ops.flash_attn_3`
    "flash_attn_3": {
        "fwd": (
            f"q, k, v, *, {LENGTHS}, softmax_scale=None, is_causal=False, {WINDOW}, num_splits=0, "
            "sm_margin=0"
        ),
        "bwd": (
            f"dout, q, k, v, out, lse, dq=None, dk=None, dv=None, *, {LENGTHS}, "
            f"softmax_scale=None, is_causal=False, {WINDOW}, deterministic=False, sm_margin=0"
        ),
    },
    # 4.0.0b36, `flash_attn.cute.interface`
    "flash_attn_4": {
        "_flash_attn_fwd": (
            f"q, k, v, *, {LENGTHS}, softmax_scale=None, causal=False, softcap=None, {NO_WINDOW}, "
            "return_lse=False"
        ),
        "_flash_attn_bwd": (
            "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, *, "
            f"{LENGTHS}, {NO_WINDOW}, deterministic=False"
        ),
    },
}


class StandIn:
    """One version.

    Attributes:
        module: where its functions are found by name.
        calls: how many there were, forward and backward.
        given: the arguments of the last of them, forward and backward.
    """

    def __init__(self, name: str) -> None:
        self.name, self.calls, self.module = name, [0, 0], SimpleNamespace()
        self.given: list[dict[str, Any]] = [{}, {}]
        for direction, (function, signature) in enumerate(SIGNATURES[name].items()):
            setattr(
                self.module,
                function,
                partial(self._call, direction, eval(f"lambda {signature}: locals()")),
            )

    def _call(
        self, direction: int, arguments: Any, *args: Any, **options: Any
    ) -> tuple[Tensor | None, ...]:
        self.calls[direction] += 1
        self.given[direction] = given = arguments(*args, **options)
        return self._backward(given) if direction else self._forward(given)

    def _forward(self, given: dict[str, Any]) -> tuple[Tensor | None, ...]:
        """o [Q, H, R], lse [H, Q] and something else."""
        assert given.get("return_lse", True)
        assert given.get("num_splits", 1) == 1
        if self.name == "flash_attn_4":  # None is no softcap here, 0.0 in its backward
            assert given["softcap"] != 0
        rows = [given[name] for name in ("q", "k", "v")]
        o, lse = ReferenceKernel().forward(*rows, *self._asked(rows, given))
        o[lse == -torch.inf] = torch.nan
        return o, lse.masked_fill(lse == -torch.inf, torch.inf).T.contiguous(), None, None

    def _backward(self, given: dict[str, Any]) -> tuple[Tensor, ...]:
        """dq, dk and dv, or these in the tensors that are given for them."""
        do, o, q, k, v, lse = (given[name] for name in ("dout", "out", "q", "k", "v", "lse"))
        assert lse.shape == (q.shape[1], q.shape[0])
        assert lse.is_contiguous()
        assert isinstance(given.get("softcap", 0.0), float)
        shapes, params = self._asked([q, k, v, do, o], given)
        gradients = dq, dk, dv = ReferenceKernel().backward(do, q, k, v, o, lse.T, shapes, params)
        of_tasks = (torch.arange(sum(lens)).split(lens) for lens in (shapes.q_lens, shapes.k_lens))
        for q_rows, k_rows in zip(*of_tasks, strict=True):
            if not len(q_rows) or not len(k_rows):
                dq[q_rows] = dk[k_rows] = dv[k_rows] = torch.nan
        if "dq" not in given:
            return gradients
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            given[name].copy_(gradient)
        return ()

    def _asked(
        self, tensors: list[Tensor], given: dict[str, Any]
    ) -> tuple[TaskShapes, AttentionParams]:
        """What a call asks for, after the checks that the kernels make; q, k and v are the first
        tensors.
        """
        q, k, v = tensors[:3]
        dims = q.shape[2], v.shape[2]
        assert k.shape[2] == dims[0] <= 256 >= dims[1]
        if self.name == "flash_attn_4":
            major = torch.cuda.get_device_capability(q.device)[0]
            assert major == 9 or max(dims) <= 128 or dims in ((192, 128), (256, 256))
        elif self.name != "flash_attn_3" or not (128 < dims[0] <= 192 and 96 < dims[1] <= 128):
            assert dims[0] == dims[1]
        assert not given.get("dropout_p")
        for x in tensors:
            assert x.shape[2] % 8 == 0
            assert x.stride(-1) == 1
            assert not any(stride % 8 for stride in x.stride()[:-1])
            assert x.data_ptr() % 16 == 0
        of_torch = self.name == "torch_varlen"
        cu_q, cu_k, max_q, max_k = (
            given[name] for name in (OF_TORCH if of_torch else LENGTHS).split(", ")
        )
        shapes = TaskShapes.build(cu_q.diff().tolist(), cu_k.diff().tolist(), "cpu")
        assert shapes.q_lens
        assert cu_q[0] == cu_k[0] == 0
        assert (sum(shapes.q_lens), sum(shapes.k_lens)) == (len(q), len(k))
        assert max_q >= shapes.max_q > 0
        assert max_k >= shapes.max_k > 0
        # With max_q == 1 they mean decoding: one row in every task.
        assert max_q > 1 or set(shapes.q_lens) == {1}
        left, right = given["window_size_left"], given["window_size_right"]
        if left == (-1 if self.name in ("flash_attn", "flash_attn_3") else None):
            assert right == left
            window = None
        else:
            assert right == 0 <= left
            window = left + 1
        scale = given["scale" if of_torch else "softmax_scale"]
        causal = given["is_causal" if of_torch or self.name == "flash_attn_3" else "causal"]
        return shapes, AttentionParams(scale, window, given.get("softcap") or None, causal)

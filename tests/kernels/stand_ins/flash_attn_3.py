"""FlashAttention-3, and the `kernels` package that has a build of it."""

from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from hf_distca.kernels import AttentionParams, TaskShapes
from tests.kernels.stand_ins.asked import backward, called, forward

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


class FlashAttn3:
    """The operators of flash_attn_3, behind the schemas of its sources, in a namespace of torch.ops."""

    def __init__(self, namespace: str) -> None:
        self.calls = {"forward": 0, "backward": 0}
        self.sm_margins: set[int] = set()
        self.deterministic: bool
        self.head_dims: set[tuple[int, int]] = set()
        self._library = torch.library.Library(namespace, "FRAGMENT")
        for schema, operator in ((FWD_SCHEMA, self._fwd), (BWD_SCHEMA, self._bwd)):
            name = self._library.define(schema)
            self._library.impl(name, operator, "CPU")
        self.operators = getattr(torch.ops, namespace)

    def remove(self) -> None:
        self._library._destroy()

    def _asked(self, tensors: tuple[Tensor, ...], options: dict) -> tuple[TaskShapes, AttentionParams]:
        """Of fwd and bwd alike, after the checks that they make on head dims."""
        dim_qk, dim_v = tensors[0].shape[2], tensors[2].shape[2]
        assert dim_qk == dim_v or (128 < dim_qk <= 192 and 96 < dim_v <= 128)
        self.head_dims.add((dim_qk, dim_v))
        self.sm_margins.add(options["sm_margin"])
        return called(
            tensors,
            (options["cu_seqlens_q"], options["cu_seqlens_k"]),
            (options["max_seqlen_q"], options["max_seqlen_k"]),
            scale=options["softmax_scale"],
            causal=options["is_causal"],
            window=(options["window_size_left"], options["window_size_right"]),
            softcap=options["softcap"],
            one_head_dim=False,
        )

    def _fwd(self, *args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self.calls["forward"] += 1
        given = by_name(self.operators.fwd, args)
        assert given["num_splits"] == 1
        q, k, v = (given[name] for name in ("q", "k", "v"))
        o, lse = forward(q, k, v, *self._asked((q, k, v), given))
        return o, lse, torch.empty(0), torch.empty(0)

    def _bwd(self, *args) -> tuple[Tensor, ...]:
        self.calls["backward"] += 1
        given = by_name(self.operators.bwd, args)
        self.deterministic = given["deterministic"]
        q, k, v, do, o = (given[name] for name in ("q", "k", "v", "dout", "out"))
        grads = backward(do, q, k, v, o, given["softmax_lse"], *self._asked((q, k, v, do, o), given))
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            given[name].copy_(grad)
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

"""The CUDA kernels as far as that goes without a GPU: what they check, the arguments they make, and, with a
stand-in for the flash-attn package that computes on the CPU, all they do around its kernels.

The stand-in behaves as the package's documentation and sources have it, at its least friendly: head dims that
are equal and a multiple of 8, [H, Q] log-sum-exp, +inf for rows without keys, results unset where no pair is.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from hf_distca.kernels import AttentionParams, TaskShapes, get_kernel
from hf_distca.kernels.reference import ReferenceKernel
from tests.kernels.cases import CASES, assert_matches_reference

CUDA = torch.device("cuda")


class StandIn(ModuleType):
    """`flash_attn.flash_attn_interface` on the CPU."""

    deterministic: bool

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
        shapes, params = self.read(locals(), q, k, v, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
        o, lse = ReferenceKernel().forward(q, k, v, shapes, params)
        o[lse == -torch.inf] = torch.nan
        return o, lse.masked_fill(lse == -torch.inf, torch.inf).T.contiguous(), torch.empty(0), torch.empty(2)

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
        assert softmax_lse.shape == (q.shape[1], q.shape[0])
        assert softmax_lse.is_contiguous()
        self.deterministic = deterministic
        shapes, params = self.read(locals(), q, k, v, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
        grads = ReferenceKernel().backward(dout, q, k, v, out, softmax_lse.T, shapes, params)
        for given, grad in zip((dq, dk, dv), grads, strict=True):
            given.copy_(grad)
        for q_rows, k_rows in zip(
            torch.arange(len(q)).split(shapes.q_lens), torch.arange(len(k)).split(shapes.k_lens), strict=True
        ):
            if not len(q_rows) or not len(k_rows):
                dq[q_rows] = dk[k_rows] = dv[k_rows] = torch.nan
        return torch.empty(0)

    @staticmethod
    def read(
        options: dict,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cumulative: tuple[Tensor, Tensor],
        longest: tuple[int, int],
    ) -> tuple[TaskShapes, AttentionParams]:
        """What a call asks for, after the checks that the package makes."""
        assert q.shape[2] == k.shape[2] == v.shape[2] <= 256
        assert q.shape[2] % 8 == 0
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        shapes = TaskShapes.build(*(x.diff().tolist() for x in cumulative), "cpu")
        assert shapes.q_lens
        assert longest[0] >= shapes.max_q > 0
        assert longest[1] >= shapes.max_k > 0
        # It takes a call with longest[0] == 1 for decoding: one row in every task.
        assert longest[0] > 1 or set(shapes.q_lens) == {1}
        left, right, causal = (options[key] for key in ("window_size_left", "window_size_right", "causal"))
        assert right == (0 if causal else -1)
        return shapes, AttentionParams(
            scale=options["softmax_scale"],
            window=left + 1 if left >= 0 else None,
            softcap=options["softcap"] or None,
            causal=causal,
        )


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    package, interface = ModuleType("flash_attn"), StandIn("flash_attn.flash_attn_interface")
    package.flash_attn_interface = interface
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    return interface


@pytest.mark.parametrize("name", CASES)
def test_matches_reference_around_a_stand_in(name: str, stand_in: StandIn) -> None:
    assert_matches_reference(get_kernel("flash_attn", CUDA), CASES[name], torch.bfloat16)


@pytest.fixture(scope="module")
def aten_stand_in():
    """`aten::_flash_attention_forward` and `_backward` for CPU tensors, behind torch's own schemas."""

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **options):
        assert dropout_p == 0
        asked = {"causal": is_causal, "softmax_scale": options["scale"], "softcap": 0.0}
        shapes, params = StandIn.read(asked | windows(options), q, k, v, (cu_q, cu_k), (max_q, max_k))
        o, lse = ReferenceKernel().forward(q, k, v, shapes, params)
        return o, lse.T.contiguous(), torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def backward(do, q, k, v, o, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, **options):
        assert dropout_p == 0
        asked = {"causal": is_causal, "softmax_scale": options["scale"], "softcap": 0.0}
        shapes, params = StandIn.read(asked | windows(options), q, k, v, (cu_q, cu_k), (max_q, max_k))
        return ReferenceKernel().backward(do, q, k, v, o, lse.T, shapes, params)

    def windows(options: dict) -> dict:
        """Left out, they are none."""
        return {
            f"window_size_{side}": -1 if options.get(f"window_size_{side}") is None else options[f"window_size_{side}"]
            for side in ("left", "right")
        }

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("name", [name for name in CASES if "softcap" not in name])
def test_torch_varlen_matches_reference_around_a_stand_in(name: str, aten_stand_in: None) -> None:
    assert_matches_reference(get_kernel("torch_varlen", CUDA), CASES[name], torch.bfloat16)


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_when_torch_is(stand_in: StandIn, deterministic: bool) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        assert_matches_reference(get_kernel("flash_attn", CUDA), CASES["gqa"], torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(before)
    assert stand_in.deterministic == deterministic


def test_a_missing_package_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-distca\[flash-attn\]'.*'torch_varlen'"):
        get_kernel("flash_attn", CUDA)


def test_an_old_package_is_refused(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(StandIn, "_wrapped_flash_attn_varlen_forward")
    with pytest.raises(ImportError, match=r"2\.7 or later"):
        get_kernel("flash_attn", CUDA)


@pytest.mark.parametrize("name", [name for name in CASES if "softcap" not in name])
def test_torch_takes_the_arguments(name: str) -> None:
    """On the meta device torch checks the call and says what shapes come back."""
    case, kernel = CASES[name], get_kernel("torch_varlen", CUDA)
    q_rows, k_rows = sum(case.q_lens), sum(case.k_lens)
    q = torch.empty(q_rows, case.heads, case.head_dim_qk, dtype=torch.bfloat16, device="meta")
    k = q.new_empty(k_rows, case.kv_heads, case.head_dim_qk)
    v = q.new_empty(k_rows, case.kv_heads, case.head_dim_v)
    shapes = TaskShapes.build(case.q_lens, case.k_lens, "meta")
    o, lse = kernel.forward(q, k, v, shapes, case.params)
    assert (o.shape, o.dtype) == ((q_rows, case.heads, case.head_dim_v), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((q_rows, case.heads), torch.float32)
    grads = kernel.backward(o, q, k, v, o, lse, shapes, case.params)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": torch.device("cpu")}, "computes on CUDA, got cpu; on the CPU use 'cpu'"),
        ({"dtype": torch.float32}, "float16 and bfloat16, got torch.float32: train in bfloat16"),
        ({"head_dim_qk": 264}, "head dims up to 256, got 264 for queries"),
        ({"head_dim_v": 512}, "up to 256, got 64 for queries and keys and 512"),
        ({"params": AttentionParams(1.0, softcap=30.0)}, "no softcap, got 30.0; 'flash_attn' has"),
        ({"capability": (7, 5)}, r"compute capability 8.0 .* got 7\.5"),
    ],
)
def test_what_torch_varlen_cannot_do(change: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {
        "device": CUDA,
        "dtype": torch.bfloat16,
        "head_dim_qk": 64,
        "head_dim_v": 64,
        "params": AttentionParams(1.0, window=5),
    }
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    get_kernel("torch_varlen", CUDA).check(**asked)
    capability = change.get("capability", (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ValueError, match=message):
        get_kernel("torch_varlen", CUDA).check(**{key: change.get(key, asked[key]) for key in asked})


def test_the_package_has_softcap(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    get_kernel("flash_attn", CUDA).check(
        device=CUDA,
        dtype=torch.float16,
        head_dim_qk=64,
        head_dim_v=64,
        params=AttentionParams(1.0, softcap=30.0),
    )

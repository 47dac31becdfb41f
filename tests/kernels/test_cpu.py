"""The CPU kernel against the float64 reference, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hf_distca.kernels import cpu
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.kernels.reference import ReferenceKernel
from tests.kernels.cases import CASES, Case, assert_matches_reference, make_inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name: str, dtype: torch.dtype) -> None:
    assert_matches_reference(CpuKernel(), CASES[name], dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads, causal = draw(st.integers(1, 3)), draw(st.booleans())
    q_lens = draw(st.lists(st.integers(0, 90), max_size=5).map(tuple))
    extra = [draw(st.integers(0, 90)) for _ in q_lens]
    return Case(
        q_lens=q_lens,
        k_lens=tuple(q + e for q, e in zip(q_lens, extra, strict=True)) if causal else tuple(extra),
        heads=(kv_heads * draw(st.integers(1, 3)), kv_heads),
        dims=(draw(st.integers(1, 20)), draw(st.integers(1, 20))),
        scale=draw(st.floats(0.05, 1.0)),
        window=draw(st.none() | st.integers(1, 120)) if causal else None,
        softcap=draw(st.none() | st.floats(0.5, 30.0)),
        causal=causal,
    )


@given(cases(), st.integers(0, 2**16))
@settings(max_examples=60)
def test_matches_reference_for_any_shapes(case: Case, seed: int) -> None:
    assert_matches_reference(CpuKernel(), case, torch.float64, seed)


def test_softcap_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SCORES_AT_ONCE", 4000)
    for name in ("softcap", "softcap_window", "softcap_not_causal"):
        assert_matches_reference(CpuKernel(), CASES[name], torch.float32)


def test_memory_is_linear_in_the_rows() -> None:
    # All scores of this task would be 256 MiB; nothing of more than 16 MiB may be allocated.
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, tuple | list) else (out,)
            largest = max([largest, *(x.untyped_storage().nbytes() for x in tensors if torch.is_tensor(x))])
            return out

    for options in ({"window": 300}, {"softcap": 5.0}):
        case = Case((4096,), (8192,), heads=(2, 1), dims=(8, 8), **options)
        do, *qkv, shapes = make_inputs(case, torch.float32)
        with Watch():
            o, lse = CpuKernel().forward(*qkv, shapes, case.params)
            CpuKernel().backward(do, *qkv, o, lse, shapes, case.params)
    assert largest <= 4 * cpu.SCORES_AT_ONCE


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_rows_of_any_strides(softcap: float | None) -> None:
    case = Case(softcap=softcap)
    *dense, shapes = make_inputs(case, torch.float64)
    # Not even the head dim lies dense.
    sparse = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in dense]
    for do, q, k, v in (sparse, [dense[0][:, :, :1].expand_as(dense[0]), *dense[1:]]):
        o, lse = CpuKernel().forward(q, k, v, shapes, case.params)
        got = CpuKernel().backward(do, q, k, v, o, lse, shapes, case.params)
        want = ReferenceKernel().backward(do, *dense[1:], o, lse, shapes, case.params)
        for got_one, want_one in zip(got, want, strict=True):
            torch.testing.assert_close(got_one, want_one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "calls"),
    [
        # Equal documents are one call, and a task with keys before it is two.
        (Case((4, 4, 4, 6), (4, 4, 4, 9)), [(3, 4, 4, False), (1, 4, 6, False), (1, 4, 6, False)]),
        # Only windows that hide keys take blocks.
        (Case((40, 30), (40, 30), window=40), [(1, 4, 40, False), (1, 4, 30, False)]),
        (Case((40, 30), (40, 30), window=39), [(1, 4, 40, True), (1, 4, 30, True)]),
    ],
)
def test_calls_of_the_op(case: Case, calls: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    seen, flash = [], cpu._flash_forward

    def watched(q, *args, attn_mask, **options):
        seen.append((*q.shape[:3], attn_mask is not None))
        return flash(q, *args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(cpu, "_flash_forward", watched)
    assert_matches_reference(CpuKernel(), case, torch.float32)
    assert seen == calls

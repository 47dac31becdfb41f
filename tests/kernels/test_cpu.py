"""The CPU kernel against the float64 reference, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.kernels import AttentionParams, cpu
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.kernels.reference import ReferenceKernel
from tests.kernels.cases import CASES, Case, assert_matches_reference, make_inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name: str, dtype: torch.dtype) -> None:
    assert_matches_reference(CpuKernel(), CASES[name], dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.integers(1, 3))
    causal = draw(st.booleans())
    q_lens = draw(st.lists(st.integers(0, 90), max_size=5).map(tuple))
    extra = [draw(st.integers(0, 90)) for _ in q_lens]
    window = draw(st.none() | st.integers(1, 120)) if causal else None
    return Case(
        q_lens=q_lens,
        k_lens=tuple(q + e for q, e in zip(q_lens, extra, strict=True)) if causal else tuple(extra),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim_qk=draw(st.integers(1, 20)),
        head_dim_v=draw(st.integers(1, 20)),
        params=AttentionParams(
            scale=draw(st.floats(0.05, 1.0)),
            window=window,
            softcap=draw(st.none() | st.floats(0.5, 30.0)),
            causal=causal,
        ),
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

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, tuple | list) else (out,)
            largest = max([largest, *(x.untyped_storage().nbytes() for x in tensors if torch.is_tensor(x))])
            return out

    for params in (AttentionParams(1.0, window=300), AttentionParams(1.0, softcap=5.0)):
        case = Case((4096,), (8192,), heads=2, kv_heads=1, head_dim_qk=8, head_dim_v=8, params=params)
        inputs = make_inputs(case, torch.float32)
        args = inputs.q, inputs.k, inputs.v
        with Watch():
            o, lse = CpuKernel().forward(*args, inputs.shapes, params)
            CpuKernel().backward(inputs.do, *args, o, lse, inputs.shapes, params)
    assert largest <= 4 * cpu.SCORES_AT_ONCE


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_rows_of_any_strides(softcap: float | None) -> None:
    case = Case(params=AttentionParams(0.2, softcap=softcap))
    inputs = make_inputs(case, torch.float64)
    dense = inputs.do, inputs.q, inputs.k, inputs.v
    # Not even the head dim lies dense.
    sparse = tuple(x.transpose(0, 2).contiguous().transpose(0, 2) for x in dense)
    expanded = (dense[0][:, :, :1].expand_as(dense[0]), *dense[1:])
    for do, q, k, v in (sparse, expanded):
        o, lse = CpuKernel().forward(q, k, v, inputs.shapes, case.params)
        got = CpuKernel().backward(do, q, k, v, o, lse, inputs.shapes, case.params)
        given = do, *dense[1:]
        want = ReferenceKernel().backward(*given, o, lse, inputs.shapes, case.params)
        for got_one, want_one in zip(got, want, strict=True):
            torch.testing.assert_close(got_one, want_one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gqa", "window_blocks", "softcap_window"])
def test_same_result_every_time_and_the_same_inputs(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case, torch.float32)
    o, lse = CpuKernel().forward(inputs.q, inputs.k, inputs.v, inputs.shapes, case.params)
    given = inputs.do, inputs.q, inputs.k, inputs.v, o, lse
    before = [x.clone() for x in given]
    first, second = (CpuKernel().backward(*given, inputs.shapes, case.params) for _ in range(2))
    again = CpuKernel().forward(*given[1:4], inputs.shapes, case.params)
    for got, want in zip((*given, *second, *again), (*before, *first, o, lse), strict=True):
        assert torch.equal(got, want)


def test_equal_documents_are_one_call_and_a_task_with_keys_before_is_two(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, flash = [], cpu._flash_forward
    monkeypatch.setattr(cpu, "_flash_forward", lambda q, *args, **kw: calls.append(q.shape) or flash(q, *args, **kw))
    assert_matches_reference(CpuKernel(), Case((4, 4, 4, 6), (4, 4, 4, 9)), torch.float32)
    assert calls == [(3, 4, 4, 32), (1, 4, 6, 32), (1, 4, 6, 32)]


@pytest.mark.parametrize(("window", "blocks"), [(40, 0), (39, 2)])
def test_only_windows_that_hide_keys_take_blocks(window: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, flash = [], cpu._flash_forward
    monkeypatch.setattr(cpu, "_flash_forward", lambda *args, **kw: calls.append(kw["attn_mask"]) or flash(*args, **kw))
    case = Case((40, 30), (40, 30), params=AttentionParams(0.2, window=window))
    assert_matches_reference(CpuKernel(), case, torch.float32)
    assert sum(mask is not None for mask in calls) == blocks

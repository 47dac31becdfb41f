"""Two calls over disjoint keys, merged, are one call over all of them."""

import math

import pytest
import torch

from hf_distca.kernels import AttentionParams, TaskShapes, get_kernel, merge_into
from hf_distca.kernels.fused import CHUNK
from tests.kernels.cases import Case, expected, make_inputs

CPU = torch.device("cpu")


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kernel_name", ["cpu", "reference"])
def test_prefix_and_own_part_make_the_whole(kernel_name: str, softcap: float | None) -> None:
    kernel = get_kernel(kernel_name, CPU)
    case = Case(q_lens=(30, 20, 8), k_lens=(50, 20, 100), params=AttentionParams(0.3, softcap=softcap))
    inputs = make_inputs(case, torch.float64)
    prefix_lens = tuple(k - q for q, k in zip(case.q_lens, case.k_lens, strict=True))
    # Of each task's keys, first those of the prefix, then those of its own rows.
    both = [n for pair in zip(prefix_lens, case.q_lens, strict=True) for n in pair]
    split = [x.split(both) for x in (inputs.k, inputs.v)]
    own = [torch.cat(pieces[1::2]) for pieces in split]
    prefix = [torch.cat(pieces[::2]) for pieces in split]
    own_call = TaskShapes.build(case.q_lens, case.q_lens, CPU), case.params
    prefix_call = (
        TaskShapes.build(case.q_lens, prefix_lens, CPU),
        AttentionParams(0.3, softcap=softcap, causal=False),
    )

    q, do = inputs.q, inputs.do
    o, lse = kernel.forward(q, *own, *own_call)
    merge_into(o, lse, *kernel.forward(q, *prefix, *prefix_call))
    prefix_grads = kernel.backward(do, q, *prefix, o, lse, *prefix_call)
    own_grads = kernel.backward(do, q, *own, o, lse, *own_call)
    dk, dv = (
        torch.cat([x for pair in zip(a.split(prefix_lens), b.split(case.q_lens), strict=True) for x in pair])
        for a, b in zip(prefix_grads[1:], own_grads[1:], strict=True)
    )
    got = o, lse, prefix_grads[0] + own_grads[0], dk, dv
    for got_one, want in zip(got, expected(case, inputs), strict=True):
        torch.testing.assert_close(got_one, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("large", [0.0, 1e4], ids=["small", "large"])
def test_by_hand(large: float) -> None:
    o, lse = torch.tensor([[[4.0]]]), torch.tensor([[math.log(3) + large]])
    merge_into(o, lse, torch.tensor([[[8.0]]]), torch.tensor([[large]]))
    assert o.item() == pytest.approx(5.0, rel=1e-3)
    assert lse.item() == pytest.approx(math.log(4) + large)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_without_keys(dtype: torch.dtype) -> None:
    none = torch.tensor([[-math.inf]])
    zero, seven, some = (
        torch.zeros(1, 1, 2, dtype=dtype),
        torch.full((1, 1, 2), 7.0, dtype=dtype),
        torch.tensor([[0.5]]),
    )
    for first, second in (((zero, none), (seven, some)), ((seven, some), (zero, none))):
        o, lse = (x.clone() for x in first)
        merge_into(o, lse, *second)
        assert o.flatten().tolist() == [7.0, 7.0]
        assert lse.item() == 0.5
    merge_into(zero, none, zero.clone(), none.clone())
    assert zero.flatten().tolist() == [0.0, 0.0]
    assert none.item() == -math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [1, 4, CHUNK], ids=lambda chunk: f"chunk{chunk}")
def test_rows_by_index(dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_distca.kernels.fused.CHUNK", chunk)
    o, lse = torch.ones(4, 1, 2, dtype=dtype), torch.zeros(4, 1)
    part, part_lse = torch.tensor([[[3.0, 5.0]], [[7.0, 9.0]]], dtype=dtype), torch.zeros(2, 1)
    merge_into(o, lse, part, part_lse, torch.tensor([3, 1]))
    assert o.squeeze(1).tolist() == [[1, 1], [4, 5], [1, 1], [2, 3]]
    assert lse.flatten().tolist() == pytest.approx([0, math.log(2), 0, math.log(2)])

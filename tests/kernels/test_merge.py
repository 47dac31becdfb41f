"""Two calls over disjoint keys, merged, are one call over all of them."""

import math

import pytest
import torch

from hf_distca.kernels import AttentionParams, TaskShapes, get_kernel, merge
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
    o, lse = merge(*kernel.forward(q, *prefix, *prefix_call), *kernel.forward(q, *own, *own_call))
    prefix_grads = kernel.backward(do, q, *prefix, o, lse, *prefix_call)
    own_grads = kernel.backward(do, q, *own, o, lse, *own_call)
    dk, dv = (
        torch.cat([x for pair in zip(a.split(prefix_lens), b.split(case.q_lens), strict=True) for x in pair])
        for a, b in zip(prefix_grads[1:], own_grads[1:], strict=True)
    )
    got = o, lse, prefix_grads[0] + own_grads[0], dk, dv
    for got_one, want in zip(got, expected(case, inputs), strict=True):
        torch.testing.assert_close(got_one, want, rtol=1e-12, atol=1e-12)


def test_by_hand() -> None:
    o_a, o_b = torch.tensor([[[4.0]]]), torch.tensor([[[8.0]]])
    lse_a, lse_b = torch.tensor([[math.log(3)]]), torch.tensor([[0.0]])
    o, lse = merge(o_a, lse_a, o_b, lse_b)
    assert o.item() == pytest.approx(5.0)
    assert lse.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_without_keys(dtype: torch.dtype) -> None:
    none = torch.tensor([[-math.inf]])
    zero, seven, some = (
        torch.zeros(1, 1, 2, dtype=dtype),
        torch.full((1, 1, 2), 7.0, dtype=dtype),
        torch.tensor([[0.5]]),
    )
    for o, lse in (merge(zero, none, seven, some), merge(seven, some, zero, none)):
        assert o.dtype == dtype
        assert o.flatten().tolist() == [7.0, 7.0]
        assert lse.item() == 0.5
    o, lse = merge(zero, none, zero, none)
    assert o.flatten().tolist() == [0.0, 0.0]
    assert lse.item() == -math.inf


def test_large_normalizers_do_not_overflow() -> None:
    ones = torch.ones(1, 1, 1)
    o, lse = merge(ones, torch.tensor([[1e4]]), 3 * ones, torch.tensor([[1e4]]))
    assert o.item() == pytest.approx(2.0)
    assert lse.item() == pytest.approx(1e4 + math.log(2))

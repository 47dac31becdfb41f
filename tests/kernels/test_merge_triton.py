"""The fused kernel merges as the operators of torch do."""

import math

import pytest
import torch

from hf_distca.kernels import merge_into
from tests.triton_interpreter import interpreted


@pytest.fixture(scope="module")
def fused():
    return interpreted("hf_distca.kernels.merge_triton").merge_into


@pytest.mark.filterwarnings("ignore:divide by zero")  # the interpreter takes logarithms of what is not used, too
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [None, [4, 0, 2]], ids=["all rows", "by index"])
@pytest.mark.parametrize("numbers", [16, 2048], ids=["few heads a program", "all heads a program"])
def test_fused_merge(fused, dtype, rows, numbers, monkeypatch):
    monkeypatch.setitem(fused.__globals__, "NUMBERS", numbers)
    generator = torch.Generator().manual_seed(0)
    count = 5 if rows is None else len(rows)
    # 3 heads of 12: neither is a power of two. The log-sum-exp as FlashAttention has it, by heads.
    o, part = (torch.randn(n, 3, 12, generator=generator).to(dtype) for n in (5, count))
    lse, part_lse = (3 * torch.randn(3, n, generator=generator).T for n in (5, count))
    lse[0, 0], part_lse[1, 1], lse[2, 2] = -math.inf, -math.inf, 1e4
    part_lse[0 if rows is None else 1, 0] = -math.inf  # row 0 has no key in either for head 0
    o[0, 0] = part[0 if rows is None else 1, 0] = 0
    index = None if rows is None else torch.tensor(rows)
    expected_o, expected_lse = o.clone(), lse.clone()
    merge_into(expected_o, expected_lse, part, part_lse, index)

    fused(o, lse, part, part_lse, index)
    one_rounding = {"rtol": 2**-7, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(o, expected_o, **one_rounding)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
    assert o[0, 0].tolist() == [0.0] * 12
    assert lse[0, 0] == -math.inf

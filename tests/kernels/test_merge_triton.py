"""The fused kernel merges as the operators of torch do."""

import importlib
import math

import pytest
import torch

from hf_distca.kernels import merge_into, merge_triton
from tests.triton_compiler import AMPERE, BLACKWELL, HOPPER, compiled
from tests.triton_interpreter import interpreted


@pytest.fixture(scope="module")
def fused():
    return interpreted("hf_distca.kernels.merge_triton").merge_into


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # in what the interpreter does not use
@pytest.mark.parametrize(
    ("so_far", "dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
    ids=["float32", "bfloat16", "stages of bfloat16"],
)
@pytest.mark.parametrize("rows", [None, [4, 0, 2]], ids=["all rows", "by index"])
@pytest.mark.parametrize("numbers", [16, 2048], ids=["few heads a program", "all heads a program"])
def test_fused_merge(fused, so_far, dtype, rows, numbers, monkeypatch):
    monkeypatch.setitem(fused.__globals__, "NUMBERS", numbers)
    generator = torch.Generator().manual_seed(0)
    count = 5 if rows is None else len(rows)
    # 3 heads of 12: neither is a power of two. The log-sum-exp as FlashAttention has it, by heads.
    o, part = (torch.randn(n, 3, 12, generator=generator).to(kind) for n, kind in ((5, so_far), (count, dtype)))
    lse, part_lse = (3 * torch.randn(3, n, generator=generator).T for n in (5, count))
    lse[0, 0], part_lse[1, 1], lse[2, 2] = -math.inf, -math.inf, 1e4
    part_lse[0 if rows is None else 1, 0] = -math.inf  # row 0 has no key in either for head 0
    o[0, 0] = part[0 if rows is None else 1, 0] = 0
    index = None if rows is None else torch.tensor(rows)
    expected_o, expected_lse = o.clone(), lse.clone()
    merge_into(expected_o, expected_lse, part, part_lse, index)

    fused(o, lse, part, part_lse, index)
    one_rounding = {"rtol": 2**-7, "atol": 1e-6} if so_far == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(o, expected_o, **one_rounding)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
    assert o[0, 0].tolist() == [0.0] * 12
    assert lse[0, 0] == -math.inf


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [AMPERE, HOPPER, BLACKWELL])
def test_machine_code(capability):
    kernel = importlib.reload(merge_triton)._merge_kernel
    types = {"o": "*bf16", "lse": "*fp32", "o_part": "*bf16", "lse_part": "*fp32", "rows": "*i64"}
    strides = ("o_row", "lse_row", "lse_head", "o_part_row", "lse_part_row", "lse_part_head")
    types |= dict.fromkeys((*strides, "heads", "head_dim"), "i32")
    ptx = compiled(kernel, capability, types, {"BY_INDEX": True, "BLOCK_H": 16, "BLOCK_E": 128})
    assert "ld.global.v4.b32" in ptx  # 16 bytes at once
    assert "st.global.v4.b32" in ptx

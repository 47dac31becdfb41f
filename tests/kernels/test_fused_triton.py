"""The fused kernels compute what the operators of torch compute."""

import importlib
import math

import numpy as np
import pytest
import torch
import triton.language as tl

from hf_distca.dispatch.rows import IndexBuffer, RowSum, addend_table
from hf_distca.kernels import fused_triton, merge_into
from hf_distca.kernels.contract import SOURCE_BITS
from tests.triton_compiler import AMPERE, BLACKWELL, HOPPER, compiled
from tests.triton_interpreter import interpreted

CPU = torch.device("cpu")
SOURCES = {
    "onto the first": [[0, 1, 2, 3], [2, 0, 2], [], [3]],
    "anew, with rows of no addend": [[2, 1, 2], [2]],
    "of six": [[0, 3], [0], [1], [3, 3], [0], [2]],
}


@pytest.fixture(scope="module")
def fused():
    return interpreted("hf_distca.kernels.fused_triton")


@pytest.mark.filterwarnings(
    "ignore:divide by zero", "ignore:invalid value"
)  # in what the interpreter does not use
@pytest.mark.parametrize(
    ("so_far", "dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
    ids=["float32", "bfloat16", "stages of bfloat16"],
)
@pytest.mark.parametrize("rows", [None, [4, 0, 2]], ids=["all rows", "by index"])
@pytest.mark.parametrize("numbers", [16, 2048], ids=["few heads a program", "all heads a program"])
def test_merge(fused, so_far, dtype, rows, numbers, monkeypatch):
    monkeypatch.setattr(fused, "NUMBERS", numbers)
    generator = torch.Generator().manual_seed(0)
    count = 5 if rows is None else len(rows)
    # 3 heads of 12: neither is a power of two. The log-sum-exp as FlashAttention has it, by heads.
    o, part = (
        torch.randn(n, 3, 12, generator=generator).to(kind)
        for n, kind in ((5, so_far), (count, dtype))
    )
    lse, part_lse = (3 * torch.randn(3, n, generator=generator).T for n in (5, count))
    lse[0, 0], part_lse[1, 1], lse[2, 2] = -math.inf, -math.inf, 1e4
    part_lse[0 if rows is None else 1, 0] = -math.inf  # row 0 has no key in either for head 0
    o[0, 0] = part[0 if rows is None else 1, 0] = 0
    index = None if rows is None else torch.tensor(rows)
    expected_o, expected_lse = o.clone(), lse.clone()
    merge_into(expected_o, expected_lse, part, part_lse, index)

    fused.merge_into(o, lse, part, part_lse, index)
    one_rounding = (
        {"rtol": 2**-7, "atol": 1e-6} if so_far == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    )
    torch.testing.assert_close(o, expected_o, **one_rounding)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
    assert o[0, 0].tolist() == [0.0] * 12
    assert lse[0, 0] == -math.inf


def strided(rows, width, dtype, generator, more=0):
    """Rows of a buffer with other columns beside them, as exchanges have them."""
    buffer = torch.randn(rows, 16 + width + more, generator=generator).to(dtype)
    return buffer[:, 8 : 8 + width].view(rows, 2, width // 2)


SAME = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize(
    ("name", "of_sum", "dtype"),
    # Stages of bfloat16 add up in float32.
    [(name, dtype, dtype) for name in SOURCES for dtype in SAME]
    + [("onto the first", torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("numbers", [4, 2048], ids=["columns of blocks", "a block a row"])
def test_sum(fused, name, of_sum, dtype, numbers, monkeypatch):
    monkeypatch.setattr(fused, "NUMBERS", numbers)
    targets, onto = (
        [np.array(source, np.int64) for source in SOURCES[name]],
        name == "onto the first",
    )
    generator = torch.Generator().manual_seed(0)
    rows = [
        strided(len(source), 6, dtype, generator, number) for number, source in enumerate(targets)
    ]
    out = strided(4, 6, of_sum, generator)
    if onto:
        rows[0] = out.clone()
    buffer = IndexBuffer(CPU)
    expected_sum = RowSum(dict(enumerate(targets)), 4, buffer, in_place=False)
    table = addend_table(targets, 4, onto, buffer)
    buffer.send()
    expected = expected_sum.add_up(rows)

    fused.sum_rows(out, *table, rows, onto)
    # The interpreter cuts bfloat16 off instead of rounding it.
    rtol = 2**-7 if of_sum == torch.bfloat16 else 1e-6 if of_sum != dtype else 0
    torch.testing.assert_close(out, expected, rtol=rtol, atol=0)


MERGE = {
    "o": "*bf16",
    "lse": "*fp32",
    "o_part": "*bf16",
    "lse_part": "*fp32",
    "rows": "*i64",
} | dict.fromkeys(
    (
        "o_row",
        "lse_row",
        "lse_head",
        "o_part_row",
        "lse_part_row",
        "lse_part_head",
        "heads",
        "head_dim",
    ),
    "i32",
)
SUM = {
    "out": "*bf16",
    "out_row": "i32",
    "width": "i32",
    "rows": "*i32",
    "ends": "*i32",
    "addends": "*i32",
}
SUM |= {"sources": ("*bf16",) * 4, "source_rows": ("i32",) * 4}
SUM_CONSTANTS = {"BITS": SOURCE_BITS, "WIDE": tl.float32, "BLOCK": 2048}


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [AMPERE, HOPPER, BLACKWELL])
def test_machine_code(capability, subtests):
    module = importlib.reload(fused_triton)
    for kernel, types, constants in (
        (module._merge_kernel, MERGE, {"BY_INDEX": True, "BLOCK_H": 16, "BLOCK_E": 128}),
        (module._sum_kernel, SUM, SUM_CONSTANTS | {"BY_INDEX": False, "ONTO": False}),
        (module._sum_kernel, SUM, SUM_CONSTANTS | {"BY_INDEX": True, "ONTO": True}),
    ):
        ptx = compiled(kernel, capability, types, constants)
        with subtests.test(f"{constants}"):  # 16 bytes at once
            assert "ld.global.v4.b32" in ptx
            assert "st.global.v4.b32" in ptx

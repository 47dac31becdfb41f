"""The fused kernel adds up what the operators of torch add up."""

import importlib

import numpy as np
import pytest
import torch
import triton.language as tl

from hf_distca.dispatch import sums_triton
from hf_distca.dispatch.rows import MAX_SOURCES, IndexBuffer
from hf_distca.dispatch.sums import RowSum, _Addends
from tests.triton_compiler import AMPERE, BLACKWELL, HOPPER, compiled
from tests.triton_interpreter import interpreted

CPU = torch.device("cpu")
SOURCES = {
    "onto the first": [[0, 1, 2, 3], [2, 0, 2], [], [3]],
    "anew, with rows of no addend": [[2, 1, 2], [2]],
    "of six": [[0, 3], [0], [1], [3, 3], [0], [2]],
}


@pytest.fixture(scope="module")
def sum_rows():
    return interpreted("hf_distca.dispatch.sums_triton").sum_rows


def strided(rows, width, dtype, generator, more=0):
    """Rows of a buffer with other columns beside them, as exchanges have them."""
    buffer = torch.randn(rows, 16 + width + more, generator=generator).to(dtype)
    return buffer[:, 8 : 8 + width].view(rows, 2, width // 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("numbers", [4, 2048], ids=["columns of blocks", "a block a row"])
def test_fused_sum(sum_rows, sources, dtype, numbers, monkeypatch):
    monkeypatch.setitem(sum_rows.__globals__, "NUMBERS", numbers)
    targets = [np.array(source, np.int64) for source in sources]
    onto = sources[0] == [0, 1, 2, 3]
    generator = torch.Generator().manual_seed(0)
    rows = [strided(len(source), 6, dtype, generator, number) for number, source in enumerate(sources)]
    out = strided(4, 6, dtype, generator)
    expected = RowSum(targets, 4, IndexBuffer(CPU), in_place=False).add_up(rows)

    table = _Addends(targets, 4, onto, IndexBuffer(CPU))
    if onto:
        out.copy_(rows[0])
    sum_rows(out, table.rows_W, table.ends_W, table.addends_A, rows, onto)
    # The interpreter cuts bfloat16 off instead of rounding it.
    torch.testing.assert_close(out, expected, rtol=2**-7 if dtype == torch.bfloat16 else 0, atol=0)


def test_stages_of_bfloat16_add_up_in_float32(sum_rows):
    targets = [np.arange(4), np.array([2, 0, 2])]
    generator = torch.Generator().manual_seed(0)
    total = strided(4, 6, torch.float32, generator).contiguous()
    rows = strided(3, 6, torch.bfloat16, generator)
    expected = total.clone()
    expected[0] += rows[1]
    expected[2] += rows[0].float() + rows[2].float()
    of_cpu = RowSum(targets, 4, IndexBuffer(CPU)).add_up([total.clone(), rows])
    torch.testing.assert_close(of_cpu, expected, rtol=1e-6, atol=1e-6)

    table = _Addends(targets, 4, True, IndexBuffer(CPU))
    sum_rows(total, table.rows_W, table.ends_W, table.addends_A, [total, rows], True)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [AMPERE, HOPPER, BLACKWELL])
@pytest.mark.parametrize("onto", [False, True], ids=["anew", "onto"])
def test_machine_code(capability, onto):
    kernel = importlib.reload(sums_triton)._sum_kernel
    types = {"out": "*bf16", "out_row": "i32", "width": "i32", "rows": "*i32", "ends": "*i32", "addends": "*i32"}
    types |= {f"source{i}": "*bf16" for i in range(MAX_SOURCES)} | {f"row{i}": "i32" for i in range(MAX_SOURCES)}
    constants = {"SOURCES": 4, "BITS": 3, "BY_INDEX": onto, "ONTO": onto, "WIDE": tl.float32, "BLOCK": 2048}
    ptx = compiled(kernel, capability, types, constants)
    assert "ld.global.v4.b32" in ptx  # 16 bytes at once
    assert "st.global.v4.b32" in ptx

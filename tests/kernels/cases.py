"""Cases that every kernel is tried on, and how it is compared with the reference.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, D
head dim of queries and keys, E head dim of values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_distca.kernels import AttentionParams, Kernel, TaskShapes
from hf_distca.kernels.reference import ReferenceKernel


@dataclass(frozen=True)
class Case:
    """Lengths, query and key/value heads, head dims of keys and values, and options of one kernel
    call.
    """

    q_lens: tuple[int, ...] = (70, 0, 131, 40, 40, 1)
    k_lens: tuple[int, ...] = (70, 0, 300, 40, 40, 9)
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    scale: float = 0.2
    window: int | None = None
    softcap: float | None = None
    causal: bool = True

    @property
    def params(self) -> AttentionParams:
        """Options."""
        return AttentionParams(self.scale, self.window, self.softcap, self.causal)


FREE_KEYS = (50, 7, 300, 0, 40, 9)
CASES = {
    "gqa": Case(),
    "mqa": Case(heads=(4, 1)),
    "mha": Case(heads=(4, 4)),
    "head_dim_80": Case(dims=(80, 80)),
    # Wide heads with their usual scale, 1/√D: larger scores round more than float32's bound allows
    # on some processors.
    "head_dim_128": Case(dims=(128, 128), scale=0.0884),
    "head_dim_256": Case(dims=(256, 256), scale=0.0625),
    "values_narrower": Case(dims=(24, 16)),
    "values_wider": Case(dims=(16, 24)),
    "no_tasks": Case((), ()),
    "no_rows": Case((0, 0), (0, 5)),
    "no_keys": Case((0, 3), (0, 0), causal=False),
    "no_rows_in_one": Case((4, 0, 3), (4, 5, 3)),
    "one_task": Case((150,), (150,)),
    "long_rows": Case((900,), (1500,), heads=(2, 1), dims=(16, 16)),
    "equal_tasks": Case((48,) * 5, (48,) * 5),
    "equal_tasks_with_prefix": Case((48,) * 5, (64,) * 5),
    "one_row_each": Case((1, 1, 1), (1, 7, 3)),
    "not_causal": Case(k_lens=FREE_KEYS, causal=False),
    "not_causal_one_row": Case((1, 0, 1), (3, 2, 0), causal=False),
    # One key a row: dq and dk are differences of equal numbers times the scale, and nothing but
    # rounding.
    "window_1": Case(scale=0.1, window=1),
    **{f"window_{window}": Case(window=window) for window in (2, 7, 64, 100, 129, 1000)},
    "window_blocks": Case((600,), (700,), dims=(16, 16), window=200),
    "window_equal_tasks": Case((96,) * 3, (111,) * 3, window=16),
    # What a task gets whose first keys lie before the window of its first row.
    "window_keys_cut_off": Case((90,), (90 + 19,), window=20),
    # A single block, whose first keys no row sees.
    "window_last_rows": Case((10,), (50,), window=20),
    "softcap": Case(softcap=1.5),
    "softcap_window": Case(softcap=1.5, window=30),
    "softcap_not_causal": Case(k_lens=FREE_KEYS, softcap=1.5, causal=False),
    "softcap_values_narrower": Case(dims=(24, 16), softcap=1.5),
}


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, TaskShapes]
"""do_QHE, q_QHD, k_KGD, v_KGE, and their tasks."""


def make_inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random rows, transposed as attention layers hand them over, and cut out of larger storage.

    With an odd seed not even the head dim lies dense.
    """
    generator = torch.Generator().manual_seed(seed)

    def rows(count: int, heads: int, head_dim: int) -> Tensor:
        x = torch.randn(heads, count + 1, head_dim + 1, dtype=torch.float64, generator=generator)
        x = x.to(dtype)[:, 1:, 1:].transpose(0, 1)
        return x.transpose(0, 2).contiguous().transpose(0, 2) if seed % 2 else x

    q_rows, k_rows, (heads, kv_heads), (dim_qk, dim_v) = (
        sum(case.q_lens),
        sum(case.k_lens),
        case.heads,
        case.dims,
    )
    do, q = rows(q_rows, heads, dim_v), rows(q_rows, heads, dim_qk)
    k, v = rows(k_rows, kv_heads, dim_qk), rows(k_rows, kv_heads, dim_v)
    return do, q, k, v, TaskShapes.build(case.q_lens, case.k_lens, "cpu")


def expected(case: Case, inputs: Inputs) -> tuple[Tensor, ...]:
    """o, lse, dq, dk and dv of the reference, in float64, from the same rounded inputs."""
    reference, of_call = ReferenceKernel(), (inputs[4], case.params)
    do, *qkv = (x.double() for x in inputs[:4])
    o, lse = reference.forward(*qkv, *of_call)
    return o, lse, *reference.backward(do, *qkv, o, lse, *of_call)


def assert_matches_reference(kernel: Kernel, case: Case, dtype: torch.dtype, seed: int = 0) -> None:
    """Forward and backward, dtypes and layout, and inputs left alone; tolerances relative to the
    largest value.
    """
    inputs = make_inputs(case, dtype, seed)
    do, *qkv, shapes = inputs
    o, lse = kernel.forward(*qkv, shapes, case.params)
    before = o.clone(), lse.clone()
    grads = kernel.backward(do, *qkv, o, lse, shapes, case.params)
    assert all(
        map(torch.equal, (*inputs[:4], o, lse), (*make_inputs(case, dtype, seed)[:4], *before))
    )

    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert [x.dtype for x in (o, lse, *grads)] == [dtype, lse_dtype, dtype, dtype, dtype]
    assert all(x.is_contiguous() for x in (o, *grads))
    # Of bfloat16's 2^-9 per rounding, o, the probabilities and the gradients each take some.
    bound = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 7e-3, torch.float16: 1e-3}[
        dtype
    ]
    # lse stays in float32, but in half precision the op's exponential is a less exact one.
    bounds = {
        "o": bound,
        "lse": 3e-5 if dtype.itemsize == 2 else bound,
        "dq": bound,
        "dk": bound,
        "dv": bound,
    }
    for (name, of_one), got, want in zip(
        bounds.items(), (o, lse, *grads), expected(case, inputs), strict=True
    ):
        finite = want[want.isfinite()]
        # At least 1: where every row has one key, dq and dk are differences of equal numbers.
        largest = max(finite.abs().max().item(), 1.0) if len(finite) else 1.0
        failed = f"{name}: {{}}".format
        torch.testing.assert_close(got.double(), want, rtol=0, atol=of_one * largest, msg=failed)

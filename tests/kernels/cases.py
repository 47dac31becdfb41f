"""Cases that every kernel is tried on, and how it is compared with the reference.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, D head dim of
queries and keys, E head dim of values.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_distca.kernels import AttentionParams, Kernel, TaskShapes
from hf_distca.kernels.reference import ReferenceKernel


@dataclass(frozen=True)
class Case:
    """Lengths, heads and options of one kernel call."""

    q_lens: tuple[int, ...] = (70, 0, 131, 40, 40, 1)
    k_lens: tuple[int, ...] = (70, 0, 300, 40, 40, 9)
    heads: int = 4
    kv_heads: int = 2
    head_dim_qk: int = 32
    head_dim_v: int = 32
    params: AttentionParams = field(default_factory=lambda: AttentionParams(scale=0.2))


CASES = {
    "gqa": Case(),
    "mqa": Case(kv_heads=1),
    "mha": Case(kv_heads=4),
    "head_dim_16": Case(head_dim_qk=16, head_dim_v=16),
    "head_dim_64": Case(head_dim_qk=64, head_dim_v=64),
    "head_dim_80": Case(head_dim_qk=80, head_dim_v=80),
    # Wide heads with their usual scale, 1/√D: larger scores round more than float32's bound allows on some processors.
    "head_dim_128": Case(head_dim_qk=128, head_dim_v=128, params=AttentionParams(scale=0.0884)),
    "head_dim_256": Case(head_dim_qk=256, head_dim_v=256, params=AttentionParams(scale=0.0625)),
    "values_narrower": Case(head_dim_qk=24, head_dim_v=16),
    "values_wider": Case(head_dim_qk=16, head_dim_v=24),
    "no_tasks": Case(q_lens=(), k_lens=()),
    "no_rows": Case(q_lens=(0, 0), k_lens=(0, 5)),
    "no_rows_in_one": Case(q_lens=(4, 0, 3), k_lens=(4, 5, 3)),
    "one_task": Case(q_lens=(150,), k_lens=(150,)),
    "long_rows": Case(q_lens=(900,), k_lens=(1500,), heads=2, kv_heads=1, head_dim_qk=16, head_dim_v=16),
    "equal_tasks": Case(q_lens=(48,) * 5, k_lens=(48,) * 5),
    "equal_tasks_with_prefix": Case(q_lens=(48,) * 5, k_lens=(64,) * 5),
    "one_row_each": Case(q_lens=(1, 1, 1), k_lens=(1, 7, 3)),
    "not_causal": Case(k_lens=(50, 7, 300, 0, 40, 9), params=AttentionParams(scale=0.2, causal=False)),
    "not_causal_one_row": Case(q_lens=(1, 0, 1), k_lens=(3, 2, 0), params=AttentionParams(scale=0.2, causal=False)),
    # One key a row: dq and dk are differences of equal numbers times the scale, and nothing but rounding.
    "window_1": Case(params=AttentionParams(scale=0.1, window=1)),
    **{
        f"window_{window}": Case(params=AttentionParams(scale=0.2, window=window))
        for window in (2, 7, 64, 100, 129, 1000)
    },
    "window_blocks": Case(
        q_lens=(600,), k_lens=(700,), head_dim_qk=16, head_dim_v=16, params=AttentionParams(0.2, window=200)
    ),
    "window_equal_tasks": Case(q_lens=(96,) * 3, k_lens=(111,) * 3, params=AttentionParams(scale=0.2, window=16)),
    "window_keys_cut_off": Case(
        # What a task gets whose first keys lie before the window of its first row.
        q_lens=(90,),
        k_lens=(90 + 19,),
        params=AttentionParams(scale=0.2, window=20),
    ),
    # A single block, whose first keys no row sees.
    "window_last_rows": Case(q_lens=(10,), k_lens=(50,), params=AttentionParams(scale=0.2, window=20)),
    "softcap": Case(params=AttentionParams(scale=0.2, softcap=1.5)),
    "softcap_window": Case(params=AttentionParams(scale=0.2, softcap=1.5, window=30)),
    "softcap_not_causal": Case(
        k_lens=(50, 7, 300, 0, 40, 9), params=AttentionParams(scale=0.2, softcap=1.5, causal=False)
    ),
    "softcap_values_narrower": Case(head_dim_qk=24, head_dim_v=16, params=AttentionParams(scale=0.2, softcap=1.5)),
}


@dataclass(frozen=True)
class Inputs:
    """What a kernel is given."""

    do: Tensor  # [Q, H, E]
    q: Tensor  # [Q, H, D]
    k: Tensor  # [K, G, D]
    v: Tensor  # [K, G, E]
    shapes: TaskShapes


def make_inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random rows, transposed as attention layers hand them over, and cut out of larger storage."""
    generator = torch.Generator().manual_seed(seed)

    def rows(count: int, heads: int, head_dim: int) -> Tensor:
        x = torch.randn(heads, count + 1, head_dim + 1, dtype=torch.float64, generator=generator)
        return x.to(dtype)[:, 1:, 1:].transpose(0, 1)

    q_rows, k_rows = sum(case.q_lens), sum(case.k_lens)
    return Inputs(
        do=rows(q_rows, case.heads, case.head_dim_v),
        q=rows(q_rows, case.heads, case.head_dim_qk),
        k=rows(k_rows, case.kv_heads, case.head_dim_qk),
        v=rows(k_rows, case.kv_heads, case.head_dim_v),
        shapes=TaskShapes.build(case.q_lens, case.k_lens, "cpu"),
    )


def expected(case: Case, inputs: Inputs) -> tuple[Tensor, ...]:
    """o, lse, dq, dk and dv of the reference, in float64, from the same rounded inputs."""
    reference = ReferenceKernel()
    do, q, k, v = (x.double() for x in (inputs.do, inputs.q, inputs.k, inputs.v))
    o, lse = reference.forward(q, k, v, inputs.shapes, case.params)
    return o, lse, *reference.backward(do, q, k, v, o, lse, inputs.shapes, case.params)


def assert_matches_reference(kernel: Kernel, case: Case, dtype: torch.dtype, seed: int = 0) -> None:
    """Forward and backward, dtypes and layout; tolerances relative to each tensor's largest value."""
    inputs = make_inputs(case, dtype, seed)
    q, k, v, shapes = inputs.q, inputs.k, inputs.v, inputs.shapes
    o, lse = kernel.forward(q, k, v, shapes, case.params)
    grads = kernel.backward(inputs.do, q, k, v, o, lse, shapes, case.params)

    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert [x.dtype for x in (o, lse, *grads)] == [dtype, lse_dtype, dtype, dtype, dtype]
    assert all(x.is_contiguous() for x in (o, *grads))

    # Of bfloat16's 2^-9 per rounding, o, the probabilities and the gradients each take some.
    bound = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 7e-3, torch.float16: 1e-3}[dtype]
    # lse stays in float32, but in half precision the op's exponential is a less exact one.
    lse_bound = 3e-5 if dtype.itemsize == 2 else bound
    names = ("o", "lse", "dq", "dk", "dv")
    for name, got, want in zip(names, (o, lse, *grads), expected(case, inputs), strict=True):
        largest = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 0.0
        torch.testing.assert_close(
            got.double(),
            want,
            rtol=0,
            # At least 1: where every row has one key, dq and dk are differences of equal numbers.
            atol=(lse_bound if name == "lse" else bound) * max(largest, 1.0),
            msg=lambda text, name=name: f"{name}: {text}",
        )

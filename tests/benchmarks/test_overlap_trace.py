"""How much of the exchange lies under computation: from a trace by hand, and from a step on two CPU ranks."""

import json
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import pytest

from benchmarks.covered import Covered, common, covered_exchange, merged

ROOT = Path(__file__).parents[2]
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
FLASH = "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128>>"


def event(kind: str, name: str, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin}


PARTS = [event("user_annotation", "forward", 0, 5000), event("user_annotation", "backward", 5000, 9000)]
ON_GPU = [
    *PARTS,
    {"ph": "M", "name": "process_name", "pid": 1},
    event("user_annotation", "nccl:all_to_all", 0, 9000),  # of the host
    event("cpu_op", "aten::mm", 0, 9000),  # launches
    event("kernel", NCCL, 1000, 3000),
    event("kernel", NCCL, 4000, 4500),
    event("kernel", FLASH, 500, 1500),
    event("kernel", "gemm", 1400, 2000),
    event("kernel", "gemm", 2900, 3500),
    event("kernel", "ncclDevKernel_AllReduce_Sum", 2000, 2800),
    event("kernel", NCCL, 6000, 7000),
    event("kernel", FLASH, 5000, 6500),
]
ON_CPU = [
    *PARTS,
    event("user_annotation", "gloo:all_to_all", 0, 1000),
    event("user_annotation", "gloo:all_reduce", 1000, 2000),
    event("cpu_op", "aten::_scaled_dot_product_flash_attention_for_cpu", 200, 300),
    event("cpu_op", "aten::mm", 300, 700),
    event("cpu_op", "c10d::alltoall_base_", 700, 800),
    event("user_annotation", "gloo:all_to_all", 6000, 8000),
    event("cpu_op", "autograd::engine::evaluate_function: _ComputeBackward", 6000, 8000),
    event("cpu_op", "aten::_scaled_dot_product_flash_attention_for_cpu_backward", 7000, 8000),
]


@pytest.mark.parametrize(
    ("events", "forward", "backward"),
    [
        (ON_GPU, Covered(2, 2.5, 0.5 / 2.5, 0.44), Covered(1, 1.0, 0.5, 0.5)),
        (ON_CPU, Covered(1, 1.0, 0.1, 0.5), Covered(1, 2.0, 0.5, 0.5)),
    ],
    ids=["kernels", "operators"],
)
def test_shares_of_a_trace(events, forward, backward):
    for part, expected in zip(covered_exchange(events).values(), (forward, backward), strict=True):
        assert astuple(part) == pytest.approx(astuple(expected))


def test_a_trace_without_what_is_looked_for():
    with pytest.raises(ValueError, match=r"no exchange in the backward: every row stayed"):
        covered_exchange(ON_CPU[:5])
    with pytest.raises(ValueError, match=r"no part called 'forward', only \['gloo:all_to_all'\]"):
        covered_exchange(ON_CPU[2:3])


def test_intervals():
    assert merged([(5, 7), (0, 2), (1, 3), (7, 8)]) == [(0, 3), (5, 8)]
    assert common([(0, 3), (5, 7)], [(2, 6), (6.5, 9)]) == [(2, 3), (5, 6), (6.5, 7)]


def _traced(file: str) -> dict[str, dict[str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))  # as for a script in it
        from overlap import trace_rank

        return {direction: asdict(covered) for direction, covered in trace_rank(256, file).items()}


def test_a_step_on_two_ranks(rank_pools, tmp_path):
    file = tmp_path / "trace.json"
    ranks = rank_pools[2].run(_traced, str(file))
    kept = covered_exchange(json.loads(file.read_text())["traceEvents"])
    assert {direction: asdict(covered) for direction, covered in kept.items()} == ranks[0]
    for covered in ranks:
        # 4 layers, 2 nano-batches, of which K and V move only: in the backward there again, and dK and dV back.
        assert (covered["forward"]["exchanges"], covered["backward"]["exchanges"]) == (8, 16)
        for part in covered.values():
            assert 0 <= part["under_attention"] <= part["under_computation"] <= 1

"""Kernels of flash-linear-attention in Triton's interpreter: one run for packed documents, with the
same results.
"""

import subprocess
import sys

import pytest

pytest.importorskip("fla", reason="needs flash-linear-attention")

PROGRAM = """
import builtins, os, sys
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


class Index(int):
    def to(self, *_):
        return self


runs = []


def run(self, *args, **kwargs):  # the first configuration, without measuring others
    runs.append(self.base_fn.__name__)
    return self.fn.run(*args, **{**kwargs, **self.configs[0].all_kwargs()})


triton.runtime.driver.set_active(Driver())
Autotuner.run = run
for name, module in list(sys.modules.items()):
    if name.startswith("fla.ops"):  # a loop's index has methods of a tensor there
        module.__dict__["range"] = lambda *args: map(Index, builtins.range(*args))

torch.manual_seed(0)
heads, rows, columns, sizes = 2, 16, 16, [30, 40]
normalize = torch.nn.functional.normalize
query, key = (normalize(torch.randn(1, sum(sizes), heads, rows), dim=-1) for _ in range(2))
value, beta = torch.randn(1, sum(sizes), heads, columns), torch.rand(1, sum(sizes), heads)
ends = torch.tensor([0, 30, 70], dtype=torch.int32)
for kernel, stock, g in (
    (chunk_gated_delta_rule, torch_chunk_gated_delta_rule, -torch.rand(1, sum(sizes), heads)),
    (chunk_kda, chunk_kimi_delta_attention, -torch.rand(1, sum(sizes), heads, rows)),
):
    runs.clear()
    out, final = kernel(query, key, value, g=g, beta=beta, cu_seqlens=ends, output_final_state=True)
    assert len(runs) == len(set(runs)) > 3, runs
    parts = [x.split(sizes, 1) for x in (query, key, value, g, beta)]
    for number, (got, q, k, v, g_, b) in enumerate(zip(out.split(sizes, 1), *parts)):
        expected, state = getattr(stock, "__wrapped__", stock)(
            q, k, v, g=g_, beta=b, initial_state=None, output_final_state=True
        )
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(final[number], state[0], rtol=1e-4, atol=1e-5)
print("equal")
"""


@pytest.mark.launches
def test_packed_documents_take_one_run_of_each_kernel():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]

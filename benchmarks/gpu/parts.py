"""All parts: first what must be right, then how fast it is; and the most seconds that each may take on an H100."""

from functools import partial
from pathlib import Path

from benchmarks.gpu.device_profile import check_profile
from benchmarks.gpu.exchange_blocks import check_exchange_blocks
from benchmarks.gpu.kernel_accuracy import check_kernel, kernel_names, why_missing
from benchmarks.gpu.many_ranks import check_many_ranks
from benchmarks.gpu.nccl import check_nccl
from benchmarks.gpu.planned_steps import check_planned_steps
from benchmarks.gpu.published_attention import check_published_attention
from benchmarks.gpu.runner import Part
from benchmarks.gpu.server import check_server
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.shards import check_shards
from benchmarks.gpu.tracing import check_trace
from benchmarks.gpu.training import check_training
from benchmarks.gpu.two_ranks import check_two_ranks

TRACES = Path("runs/gpu")


def parts_of(setting: Setting) -> list[Part]:
    """The parts for a device."""
    kernels = kernel_names(setting.device)
    return [
        *(Part(f"kernel {name}", partial(check_kernel, name=name), 60, why_missing(name)) for name in kernels),
        Part("planned steps", check_planned_steps, 60),
        Part("two ranks", check_two_ranks, 60),
        Part("nccl", check_nccl, 40),
        Part("server", check_server, 80),
        Part("training", check_training, 130),
        *(Part(f"shards, {name}", partial(check_shards, name=name), 60, why_missing(name)) for name in kernels),
        Part("profile", check_profile, 60),
        Part("published attention", check_published_attention, 60),
        Part("exchange blocks", check_exchange_blocks, 60, all_gpus=True),
        Part("many ranks", check_many_ranks, 150),
        Part("trace", partial(check_trace, folder=TRACES), 60),
    ]

"""NCCL with one rank: its exchange is accepted as it is configured, brings every row, and does not stop the host."""

import time
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.kernel_accuracy import never_waiting
from benchmarks.gpu.setting import Setting
from benchmarks.harness import median_seconds
from hf_distca.dispatch.backends import exchange_backend, exchange_options
from hf_distca.dispatch.exchange import Exchange, Route
from hf_distca.dispatch.rows import IndexBuffer, row_index


def check_nccl(setting: Setting) -> Findings:
    """Rows that a rank exchanges with itself, over the backend of its device."""
    device = setting.device
    # As accelerate does it: without a device.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return _exchange(setting)
    finally:
        dist.destroy_process_group()


def _exchange(setting: Setting) -> Findings:
    findings, device, rows = Findings(), setting.device, setting.tokens // 4
    backend = exchange_backend(device)
    begin = time.perf_counter()
    # With two ranks or more the library makes the group itself, with the same arguments.
    group = dist.new_group(
        backend=backend,
        pg_options=exchange_options(backend),
        device_id=device if backend == dist.Backend.NCCL else None,
    )
    exchange = Exchange(SimpleNamespace(exchange=group, node=None, closed=False))
    heads, dim = setting.wide["num_attention_heads"], setting.wide["head_dim"]
    columns = [
        torch.randn(rows, heads, dim, device=device).to(setting.dtype),
        torch.randn(rows, 14, device=device),
    ]
    buffer = IndexBuffer(device)
    last_first = row_index(np.arange(rows)[::-1], buffer)
    buffer.send()
    route = Route([rows], [rows], crossing=True)

    def there_and_back() -> None:
        exchange.buffer("queries", route, columns).send(columns, last_first).wait()

    there_and_back()
    setting.synchronize()
    findings.figures["seconds_to_connect"] = time.perf_counter() - begin
    with findings.trying("the exchange makes the host wait for the device"), never_waiting(device):
        there_and_back()
    arrived = exchange.buffer("queries", route, columns).send(columns, last_first).wait()
    for index, (sent, received) in enumerate(zip(columns, arrived, strict=True)):
        findings.check(torch.equal(received, sent.flip(0)), f"column {index} came otherwise than it was sent")

    size = 4096 if device.type == "cuda" else 128
    factor = torch.randn(size, size, device=device).to(setting.dtype)

    def compute() -> None:
        for _ in range(10):
            factor @ factor

    def both() -> None:
        pending = exchange.buffer("queries", route, columns).send(columns, last_first)
        compute()
        pending.wait()

    alone, computing, together = (
        median_seconds(call, device, setting.repeats) for call in (there_and_back, compute, both)
    )
    findings.figures |= {
        "backend": str(backend),
        "bytes": rows * (heads * dim * setting.dtype.itemsize + 14 * 4),
        "exchange_ms": alone * 1e3,
        "computation_ms": computing * 1e3,
        "both_ms": together * 1e3,
        "hidden": (alone + computing - together) / alone,
    }
    return findings

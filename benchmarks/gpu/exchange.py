"""The exchange by number of thread blocks: rows arrive as sent, at what speed, and what attention
loses beside it.

One rank a GPU, on all GPUs of the machine. On one GPU, which NCCL gives no second rank, the rank
exchanges rows with itself: the blocks then copy in one memory, and no link is in the figures.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.findings import Findings, waits
from benchmarks.gpu.setting import Setting
from benchmarks.harness import median_seconds, run_ranks
from hf_distca.dispatch.exchange import Exchange, Route
from hf_distca.dispatch.process_groups import EXCHANGE_CTAS, exchange_options
from hf_distca.dispatch.rows import IndexBuffer, row_index
from hf_distca.dispatch.waits import Waits
from hf_distca.kernels import AttentionParams, TaskShapes, get_kernel

BLOCKS = (1, 4, 8, 16, 32)
"""Values of EXCHANGE_CTAS. On other backends than NCCL they change nothing."""


def check_exchange(
    setting: Setting, ranks: int, run: Callable[..., list[Any]] = run_ranks
) -> Findings:
    """Exchanges with numbers of blocks, alone and under attention; the slowest rank's figures."""
    findings = Findings()
    by_rank = run(ranks, rank_figures, setting)
    findings.figures |= {
        "ranks": ranks,
        "link": "between GPUs" if ranks > 1 else "none: a rank with itself",
    }
    findings.figures["blocks_in_use"] = EXCHANGE_CTAS
    for blocks in BLOCKS:
        of_ranks = [figures[blocks] for figures in by_rank]
        findings.figures[f"{blocks} blocks"] = max(
            of_ranks, key=lambda figures: figures["exchange_ms"]
        )
        findings.check(
            all(figures["right"] for figures in of_ranks), f"{blocks} blocks: rows came otherwise"
        )
        places = sorted({place for figures in of_ranks for place in figures["waits"]})
        findings.check(not places, f"{blocks} blocks: the host waits for the device in {places}")
    return findings


def rank_figures(setting: Setting) -> dict[int, dict[str, Any]]:
    if setting.on_cuda:
        setting = replace(setting, device=torch.device("cuda", dist.get_rank()))
        torch.cuda.set_device(setting.device)
    return {blocks: _figures(setting, blocks) for blocks in BLOCKS}


def _figures(setting: Setting, blocks: int) -> dict[str, Any]:
    ranks, rank, device = dist.get_world_size(), dist.get_rank(), setting.device
    backend = "nccl" if setting.on_cuda else "gloo"
    begin = time.perf_counter()
    group = dist.new_group(
        backend=backend,
        pg_options=exchange_options(backend, blocks),
        device_id=device if setting.on_cuda else None,
    )
    exchange = Exchange(
        SimpleNamespace(exchange=group, pods={ranks: group}, node=None, closed=False, waits=Waits())
    )
    heads, kv_heads, dim = (
        setting.wide[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )

    def peers(of: int) -> list[int]:
        return [other for other in range(ranks) if other != of or ranks == 1]

    # As a rank that sends the keys and values of its rows, the last one first, to each other rank
    # in turn.
    rows = setting.tokens // len(peers(rank))
    counts = [rows * (other in peers(rank)) for other in range(ranks)]
    route, total = Route(counts, counts, crossing=True), rows * len(peers(rank))
    buffer = IndexBuffer(device)
    last_first = row_index(np.arange(total)[::-1], buffer)
    buffer.send()

    def columns_of(sender: int) -> list[Tensor]:
        numbers = torch.arange(total, dtype=torch.float32, device=device) + sender * total
        wide = (numbers % 251)[:, None, None].expand(-1, 2 * kv_heads, dim)
        return [wide.to(setting.dtype).contiguous(), numbers[:, None].expand(-1, 14).contiguous()]

    columns = columns_of(rank)

    def start() -> Any:
        return exchange.buffer("keys", route, columns).send(columns, last_first)

    def there() -> list[Tensor]:
        received: list[Tensor] = start().wait()
        return received

    there()
    setting.synchronize()
    seconds_to_connect = time.perf_counter() - begin
    with waits(device) as places:
        arrived = there()
    right = True
    for index, received in enumerate(arrived):
        parts = [
            columns_of(sender)[index].flip(0)[peers(sender).index(rank) * rows :][:rows]
            for sender in peers(rank)
        ]
        right &= torch.equal(received, torch.cat(parts))

    kernel, lengths = get_kernel("auto", device, sm_margin=blocks), [setting.attention_rows]
    shapes, params = TaskShapes.build(lengths, lengths, device), AttentionParams(dim**-0.5)
    do, q, k, v = (
        torch.randn(lengths[0], count, dim, device=device).to(setting.dtype)
        for count in (heads, heads, kv_heads, kv_heads)
    )

    def attention() -> None:
        o, lse = kernel.forward(q, k, v, shapes, params)
        kernel.backward(do, q, k, v, o, lse, shapes, params)

    def both() -> None:
        pending = start()
        attention()
        pending.wait()

    alone, computing, together = (
        median_seconds(call, device, setting.repeats) for call in (there, attention, both)
    )
    dist.destroy_process_group(group)
    return {
        "right": right,
        "waits": places,
        "seconds_to_connect": seconds_to_connect,
        "exchange_ms": alone * 1e3,
        "exchange_gb_per_s": sum(column.nbytes for column in columns) / alone / 1e9,
        "attention_ms": computing * 1e3,
        "both_ms": together * 1e3,
        "hidden": (alone + computing - together) / alone,
    }

"""How many thread blocks the exchange should have: its speed with so many, and what it costs attention beside it.

One rank a GPU, on all GPUs of the machine. On one GPU, which NCCL gives no second rank, the rank exchanges rows with
itself: the blocks then copy in one memory, and no link is in the figures.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.setting import Setting
from benchmarks.harness import median_seconds, run_ranks
from hf_distca.dispatch.backends import EXCHANGE_CTAS, exchange_options
from hf_distca.dispatch.exchange import Exchange, Route
from hf_distca.kernels import AttentionParams, TaskShapes, get_kernel

BLOCKS = (1, 4, 8, 16, 32)
"""Values of EXCHANGE_CTAS. On other backends than NCCL they change nothing."""
RunRanks = Callable[..., list[Any]]
"""Runs a function with arguments on so many ranks: returns what each returned."""


def check_exchange_blocks(setting: Setting, run: RunRanks = run_ranks) -> Findings:
    """Exchanges with numbers of blocks, alone and under attention; the slowest rank's figures.

    Args:
        setting: sizes and device.
        run: starts the ranks.
    """
    findings = Findings()
    ranks = torch.cuda.device_count() if setting.device.type == "cuda" else setting.ranks[0]
    by_rank = run(ranks, rank_figures, setting)
    findings.figures |= {"ranks": ranks, "link": "between GPUs" if ranks > 1 else "none: a rank with itself"}
    findings.figures["blocks_in_use"] = EXCHANGE_CTAS
    for blocks in BLOCKS:
        of_ranks = [figures[blocks] for figures in by_rank]
        slowest = max(of_ranks, key=lambda figures: figures["exchange_ms"])
        findings.figures[f"{blocks} blocks"] = slowest
        findings.check(all(figures["right"] for figures in of_ranks), f"{blocks} blocks: rows came otherwise")
    return findings


def rank_figures(setting: Setting) -> dict[int, dict[str, float | bool]]:
    """The figures of one rank, by number of blocks."""
    on_cuda = setting.device.type == "cuda"
    if on_cuda:
        setting = replace(setting, device=torch.device("cuda", dist.get_rank()))
        torch.cuda.set_device(setting.device)
    return {blocks: _figures(setting, blocks, "nccl" if on_cuda else "gloo") for blocks in BLOCKS}


def _figures(setting: Setting, blocks: int, backend: str) -> dict[str, float | bool]:
    ranks, rank, device = dist.get_world_size(), dist.get_rank(), setting.device
    group = dist.new_group(
        backend=backend,
        pg_options=exchange_options(backend, blocks),
        device_id=device if backend == dist.Backend.NCCL else None,
    )
    exchange = Exchange(SimpleNamespace(exchange=group, node=None, closed=False))
    heads, kv_heads, dim = (setting.wide[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    # As a rank that sends the keys and values of all its rows to each other rank in turn.
    peers = max(ranks - 1, 1)
    rows = setting.tokens // peers
    counts = [rows if ranks == 1 or other != rank else 0 for other in range(ranks)]
    route = Route(counts, counts, crossing=True)
    column = torch.full((rows * peers, 2 * kv_heads, dim), float(rank), device=device).to(setting.dtype)

    def exchanged() -> torch.Tensor:
        (received,) = exchange.buffer("keys", route, [column]).send([column]).wait()
        return received

    expected = [float(other) for other, count in enumerate(counts) for _ in range(count)]
    right = exchanged()[:, 0, 0].tolist() == expected

    kernel = get_kernel("auto", device, sm_margin=blocks)
    lengths = [setting.context // 2]
    shapes, params = TaskShapes.build(lengths, lengths, device), AttentionParams(dim**-0.5)
    do, q, k, v = (
        torch.randn(lengths[0], count, dim, device=device).to(setting.dtype)
        for count in (heads, heads, kv_heads, kv_heads)
    )

    def attention() -> None:
        o, lse = kernel.forward(q, k, v, shapes, params)
        kernel.backward(do, q, k, v, o, lse, shapes, params)

    def both() -> None:
        pending = exchange.buffer("keys", route, [column]).send([column])
        attention()
        pending.wait()

    alone, computing, together = (
        median_seconds(call, device, setting.repeats) for call in (exchanged, attention, both)
    )
    dist.destroy_process_group(group)
    return {
        "right": right,
        "exchange_ms": alone * 1e3,
        "exchange_gb_per_s": column.nbytes / alone / 1e9,
        "attention_ms": computing * 1e3,
        "both_ms": together * 1e3,
        "hidden": (alone + computing - together) / alone,
    }

"""Core attention as MagiAttention's authors measured it (their "Long-Context Attention Benchmark", on H100).

64 query and 8 key-value heads of 128, varlen causal, 8192 tokens a GPU, no document longer than a quarter of all
tokens; TFLOP/s of a GPU by the time of the slowest one, a pair taking 4 operations a head and column forward and 10
backward. Their lengths are drawn from a data set that they name and do not publish; here they are ProLong's, cut.

Measured: the kernel calls of each rank of a plan, on this one GPU. The exchange, which their figures hold as far as it
is not hidden, is counted, and its time reckoned.
"""

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.shards import Bench
from hf_distca import PlanSettings
from hf_distca.kernels import get_kernel
from hf_distca.plan import AttentionKind, MicroBatchPlan
from hf_distca.planner.cost import RowBytes
from hf_distca.planner.metrics import RowsMoved, link_seconds
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.nodes import EXCHANGE_BANDWIDTH, NETWORK_BANDWIDTH, node_sizes, nodes_of
from hf_distca.sim.lengths import corpora, cut_at, micro_batches

PUBLISHED = {8: {"forward_tflops": 459, "backward_tflops": 360}, 64: {"forward_tflops": 237, "backward_tflops": 264}}
"""By GPUs, of each."""
LONGEST = 4
"""No document is longer than this part of all tokens."""
REPEATS = 3
BATCHES = {8: 3}
"""Micro-batches by ranks; one where it is not said."""


def check_published_attention(setting: Setting) -> Findings:
    """The slowest rank's time of the plans of a few micro-batches, beside the published figures."""
    findings = Findings()
    for ranks in (setting.ranks[0], setting.ranks[-1]):
        with findings.trying(f"{ranks} ranks"):
            tokens = setting.published_tokens * ranks
            draw = cut_at(corpora()["prolong"], tokens // LONGEST)
            found = [
                _figures(setting, lengths.tolist(), ranks)
                for lengths in islice(micro_batches(draw, tokens, seed=0), BATCHES.get(ranks, 1))
            ]
            figures: dict[str, Any] = {name: [figures[name] for figures in found] for name in found[0]}
            findings.figures[f"{ranks} ranks"] = {**figures, "published on H100": PUBLISHED.get(ranks)}
    return findings


def _figures(setting: Setting, lengths: list[int], ranks: int) -> dict[str, float | str]:
    """Figures of one micro-batch."""
    heads, kv_heads, dim = setting.published_heads
    kind = AttentionKind(None, heads, kv_heads, dim, dim)
    kernel = get_kernel("auto", setting.device)
    per_node = min(ranks, 8)
    settings = PlanSettings(
        ranks,
        setting.published_tokens,
        kinds=(kind,),
        bytes_per_value=setting.dtype.itemsize,
        row_overhead=kernel.row_overhead,
        gather_cost=kernel.gather_cost,
        ping_pong=True,
        ranks_per_node=per_node if ranks > per_node else 1,
    )
    plan = plan_micro_batch(lengths, settings)
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    bench = Bench(replace(setting, wide=shape, context=max(lengths), repeats=min(setting.repeats, REPEATS)), kernel)
    seconds = np.zeros((ranks, 2))
    amount = 0
    for nano in plan.nano_batches:
        tasks = nano.plans[kind].tasks
        for rank in range(ranks):
            own = tasks[tasks["worker"] == rank]
            if len(own):
                timed, _ = bench.time(list(zip(own["start"].tolist(), own["stop"].tolist(), strict=True)))
                seconds[rank] += timed.forward_s, timed.backward_s
                amount += timed.pairs
    flops = amount * bench.flops_of_a_pair / ranks / 1e12
    forward_s, backward_s = seconds.max(axis=0)
    forward_exchange_s, backward_exchange_s = _exchange_s(plan, kind, settings, per_node)
    return {
        "kernel": kernel.name,
        "documents": len(lengths),
        "forward_tflops": flops / forward_s,
        "backward_tflops": 2.5 * flops / backward_s,
        "forward_ms": forward_s * 1e3,
        "backward_ms": backward_s * 1e3,
        "slowest_over_mean": seconds.sum(axis=1).max() / seconds.sum(axis=1).mean(),
        "forward_exchange_ms": forward_exchange_s * 1e3,
        "backward_exchange_ms": backward_exchange_s * 1e3,
    }


def _exchange_s(plan: MicroBatchPlan, kind: AttentionKind, settings: PlanSettings, per_node: int) -> list[float]:
    """Seconds of the exchanges of a forward and of a backward, reckoned."""
    nodes = nodes_of(node_sizes(settings.ranks, per_node))
    row_bytes = RowBytes.of_kind(kind, settings.bytes_per_value)
    moved = [RowsMoved.of(nano.plans[kind], nodes) for nano in plan.nano_batches]
    exchanges = ([each.forward_bytes(row_bytes) for each in moved], [each.backward_bytes(row_bytes) for each in moved])
    return [link_seconds(sum(each), EXCHANGE_BANDWIDTH, NETWORK_BANDWIDTH) for each in exchanges]

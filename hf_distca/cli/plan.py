"""hf-distca plan: run the planner on a user's document lengths."""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_distca.cli.input_error import InputError
from hf_distca.cli.options import MOST_RANKS, check_stages, gigabytes, positive, ranks, tokens
from hf_distca.cli.plan_ranks import figures_of_ranks
from hf_distca.cli.report_files import add_report_option, check_writable, write_report
from hf_distca.cli.settings import RANKS_PER_NODE, add_node_option, add_setting, config_of, nodes_of_ranks
from hf_distca.cli.sources import SOURCES, add_source_options, one_micro_batch
from hf_distca.kernels import KERNELS
from hf_distca.memory.core_attention import Use, busiest_rank, count_core_attention
from hf_distca.memory.live import without_numbers
from hf_distca.memory.stand_ins import counted_kernel
from hf_distca.plan import AttentionKind, MicroBatchPlan
from hf_distca.planner.build import plan_placed
from hf_distca.planner.cost import as_lengths
from hf_distca.planner.layout import check_capacity
from hf_distca.planner.metrics import exchange_figures, loads_of
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.nodes import NETWORK_BANDWIDTH, NODE_BANDWIDTH, node_sizes, nodes_of
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.stages import rows_by_stage
from hf_distca.sim.model import MODELS

if TYPE_CHECKING:
    from hf_distca.cli.model_memory import ModelMemory

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
HEADS = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
"""Default heads: those of Llama-3-8B."""
MANY_RANKS, LEAST_BLOCKS = 512, 8
"""Beyond 512 ranks, each needs at least 8 blocks of rows: balancing smaller shares takes too many moves."""

SHOWN = (
    "lengths", "ranks", "tokens_per_rank", "document_layout", "balance_tolerance", "balance_block_size",
    "exchange_buffer_bytes", "ping_pong", "attention_kernel", "dtype",
)  # fmt: skip
"""Options that a report shows."""

DESCRIPTION = f"""\
Plan one micro-batch and show its balance, its bytes and, with --model, its memory. The plan is the one that
DistCATrainer makes of these documents with the same settings. Figures are sums over both nano-batches.

{SOURCES}
A file gives the documents of the micro-batch. From every other source one micro-batch is drawn (--seed).

With --document-layout fixed a list of lists keeps every document on its rank. A plain list is packed in order with
equal tokens on every rank; documents are cut where a rank's share ends. The other layouts place documents themselves.

With --model the step of the rank that exchanges the most runs on meta tensors, and its memory is counted for each
strategy (ddp, zero1, zero2, zero3, fsdp2). "Longest rows" are the most tokens of a rank that fit: for one document
over all ranks, or for one document on each rank where documents stay whole. CUDA, NCCL and gaps between tensors take
some 2 GB more.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add_source_options(parser)
    add = parser.add_argument
    add("--ranks", required=True, type=ranks, metavar="N", help=f"number of ranks, at most {MOST_RANKS}")
    add_setting(parser, "tokens_per_rank", required=True, metavar="T", type=tokens)
    for name in ("document_layout", "balance_tolerance", "balance_block_size", "exchange_buffer_bytes", "ping_pong"):
        add_setting(parser, name)
    add_node_option(parser)
    for name, value, where in (
        ("--node-bandwidth", NODE_BANDWIDTH, "inside its node"),
        ("--network-bandwidth", NETWORK_BANDWIDTH, "between nodes"),
    ):
        add(
            name,
            type=gigabytes,
            default=value,
            metavar="GB/S",
            help=f"bandwidth of a rank {where}, in each direction (default: {value:g})",
        )
    add_setting(
        parser, "attention_kernel", default="torch_varlen", choices=tuple(KERNELS), help="kernel whose costs are used"
    )
    for (name, value), what in zip(HEADS.items(), ("query heads", "key-value heads", "size of a head"), strict=True):
        add(f"--{name.replace('_', '-')}", type=positive, help=f"{what} of a layer (default: {value})")
    add("--window", type=positive, metavar="W", help="sliding window in tokens (default: full attention)")
    add("--dtype", choices=tuple(BYTES), default="bfloat16", help="dtype of activations (default: bfloat16)")
    add(
        "--model",
        metavar="CONFIG",
        help=f"model whose attention to plan and whose memory to count: {', '.join(MODELS)}, a config.json, a folder "
        "with one, or a name on the Hub",
    )
    for name in ("keep_core_attention", "keep_received", "loss_chunk_bytes", "mlp_chunk_rows"):
        add_setting(parser, name)
    add(
        "--device-memory",
        type=gigabytes,
        metavar="GB",
        help="memory of a device: show the longest rows that fit, with --model",
    )
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("--dump", metavar="FILE", help="write the documents, segments and tasks of the plan as JSON")
    add_report_option(parser)


def run(options: argparse.Namespace) -> None:
    """Plan, print and write; raise InputError if the options or files cannot be used."""
    check_writable(options.report, options.dump)
    lengths = one_micro_batch(options, options.ranks * options.tokens_per_rank)
    memory = _memory(options)
    try:
        settings = _settings(options, memory)
        check_stages(settings)
        began = time.perf_counter()
        plan = _plan(lengths, settings, options)
        plan_ms = (time.perf_counter() - began) * 1e3
    except ValueError as error:
        raise InputError(str(error)) from error
    kind = settings.dominant_kind
    figures: dict[str, Any] = {
        **_figures(plan, kind, settings, options),
        "stages": max(len(rows_by_stage(nano.plans[kind])) for nano in plan.nano_batches),
        "exchange_buffers": _exchange_buffers(plan, kind, settings, options.dtype),
        "plan_ms": round(plan_ms, 3),
    }
    if memory is not None:
        figures["memory"] = memory.figures(plan, settings)
    if options.report:
        from hf_distca.sim.report.plan import plan_report

        figures |= figures_of_ranks(_documents(lengths), plan, settings)
        figures["setting"] = {name: getattr(options, name) for name in SHOWN} | {
            "document_layout": settings.document_layout,
            "ranks_per_node": options.ranks_per_node or str(RANKS_PER_NODE),
            "attention": str(kind),
        }
        write_report(options.report, plan_report(figures).encode())
    if options.dump:
        _dump(plan, kind, options.dump)
    if options.json:
        print(json.dumps(figures))
        return
    print(_table(plan, figures, settings, options))
    if memory is not None:
        print("", *memory.lines(figures["memory"]), sep="\n")


def _exchange_buffers(plan: MicroBatchPlan, kind: AttentionKind, settings: PlanSettings, dtype: str) -> int:
    """Return the bytes of exchange buffers on the busiest rank, which all layers of a kind share."""
    use = Use(counted_kernel(settings.kernel))
    rank = busiest_rank(plan, settings)
    counted = count_core_attention(plan, kind, getattr(torch, dtype), rank, use, without_numbers())
    return counted.get("exchange buffers", 0)


def _memory(options: argparse.Namespace) -> "ModelMemory | None":
    """Return the memory of the named model; None if no model is named."""
    given = [f"--{name.replace('_', '-')}" for name in (*HEADS, "window") if getattr(options, name) is not None]
    if options.model is None:
        if options.device_memory is not None:
            raise InputError("--device-memory says how long rows of a model may be: give --model too")
        return None
    if given:
        raise InputError(f"{given[0]} is what --model has: leave one of them out")
    if options.dtype == "float16":
        raise InputError("--model computes in bfloat16 or float32; give one of them as --dtype")
    from hf_distca.cli.model_memory import ModelMemory  # imports all of transformers

    return ModelMemory(options)


def _settings(options: argparse.Namespace, memory: "ModelMemory | None") -> PlanSettings:
    config = config_of(options)
    kernel, nodes = KERNELS[config.attention_kernel], nodes_of_ranks(config, options.ranks)
    q_heads, kv_heads, head_dim = (getattr(options, name) or value for name, value in HEADS.items())
    named = (AttentionKind(options.window, q_heads, kv_heads, head_dim, head_dim),)
    layout = config.planned_layout if memory is None else memory.document_layout(config)
    return PlanSettings(
        **{**config.planning(options.ranks), "ranks_per_node": nodes, "document_layout": layout},
        kinds=named if memory is None else memory.kinds,
        bytes_per_value=BYTES[options.dtype],
        row_overhead=kernel.row_overhead,
        gather_cost=kernel.gather_cost,
        kernel=config.attention_kernel,
    )


def _plan(lengths: list[int] | list[list[int]], settings: PlanSettings, options: argparse.Namespace) -> MicroBatchPlan:
    rows = [row for row in lengths if isinstance(row, list)]
    documents = _documents(lengths)
    ranks, tokens = settings.ranks, settings.tokens_per_rank
    if len(rows) > ranks:
        raise InputError(f"{options.lengths} holds {len(rows)} rows, but --ranks is {ranks}; give a row per rank")
    check_capacity(as_lengths(documents), ranks, tokens)
    if ranks > MANY_RANKS and sum(documents) < ranks * LEAST_BLOCKS * settings.balance_block_size:
        raise InputError(
            f"{sum(documents)} tokens on {ranks} ranks leave fewer than {LEAST_BLOCKS} blocks of "
            f"{settings.balance_block_size} rows to each; give more documents, or at most {MANY_RANKS} ranks"
        )
    if not rows or settings.document_layout != "fixed":
        return plan_micro_batch(documents, settings)
    if len(rows) != ranks:
        raise InputError(f"got {len(rows)} rows of documents for {ranks} ranks; give one row per rank")
    for rank, row in enumerate(rows):
        if sum(row) > tokens:
            raise InputError(f"row {rank} holds {sum(row)} tokens, but a rank takes {tokens}; raise --tokens-per-rank")
    return plan_placed(rows, settings)


def _documents(lengths: list[int] | list[list[int]]) -> list[int]:
    """Return the lengths of all documents, in order."""
    return [length for row in lengths for length in (row if isinstance(row, list) else [row])]


def _figures(
    plan: MicroBatchPlan, kind: AttentionKind, settings: PlanSettings, options: argparse.Namespace
) -> dict[str, float]:
    """Return balance and costs of the plan, summed over nano-batches."""
    plans = [nano.plans[kind] for nano in plan.nano_batches]
    loads = np.sum([loads_of(each) for each in plans], axis=0)
    rows = np.concatenate([each.tasks["stop"] - each.tasks["start"] for each in plans])
    exchange = exchange_figures(
        plans,
        settings.row_bytes(kind),
        nodes_of(node_sizes(settings.ranks, settings.ranks_per_node)),
        options.node_bandwidth,
        options.network_bandwidth,
    )
    return {
        "max_over_mean": float(loads.max() / loads.mean()),
        "tokens_max_over_mean": float(plan.tokens.max() / plan.tokens.mean()),
        **asdict(exchange),
        "tasks": len(rows),
        "min_rows": int(rows.min()),
        "tasks_below_block": int((rows < settings.balance_block_size).sum()),
        "nano_batches": len(plans),
    }


def _dump(plan: MicroBatchPlan, kind: AttentionKind, path: str) -> None:
    content = [
        {
            "documents": nano.documents.tolist(),
            "lengths": nano.layout.lengths.tolist(),
            "segments": [list(segment) for segment in nano.layout.segments.tolist()],
            "tasks": [list(task) for task in nano.plans[kind].tasks.tolist()],
        }
        for nano in plan.nano_batches
    ]
    try:
        Path(path).write_text(json.dumps({"nano_batches": content}) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def _table(plan: MicroBatchPlan, figures: dict[str, Any], settings: PlanSettings, options: argparse.Namespace) -> str:
    documents = sum(len(nano.documents) for nano in plan.nano_batches)
    cuts = sum(len(nano.layout.segments) for nano in plan.nano_batches) - documents
    divided = "2 nano-batches" if len(plan.nano_batches) == 2 else "1 nano-batch"
    lines = [
        ("documents", f"{documents}, {int(plan.tokens.sum())} tokens, {cuts} cuts, {divided}"),
        ("layout", f"{settings.document_layout}, {options.ranks} ranks of at most {options.tokens_per_rank} tokens"),
        ("attention, max / mean", f"{figures['max_over_mean']:.4f}"),
        ("tokens, max / mean", f"{figures['tokens_max_over_mean']:.4f}"),
        ("bytes per layer, all ranks", f"{figures['bytes_total'] / 1e6:.2f} MB"),
        ("bytes per layer, busiest rank", f"{figures['bytes_bottleneck'] / 1e6:.2f} MB"),
        *([] if settings.nodes is None else _node_lines(figures, options)),
        ("stages of a layer's K and V", f"{figures['stages']}"),
        ("exchange buffers, busiest rank", f"{figures['exchange_buffers'] / 1e6:.2f} MB"),
        ("tasks", f"{figures['tasks']}, the smallest of {figures['min_rows']} rows"),
        (f"tasks below {options.balance_block_size} rows", f"{figures['tasks_below_block']}"),
        ("planned in", f"{figures['plan_ms']:.1f} ms"),
    ]
    return "\n".join(f"{name:<30} {value}" for name, value in lines)


def _node_lines(figures: dict[str, Any], options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return lines on intra-node and inter-node bytes."""
    lines = []
    for where in ("within_nodes", "between_nodes"):
        total, rank, node = (
            f"{figures[f'bytes_{where}{of}'] / 1e6:.2f} MB" for of in ("", "_bottleneck", "_busiest_node")
        )
        lines.append((f"bytes {where.replace('_', ' ')}", f"{total}, busiest rank {rank}, busiest node {node}"))
    speeds = f"{options.node_bandwidth:g} GB/s within and {options.network_bandwidth:g} GB/s between nodes"
    return [*lines, ("busiest link, per layer", f"{figures['link_seconds'] * 1e3:.2f} ms at {speeds}")]

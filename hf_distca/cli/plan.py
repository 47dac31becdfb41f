"""hf-distca plan: run the planner on a user's document lengths."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_distca.cli import InputError
from hf_distca.cli.length_sources import SOURCES, documents_of, one_micro_batch
from hf_distca.cli.names import MODEL_SOURCES, check_model
from hf_distca.cli.options import (
    RANKS_PER_NODE,
    READING_MODEL,
    add_planning_options,
    add_settings,
    check_writable,
    config_of,
    gigabytes,
    nodes_of_ranks,
    run_of,
    wrapped,
    write,
)
from hf_distca.config import DistCAConfig
from hf_distca.kernel_names import KERNEL_NAMES
from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.cost import as_lengths
from hf_distca.plan.figures import bytes_by_link, exchange_figures, loads_of
from hf_distca.plan.nodes import NETWORK_BANDWIDTH, NODE_BANDWIDTH
from hf_distca.plan.stages import rows_by_stage
from hf_distca.planner.build import packed_in_order
from hf_distca.planner.layout import check_capacity
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.shapes import MODELS
from hf_distca.progress import TORCH_AND_TRANSFORMERS, importing, terminal_status
from hf_distca.run import STRATEGIES, RunSpec
from hf_distca.sim.lengths import histogram
from hf_distca.sim.report import plan_report
from hf_distca.units import counted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Lengths = list[int] | list[list[int]]
"""Lengths of documents, or a list of them for each rank."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULT_MODEL = "llama-8b"
"""Model whose attention is planned where none is named."""
MANY_RANKS = 512
LEAST_BLOCKS = 8
"""Beyond 512 ranks, each needs at least 8 blocks of rows: balancing smaller shares takes too many
moves."""
PLANNED = (
    "document_layout",
    "balance_tolerance",
    "balance_block_size",
    "exchange_buffer_bytes",
    "ping_pong",
)
"""Settings of plans."""

DESCRIPTION = f"""\
Plan one micro-batch and show its balance, its bytes and, with --model, its memory. The plan is the
one that DistCATrainer makes of these documents with the same settings. Figures are sums over both
nano-batches.

{SOURCES} A file gives the documents of the micro-batch. From every other source one micro-batch is
drawn (--seed).

With --document-layout fixed a list of lists keeps every document on its rank. A plain list is
packed in order with equal tokens on every rank; documents are cut where a rank's share ends. The
other layouts place documents themselves.

With --model the step of the rank that exchanges the most runs on meta tensors, and its memory is
counted for each strategy (ddp, zero1, zero2, zero3, fsdp2). "Longest rows" are the most tokens of a
rank that fit: for one document over all ranks, or for one document on each rank where documents
stay whole. CUDA, NCCL and gaps between tensors take some 2 GB more. MLPs compute all rows at once
unless --mlp-chunk-rows is a number: set 8192 to count what training does where it does not fit
otherwise. Kernels of Liger are not counted.

With --offload activation checkpoints are counted as host memory, for all layers but two.
The step is predicted by --profile, with copies of 55 GB/s in each direction beside computation.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add_planning_options(parser, *PLANNED, within=NODE_BANDWIDTH, between=NETWORK_BANDWIDTH)
    add = parser.add_argument
    kernel_options = {
        "default": "torch_varlen",
        "choices": KERNEL_NAMES[1:],
        "help": "kernel whose costs are used",
    }
    add_settings(parser, "attention_kernel", **kernel_options)
    add(
        "--dtype",
        choices=tuple(BYTES),
        default="bfloat16",
        help="dtype of activations (default: bfloat16)",
    )
    model_help = f"model whose attention to plan and whose memory to count: {MODEL_SOURCES}"
    add("--model", metavar="CONFIG", help=model_help)
    add_settings(parser, "loss_chunk_bytes", "mlp_chunk_rows")
    strategy_help = "count one strategy only, which is faster, with --model (default: all)"
    add("--strategy", choices=STRATEGIES, help=strategy_help)
    device_help = "memory of a device: show the longest rows that fit, with --model"
    add("--device-memory", type=gigabytes, metavar="GB", help=device_help)
    add(
        "--offload",
        action="store_true",
        help="count activation checkpoints as host memory, and predict the copies and the step, "
        "with --model",
    )
    costs = (
        "costs of the device that predict a step with --offload: h100, h200, cpu, or a file that "
        "hf-distca profile wrote (default: h100)"
    )
    add("--profile", default="h100", help=costs)
    add(
        "--dump", metavar="FILE", help="write the documents, segments and tasks of the plan as JSON"
    )


def run(options: argparse.Namespace) -> None:
    """Plan, print and write; raise InputError if the options or files cannot be used."""
    # 1. Read everything and plan. What is wrong is said before planning begins.
    check_writable(options.report, options.dump)
    _check_model_options(options)
    try:
        config = config_of(options)
        nodes_of_ranks(config, options.ranks)
        lengths, cut_advice = one_micro_batch(options, options.ranks * options.tokens_per_rank)
        _check_fit(lengths, config, options)
        model, run = _model_and_run(config, options)
        settings = run.plans
        began = time.perf_counter()
        with terminal_status("Planning"):
            plan = _plan(lengths, settings)
        plan_ms = (time.perf_counter() - began) * 1e3
    except ValueError as error:
        raise InputError(str(error)) from error
    # 2. Figures of the plan, and of the model's memory.
    figures = _figures(documents_of(lengths), plan, settings, options) | {
        "plan_ms": round(plan_ms, 3),
        "advice": [] if cut_advice is None else [cut_advice],
    }
    memory_figures, memory = _figures_of_memory(model, plan, run, options)
    figures |= memory_figures
    # 3. Files, and then either JSON or tables.
    if options.report:
        write(options.report, plan_report(figures, memory))
    if options.dump:
        dumped = []
        for nano in plan.nano_batches:
            tables = {
                "documents": nano.documents,
                "lengths": nano.layout.lengths,
                "segments": nano.layout.segments,
            }
            tables["tasks"] = nano.plans[settings.dominant_kind].tasks
            dumped.append({name: table.tolist() for name, table in tables.items()})
        write(options.dump, json.dumps({"nano_batches": dumped}) + "\n")
    if options.json:
        print(json.dumps(figures))
        return
    print(_table(plan, figures, settings, options))
    if cut_advice is not None:
        print("", wrapped(cut_advice), sep="\n")
    if memory:
        from hf_distca.cli.model import memory_table

        print("", memory_table(memory), sep="\n")
    if options.offload:
        from hf_distca.cli.offload_report import offload_lines

        print("", *offload_lines(figures["offload"]), sep="\n")


def _figures_of_memory(
    model: "PreTrainedModel | None",
    plan: MicroBatchPlan,
    run: RunSpec,
    options: argparse.Namespace,
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return figures of memory, and a table of a model's memory, which is empty without a model."""
    if model is None:
        return {"exchange_buffers": _exchange_buffers(plan, run, options)}, {}
    from hf_distca.cli.model import exchange_buffers_of, memory_of, memory_rows, mixing_of

    memory = memory_of(model, plan, run, options)
    figures = {
        "exchange_buffers": exchange_buffers_of(memory),
        "memory": memory,
        "mixing": mixing_of(model, plan, run.plans),
    }
    if options.offload:
        from hf_distca.cli.offload_report import offload_of

        figures["offload"] = offload_of(model, plan, run, options.profile, memory)
    return figures, memory_rows(memory, options.device_memory)


def _check_model_options(options: argparse.Namespace) -> None:
    """Raise InputError if options of a model contradict each other."""
    if options.model is None:
        if options.device_memory is not None:
            raise InputError(
                "--device-memory limits the rows of a model, but no model is given; add --model"
            )
        if options.offload:
            raise InputError(
                "--offload moves a model's activation checkpoints, but no model is given; add "
                "--model"
            )
        if options.strategy is not None:
            raise InputError(
                "--strategy counts the memory of a model, but no model is given; add --model"
            )
        return
    if options.dtype == "float16":
        raise InputError(
            "memory with --model is counted in bfloat16 or float32 only; set --dtype to one of them"
        )
    if options.offload:
        try:
            DeviceProfile.load(options.profile)
        except ValueError as error:
            raise InputError(str(error)) from error
    check_model(options.model)


def _check_fit(lengths: Lengths, config: DistCAConfig, options: argparse.Namespace) -> None:
    """Raise ValueError if ranks cannot hold documents or rows, or cannot plan them in time."""
    rows, documents = _rows_of(lengths), documents_of(lengths)
    ranks, tokens = options.ranks, options.tokens_per_rank
    stay = bool(rows) and config.document_layout == "fixed"
    if len(rows) > ranks or (stay and len(rows) < ranks):
        raise InputError(
            f"{options.lengths} holds {len(rows)} rows, but --ranks is {ranks}; give a row per rank"
        )
    check_capacity(as_lengths(documents), ranks, tokens)
    if ranks > MANY_RANKS and sum(documents) < ranks * LEAST_BLOCKS * config.balance_block_size:
        raise InputError(
            f"{sum(documents)} tokens on {ranks} ranks leave fewer than {LEAST_BLOCKS} blocks of "
            f"{config.balance_block_size} rows to each; give more documents, or at most "
            f"{MANY_RANKS} ranks"
        )
    for rank, row in enumerate(rows if stay else ()):
        if sum(row) > tokens:
            raise InputError(
                f"row {rank} holds {sum(row)} tokens, but a rank holds {tokens}; raise "
                "--tokens-per-rank"
            )


def _rows_of(lengths: Lengths) -> list[list[int]]:
    """Return lists of lengths, one for each rank; none if the lengths are a plain list."""
    return [row for row in lengths if isinstance(row, list)]


def _model_and_run(
    config: DistCAConfig, options: argparse.Namespace
) -> tuple["PreTrainedModel | None", RunSpec]:
    """Return the named model, None if no model is named, and the run that is planned."""
    planning: dict[str, Any] = {
        "kernel": config.attention_kernel,
        "bytes_per_value": BYTES[options.dtype],
    }
    mixed = options.dtype != "float32"
    model = None
    if options.model is None:
        run = run_of(config, MODELS[DEFAULT_MODEL], options.ranks, planning, mixed=mixed)
    else:
        with importing(TORCH_AND_TRANSFORMERS):
            from hf_distca.cli.model import fake_model
            from hf_distca.models.describe import document_layout
            from hf_distca.models.shape import model_shape

        with terminal_status(READING_MODEL):
            model = fake_model(options.model)
        planning["document_layout"] = document_layout(model, config)
        run = run_of(config, model_shape(model), options.ranks, planning, mixed=mixed)

    with importing("torch"):
        from hf_distca.kernels import KERNELS

    kernel = KERNELS[config.attention_kernel]
    plans = replace(run.plans, row_overhead=kernel.row_overhead, gather_cost=kernel.gather_cost)
    return model, replace(run, plans=plans)


def _plan(lengths: Lengths, settings: PlanSettings) -> MicroBatchPlan:
    rows = _rows_of(lengths)
    if rows and settings.document_layout == "fixed":
        return plan_placed(rows, settings)
    return plan_micro_batch(documents_of(lengths), settings)


def _figures(
    documents: Sequence[int],
    plan: MicroBatchPlan,
    settings: PlanSettings,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return balance and costs of the plan, summed over nano-batches.

    For a report, figures of each rank too.
    """
    kind, nodes = settings.dominant_kind, settings.node_of_ranks
    plans = [nano.plans[kind] for nano in plan.nano_batches]
    loads = np.sum([loads_of(nano_plan) for nano_plan in plans], axis=0)
    tasks = np.concatenate([nano_plan.tasks for nano_plan in plans])
    rows = tasks["stop"] - tasks["start"]
    moved = np.sum(
        [bytes_by_link(nano_plan, settings.row_bytes(kind), nodes) for nano_plan in plans], axis=0
    )
    exchange = exchange_figures(moved, nodes, (options.node_bandwidth, options.network_bandwidth))
    figures = {
        "max_over_mean": float(loads.max() / loads.mean()),
        "tokens_max_over_mean": float(plan.tokens.max() / plan.tokens.mean()),
        **asdict(exchange),
        "tasks": len(rows),
        "min_rows": int(rows.min()),
        "tasks_below_block": int((rows < settings.balance_block_size).sum()),
        "nano_batches": len(plans),
        "stages": max(len(rows_by_stage(nano_plan)) for nano_plan in plans),
    }
    if not options.report:
        return figures
    lengths = np.array(documents, np.int64)
    packed = loads_of(packed_in_order(lengths, settings).plans[kind])
    sent, received = moved.sum(axis=0)
    shown = ("lengths", "ranks", "tokens_per_rank", *PLANNED, "attention_kernel", "dtype")
    return figures | {
        "histogram": histogram(lengths),
        "packed_max_over_mean": float(packed.max() / packed.mean()),
        "by_rank": {
            "pairs_packed": packed.tolist(),
            "pairs": loads.tolist(),
            "tokens": plan.tokens.tolist(),
            "tasks": np.bincount(tasks["worker"], minlength=settings.ranks).tolist(),
            "bytes_sent": sent.tolist(),
            "bytes_received": received.tolist(),
        },
        "setting": {
            **{name: getattr(options, name) for name in shown},
            "document_layout": settings.document_layout,
            "ranks_per_node": options.ranks_per_node or str(RANKS_PER_NODE),
            "attention": str(kind),
        },
    }


def _exchange_buffers(plan: MicroBatchPlan, run: RunSpec, options: argparse.Namespace) -> int:
    """Return bytes of the buffers that all layers of the dominant kind share, on the busiest rank.

    A model's layers are not known.
    """
    with importing(TORCH_AND_TRANSFORMERS):
        import torch

        from hf_distca.memory.counted_step import busiest_rank, count_core_attention

    parts = count_core_attention(
        plan,
        run.plans.dominant_kind,
        getattr(torch, options.dtype),
        busiest_rank(plan, run.plans),
        run,
    )
    return parts.get("exchange buffers", 0)


def _table(
    plan: MicroBatchPlan,
    figures: dict[str, Any],
    settings: PlanSettings,
    options: argparse.Namespace,
) -> str:
    def mb(name: str) -> str:
        return f"{figures[name] / 1e6:.2f} MB"

    documents = sum(len(nano.documents) for nano in plan.nano_batches)
    cuts = sum(len(nano.layout.segments) for nano in plan.nano_batches) - documents
    divided = counted(len(plan.nano_batches), "nano-batch", "nano-batches")
    lines = {
        "documents": (
            f"{documents:,} of {counted(int(plan.tokens.sum()), 'token')}, {counted(cuts, 'cut')}, "
            f"{divided}"
        ),
        "layout": (
            f"{settings.document_layout}, {counted(options.ranks, 'rank')} of at most "
            f"{counted(options.tokens_per_rank, 'token')}"
        ),
        "attention, max / mean": f"{figures['max_over_mean']:.4f}",
        "tokens, max / mean": f"{figures['tokens_max_over_mean']:.4f}",
        "bytes per layer, all ranks": mb("bytes_total"),
        "bytes per layer, busiest rank": mb("bytes_bottleneck"),
    }
    if settings.nodes is not None:
        for name in ("bytes_within_nodes", "bytes_between_nodes"):
            busiest = (
                f"busiest rank {mb(f'{name}_bottleneck')}, busiest node "
                f"{mb(f'{name}_busiest_node')}"
            )
            lines[name.replace("_", " ")] = f"{mb(name)}, {busiest}"
        speeds = (
            f"{options.node_bandwidth:g} GB/s within and {options.network_bandwidth:g} GB/s "
            "between nodes"
        )
        lines["busiest link, per layer"] = f"{figures['link_seconds'] * 1e3:.2f} ms at {speeds}"
    lines |= {
        "stages of a layer's K and V": f"{figures['stages']}",
        "exchange buffers, busiest rank": mb("exchange_buffers"),
        "tasks": f"{figures['tasks']:,}, the smallest of {counted(figures['min_rows'], 'row')}",
        f"tasks below {options.balance_block_size} rows": f"{figures['tasks_below_block']}",
        "planned in": f"{figures['plan_ms']:.1f} ms",
    }
    if mixing := figures.get("mixing"):
        runs = mixing["runs"]
        without = f"{mixing['runs_unpacked']} without a kernel that takes packed documents"
        lines |= {
            "mixing layers": (
                f"{mixing['layers']}, {counted(mixing['segments'], 'segment')} of cut documents on "
                "all ranks"
            ),
            "kernel runs, busiest rank": f"{runs} a layer; {without}",
            "state that a cut moves": f"{mixing['state_bytes'] / 1e6:.2f} MB a layer",
            "states and halos, busiest rank": f"{mixing['bytes_bottleneck'] / 1e6:.2f} MB a layer",
        }
    return "\n".join(f"{name:<30} {value}" for name, value in lines.items())

"""hf-distca plan: run the planner on a user's document lengths."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_distca.cli import InputError
from hf_distca.cli.arguments_file import has_checkpoints, read_arguments, settings_in
from hf_distca.cli.length_sources import (
    SOURCES,
    documents_of,
    documents_with_images,
    one_micro_batch,
)
from hf_distca.cli.names import check_model
from hf_distca.cli.options import (
    GB,
    READING_MODEL,
    add_planning_options,
    check_writable,
    config_of,
    gigabytes,
    nodes_of_ranks,
    profile_of,
    run_of,
    shown_nodes,
    wrapped,
    write,
)
from hf_distca.config import DistCAConfig
from hf_distca.plan import AttentionKind, MicroBatchPlan
from hf_distca.plan.arrays import IntArray
from hf_distca.plan.cost import as_lengths
from hf_distca.plan.figures import bytes_by_link, exchange_figures, loads_of
from hf_distca.plan.stages import rows_by_stage
from hf_distca.planner.build import packed_in_order
from hf_distca.planner.layout import check_capacity
from hf_distca.planner.micro_batch import plan_placed, plan_pods
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

    from hf_distca.cli.image_sources import ImageDocuments
    from hf_distca.memory.counted_encoder import Encoded

    ImagesOfPlan = tuple[ImageDocuments, IntArray]

Lengths = list[int] | list[list[int]]
"""Lengths of documents, or a list of them for each rank."""
DESCRIPTION = f"""\
Plan one micro-batch and show its balance and its bytes. The plan is the one that DistCATrainer
makes of these documents, with the same settings (--config) and the same costs of the device
(--profile). Figures are sums over both nano-batches.

{SOURCES} A file gives the documents of the micro-batch. From every other source one micro-batch is
drawn.

With document_layout: fixed in --config a list of lists keeps every document on its rank. A plain
list is packed in order with equal tokens on every rank; documents are cut where a rank's share
ends. The other layouts place documents themselves.

With --device-memory or --strategy the step of the rank that exchanges the most runs on meta
tensors, and its memory is counted for each strategy (ddp, zero1, zero2, zero3, fsdp2), or for one.
"Longest rows" are the most tokens of a rank that fit: for one document over all ranks, or for one
document on each rank where documents stay whole. CUDA, NCCL and gaps between tensors take some 2 GB
more. MLPs compute all rows at once unless mlp_chunk_rows of --config is a number: set 8192 to count
what training does where it does not fit otherwise. Kernels of Liger are not counted.

With offload_activations: true in --config activation checkpoints are counted as host memory, for
all layers but two. The step is then predicted too, with copies of 55 GB/s in each direction beside
computation.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add_planning_options(parser)
    add = parser.add_argument
    device_help = "count memory, and show the longest rows that fit into this memory of a device"
    add("--device-memory", type=gigabytes, metavar="GB", help=device_help)
    strategy_help = "count memory of one strategy only, which is faster"
    add("--strategy", choices=STRATEGIES, help=strategy_help)


def run(options: argparse.Namespace) -> None:
    """Plan, print and write; raise InputError if the options or files cannot be used."""
    # 1. Read everything and plan. What is wrong is said before planning begins.
    check_writable(options.report)
    check_model(options.model)
    try:
        arguments = read_arguments(options.config)
        config, checkpointing = config_of(arguments, options), has_checkpoints(arguments)
        profile = profile_of(config, options)
        nodes_of_ranks(config, options.ranks)
        tokens = PlanSettings(**config.plan_settings(options.ranks)).micro_batch_tokens
        seen, lengths, cut_advice = _micro_batch(options, tokens)
        _check_fit(lengths, config, options)
        model, run = _model_and_run(config, profile, options, checkpointing=checkpointing)
        settings = run.plans
        began = time.perf_counter()
        with terminal_status("Planning"):
            plans = _plan(lengths, settings)
        plan_ms = (time.perf_counter() - began) * 1e3
    except ValueError as error:
        raise InputError(str(error)) from error
    # 2. Figures of the plan, and of the model's memory.
    figures = _figures(plans, run) | {
        "plan_ms": round(plan_ms, 3),
        "advice": [] if cut_advice is None else [cut_advice],
    }
    encoded = None
    if seen is not None:
        figures["images"], encoded = _figures_of_images(seen, plans, run)
    memory_figures, memory = _figures_of_memory(model, plans, run, config, options, encoded)
    figures |= memory_figures
    # 3. Files, and then either JSON or tables.
    if options.report:
        figures |= _figures_of_report(documents_of(lengths), plans, run, config, options)
        write(options.report, plan_report(figures, memory))
    if options.json:
        print(json.dumps(figures | {"plan": _tables(plans, settings)}))
        return
    print(_table(plans, figures, run, [*settings_in(arguments)], options))
    if cut_advice is not None:
        print("", wrapped(cut_advice), sep="\n")
    if memory:
        from hf_distca.cli.model import memory_table

        print("", memory_table(memory), sep="\n")
    if "offload" in figures:
        from hf_distca.cli.offload_report import offload_lines

        print("", *offload_lines(figures["offload"]), sep="\n")


def _micro_batch(
    options: argparse.Namespace, tokens: int
) -> tuple["ImagesOfPlan | None", Lengths, str | None]:
    """Return the documents of one micro-batch, with their images if they have any.

    The last value is a sentence on documents that are cut.
    """
    found = documents_with_images(options)
    if found is None:
        return None, *one_micro_batch(options, tokens)
    documents = next(found.drawn(tokens))
    return (found, documents), found.lengths[documents].tolist(), None


def _figures_of_images(
    seen: "ImagesOfPlan", plans: Sequence[MicroBatchPlan], run: RunSpec
) -> tuple[dict[str, Any], "Encoded"]:
    """Return figures of encoders, and what the rank with the most patches encodes."""
    from hf_distca.memory.counted_encoder import Encoded

    found, documents = seen
    batch = found.simulated(documents, run)
    ranks = run.plans.ranks
    encoders, _ = batch.encoders(plans)
    patches = np.bincount(encoders, batch.images["patches"], ranks).astype(int)
    seconds = np.bincount(encoders, batch.images["cost"], ranks)
    busiest = int(patches.argmax())
    figures = {
        "images": len(encoders),
        "patches": int(patches.sum()),
        "max_over_mean": float(seconds.max() / max(seconds.mean(), 1e-30)),
        "seconds": float(seconds.max()),
    }
    return figures, Encoded(int((encoders == busiest).sum()), int(patches[busiest]))


def _tables(plans: Sequence[MicroBatchPlan], settings: PlanSettings) -> list[dict[str, Any]]:
    """Return the documents, segments and tasks of each nano-batch, for JSON.

    Ranks and workers are numbered from the first rank of the pod on.
    """
    tables = []
    for plan in plans:
        for nano in plan.nano_batches:
            arrays = {
                "documents": nano.documents,
                "lengths": nano.layout.lengths,
                "segments": nano.layout.segments,
                "tasks": nano.plans[settings.dominant_kind].tasks,
            }
            table: dict[str, Any] = {name: array.tolist() for name, array in arrays.items()}
            tables.append({"first_rank": plan.first_rank, **table})
    return tables


def _counts_memory(options: argparse.Namespace) -> bool:
    """Return whether the options ask for memory."""
    return options.device_memory is not None or options.strategy is not None


def _figures_of_memory(
    model: "PreTrainedModel | None",
    plans: Sequence[MicroBatchPlan],
    run: RunSpec,
    config: DistCAConfig,
    options: argparse.Namespace,
    encoded: "Encoded | None",
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return figures of memory, and a table of it, which is empty where memory is not counted.

    Memory is that of the pod whose busiest rank exchanges the most.

    Args:
        encoded: images of the rank with the most patches; None without images.
    """
    figures: dict[str, Any] = {}
    plan = max(plans, key=lambda plan: plan.summary.exchange.bytes_bottleneck)
    if model is not None:
        from hf_distca.cli.model import mixing_of

        figures["mixing"] = mixing_of(model, plans, run.plans)
    if model is None or not _counts_memory(options):
        return {"exchange_buffers": _exchange_buffers(plan, run), **figures}, {}
    from hf_distca.cli.model import exchange_buffers_of, memory_of, memory_rows

    offload = config.offload_activations is True
    memory = memory_of(model, plan, run, options, offload=offload, encoded=encoded)
    figures |= {"exchange_buffers": exchange_buffers_of(memory), "memory": memory}
    if offload:
        from hf_distca.cli.offload_report import offload_of

        figures["offload"] = offload_of(model, plan, run, memory)
    return figures, memory_rows(memory, options.device_memory)


def _check_fit(lengths: Lengths, config: DistCAConfig, options: argparse.Namespace) -> None:
    """Raise ValueError if ranks cannot hold documents or rows."""
    rows, documents = _rows_of(lengths), documents_of(lengths)
    ranks, tokens = options.ranks, config.tokens_per_rank
    stay = bool(rows) and config.document_layout == "fixed"
    if len(rows) > ranks or (stay and len(rows) < ranks):
        raise InputError(
            f"{options.lengths} holds {len(rows)} rows, but --ranks is {ranks}; give a row per rank"
        )
    check_capacity(as_lengths(documents), ranks, tokens)
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
    config: DistCAConfig,
    profile: DeviceProfile,
    options: argparse.Namespace,
    *,
    checkpointing: bool,
) -> tuple["PreTrainedModel | None", RunSpec]:
    """Return the model, and the run that is planned.

    The model is None if its shape is known and nothing else of it is needed.
    """
    model, shape, layout = None, MODELS.get(options.model), config.document_layout
    if shape is None or _counts_memory(options):
        with importing(TORCH_AND_TRANSFORMERS):
            from hf_distca.cli.model import fake_model
            from hf_distca.models.describe import document_layout
            from hf_distca.models.shape import model_shape

        with terminal_status(READING_MODEL):
            model = fake_model(options.model)
        shape, layout = model_shape(model), document_layout(model, config)

    run = run_of(
        config,
        shape,
        options.ranks,
        profile,
        document_layout=layout,
        checkpointing=checkpointing,
    )
    return model, run


def _plan(lengths: Lengths, settings: PlanSettings) -> list[MicroBatchPlan]:
    """Return the plan of each pod."""
    rows = _rows_of(lengths)
    if rows and settings.document_layout == "fixed":
        return [plan_placed(rows, settings)]
    return plan_pods(documents_of(lengths), settings)


def _loads(plan: MicroBatchPlan, kind: AttentionKind) -> IntArray:
    """Return [ranks of the pod] query-key pairs."""
    loads: IntArray = np.sum([loads_of(nano.plans[kind]) for nano in plan.nano_batches], axis=0)
    return loads


def _bytes_moved(plans: Sequence[MicroBatchPlan], settings: PlanSettings) -> IntArray:
    """Return [2, 2, ranks] bytes within and between nodes, sent and received."""
    kind = settings.dominant_kind
    row_bytes = settings.row_bytes(kind)
    of_pods = []
    for plan in plans:
        nodes = settings.node_of_ranks[plan.ranks.start : plan.ranks.stop]
        of_nanos = [bytes_by_link(n.plans[kind], row_bytes, nodes) for n in plan.nano_batches]
        of_pods.append(np.sum(of_nanos, axis=0))
    return np.concatenate(of_pods, axis=2)


def _figures(plans: Sequence[MicroBatchPlan], run: RunSpec) -> dict[str, Any]:
    """Return balance and costs of the plans, summed over pods and nano-batches."""
    settings = run.plans
    kind = settings.dominant_kind
    of_nanos = [nano.plans[kind] for plan in plans for nano in plan.nano_batches]
    loads = np.concatenate([_loads(plan, kind) for plan in plans])
    tokens = np.concatenate([plan.tokens for plan in plans])
    tasks = np.concatenate([nano_plan.tasks for nano_plan in of_nanos])
    rows = tasks["stop"] - tasks["start"]
    moved = _bytes_moved(plans, settings)
    exchange = exchange_figures(moved, settings.node_of_ranks, _bandwidths(run))
    return {
        "max_over_mean": float(loads.max() / loads.mean()),
        "tokens_max_over_mean": float(tokens.max() / tokens.mean()),
        **asdict(exchange),
        "tasks": len(rows),
        "min_rows": int(rows.min()),
        "tasks_below_block": int((rows < settings.balance_block_size).sum()),
        "pods": len(plans),
        "nano_batches": max(len(plan.nano_batches) for plan in plans),
        "stages": max(len(rows_by_stage(nano_plan)) for nano_plan in of_nanos),
    }


def _bandwidths(run: RunSpec) -> tuple[float, float]:
    """Return the GB/s of exchanges of rows within and between nodes."""
    links = run.device.exchange
    return links.within.bandwidth / GB, links.between.bandwidth / GB


def _figures_of_report(
    documents: Sequence[int],
    plans: Sequence[MicroBatchPlan],
    run: RunSpec,
    config: DistCAConfig,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return what a report shows beside the figures: documents, ranks and settings."""
    settings = run.plans
    kind = settings.dominant_kind
    workers = [
        plan.first_rank + nano.plans[kind].tasks["worker"]
        for plan in plans
        for nano in plan.nano_batches
    ]
    tasks = np.bincount(np.concatenate(workers), minlength=settings.ranks)
    sent, received = _bytes_moved(plans, settings).sum(axis=0)
    lengths = np.array(documents, np.int64)
    packed = loads_of(packed_in_order(lengths, settings).plans[kind])
    changed = config.planning.plain()
    return {
        "histogram": histogram(lengths),
        "packed_max_over_mean": float(packed.max() / packed.mean()),
        "by_rank": {
            "pairs_packed": packed.tolist(),
            "pairs": np.concatenate([_loads(plan, kind) for plan in plans]).tolist(),
            "tokens": np.concatenate([plan.tokens for plan in plans]).tolist(),
            "tasks": tasks.tolist(),
            "bytes_sent": sent.tolist(),
            "bytes_received": received.tolist(),
        },
        "setting": {
            "lengths": options.lengths,
            "model": options.model,
            "ranks": settings.ranks,
            "tokens_per_rank": settings.rows_per_rank,
            "document_layout": settings.document_layout,
            **({} if changed is None else {"planning": changed}),
            "ranks_per_node": shown_nodes(config),
            "attention": str(kind),
            "attention_kernel": settings.kernel,
            "device": run.device.name,
        },
    }


def _exchange_buffers(plan: MicroBatchPlan, run: RunSpec) -> int:
    """Return bytes of the buffers that all layers of the dominant kind share, on the busiest rank.

    A model's layers are not known.
    """
    with importing(TORCH_AND_TRANSFORMERS):
        import torch

        from hf_distca.memory.counted_step import busiest_rank, count_core_attention

    parts = count_core_attention(
        plan,
        run.plans.dominant_kind,
        getattr(torch, run.device.dtype),
        busiest_rank(plan, run.plans),
        run,
    )
    return parts.get("exchange buffers", 0)


def _table(
    plans: Sequence[MicroBatchPlan],
    figures: dict[str, Any],
    run: RunSpec,
    names: Sequence[str],
    options: argparse.Namespace,
) -> str:
    """Return the figures as text; `names` are those of the settings in the file of arguments."""
    settings = run.plans

    def mb(name: str) -> str:
        return f"{figures[name] / 1e6:.2f} MB"

    nano_batches = [nano for plan in plans for nano in plan.nano_batches]
    documents = sum(len(nano.documents) for nano in nano_batches)
    cuts = sum(len(nano.layout.segments) for nano in nano_batches) - documents
    tokens = sum(int(plan.tokens.sum()) for plan in plans)
    divided = counted(figures["nano_batches"], "nano-batch", "nano-batches")
    sizes = sorted(len(plan.ranks) for plan in plans)
    lines = {
        "documents": (
            f"{documents:,} of {counted(tokens, 'token')}, {counted(cuts, 'cut')}, "
            f"{'at most ' * (len(plans) > 1)}{divided}"
        ),
        "layout": (
            f"{settings.document_layout}, {counted(settings.ranks, 'rank')} of at most "
            f"{counted(settings.rows_per_rank, 'token')}"
        ),
        **({"pods": _pods(sizes)} if len(plans) > 1 else {}),
        "model and costs": f"{options.model}, {run.device.name}",
        **({"settings of --config": ", ".join(names) or "none"} if options.config else {}),
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
        within, between = _bandwidths(run)
        speeds = f"{within:.3g} GB/s within and {between:.3g} GB/s between nodes"
        lines["busiest link, per layer"] = f"{figures['link_seconds'] * 1e3:.2f} ms at {speeds}"
    lines |= {
        "stages of a layer's K and V": f"{figures['stages']}",
        "exchange buffers, busiest rank": mb("exchange_buffers"),
        "tasks": f"{figures['tasks']:,}, the smallest of {counted(figures['min_rows'], 'row')}",
        f"tasks below {settings.balance_block_size} rows": f"{figures['tasks_below_block']}",
        "planned in": f"{figures['plan_ms']:.1f} ms",
    }
    if images := figures.get("images"):
        patches = counted(images["patches"], "patch", "patches")
        lines |= {
            "images": f"{images['images']:,} of {patches}",
            "encoders, max / mean": f"{images['max_over_mean']:.4f}",
            "encoder, busiest rank": f"{images['seconds']:.3f} s forward and backward",
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


def _pods(sizes: Sequence[int]) -> str:
    """Return the number of pods, and their ranks in ascending order."""
    least, most = sizes[0], sizes[-1]
    ranks = counted(most, "rank")
    return f"{len(sizes):,} of {ranks if least == most else f'{least:,} to {ranks}'}"

"""hf-distca simulate: predict the time of a training step without a GPU."""

import argparse
import json
import time
from dataclasses import asdict, fields, replace
from typing import Any

from hf_distca.cli.input_error import InputError
from hf_distca.cli.options import batches, check_stages, gigabytes, positive, ranks, servers, tokens
from hf_distca.cli.report_files import add_report_option, check_writable, write_report
from hf_distca.cli.settings import RANKS_PER_NODE, add_node_option, add_setting, config_of, nodes_of_ranks
from hf_distca.cli.sources import SOURCES, add_source_options, drawn_micro_batches
from hf_distca.planner.seconds import Links
from hf_distca.planner.settings import PlanSettings
from hf_distca.sim.costs import DeviceProfile
from hf_distca.sim.figures import Simulation
from hf_distca.sim.model import MODELS, ModelShape
from hf_distca.sim.scaling import scaling
from hf_distca.sim.simulate import Memory, simulate
from hf_distca.sim.ways import Setup
from hf_distca.units import AUTO

FEWER_BATCHES = 4
"""Factor by which a report draws fewer micro-batches for other numbers of ranks."""
GB = 1e9
SHOWN = (
    "lengths", "model", "tensor_parallel", "checkpointing", "batches", "seed", "servers",
)  # fmt: skip
"""Options that a report shows."""

COUNTED_RANKS = 128
"""Maximum number of ranks for counted memory: beyond it, counting takes longer than everything else."""
DESCRIPTION = f"""\
Predict the time of a training step for documents like yours, without a GPU, by each strategy: plain packing with equal
tokens, whole documents balanced, context parallelism over 2, 4, 8 ... ranks, and hf_distca. The costs of the device
were measured. The last lines say whether balancing pays.

{SOURCES}
A step has one micro-batch on each rank. It leaves out gradient synchronisation and the optimizer, which are the same
for all strategies. Memory is counted as hf-distca plan --model does, with the model's state divided as in FSDP2. With
--tensor-parallel, or on more than {COUNTED_RANKS} ranks, memory is a lower bound from the shapes of tensors.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add_source_options(parser)
    add = parser.add_argument
    add("--ranks", required=True, type=ranks, metavar="N", help="number of ranks that train")
    add_setting(parser, "tokens_per_rank", required=True, metavar="T", type=tokens)
    for name in ("balance_tolerance", "balance_block_size", "exchange_buffer_bytes", "ping_pong"):
        add_setting(parser, name)
    add_node_option(parser)
    add(
        "--model",
        default="llama-8b",
        metavar="CONFIG",
        help=f"model: {', '.join(MODELS)}, a config.json, a folder with one, or a name on the Hub (default: llama-8b)",
    )
    add(
        "--profile",
        default="h100",
        help="costs of the device: h100, cpu, or a file that hf-distca profile wrote (default: h100)",
    )
    for name, where in (("--node-bandwidth", "inside its node"), ("--network-bandwidth", "between nodes")):
        add(
            name,
            type=gigabytes,
            metavar="GB/S",
            help=f"bandwidth of a rank {where}, in each direction (default: the profile's)",
        )
    add("--tensor-parallel", type=positive, default=1, metavar="G", help="GPUs that share each layer (default: 1)")
    add(
        "--servers",
        type=servers,
        default=0,
        metavar="M",
        help="simulate M dedicated attention servers too (default: 0)",
    )
    add(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="gradient checkpointing: run layers again in the backward pass (default: on)",
    )
    add("--batches", type=batches, default=16, metavar="B", help="micro-batches to draw (default: 16)")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add_report_option(parser)


def run(options: argparse.Namespace) -> None:
    """Simulate and print; raise InputError if the options or files cannot be used."""
    began = time.perf_counter()
    check_writable(options.report)
    if options.tokens_per_rank < 2:
        raise InputError("--tokens-per-rank must be at least 2: memory is counted with full and with half rows")
    try:
        setup = _setup(options, options.ranks)
        counted = options.tensor_parallel == 1 and options.ranks <= COUNTED_RANKS
        memory = _memory(options, setup, counted=counted)
        result = _simulation(options, options.ranks, options.batches, options.servers, memory)
        figures = {**result.as_dict(), "memory_counted": counted, "profile": setup.profile.name}
        if options.report:
            batches = -(-options.batches // FEWER_BATCHES)
            node = options.ranks_per_node or str(RANKS_PER_NODE)
            ranks_per_node = int(node) if node.isdecimal() else None
            points = scaling(result, lambda ranks: _simulation(options, ranks, batches, 0), ranks_per_node)
            figures |= {
                "scaling": [asdict(point) for point in points],
                "settings": _to_copy(options, result, setup),
                "setting": {name: getattr(options, name) for name in SHOWN} | {"ranks_per_node": node},
                "profile_source": setup.profile.source,
            }
    except ValueError as error:
        raise InputError(str(error)) from error
    seconds = time.perf_counter() - began
    figures["simulated_in"] = round(seconds, 3)
    if options.report:
        from hf_distca.sim.report.simulation import simulation_report

        write_report(options.report, simulation_report(figures).encode())
    if options.json:
        print(json.dumps(figures))
    else:
        print(_table(result, setup, seconds, counted=counted))


def _simulation(
    options: argparse.Namespace, ranks: int, batches: int, servers: int, memory: Memory | None = None
) -> Simulation:
    """Simulate this number of ranks."""
    setup = _setup(options, ranks)
    drawn = drawn_micro_batches(options, ranks * options.tokens_per_rank)
    settings = _settings(options, setup)
    return simulate(drawn, setup, settings, count=batches, servers=servers, memory=memory)


def _memory(options: argparse.Namespace, setup: Setup, *, counted: bool) -> Memory:
    """Return the memory of a GPU: counted on a step of the model itself, or bounded from shapes."""
    from hf_distca.memory.simulated import CountedMemory, LeastMemory  # imports all of transformers

    if not counted:
        return LeastMemory(setup)
    from hf_distca.cli.model_shape import read_config

    return CountedMemory(setup, read_config(options.model), _settings(options, setup), config_of(options))


def _to_copy(options: argparse.Namespace, result: Simulation, setup: Setup) -> dict[str, Any]:
    """Return the simulated training's arguments that differ from the defaults."""
    config = config_of(options)
    changed = {
        setting.name: getattr(config, setting.name)
        for setting in fields(config)
        if getattr(config, setting.name) != setting.default and setting.name != "ranks_per_node"  # the launch gives it
    }
    best = next(way for way in result.ways if way.name == result.best_planned)
    precision = {"bfloat16": {"bf16": True}, "float16": {"fp16": True}}.get(setup.profile.dtype, {})
    return {
        "tokens_per_rank": options.tokens_per_rank,
        **({} if best.document_layout == AUTO else {"document_layout": best.document_layout}),
        **changed,
        checkpointing_name(): options.checkpointing,
        **precision,
    }


def checkpointing_name() -> str:
    """Return the setting's name in the installed transformers; newer versions deprecate the older name."""
    from transformers import TrainingArguments

    new, old = "activation_checkpointing", "gradient_checkpointing"
    return new if new in {setting.name for setting in fields(TrainingArguments)} else old


def _setup(options: argparse.Namespace, ranks: int) -> Setup:
    model = _model(options.model)
    for kind in model.layers:
        if kind.q_heads % options.tensor_parallel:
            raise InputError(
                f"--tensor-parallel {options.tensor_parallel} does not divide the model's {kind.q_heads} query heads"
            )
    return Setup(
        model=model,
        profile=_profile(options),
        ranks=ranks,
        tokens_per_rank=options.tokens_per_rank,
        ranks_per_node=nodes_of_ranks(config_of(options), ranks),
        tensor_parallel=options.tensor_parallel,
        checkpointing=options.checkpointing,
    )


def _profile(options: argparse.Namespace) -> DeviceProfile:
    """Return the device's profile, with given bandwidths in place of its own."""
    profile = DeviceProfile.load(options.profile)

    def changed(links: Links) -> Links:
        within, between = links.within, links.between
        if options.node_bandwidth is not None:
            within = replace(within, bandwidth=options.node_bandwidth * GB)
        if options.network_bandwidth is not None:
            between = replace(between, bandwidth=options.network_bandwidth * GB)
        return replace(links, within=within, between=between)

    return replace(profile, links=changed(profile.links), exchange=changed(profile.exchange))


def _settings(options: argparse.Namespace, setup: Setup) -> PlanSettings:
    config = config_of(options)
    settings = PlanSettings(
        **{**config.planning(setup.ranks), "ranks_per_node": setup.ranks_per_node, "document_layout": "joint"},
        kinds=tuple(map(setup.on_a_gpu, setup.model.layers)),
        bytes_per_value=setup.profile.bytes_per_value,
    )
    check_stages(settings)
    return settings


def _model(name: str) -> ModelShape:
    if name in MODELS:
        return MODELS[name]
    from hf_distca.cli.model_shape import shape_of  # imports all of transformers

    return shape_of(name)


def _table(result: Simulation, setup: Setup, seconds: float, *, counted: bool) -> str:
    memory = "GB" if counted else "GB, least"
    header = ("", "step, s", "attention, s", "other, s", "waits, s", "idle", "tokens/s", "MFU", memory, "cut")
    rows = [
        (
            way.name,
            f"{way.step_seconds:.3f}",
            f"{way.attention_seconds:.3f}",
            f"{way.other_seconds:.3f}",
            f"{way.exchange_seconds:.3f}",
            f"{way.idle:.0%}",
            f"{way.tokens_per_second:,.0f}",
            f"{way.mfu:.1%}",
            "" if way.rows_bytes is None else f"{(way.rows_bytes + (way.state_bytes or 0)) / GB:.1f}",
            f"{way.documents_cut:.1%}",
        )
        for way in result.ways
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in [header, *rows]
    ]
    return "\n".join(
        [
            f"{result.documents:,} documents, {result.tokens:,} tokens; {result.ranks} ranks of "
            f"{result.tokens_per_rank:,} tokens; {setup.profile.name}",
            "",
            *lines,
            "",
            *result.advice,
            f"simulated in {seconds:.1f} s",
        ]
    )

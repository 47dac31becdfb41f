"""hf-distca simulate: predict the time of a training step without a GPU."""

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_distca.cli import InputError
from hf_distca.cli.arguments_file import has_checkpoints, read_arguments
from hf_distca.cli.length_sources import (
    AGENTS_TREE,
    SOURCES,
    documents_with_images,
    drawn_micro_batches,
    drawn_padded_batches,
)
from hf_distca.cli.names import check_model
from hf_distca.cli.options import (
    FROM_ZERO,
    GB,
    MOST_RANKS,
    READING_MODEL,
    add_planning_options,
    batches,
    check_writable,
    config_of,
    gigabytes,
    nodes_of_ranks,
    number,
    positive,
    profile_of,
    run_of,
    sequences,
    shown_nodes,
    wrapped,
    write,
)
from hf_distca.config import DistCAConfig
from hf_distca.plan.arrays import IntArray
from hf_distca.planner.padding import PlannedPadding, plan_padded
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.simulation import with_servers
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.shapes import MODELS, ModelShape
from hf_distca.progress import TORCH_AND_TRANSFORMERS, importing, terminal_status
from hf_distca.run import RunSpec
from hf_distca.sim.compare import (
    Simulation,
    columns_of,
    meaning_of_seconds,
    ranks_of_tokens,
    simulate,
)
from hf_distca.sim.encoders import SimulatedImages
from hf_distca.sim.padded_batches import (
    PaddedFigures,
    padded_advice,
    padded_columns,
    simulate_padded,
)
from hf_distca.sim.report import simulation_report
from hf_distca.sim.trees import DrawnBatch
from hf_distca.units import AUTO, counted

if TYPE_CHECKING:
    from hf_distca.cli.image_sources import ImageDocuments

DESCRIPTION = f"""\
Predict the time of a training step for documents like yours, without a GPU, by each strategy: plain
packing with equal tokens (TRL's packing=True), whole documents balanced, Ulysses and context
parallelism over 2, 4, 8 ... ranks, and hf_distca. The costs of the device were measured. The last
lines report the speed over TRL's packing, and over the best of the other strategies.

{SOURCES} A step has one micro-batch on each rank. It leaves out gradient synchronisation and the
optimizer, which are the same for all strategies. Where training would draw micro-batches whose
documents fit into whole ranks, all strategies get these. Memory is counted as hf-distca plan
--strategy fsdp2 does.
"""

SHARED_IF_PADDED = (
    "These figures are without prefix sharing. Padded batches share equal prefixes: --padded 8 "
    "compares them."
)
"""Advice where sequences have equal prefixes and no padded batches are compared."""
MARK = " *"
IN_TRANSFORMERS = "* transformers, accelerate or TRL run it on packed documents."
"""Mark of strategies in the table, and its meaning."""
TABLE_WIDTH = 100
"""Columns of a terminal that hold a table without broken lines."""
SERVERS = number(FROM_ZERO, minimum=0, maximum=MOST_RANKS, why=": planning would not end in time")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add_planning_options(parser)
    add = parser.add_argument
    links = {"--node-bandwidth": "inside its node", "--network-bandwidth": "between nodes"}
    for name, reach in links.items():
        help_text = f"bandwidth of a rank {reach}, in each direction (default: the profile's)"
        add(name, type=gigabytes, metavar="GB/S", help=help_text)
    add(
        "--tensor-parallel",
        type=positive,
        default=1,
        metavar="G",
        help="GPUs that share each layer (default: 1)",
    )
    servers_help = "simulate M dedicated attention servers too (default: 0)"
    add("--servers", type=SERVERS, default=0, metavar="M", help=servers_help)
    padded = (
        "compare padded batches of B sequences a rank too, as in preference training (default: "
        "none)"
    )
    add("--padded", type=sequences, metavar="B", help=padded)
    add(
        "--batches",
        type=batches,
        default=16,
        metavar="B",
        help="micro-batches to draw (default: 16)",
    )


def run(options: argparse.Namespace) -> None:
    """Simulate and print; raise InputError if the options or files cannot be used."""
    began = time.perf_counter()
    check_writable(options.report)
    check_model(options.model)
    try:
        # 1. The model's shape. A model by name needs torch, so the lengths are read before it.
        arguments = read_arguments(options.config)
        config, checkpointing = config_of(arguments, options), has_checkpoints(arguments)
        if config.tokens_per_rank < 2:
            raise InputError(
                "--tokens-per-rank must be at least 2: memory is counted with full and with half "
                "rows"
            )
        profile = _with_bandwidths(profile_of(config, options), options)
        nodes_of_ranks(config, options.ranks)
        shape = MODELS.get(options.model)
        layout = config.document_layout
        if shape is not None:
            _check_heads(shape, options.tensor_parallel)
        drawn = _drawn(options, config)
        if shape is None:
            shape, layout = _shape_and_layout(options.model, config)
            _check_heads(shape, options.tensor_parallel)
        # 2. The run that is simulated.
        run = run_of(
            config,
            shape,
            options.ranks,
            profile,
            document_layout=layout,
            checkpointing=checkpointing,
            tensor_parallel=options.tensor_parallel,
            strategy="fsdp2",
        )

        with importing(TORCH_AND_TRANSFORMERS):
            from hf_distca.cli.model import read_config
            from hf_distca.memory.simulated import gpu_memory

        # 3. The simulation.
        with terminal_status(READING_MODEL):
            memory = gpu_memory(run, read_config(options.model))
        padded = [] if options.padded is None else _padded(options, run)
        images = drawn.images(run)
        result = simulate(
            drawn.lengths,
            run,
            count=options.batches,
            others=[with_servers(options.servers, run)] if options.servers else [],
            memory=memory,
            images=images,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    # 4. The result, as a file and in the terminal.
    figures = _figures(options, result, padded, run, images)
    figures["simulated_in"] = round(time.perf_counter() - began, 3)
    if options.report:
        shown = ("lengths", "model", "tensor_parallel", "batches", "servers")
        figures["settings"] = _to_copy(config, result, run)
        figures["setting"] = {name: getattr(options, name) for name in shown}
        figures["setting"] |= {
            "checkpointing": checkpointing,
            "ranks_per_node": shown_nodes(config),
        }
        figures["profile_source"] = profile.source
        write(options.report, simulation_report(figures))
    print(json.dumps(figures) if options.json else _table(figures))


def _figures(
    options: argparse.Namespace,
    result: Simulation,
    padded: Sequence[PaddedFigures],
    run: RunSpec,
    images: Sequence[SimulatedImages],
) -> dict[str, Any]:
    figures = {**asdict(result), "profile": run.device.name}
    if images:
        figures["images"] = sum(len(batch.images) for batch in images)
        figures["patches"] = int(sum(batch.images["patches"].sum() for batch in images))
    if padded:
        columns = [padded_columns(strategy, padded[0]) for strategy in padded]
        figures["padded"] = {
            "sequences": options.padded,
            "strategies": [asdict(strategy) for strategy in padded],
            "columns": columns,
            "advice": padded_advice(padded),
        }
    elif options.lengths == AGENTS_TREE:
        figures["advice"] = (*result.advice, SHARED_IF_PADDED)
    return figures


def _padded(options: argparse.Namespace, run: RunSpec) -> Sequence[PaddedFigures]:
    """Compare padded batches.

    Plans without gradients are chosen by the forward alone, as in training.
    """
    batches = drawn_padded_batches(options, run.plans.ranks, options.padded, options.batches)

    def plan(batch: DrawnBatch, run_of_batch: RunSpec) -> PlannedPadding:
        # On one rank nothing is chosen.
        costs = None if run.plans.ranks == 1 else run_of_batch.costs
        return plan_padded(batch.lengths, replace(run.plans, costs=costs), batch.hashes)

    return simulate_padded(batches, run, plan)


class _Drawn(NamedTuple):
    """Micro-batches that are drawn from a source."""

    lengths: Iterable[IntArray]
    documents: Sequence[IntArray] = ()  # numbers of the documents, where these have images
    seen: "ImageDocuments | None" = None

    def images(self, run: RunSpec) -> list[SimulatedImages]:
        """Return the images of each micro-batch; none for text."""
        if self.seen is None:
            return []
        return [self.seen.simulated(documents, run) for documents in self.documents]


def _drawn(options: argparse.Namespace, config: DistCAConfig) -> _Drawn:
    """Return micro-batches as training draws them, with images if the source has any."""
    tokens = PlanSettings(**config.plan_settings(options.ranks)).micro_batch_tokens
    seen = documents_with_images(options)
    if seen is not None:
        documents = list(islice(seen.drawn(tokens), options.batches))
        return _Drawn([seen.lengths[numbers] for numbers in documents], documents, seen)
    return _Drawn(drawn_micro_batches(options, tokens))


def _shape_and_layout(name: str, config: DistCAConfig) -> tuple[ModelShape, str]:
    """Return the shape of a user's model, and the layout of its documents."""
    with importing(TORCH_AND_TRANSFORMERS):
        from hf_distca.cli.model import fake_model
        from hf_distca.models.describe import document_layout
        from hf_distca.models.shape import model_shape

    with terminal_status(READING_MODEL):
        model = fake_model(name)
        return model_shape(model), document_layout(model, config)


def _check_heads(model: ModelShape, tensor_parallel: int) -> None:
    """Raise InputError unless tensor parallelism divides the query heads of every layer."""
    for kind in model.layers:
        if kind.q_heads % tensor_parallel:
            raise InputError(
                f"--tensor-parallel {tensor_parallel} does not divide the model's {kind.q_heads} "
                "query heads"
            )


def _with_bandwidths(profile: DeviceProfile, options: argparse.Namespace) -> DeviceProfile:
    """Return a profile with the bandwidths that the options set."""
    links, exchange = profile.links, profile.exchange
    for reach, rate in (("within", options.node_bandwidth), ("between", options.network_bandwidth)):
        if rate is not None:
            links = replace(links, **{reach: replace(getattr(links, reach), bandwidth=rate * GB)})
            exchange = replace(
                exchange, **{reach: replace(getattr(exchange, reach), bandwidth=rate * GB)}
            )
    return replace(profile, links=links, exchange=exchange)


def _to_copy(config: DistCAConfig, result: Simulation, run: RunSpec) -> dict[str, Any]:
    """Return the simulated training's arguments that differ from the defaults."""
    from hf_distca.checks.setting_names import CHECKPOINTING

    default = vars(DistCAConfig())
    changed = {name: value for name, value in vars(config).items() if value != default[name]}
    if "planning" in changed:
        changed["planning"] = config.planning.plain()
    changed.pop("ranks_per_node", None)  # the launch gives the nodes
    best = next(strategy for strategy in result.strategies if strategy.name == result.best_planned)
    return {
        "tokens_per_rank": config.tokens_per_rank,
        **({} if best.document_layout == AUTO else {"document_layout": best.document_layout}),
        **changed,
        CHECKPOINTING: run.checkpointing is not None,
        **{"bfloat16": {"bf16": True}, "float16": {"fp16": True}}.get(run.device.dtype, {}),
    }


def _table(figures: Mapping[str, Any]) -> str:
    lines = [*_aligned([*map(_marked_columns, figures["strategies"])]), IN_TRANSFORMERS]
    advice = list(figures["advice"])
    padded = figures.get("padded")
    padded_lines: list[str] = []
    if padded is not None:
        sequences = counted(padded["sequences"], "sequence")
        title = f"Padded batches of {sequences} a rank. Rows: those that all ranks compute."
        padded_lines = ["", wrapped(title), *_aligned(padded["columns"])]
        advice.append(padded["advice"])
    documents = counted(figures["documents"], "document")
    tokens = counted(figures["tokens"], "token")
    if "images" in figures:
        documents += f" with {counted(figures['images'], 'image')}"
        tokens += f", {counted(figures['patches'], 'patch', 'patches')}"
    first = f"{documents}, {tokens}; {ranks_of_tokens(figures)}; {figures['profile']}"
    simulated = f"simulated in {figures['simulated_in']:.1f} s"
    wrapped_advice = map(wrapped, advice)
    seconds = meaning_of_seconds(figures["strategies"][0])
    return "\n".join(
        [wrapped(first), "", seconds, *lines, *padded_lines, "", *wrapped_advice, simulated]
    )


def _marked_columns(strategy: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of the table; strategies that transformers run have a mark."""
    name = strategy["name"] + MARK * strategy["in_transformers"]
    return {**columns_of(strategy), "": name}


def _aligned(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines of a table, its header first.

    Columns that do not fit into `TABLE_WIDTH` follow below, beside the names of the rows.

    `rows` are the cells of each row by the title of the column.
    """
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    names, *columns = map(list, zip(*cells, strict=True))
    names_width = max(map(len, names))
    lines: list[str] = []
    block = [name.ljust(names_width) for name in names]
    for column in columns:
        width = max(map(len, column))
        if len(block[0]) + 1 + width > TABLE_WIDTH:
            lines += [*block, ""]
            block = [name.ljust(names_width) for name in names]
        block = [f"{line} {cell:>{width}}" for line, cell in zip(block, column, strict=True)]
    return [*lines, *block]

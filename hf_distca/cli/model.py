"""A user's model on fake tensors: its config, kinds of attention, shape and memory."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel

from hf_distca.cli.names import no_config
from hf_distca.cli.options import GB
from hf_distca.memory.counted_encoder import Encoded
from hf_distca.memory.counter import MEMORY, MemoryCounter
from hf_distca.memory.live import Part
from hf_distca.models.fake import model_of_config
from hf_distca.models.model_facts import check_model
from hf_distca.models.shape import mixing_shape
from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.arrays import IntArray
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.mixing_layers import CountedCuts, count_cuts
from hf_distca.predict.shapes import MODELS, ModelShape
from hf_distca.progress import terminal_bar
from hf_distca.run import STRATEGIES, RunSpec

STATE_PARTS = ("weights", "gradients", "optimizer")
"""Parts of a model's state, which a table shows even where they are empty."""


class Case(NamedTuple):
    """How a step keeps what layers need for their backward."""

    shown: str  # in a table
    checkpointing: dict[str, Any] | None  # transformers' keyword arguments; None without
    offload: bool  # whether activation checkpoints are on the host


CASES = {
    "without_checkpointing": Case("no", None, False),
    "with_checkpointing": Case("yes", {}, False),
    "with_offload": Case("offload", {}, True),
}
TABLE_COLUMNS = 6
"""Columns of numbers in a table of memory: two for each of three strategies, which fit a terminal
of 100 columns."""
NAMES: dict[Part, str] = {
    "encoder": "encoder of images",
    "activations": "activations",
    "cast weights": "autocast's copies of weights",
    "kept O": "kept O and log-sum-exp",
    "exchange buffers": "exchange buffers",
    "plan": "row numbers of the plan",
    "loss": "loss",
    "backward": "gradients under way",
}
"""Labels for the parts of a micro-batch's memory."""


def fake_model(name: str) -> PreTrainedModel:
    """Return a user's model on fake tensors.

    Raise ValueError if there is none, or the model cannot be planned.
    """
    config = read_config(name)
    try:
        model = model_of_config(config, torch.float32)
    except ValueError as error:
        raise no_config(name, error) from error
    check_model(model)
    return model


def read_config(name: str) -> PreTrainedConfig:
    """Return the config of a model.

    Args:
        name: one of `MODELS`, a config.json, a folder with one, or a name on the hub.

    Raises:
        InputError: there is no config, or transformers does not know the model.
    """
    if name in MODELS:
        return config_of_shape(MODELS[name])
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise no_config(name, error) from error
    return config


def config_of_shape(shape: ModelShape) -> LlamaConfig:
    """Return the config of a LLaMA-like model of this shape, see `ModelShape.llama`."""
    (kind,) = shape.layers
    output = shape.hidden * kind.q_heads * kind.dim_v
    return LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=(shape.after_attention - output) // (3 * shape.hidden),
        num_hidden_layers=shape.depth,
        num_attention_heads=kind.q_heads,
        num_key_value_heads=kind.kv_heads,
        head_dim=kind.dim_qk,
        vocab_size=shape.head // shape.hidden,
    )


def mixing_of(
    model: PreTrainedModel, plans: Sequence[MicroBatchPlan], settings: PlanSettings
) -> dict[str, float] | None:
    """Return figures of a layer that mixes rows in order; None for a model without.

    Args:
        plans: of each pod.
    """
    shape = mixing_shape(model)
    if shape is None:
        return None
    nodes = settings.nodes or (0,) * settings.ranks
    cuts = [
        [
            count_cuts(nano.layout, nodes[plan.ranks.start : plan.ranks.stop])
            for nano in plan.nano_batches
        ]
        for plan in plans
    ]
    halo = shape.width * shape.channels * settings.bytes_per_value

    def most_of_ranks(runs: Callable[[CountedCuts], IntArray]) -> int:
        """Return the runs of the busiest rank, of all its nano-batches."""
        return max(int(np.sum([runs(cut) for cut in of_pod], axis=0).max()) for of_pod in cuts)

    return {
        "layers": shape.layers,
        "runs": most_of_ranks(lambda cut: cut.runs),
        "runs_unpacked": most_of_ranks(lambda cut: cut.segments + cut.uncut_documents),
        "segments": sum(int(cut.segments.sum()) for of_pod in cuts for cut in of_pod),
        "state_bytes": shape.state_bytes,
        "bytes_bottleneck": max(
            sum(cut.bytes_moved(halo, shape.state_bytes) for cut in of_pod) for of_pod in cuts
        ),
    }


def memory_of(
    model: PreTrainedModel,
    plan: MicroBatchPlan,
    run: RunSpec,
    options: argparse.Namespace,
    *,
    offload: bool,
    encoded: Encoded | None = None,
) -> dict[str, Any]:
    """Return bytes on a rank by strategy and checkpointing, and the longest rows that fit.

    The strategies are those that the options ask for.

    Args:
        offload: count what checkpoints keep as host memory, beside checkpoints on the device.
        encoded: images of the rank with the most patches; None without images.
    """
    device = MEMORY if options.device_memory is None else int(options.device_memory * GB)
    run = replace(run, device_memory=device)
    memory = MemoryCounter(model, by_config=True)
    figures: dict[str, Any] = {}
    counted_cases = list(CASES)[1:] if offload else list(CASES)[:-1]
    strategies = STRATEGIES if options.strategy is None else (options.strategy,)
    cases = list(product(strategies, counted_cases))
    for strategy, name in terminal_bar(cases, "Counting memory"):
        _, checkpointing, offloaded = CASES[name]
        case_run = replace(run, checkpointing=checkpointing, offload=offloaded)
        counted_run = replace(case_run, strategy=strategy)
        counted = memory.count(plan, counted_run, encoded=encoded)
        case: dict[str, Any] = {"parts": dict(counted.parts), "total": counted.total}
        if offloaded:
            case["host"] = counted.host
        if options.device_memory is not None:
            for_text = device - counted.parts.pop("encoder", 0)
            case["longest_rows"] = memory.longest(for_text, counted_run, counted)
        figures.setdefault(strategy, counted.state._asdict())[name] = case
    return figures


def exchange_buffers_of(figures: dict[str, Any]) -> int:
    """Return the bytes of exchange buffers in the figures of `memory_of`, the largest of a case."""
    sizes: list[int] = [
        state[name]["parts"].get("exchange buffers", 0)
        for state in figures.values()
        for name in CASES
        if name in state
    ]
    return max(sizes)


def memory_rows(figures: dict[str, Any], device_memory: float | None) -> dict[str, list[str]]:
    """Return the figures of `memory_of` in GB as cells of a table by the heading of their row."""
    columns: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    strategies: list[str] = []
    shown_cases: list[str] = []
    for strategy, state in figures.items():
        cases = [name for name in CASES if name in state]
        columns += [(state, state[name]) for name in cases]
        strategies += [strategy, *[""] * (len(cases) - 1)]
        shown_cases += [CASES[name].shown for name in cases]
    rows = {"memory of a rank, GB": strategies, "checkpointing": shown_cases}
    # [columns] bytes of each row: the model's state, the parts of a micro-batch, and their sum.
    sizes: dict[str, list[float]] = {}
    for name in STATE_PARTS:
        sizes[name] = [state[name] for state, _ in columns]
    for part, name in NAMES.items():
        sizes[name] = [counted["parts"].get(part, 0) for _, counted in columns]
    sizes["together"] = [counted["total"] for _, counted in columns]
    sizes["in host memory"] = [counted.get("host", 0) for _, counted in columns]
    for name, row in sizes.items():
        if any(row) or name in STATE_PARTS:
            rows[name] = [f"{size / GB:.2f}" for size in row]
    if device_memory is not None:
        longest = [str(counted["longest_rows"]) for _, counted in columns]
        rows[f"longest rows in {device_memory:g} GB"] = longest
    return rows


def memory_table(rows: dict[str, list[str]]) -> str:
    """Return the rows of `memory_rows` as text: tables that fit a terminal."""
    count = max(map(len, rows.values()))
    tables: list[str] = []
    for start in range(0, count, TABLE_COLUMNS):
        lines = []
        for name, values in rows.items():
            cells = "".join(f"{value:>9}" for value in values[start : start + TABLE_COLUMNS])
            lines.append(f"{name:<30} {cells}".rstrip())
        tables.append("\n".join(lines))
    return "\n\n".join(tables)

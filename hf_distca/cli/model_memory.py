"""Memory of a model on a rank, for hf-distca plan."""

import argparse
from collections.abc import Iterable
from typing import Any

import torch

from hf_distca.cli.input_error import InputError
from hf_distca.cli.model_shape import read_config
from hf_distca.cli.settings import config_of
from hf_distca.config import DistCAConfig
from hf_distca.memory.counter import MemoryCounter, Training
from hf_distca.memory.live import Part, without_numbers
from hf_distca.memory.model_state import STRATEGIES
from hf_distca.models.fake import model_of_config
from hf_distca.models.kinds import layers_by_kind
from hf_distca.models.refusals import check_model
from hf_distca.models.settings import document_layout
from hf_distca.plan import AttentionKind, MicroBatchPlan
from hf_distca.planner.settings import PlanSettings

GB = 1e9

OF_STATE = ("weights", "gradients", "optimizer")
CHECKPOINTING: dict[str, dict[str, Any] | None] = {"without_checkpointing": None, "with_checkpointing": {}}

NAMES: dict[Part, str] = {
    "activations": "activations",
    "cast weights": "autocast's copies of weights",
    "kept O": "kept O and log-sum-exp",
    "exchange buffers": "exchange buffers",
    "plan": "row numbers of the plan",
    "loss": "loss",
    "backward": "gradients under way",
}
"""Labels for the parts of a micro-batch's memory."""


class ModelMemory:
    """Memory that training a user's model takes; InputError if the model cannot be found or planned."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._config = read_config(options.model)
        try:
            model = model_of_config(self._config, torch.float32, without_numbers())
            self._model = model
            check_model(model)
            self.kinds: tuple[AttentionKind, ...] = tuple(layers_by_kind(model))
        except ValueError as error:
            raise InputError(str(error)) from error

    def document_layout(self, config: DistCAConfig) -> str:
        """Return the layout of documents for the model; see `hf_distca.models.settings.document_layout`."""
        return document_layout(self._model, config)

    def figures(self, plan: MicroBatchPlan, settings: PlanSettings) -> dict[str, Any]:
        """Return bytes on a rank by strategy and checkpointing, and the longest rows that fit."""
        options = self._options
        memory = MemoryCounter(self._config, settings, config_of(options))
        figures: dict[str, Any] = {}
        for strategy in STRATEGIES:
            for name, checkpointing in CHECKPOINTING.items():
                training = Training(strategy, options.dtype != "float32", checkpointing)
                counted = memory.count(plan, training)
                found: dict[str, Any] = {"parts": counted.parts, "total": counted.total}
                if options.device_memory is not None:
                    found["longest_tokens_per_rank"] = memory.longest(int(options.device_memory * GB), training)
                figures.setdefault(strategy, {**vars(counted.state)})[name] = found
        return figures

    def lines(self, figures: dict[str, Any]) -> list[str]:
        """Return the figures as the lines of a table in GB."""
        columns = [(figures[strategy], figures[strategy][way]) for strategy in figures for way in CHECKPOINTING]
        lines = [
            _line("memory of a rank, GB", (text for strategy in figures for text in (strategy, ""))),
            _line("checkpointing", (text for _ in figures for text in ("no", "yes"))),
            *(_line(name, [_gb(state[name]) for state, _ in columns]) for name in OF_STATE),
        ]
        for part, name in NAMES.items():
            sizes = [way["parts"].get(part, 0) for _, way in columns]
            if any(sizes):
                lines.append(_line(name, map(_gb, sizes)))
        lines.append(_line("together", [_gb(way["total"]) for _, way in columns]))
        if self._options.device_memory is not None:
            title = f"longest rows in {self._options.device_memory:g} GB"
            lines.append(_line(title, [str(way["longest_tokens_per_rank"]) for _, way in columns]))
        return lines


def _line(name: str, values: Iterable[str]) -> str:
    return f"{name:<30} " + "".join(f"{value:>9}" for value in values)


def _gb(size: int) -> str:
    return f"{size / GB:.2f}"

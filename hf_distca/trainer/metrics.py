"""Metrics that a training logs: meanings, computation, the few on a console, and warnings."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from hf_distca.config import DistCAConfig
from hf_distca.dispatch.bound import BoundPlan, Ran
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.padded_rows import PackedBatch
from hf_distca.kernels.speed import peak_flops
from hf_distca.models.flops import flops_counter
from hf_distca.models.kinds import layers_by_kind
from hf_distca.plan import AttentionKind, MicroBatchPlan, PlanChoice
from hf_distca.plan.figures import loads_of
from hf_distca.pool.rank.pool import FIGURES
from hf_distca.profiling.costs import LearnedCosts
from hf_distca.units import AUTO

logger = logging.getLogger(__name__)

PREFIX = "distca/"
"""Prefix of all metric names, by which trackers group metrics: W&B and TensorBoard show
train/distca/…"""
# When a metric is logged, as the reference page says it.
ALWAYS = ""
NODES = "Ranks share nodes"
CHOSEN = "The planner chooses"
CUDA = "CUDA"
PADDED = "Trainers with padded batches"
SHARED = "Prefix sharing"


class Metric(NamedTuple):
    """Unit and meaning of a figure that the trainer logs."""

    unit: str  # "share" is from 0 to 1
    meaning: str  # since the last log
    condition: str = ALWAYS  # when the figure is logged


METRICS: dict[str, Metric] = {
    "tokens_per_second": Metric("tokens/s", "Tokens of all ranks per second"),
    "tokens_per_second_per_device": Metric(
        "tokens/s", "The same per process that trains or computes core attention"
    ),
    "imbalance_degree": Metric(
        "ratio", "Query-key pairs of the busiest rank over the mean, as planned"
    ),
    "imbalance_degree_packed": Metric("ratio", "The same for documents packed in order"),
    "attention_ms": Metric(
        "ms per step", "Time in kernel calls of core attention, on the slowest rank"
    ),
    "attention_ms_predicted": Metric(
        "ms per step", "The same on the busiest rank, if all ranks were equally fast"
    ),
    "exchange_bytes": Metric(
        "bytes", "Bytes through the busiest rank in the forward pass of one layer"
    ),
    "exchange_stages": Metric("stages", "Stages in which K and V rows travel in a layer"),
    "exchange_wait_seconds": Metric("s", "Time in waits for rows, on the rank that waited longest"),
    "exposed_exchange_share": Metric("share", "The same as a share of the elapsed time"),
    "ping_pong_share": Metric(
        "share", "Share of decoder layer runs in which two nano-batches took turns"
    ),
    "exchange_bytes_within_nodes": Metric(
        "bytes", "Bytes of the busiest rank inside its node", NODES
    ),
    "exchange_bytes_between_nodes": Metric(
        "bytes", "Bytes of the busiest rank between nodes", NODES
    ),
    "busiest_node_bytes_within": Metric(
        "bytes", "Bytes inside the busiest node, all of its ranks together", NODES
    ),
    "busiest_node_bytes_between": Metric(
        "bytes", "Bytes between all ranks of the busiest node and others", NODES
    ),
    "step_ms": Metric("ms", "Time of an optimizer step", CHOSEN),
    "step_ms_predicted": Metric("ms", "The same as the planner's costs predict it", CHOSEN),
    "gain_predicted": Metric(
        "ratio", "Predicted time of documents packed in order over that of the plans", CHOSEN
    ),
    "plans_without_exchange": Metric(
        "share", "Share of micro-batches in which no rows travel", CHOSEN
    ),
    "plans_within_nodes": Metric(
        "share", "Share of micro-batches in which rows travel only inside nodes", CHOSEN
    ),
    **{name: Metric(*described) for name, described in FIGURES.items()},
    "padding_share": Metric(
        "share", "Share of padded batches that is padding, which is not computed", PADDED
    ),
    "computed_rows": Metric(
        "rows per step", "Rows that all ranks compute: tokens, without shared rows", SHARED
    ),
    "shared_rows": Metric(
        "rows per step",
        "Tokens that are not computed, because another sequence begins with them too",
        SHARED,
    ),
    "mfu": Metric(
        "share",
        "Model FLOPs utilization in bfloat16, on A100, A800, H100, H200, H800, B200 and L40S",
        CUDA,
    ),
    "memory_peak_gib": Metric("GiB", "Most memory in use on this rank", CUDA),
    "memory_reserved_gib": Metric("GiB", "Memory that the CUDA allocator of this rank holds", CUDA),
}
"""All metrics by name, in the order of the documentation; `StepMeter.figures` computes them."""
GIB = 2**30


def attention_as_chosen(plans: Sequence[MicroBatchPlan], rank: int) -> float | None:
    """Return the predicted seconds of a rank's core attention, if the planner chose all plans."""
    if any(plan.choice is None for plan in plans):
        return None
    return sum(plan.choice.attention[rank - plan.first_rank] for plan in plans if plan.choice)


def attention_as_shared(
    layers: Mapping[AttentionKind, int],
    plans: Sequence[MicroBatchPlan],
    measured_seconds: Sequence[float],
) -> float:
    """Return the seconds of core attention on the busiest rank, as its share of the measured ones.

    The share is that of the query-key pairs of all ranks, weighted by the width of the heads.

    Args:
        layers: number of layers of each kind of attention.
        plans: of micro-batches that have run.
        measured_seconds: [ranks] seconds in the kernels of each rank for these micro-batches.
    """
    # The number of workers beyond the ranks changes.
    work = np.zeros(len(measured_seconds))  # [ranks]
    for plan in plans:
        for nano_batch in plan.nano_batches:
            for kind, kind_plan in nano_batch.plans.items():
                width = layers[kind] * kind.q_heads * (kind.dim_qk + kind.dim_v)
                work += loads_of(kind_plan)[: len(measured_seconds)].astype(np.float64) * width
    return float(sum(measured_seconds) * np.max(work) / max(np.sum(work), 1.0))


def _choices(plans: Sequence[MicroBatchPlan]) -> list[PlanChoice] | None:
    """Return the planner's choice for each plan; None if it did not choose all of them."""
    choices = [plan.choice for plan in plans if plan.choice is not None]
    return choices if len(choices) == len(plans) else None


class StepMeter(TrainerCallback):
    """Collect figures of micro-batches and return them when the trainer logs."""

    def __init__(self, dispatcher: Dispatcher, model: nn.Module, processes: int) -> None:
        self._dispatcher = dispatcher
        self._processes = processes
        self._costs: LearnedCosts | None = None  # None: steps also compute what is not in the plans
        self._layers = layers_by_kind(model)
        self._device = dispatcher.device
        self._is_cuda = self._device.type == "cuda"
        device_name = torch.cuda.get_device_name(self._device) if self._is_cuda else ""
        self._peak_flops = peak_flops(device_name)
        self._count_flops: Callable[[MicroBatchPlan], float] | None = None
        if self._peak_flops is not None:
            processes_per_rank = max(processes // dispatcher.groups.ranks, 1)
            self._count_flops = flops_counter(model, processes_per_rank)
        self.on_train_begin()

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Reset the figures, which leave out start-up and the rest of an earlier training."""
        # Of each micro-batch: plan, what ran, and number of stages.
        self._counted: list[tuple[MicroBatchPlan, Ran, int]] = []
        self._padded_rows = 0  # of this rank's padded batches, padding included
        self.steps = 0  # since figures were last returned
        self._since = self._seconds()  # when figures were last returned

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Count the step."""
        self.steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave an evaluation inside the block out of the time, the waits and the kernel calls."""
        begin = self._seconds()
        yield
        self._since += self._seconds() - begin

    def _seconds(self) -> NDArray[np.float64]:
        """Return [3] seconds so far: elapsed, in waits and in kernel calls."""
        seconds = self._dispatcher.recorder.seconds
        return np.array([time.perf_counter(), seconds("wait"), seconds("kernel")])

    def compare_with(self, costs: LearnedCosts) -> None:
        """Also report predicted and measured seconds of steps, by these costs.

        Call it only where steps compute nothing besides the planned micro-batches.
        """
        self._costs = costs

    def count(self, bound: BoundPlan) -> None:
        """Note a micro-batch that is about to run."""
        self._counted.append((bound.plan, bound.ran, bound.stages))

    def count_padded(self, packed: PackedBatch) -> None:
        """Note a padded batch whose micro-batches are about to run."""
        for _, bound in packed.micro_batches:
            self.count(bound)
        self._padded_rows += math.prod(packed.travel.shape)

    def figures(self) -> dict[str, float]:
        """Return the figures since the last call, by their names in `METRICS`. A collective."""
        if not self._counted:
            return {}
        measured = self._measured()
        figures = {
            **self._figures_of_time(measured),
            **measured.of_plans,
            **self._figures_of_predictions(measured),
        }
        if self._dispatcher.remote is not None:
            figures |= self._dispatcher.remote.figures()
        if self._is_cuda:
            figures["memory_peak_gib"] = torch.cuda.max_memory_allocated(self._device) / GIB
            figures["memory_reserved_gib"] = torch.cuda.memory_reserved(self._device) / GIB
            torch.cuda.reset_peak_memory_stats(self._device)
        self.on_train_begin()
        return figures

    def _measured(self) -> "_Measured":
        """Return the times and counts of all ranks since the last log. A collective."""
        elapsed, waits, attention = (self._seconds() - self._since).tolist()
        plans = [plan for plan, _, _ in self._counted]
        rank = self._dispatcher.groups.rank
        as_chosen = attention_as_chosen(plans, rank)
        # One rank of each pod counts the operations of its pod.
        own_plans = [plan for plan in plans if plan.first_rank == rank]
        flops = 0.0 if self._count_flops is None else sum(map(self._count_flops, own_plans))
        own = (waits, attention, self._padded_rows, as_chosen, flops, self._figures_of_plans(plans))
        of_ranks = list(zip(*self._dispatcher.groups.all_gather(own), strict=True))
        waits_of_ranks, attention_of_ranks, padded_rows, predicted, flops_of_ranks, figures = (
            of_ranks
        )
        return _Measured(
            elapsed,
            waits_of_ranks,
            attention_of_ranks,
            sum(padded_rows),
            plans,
            attention_as_shared(self._layers, plans, attention_of_ranks)
            if as_chosen is None
            else max(predicted),
            sum(flops_of_ranks),
            of_all_pods(figures),
        )

    def _figures_of_time(self, measured: "_Measured") -> dict[str, float]:
        """Return speed, waits and the times of core attention."""
        elapsed = measured.elapsed
        plans = measured.plans
        shared_rows = sum(plan.shared_rows for plan in plans)
        tokens = sum(plan.document_tokens for plan in plans)
        remote = self._dispatcher.remote
        devices = self._processes + (0 if remote is None else remote.present)
        longest_wait = max(measured.waits)
        figures = {
            "tokens_per_second": tokens / elapsed,
            "tokens_per_second_per_device": tokens / elapsed / devices,
            "exchange_wait_seconds": longest_wait,
            "exposed_exchange_share": longest_wait / elapsed,
        }
        if measured.padded_rows:
            figures["padding_share"] = 1 - tokens / measured.padded_rows
        # Rows a step, where padding is left out or prefixes are shared.
        if self.steps and (measured.padded_rows or shared_rows):
            figures["computed_rows"] = (tokens - shared_rows) / self.steps
            figures["shared_rows"] = shared_rows / self.steps
        if self.steps:
            figures["attention_ms"] = max(measured.attention) * 1e3 / self.steps
            figures["attention_ms_predicted"] = measured.predicted_attention * 1e3 / self.steps
        computes_plans_alone = self._costs is not None
        if self._count_flops is not None and self._peak_flops and computes_plans_alone:
            figures["mfu"] = measured.flops / (elapsed * devices * self._peak_flops)
        return figures

    def _figures_of_plans(self, plans: Sequence[MicroBatchPlan]) -> dict[str, float]:
        """Return balance, turns of nano-batches and exchanged bytes of this rank's pods."""
        summaries = [plan.summary for plan in plans]
        exchanges = [summary.exchange for summary in summaries]
        runs = [ran for _, ran, _ in self._counted]
        layers_in_turns = sum(ran.layers_in_turns for ran in runs)
        layers = sum(ran.layers for ran in runs)
        figures = {
            "imbalance_degree_packed": _mean(summary.packed_max_over_mean for summary in summaries),
            "imbalance_degree": _mean(summary.max_over_mean for summary in summaries),
            "exchange_bytes": _mean(exchange.bytes_bottleneck for exchange in exchanges),
            "ping_pong_share": layers_in_turns / max(layers, 1),
            "exchange_stages": _mean(stages for _, _, stages in self._counted),
        }
        if self._dispatcher.settings.nodes is not None:
            figures |= {
                "exchange_bytes_within_nodes": _mean(
                    exchange.bytes_within_nodes_bottleneck for exchange in exchanges
                ),
                "exchange_bytes_between_nodes": _mean(
                    exchange.bytes_between_nodes_bottleneck for exchange in exchanges
                ),
                "busiest_node_bytes_within": _mean(
                    exchange.bytes_within_nodes_busiest_node for exchange in exchanges
                ),
                "busiest_node_bytes_between": _mean(
                    exchange.bytes_between_nodes_busiest_node for exchange in exchanges
                ),
            }
        choices = _choices(plans)
        if self.steps and choices is not None:
            seconds = sum(choice.seconds for choice in choices)
            figures |= {
                "gain_predicted": sum(choice.packed_seconds for choice in choices) / seconds,
                "plans_without_exchange": _mean(
                    exchange.bytes_total == 0 for exchange in exchanges
                ),
                "plans_within_nodes": _mean(
                    exchange.bytes_total > 0 and exchange.bytes_between_nodes == 0
                    for exchange in exchanges
                ),
            }
        return figures

    def _figures_of_predictions(self, measured: "_Measured") -> dict[str, float]:
        """Return predicted and measured seconds of a step, if the planner chose all plans."""
        choices = _choices(measured.plans)
        figures: dict[str, float] = {}
        if self.steps and choices is not None and self._costs is not None:
            seconds = sum(choice.seconds for choice in choices)
            figures["step_ms"] = measured.elapsed * 1e3 / self.steps
            figures["step_ms_predicted"] = (seconds / self.steps + self._costs.besides) * 1e3
        return figures


class _Measured(NamedTuple):
    """Times and counts of all ranks since the last log."""

    elapsed: float  # seconds
    waits: Sequence[float]  # [ranks] seconds in waits for rows
    attention: Sequence[float]  # [ranks] seconds in kernel calls
    padded_rows: int  # rows of all ranks' padded batches, padding included
    plans: Sequence[MicroBatchPlan]  # of the micro-batches that have run, for this rank's pods
    predicted_attention: float  # seconds of the busiest rank
    flops: float  # operations of all ranks, 0 if they are not counted
    of_plans: Mapping[str, float]  # balance and exchanges of all pods


def of_all_pods(figures_of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of all pods, from those of each rank's pods.

    A share is the mean of the ranks. Any other figure is the largest: that of the pod for which all
    others wait.
    """
    figures = dict(figures_of_ranks[0])
    for name, first in figures.items():
        values = [figures_of_rank[name] for figures_of_rank in figures_of_ranks]
        if any(value != first for value in values):
            figures[name] = _mean(values) if METRICS[name].unit == "share" else max(values)
    return figures


def _mean(values: Iterable[float]) -> float:
    """Return the mean of at least one value."""
    listed = list(values)
    return sum(listed) / len(listed)


# The console


def for_console(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs with a few readable figures in place of all figures of hf_distca.

    All figures are shares and ratios. Imbalance is left out where no core attention moves: whole
    documents then lie where ranks finish together, with all that their tokens take.

    Texts are in ASCII: some terminals cannot print other characters, and raise an error.
    """
    short = {name: value for name, value in logs.items() if not name.startswith(PREFIX)}
    figures = {
        name.removeprefix(PREFIX): value for name, value in logs.items() if name.startswith(PREFIX)
    }
    if "tokens_per_second" in figures:
        short["tokens/s"] = f"{figures['tokens_per_second']:,.0f}"
    if figures.get("exchange_bytes"):
        short["imbalance"] = (
            f"{figures['imbalance_degree_packed']:.2f} -> {figures['imbalance_degree']:.2f}"
        )
    if "exposed_exchange_share" in figures:
        short["exposed wait"] = f"{figures['exposed_exchange_share']:.1%}"
    if "gain_predicted" in figures:
        short["gain"] = f"{figures['gain_predicted']:.2f}"
    if "mfu" in figures:
        short["mfu"] = f"{figures['mfu']:.1%}"
    return short


class ShortProgress(ProgressCallback):
    """transformers' progress bar, which prints few figures beside it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a log."""
        base_callback: Any = super()  # without types
        base_callback.on_log(args, state, control, logs=for_console(logs or {}), **kwargs)


class ShortPrinter(PrinterCallback):
    """transformers' printer of logs, which prints few figures."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a log."""
        base_callback: Any = super()  # without types
        base_callback.on_log(args, state, control, logs=for_console(logs or {}), **kwargs)


SHORT: dict[type[TrainerCallback], type[TrainerCallback]] = {
    ProgressCallback: ShortProgress,
    PrinterCallback: ShortPrinter,
}
"""For each callback of transformers that prints logs, the class that prints few figures."""


def shorten_console(handler: CallbackHandler) -> None:
    """Let transformers' own callbacks print few figures.

    Callbacks of other classes stay as they are.
    """
    for callback in handler.callbacks:
        if type(callback) in SHORT:
            # The same object, because a user may hold it, and may have set its `max_str_len`.
            callback.__class__ = SHORT[type(callback)]


# Warnings

STEPS = 50
"""Number of steps averaged for a warning: fewer steps depend too much on their documents."""
REMEDIES = {
    "imbalance_degree": (
        "distca/imbalance_degree is {1:.2f}: the busiest rank computes that many times the mean "
        "core attention, and all ranks wait for it; leave balance_tolerance (it is "
        "{0.planning.balance_tolerance}) and balance_block_size (it is "
        "{0.planning.balance_block_size}) out of planning, or raise tokens_per_rank"
    ),
    "exposed_exchange_share": (
        "distca/exposed_exchange_share is {1:.2f}: a rank waits for rows during that share of a "
        "step; leave ping_pong (it is {0.planning.ping_pong}) and balance_tolerance (it is "
        "{0.planning.balance_tolerance}) out of planning, check links and nodes with hf-distca "
        "doctor, and find the long waits with trace_steps=3"
    ),
    "ping_pong_share": (
        "distca/ping_pong_share is {1:.2f}: few micro-batches run as two nano-batches, so "
        "exchanges are not hidden; raise tokens_per_rank until no document has more than half of "
        "a micro-batch's tokens, and put hooks on decoder layers, not inside them"
    ),
}
"""Warnings about figures, as format strings of the settings and the figure."""
NO_TARGETS = (
    "the loss is 0: no document since the last log has a target, so weights do not change. Give "
    "labels other than -100, or leave the column 'labels' out: each token then predicts the next "
    "one. A document of one token has none"
)


class Remedies:
    """Average figures over some fifty steps, and warn of each problem once."""

    def __init__(self, settings: DistCAConfig, *, ping_pong: bool) -> None:
        self._settings = settings
        # Least and greatest mean of a figure without a warning.
        self._limits = {"exposed_exchange_share": (-math.inf, 0.1)}
        # With "auto" the planner chooses these two.
        if settings.planning.balance_tolerance != AUTO:
            self._limits["imbalance_degree"] = (-math.inf, 1.1)
        if ping_pong and settings.planning.ping_pong is True:
            self._limits["ping_pong_share"] = (0.1, math.inf)
        self._seen: list[tuple[int, Mapping[str, float]]] = []  # steps, and means over them
        self._seen_without_targets = False

    def see_loss(self, loss: float) -> None:
        """Warn once of a logged loss of 0, which documents without a target have."""
        if loss == 0 and not self._seen_without_targets:
            self._seen_without_targets = True
            logger.warning(NO_TARGETS)

    def see(self, figures: Mapping[str, float], steps: int) -> None:
        """Add means over some steps, from `StepMeter.figures`; empty figures change nothing."""
        if figures:
            self._seen.append((steps, figures))
        total = sum(steps for steps, _ in self._seen)
        if total < STEPS:
            return
        for name, (low, high) in list(self._limits.items()):
            mean = sum(figures[name] * steps for steps, figures in self._seen) / total
            if not low <= mean <= high:
                logger.warning(
                    "mean of the last steps: %s", REMEDIES[name].format(self._settings, mean)
                )
                del self._limits[name]
        self._seen = []

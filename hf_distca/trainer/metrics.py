"""Metrics that a training logs: their names and meanings, what computes them, and warnings with remedies."""

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
from transformers import TrainerCallback

from hf_distca.config import DistCAConfig
from hf_distca.dispatch.bound import BoundPlan, Ran
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.padded import PackedBatch
from hf_distca.kernels.speed import peak_flops
from hf_distca.models.decoder import base_model
from hf_distca.models.kinds import layers_by_kind
from hf_distca.models.shape import count_of, weights_met
from hf_distca.plan import AttentionKind, MicroBatchPlan
from hf_distca.plan.cost import pairs
from hf_distca.plan.metrics import loads_of
from hf_distca.pool.rank.pool import Pool
from hf_distca.trainer.costs import LearnedCosts
from hf_distca.units import AUTO

logger = logging.getLogger(__name__)

PREFIX = "distca/"
"""Prefix of all metric names, by which trackers group metrics: W&B and TensorBoard show
train/distca/…"""
ALWAYS = ""
NODES = "Ranks share nodes"
CHOSEN = "The planner chooses"
SERVERS = "Dedicated attention servers"
CUDA = "CUDA"
PADDED = "Trainers with padded batches"


class Metric(NamedTuple):
    """A logged figure: its unit ("share" is from 0 to 1), its meaning since the last log, and when it is logged."""

    unit: str
    meaning: str
    where: str = ALWAYS


METRICS: dict[str, Metric] = {
    "tokens_per_second": Metric("tokens/s", "Tokens of all ranks per second"),
    "tokens_per_second_per_device": Metric(
        "tokens/s", "The same per training process and attention server"
    ),
    "imbalance_degree": Metric(
        "ratio", "Query-key pairs of the busiest rank over the mean, as planned"
    ),
    "imbalance_degree_packed": Metric("ratio", "The same if the documents were packed in order"),
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
    "attention_servers": Metric("servers", "Dedicated attention servers that take part", SERVERS),
    "padding_share": Metric(
        "share", "Share of padded batches that is padding, which is not computed", PADDED
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


def predicted_attention(
    layers: Mapping[AttentionKind, int], plans: Sequence[MicroBatchPlan], seen: Sequence[float]
) -> float:
    """Return the predicted seconds of core attention of the busiest rank in micro-batches that have run.

    Args:
        seen: [ranks] seconds measured in the kernels of each rank for these micro-batches.
    """
    choices = [plan.choice for plan in plans if plan.choice is not None]
    if len(choices) == len(plans):
        return float(np.sum([choice.attention for choice in choices], axis=0).max())
    # Without a prediction, the busiest rank takes its share of the time of all ranks, by [ranks]
    # query-key pairs weighted by the width of the heads. Workers beyond the ranks are servers,
    # whose number changes.
    pairs_of_ranks = sum(
        loads_of(of_kind)[: len(seen)].astype(np.float64)
        * layers[kind]
        * kind.q_heads
        * (kind.dim_qk + kind.dim_v)
        for plan in plans
        for nano in plan.nano_batches
        for kind, of_kind in nano.plans.items()
    )
    return float(sum(seen) * np.max(pairs_of_ranks) / max(np.sum(pairs_of_ranks), 1.0))


def flops_counter(model: nn.Module, shared_by: int) -> Callable[[MicroBatchPlan], float]:
    """Return a function that counts the FLOPs of a micro-batch on all ranks, as MFU defines them.

    Each active parameter of a token takes two forward and four backward; two backward if it is
    frozen. Core attention counts likewise, by query-key pairs that are not masked. `shared_by`
    processes share each layer's heads.
    """
    base, layers = base_model(model), layers_by_kind(model)
    met = weights_met(base)
    head = getattr(base.get_output_embeddings(), "weight", None)
    if head is not None:
        met[head] = float(count_of(head))
    of_token = sum(count * (6.0 if weight.requires_grad else 4.0) for weight, count in met.items())

    def count_flops(plan: MicroBatchPlan) -> float:
        total = of_token * float(plan.tokens.sum())
        for nano in plan.nano_batches:
            for kind, of_kind in nano.plans.items():
                of_pair = 6.0 * kind.q_heads * (kind.dim_qk + kind.dim_v) * shared_by
                total += (
                    layers[kind]
                    * of_pair
                    * float(np.sum(pairs(0, of_kind.layout.lengths, of_kind.window)))
                )
        return total

    return count_flops


class StepMeter(TrainerCallback):
    """Collect figures of micro-batches and return them when the trainer logs."""

    def __init__(
        self, dispatcher: Dispatcher, model: nn.Module, pool: Pool | None, processes: int
    ) -> None:
        self._dispatcher, self._pool, self._processes = dispatcher, pool, processes
        self._costs: LearnedCosts | None = None  # None: steps also compute what is not in the plans
        self._layers, self._device = layers_by_kind(model), dispatcher.device
        is_cuda = self._device.type == "cuda"
        self._peak_flops = peak_flops(torch.cuda.get_device_name(self._device) if is_cuda else "")
        shared_by = max(processes // dispatcher.groups.ranks, 1)
        self._flops_of = None if self._peak_flops is None else flops_counter(model, shared_by)
        self.on_train_begin()

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Reset the figures, which leave out start-up and the rest of an earlier training."""
        self._counted: list[tuple[MicroBatchPlan, Ran, int]] = []
        self._padded_rows = 0  # of this rank's padded batches, padding included
        self.steps = 0  # since figures were last returned
        self._since = self._seconds()

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
        """Also report how long steps take, beside what these costs predict: the plans are all that steps compute."""
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
        elapsed, *measured = (self._seconds() - self._since).tolist()
        of_ranks = self._dispatcher.groups.all_gather((*measured, self._padded_rows))
        waits, attention, padded_rows = zip(*of_ranks, strict=True)
        plans, runs, stages = zip(*self._counted, strict=True)
        summaries = [plan.summary for plan in plans]
        moved = [summary.exchange for summary in summaries]
        tokens = sum(int(plan.tokens.sum()) - plan.fillers for plan in plans)
        devices = self._processes + (0 if self._pool is None else len(self._pool.servers))

        def mean(values: Iterable[float]) -> float:
            return sum(values) / len(plans)

        figures = {
            "tokens_per_second": tokens / elapsed,
            "tokens_per_second_per_device": tokens / elapsed / devices,
            "imbalance_degree_packed": mean(summary.packed_max_over_mean for summary in summaries),
            "imbalance_degree": mean(summary.max_over_mean for summary in summaries),
            "exchange_bytes": mean(each.bytes_bottleneck for each in moved),
            "ping_pong_share": sum(ran.layers_in_turns for ran in runs)
            / max(sum(ran.layers for ran in runs), 1),
            "exchange_stages": mean(stages),
            "exchange_wait_seconds": max(waits),
            "exposed_exchange_share": max(waits) / elapsed,
        }
        if sum(padded_rows):
            figures["padding_share"] = 1 - tokens / sum(padded_rows)
        if self.steps:
            predicted = predicted_attention(self._layers, plans, attention)
            figures["attention_ms"] = max(attention) * 1e3 / self.steps
            figures["attention_ms_predicted"] = predicted * 1e3 / self.steps
        choices = [plan.choice for plan in plans if plan.choice is not None]
        if self.steps and len(choices) == len(plans):
            seconds = sum(choice.seconds for choice in choices)
            if self._costs is not None:
                figures["step_ms"] = elapsed * 1e3 / self.steps
                figures["step_ms_predicted"] = (seconds / self.steps + self._costs.besides) * 1e3
            figures |= {
                "gain_predicted": sum(choice.packed_seconds for choice in choices) / seconds,
                "plans_without_exchange": mean(each.bytes_total == 0 for each in moved),
                "plans_within_nodes": mean(
                    each.bytes_total > 0 and each.bytes_between_nodes == 0 for each in moved
                ),
            }
        if self._flops_of is not None and self._peak_flops is not None and self._costs is not None:
            figures["mfu"] = sum(map(self._flops_of, plans)) / (
                elapsed * devices * self._peak_flops
            )
        if self._dispatcher.settings.nodes is not None:
            figures |= {
                "exchange_bytes_within_nodes": mean(
                    each.bytes_within_nodes_bottleneck for each in moved
                ),
                "exchange_bytes_between_nodes": mean(
                    each.bytes_between_nodes_bottleneck for each in moved
                ),
                "busiest_node_bytes_within": mean(
                    each.bytes_within_nodes_busiest_node for each in moved
                ),
                "busiest_node_bytes_between": mean(
                    each.bytes_between_nodes_busiest_node for each in moved
                ),
            }
        if self._pool is not None:
            figures["attention_servers"] = len(self._pool.servers)
        if self._device.type == "cuda":
            figures["memory_peak_gib"] = torch.cuda.max_memory_allocated(self._device) / GIB
            figures["memory_reserved_gib"] = torch.cuda.memory_reserved(self._device) / GIB
            torch.cuda.reset_peak_memory_stats(self._device)
        self.on_train_begin()
        return figures


STEPS = 50
"""Number of steps averaged for a warning: fewer steps depend too much on their documents."""
REMEDIES = {
    "imbalance_degree": (
        "distca/imbalance_degree is {1:.2f}: the busiest rank computes that many times the mean "
        "core attention, and all ranks wait for it; set balance_tolerance to 0.01 (it is "
        "{0.balance_tolerance}), lower balance_block_size (it is {0.balance_block_size}), or "
        "raise tokens_per_rank"
    ),
    "exposed_exchange_share": (
        "distca/exposed_exchange_share is {1:.2f}: a rank waits for rows during that share of a "
        "step; leave ping_pong (it is {0.ping_pong}) and balance_tolerance (it is "
        "{0.balance_tolerance}) at 'auto', check links and nodes with hf-distca doctor, and find "
        "the long waits with trace_steps=3"
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
        self._limits = {"exposed_exchange_share": (-math.inf, 0.1)}
        # With "auto" the planner chooses these two.
        if settings.balance_tolerance != AUTO:
            self._limits["imbalance_degree"] = (-math.inf, 1.1)
        if ping_pong and settings.ping_pong is True:
            self._limits["ping_pong_share"] = (0.1, math.inf)
        self._seen: list[tuple[int, Mapping[str, float]]] = []
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
        for name, (least, most) in list(self._limits.items()):
            mean = sum(figures[name] * steps for steps, figures in self._seen) / total
            if not least <= mean <= most:
                logger.warning(
                    "mean of the last steps: %s", REMEDIES[name].format(self._settings, mean)
                )
                del self._limits[name]
        self._seen = []

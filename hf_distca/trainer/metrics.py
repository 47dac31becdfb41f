"""Metrics that a training logs: their names and meanings, what computes them, and warnings with remedies."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_distca.config import DistCAConfig
from hf_distca.dispatch.bound import BoundPlan, Ran
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.groups import Groups
from hf_distca.kernels.speed import peak_flops
from hf_distca.models.decoder import base_model
from hf_distca.models.kinds import layers_by_kind
from hf_distca.models.shape import count_of, weights_met
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.cost import pairs
from hf_distca.planner.metrics import loads_of
from hf_distca.pool.rank.pool import Pool
from hf_distca.trainer.costs import LearnedCosts
from hf_distca.units import AUTO

PREFIX = "distca/"
"""Prefix of all metric names, by which trackers group metrics: W&B and TensorBoard show train/distca/…"""
ALWAYS = ""
NODES = "Ranks share nodes"
CHOSEN = "The planner chooses"
SERVERS = "Dedicated attention servers"
CUDA = "CUDA"


class Metric(NamedTuple):
    """A logged figure: its unit ("share" is from 0 to 1), its meaning since the last log, and when it is logged."""

    unit: str
    meaning: str
    where: str = ALWAYS


METRICS: dict[str, Metric] = {
    "tokens_per_second": Metric("tokens/s", "Tokens of all ranks per second"),
    "tokens_per_second_per_device": Metric(
        "tokens/s", "The same, divided by the number of training processes and attention servers"
    ),
    "imbalance_degree_packed": Metric(
        "ratio", "Query-key pairs of the busiest rank over the mean, if the documents were packed in order"
    ),
    "imbalance_degree": Metric("ratio", "Query-key pairs of the busiest rank over the mean, as planned"),
    "attention_ms": Metric("ms per step", "Time in kernel calls of core attention, on the slowest rank"),
    "attention_ms_predicted": Metric(
        "ms per step", "The same if all ranks were equally fast: the busiest rank's share of the time of all ranks"
    ),
    "exchange_bytes": Metric("bytes", "Bytes through the busiest rank in the forward pass of one layer"),
    "exchange_stages": Metric("stages", "Stages in which K and V rows travel in a layer"),
    "exchange_wait_seconds": Metric("s", "Time in waits for rows, on the rank that waited longest"),
    "exposed_exchange_share": Metric("share", "The same as a share of the elapsed time"),
    "ping_pong_share": Metric("share", "Share of decoder layer runs in which two nano-batches took turns"),
    "exchange_bytes_within_nodes": Metric("bytes", "Bytes of the busiest rank inside its node", NODES),
    "exchange_bytes_between_nodes": Metric("bytes", "Bytes of the busiest rank between nodes", NODES),
    "busiest_node_bytes_within": Metric("bytes", "Bytes inside the busiest node, all of its ranks together", NODES),
    "busiest_node_bytes_between": Metric(
        "bytes", "Bytes between the busiest node and others, all of its ranks together", NODES
    ),
    "step_ms": Metric("ms", "Time of an optimizer step", CHOSEN),
    "step_ms_predicted": Metric("ms", "The same as the planner's costs predict it", CHOSEN),
    "gain_predicted": Metric(
        "ratio", "Predicted time of the same documents packed in order, over that of the plans", CHOSEN
    ),
    "plans_without_exchange": Metric("share", "Share of micro-batches in which no rows travel", CHOSEN),
    "plans_within_nodes": Metric("share", "Share of micro-batches in which rows travel only inside nodes", CHOSEN),
    "attention_servers": Metric("servers", "Dedicated attention servers that take part", SERVERS),
    "mfu": Metric(
        "share",
        "Model FLOPs utilization in bfloat16, on GPUs whose peak is known (A100, H100, H200, H800, B200)",
        CUDA,
    ),
    "memory_peak_gib": Metric("GiB", "Most memory in use on this rank", CUDA),
    "memory_reserved_gib": Metric("GiB", "Memory that the CUDA allocator of this rank holds", CUDA),
}
"""All metrics by name, in the order of the documentation; `StepMeter.figures` computes them."""


FloatArray = NDArray[np.float64]
GIB = 2**30


class AttentionTime:
    """Predict the attention time of micro-batches that have run.

    Plans that were chosen by costs carry a prediction. For other plans, the busiest rank takes a share of the measured
    time of all ranks, by query-key pairs. If the rank takes longer, it is slow, or the shapes of its tasks are worse.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = layers_by_kind(model)

    def predicted(self, plans: Sequence[MicroBatchPlan], seen: Sequence[float]) -> float:
        """Return the predicted seconds of the busiest rank in all of these micro-batches.

        Args:
            seen: [ranks] seconds measured in the kernels of each rank for these micro-batches.
        """
        choices = [plan.choice for plan in plans if plan.choice is not None]
        if len(choices) == len(plans):
            return float(np.sum([choice.attention for choice in choices], axis=0).max())
        # Workers beyond the ranks are servers, whose number changes.
        pairs = np.sum([self._pairs(plan)[: len(seen)] for plan in plans], axis=0)
        return float(sum(seen) * pairs.max() / max(pairs.sum(), 1.0))

    def _pairs(self, plan: MicroBatchPlan) -> FloatArray:
        """[workers] query-key pairs of all layers, weighted by the width of the heads."""
        every = [
            loads_of(of_kind).astype(np.float64) * (self._layers[kind] * kind.q_heads * (kind.dim_qk + kind.dim_v))
            for nano in plan.nano_batches
            for kind, of_kind in nano.plans.items()
        ]
        return np.asarray(np.sum(every, axis=0))


class ModelFlops:
    """Count floating point operations as model FLOPs utilization (MFU) defines them.

    Each active parameter of a token takes two operations forward and four backward; two backward if it is frozen. Core
    attention counts likewise, by query-key pairs that are not masked.

    Args:
        shared_by: number of processes that share each layer's heads, by tensor parallelism.
    """

    def __init__(self, model: nn.Module, shared_by: int) -> None:
        base = base_model(model)
        self._layers = layers_by_kind(model)
        self._shared_by = shared_by
        met = weights_met(base)
        head = getattr(base.get_output_embeddings(), "weight", None)
        if head is not None:
            met[head] = float(count_of(head))
        self.of_token = sum(count * (6.0 if weight.requires_grad else 4.0) for weight, count in met.items())

    def of(self, plan: MicroBatchPlan) -> float:
        """Return the operations of a micro-batch on all ranks, forward and backward."""
        total = self.of_token * float(plan.tokens.sum())
        for nano in plan.nano_batches:
            for kind, of_kind in nano.plans.items():
                count = float(np.sum(pairs(0, of_kind.layout.lengths, of_kind.window)))
                of_pair = 6.0 * kind.q_heads * (kind.dim_qk + kind.dim_v) * self._shared_by
                total += self._layers[kind] * of_pair * count
        return total


class StepMeter(TrainerCallback):
    """Collect figures of micro-batches and return them when the trainer logs.

    Args:
        pool: dedicated servers; None without servers.
        processes: number of training processes, each with one device.
        flops: floating point operations of the model; None if unknown.
        costs: learned costs, with the time of steps outside their micro-batches.

    Attributes:
        steps: optimizer steps since figures were last returned.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        pool: Pool | None,
        attention: AttentionTime,
        *,
        processes: int,
        flops: ModelFlops | None = None,
        costs: LearnedCosts | None = None,
    ) -> None:
        self._dispatcher, self._pool, self._attention, self._processes = dispatcher, pool, attention, processes
        self._flops, self._costs = flops, costs
        is_cuda = dispatcher.device.type == "cuda"
        self._peak_flops = peak_flops(torch.cuda.get_device_name(dispatcher.device) if is_cuda else "")
        self._reset()

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Reset the figures, which leave out start-up and the rest of an earlier training."""
        self._reset()

    def _reset(self) -> None:
        self._counted: list[tuple[MicroBatchPlan, Ran, int]] = []
        self.steps = 0
        self._since = time.perf_counter()
        self._measured_before = self._measured()

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Count the step."""
        self.steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave an evaluation inside the block out of the time, the waits and the kernel calls."""
        begin, measured = time.perf_counter(), self._measured()
        yield
        self._since += time.perf_counter() - begin
        self._measured_before += self._measured() - measured

    def _measured(self) -> NDArray[np.float64]:
        """[2] seconds of waits and of kernel calls so far."""
        return np.array([self._dispatcher.recorder.seconds(kind) for kind in ("wait", "kernel")])

    def count(self, bound: BoundPlan) -> None:
        """Note a micro-batch that is about to run."""
        self._counted.append((bound.plan, bound.ran, bound.stages))

    def figures(self) -> dict[str, float]:
        """Return the figures since the last call, by their names in `METRICS`. A collective."""
        if not self._counted:
            return {}
        elapsed = time.perf_counter() - self._since
        measured_here = (self._measured() - self._measured_before).tolist()
        waits, attention = zip(*self._dispatcher.groups.all_gather(measured_here), strict=True)
        waited = max(waits)
        plans, runs, stages = zip(*self._counted, strict=True)
        summaries = [plan.summary for plan in plans]
        count = len(summaries)
        tokens = sum(int(plan.tokens.sum()) for plan in plans)
        devices = self._processes + (0 if self._pool is None else len(self._pool.servers))
        figures = {
            "tokens_per_second": tokens / elapsed,
            "tokens_per_second_per_device": tokens / elapsed / devices,
            "imbalance_degree_packed": sum(s.packed_max_over_mean for s in summaries) / count,
            "imbalance_degree": sum(s.max_over_mean for s in summaries) / count,
            "exchange_bytes": sum(s.exchange.bytes_bottleneck for s in summaries) / count,
            "ping_pong_share": sum(ran.layers_in_turns for ran in runs) / max(sum(ran.layers for ran in runs), 1),
            "exchange_stages": sum(stages) / count,
            "exchange_wait_seconds": waited,
            "exposed_exchange_share": waited / elapsed,
        }
        if self.steps:
            predicted = self._attention.predicted(plans, attention)
            figures["attention_ms"] = max(attention) * 1e3 / self.steps
            figures["attention_ms_predicted"] = predicted * 1e3 / self.steps
            figures |= self._chosen(plans, elapsed)
        if self._flops is not None and self._peak_flops is not None:
            figures["mfu"] = sum(map(self._flops.of, plans)) / (elapsed * devices * self._peak_flops)
        if self._dispatcher.settings.nodes is not None:
            moved = [s.exchange for s in summaries]
            figures |= {
                "exchange_bytes_within_nodes": sum(m.bytes_within_nodes_bottleneck for m in moved) / count,
                "exchange_bytes_between_nodes": sum(m.bytes_between_nodes_bottleneck for m in moved) / count,
                "busiest_node_bytes_within": sum(m.bytes_within_nodes_busiest_node for m in moved) / count,
                "busiest_node_bytes_between": sum(m.bytes_between_nodes_busiest_node for m in moved) / count,
            }
        if self._pool is not None:
            figures["attention_servers"] = len(self._pool.servers)
        device = self._dispatcher.device
        if device.type == "cuda":
            figures["memory_peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
            figures["memory_reserved_gib"] = torch.cuda.memory_reserved(device) / GIB
            torch.cuda.reset_peak_memory_stats(device)
        self._reset()
        return figures

    def _chosen(self, plans: Sequence[MicroBatchPlan], elapsed: float) -> dict[str, float]:
        """Return the figures of plans chosen by costs; none unless the planner chose all plans."""
        choices = [plan.choice for plan in plans if plan.choice is not None]
        if len(choices) < len(plans) or self._costs is None:
            return {}
        seconds = sum(choice.seconds for choice in choices)
        moved = [plan.summary.exchange for plan in plans]
        nothing = [figures.bytes_total == 0 for figures in moved]
        inside = [figures.bytes_total > 0 and figures.bytes_between_nodes == 0 for figures in moved]
        return {
            "step_ms": elapsed * 1e3 / self.steps,
            "step_ms_predicted": (seconds / self.steps + self._costs.besides) * 1e3,
            "gain_predicted": sum(choice.packed_seconds for choice in choices) / seconds,
            "plans_without_exchange": sum(nothing) / len(plans),
            "plans_within_nodes": sum(inside) / len(plans),
        }


class EvaluationLoss:
    """Sum the losses of an evaluation's micro-batches."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._sum = self._targets = 0.0

    def add(self, loss: Tensor, targets: Tensor) -> None:
        """Add a micro-batch: its loss as the mean over ranks of `loss`, and its targets on all ranks."""
        self._sum += (loss * targets / self._groups.ranks).item()
        self._targets += targets.item()

    def mean(self) -> float | None:
        """Return the loss per target; None if there was no micro-batch. A collective."""
        total = sum(self._groups.all_gather(self._sum))
        return total / self._targets if self._targets else None


logger = logging.getLogger(__name__)

STEPS = 50
"""Number of steps averaged for a warning: fewer steps depend too much on their documents."""
MOST_IMBALANCE, MOST_EXPOSED, LEAST_PING_PONG = 1.1, 0.1, 0.1
"""Limits beyond which a warning is logged: imbalance degree, share of waits, share of layers in turns."""
REMEDIES = {
    "imbalance_degree": "distca/imbalance_degree is {1:.2f}: the busiest rank computes that many times the mean core "
    "attention, and all ranks wait for it; set balance_tolerance to 0.01 (it is {0.balance_tolerance}), lower "
    "balance_block_size (it is {0.balance_block_size}), or raise tokens_per_rank",
    "exposed_exchange_share": "distca/exposed_exchange_share is {1:.2f}: a rank waits for rows during that share of a "
    "step; leave ping_pong (it is {0.ping_pong}) and balance_tolerance (it is {0.balance_tolerance}) at 'auto', check "
    "links and nodes with hf-distca doctor, and find the long waits with trace_steps=3",
    "ping_pong_share": "distca/ping_pong_share is {1:.2f}: few micro-batches run as two nano-batches, so exchanges "
    "are not hidden; raise tokens_per_rank until no document has more than half of a micro-batch's tokens, and put "
    "hooks on decoder layers, not inside them",
}
"""Warnings about figures beyond their limits, as format strings of the settings and the figure."""


class Remedies:
    """Average figures over some fifty steps, and warn of each problem once."""

    def __init__(self, settings: DistCAConfig, *, ping_pong: bool) -> None:
        self._settings, self._ping_pong = settings, ping_pong and settings.ping_pong is True
        self._warned: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._sums = dict.fromkeys(REMEDIES, 0.0)

    def see(self, figures: Mapping[str, float], steps: int) -> None:
        """Add means over some steps, from `StepMeter.figures`; empty figures change nothing."""
        if not figures or not steps:
            return
        self._steps += steps
        for name in REMEDIES:
            self._sums[name] += figures[name] * steps
        if self._steps < STEPS:
            return
        means = {name: total / self._steps for name, total in self._sums.items()}
        self._begin()
        wrong = {
            "imbalance_degree": means["imbalance_degree"] > MOST_IMBALANCE
            and self._settings.balance_tolerance != AUTO,
            "exposed_exchange_share": means["exposed_exchange_share"] > MOST_EXPOSED,
            "ping_pong_share": self._ping_pong and means["ping_pong_share"] < LEAST_PING_PONG,
        }
        for name in [name for name in REMEDIES if wrong[name] and name not in self._warned]:
            self._warned.add(name)
            logger.warning("mean of the last steps: %s", REMEDIES[name].format(self._settings, means[name]))

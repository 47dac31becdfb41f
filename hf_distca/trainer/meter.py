"""Measure plans and exchanges of a training run for its log."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import TrainerCallback

from hf_distca.dispatch.bound import BoundPlan, Ran
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.kernels.speed import peak_flops
from hf_distca.plan import MicroBatchPlan
from hf_distca.pool.rank.pool import Pool
from hf_distca.trainer.attention_time import AttentionTime
from hf_distca.trainer.learned_costs import LearnedCosts
from hf_distca.trainer.model_flops import ModelFlops

GIB = 2**30


class StepMeter(TrainerCallback):
    """Collect figures of micro-batches and return them when the trainer logs.

    Args:
        pool: dedicated servers; None without servers.
        processes: number of training processes, each with one device.
        flops: floating point operations of the model; None if unknown.
        costs: learned time of steps outside their micro-batches; None if nothing is chosen by costs.

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
        self._costs = costs
        device = dispatcher.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._flops, self._peak_flops = flops, peak_flops(name)
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
            moved = [summary.exchange for summary in summaries]
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

"""Plans of many ranks replayed on one GPU: the kernel calls of each rank run one rank after
another.

Nothing is exchanged, so this shows how evenly a plan divides core attention, what cutting documents
costs the kernel, and how well seconds of ranks are predicted. Each plan stands beside whole
documents: the longest first, each to the rank with the fewest query-key pairs, whatever the rank
holds already.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, D
head dim.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.setting import Replay, Setting
from benchmarks.harness import median_seconds
from benchmarks.harness.simulated import simulated_run
from benchmarks.planner_inputs import read_batches
from hf_distca.dispatch.bound import BoundNanoBatch, BoundTasks
from hf_distca.dispatch.rows import IndexBuffer
from hf_distca.kernels import AttentionParams, Kernel, TaskShapes, get_kernel
from hf_distca.plan import AttentionKind, Direction, MicroBatchPlan
from hf_distca.plan.cost import pairs
from hf_distca.plan.schedule import Turn
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.shapes import ModelShape
from hf_distca.profiling.device import measured_profile

RANKS_PER_NODE = 8
MOST_OFF = 0.15
"""Largest share by which predicted seconds of a rank may be off."""


@dataclass(frozen=True)
class Call:
    """One kernel call of a rank in one direction; `causal` as in `AttentionParams`."""

    shapes: TaskShapes
    pairs: int
    causal: bool = True


class Device:
    """Kernel that computes calls of one kind of attention on the device of a setting."""

    def __init__(self, setting: Setting, kernel: Kernel, kind: AttentionKind) -> None:
        self.setting, self.kernel, self.kind = setting, kernel, kind

    def seconds(self, calls: Sequence[Call], direction: Direction) -> float:
        """Return the seconds of calls, one after another; each is measured alone, so that one set
        of tensors lives.
        """
        return sum(self._seconds(call, direction) for call in calls)

    def _seconds(self, call: Call, direction: Direction) -> float:
        kind, shapes = self.kind, call.shapes
        params = AttentionParams(kind.dim_qk**-0.5, causal=call.causal)
        q_QHD, do_QHD = (self._rows(sum(shapes.q_lens), kind.q_heads) for _ in range(2))
        k_KGD, v_KGD = (self._rows(sum(shapes.k_lens), kind.kv_heads) for _ in range(2))
        run: Callable[[], object]
        if direction == "forward":

            def run() -> object:
                return self.kernel.forward(q_QHD, k_KGD, v_KGD, shapes, params)
        else:
            o_QHD, lse_QH = self.kernel.forward(q_QHD, k_KGD, v_KGD, shapes, params)

            def run() -> object:
                return self.kernel.backward(
                    do_QHD, q_QHD, k_KGD, v_KGD, o_QHD, lse_QH, shapes, params
                )

        return median_seconds(run, self.setting.device, self.setting.replay_repeats)

    def _rows(self, rows: int, heads: int) -> Tensor:
        setting = self.setting
        return torch.randn(
            rows, heads, self.kind.dim_qk, dtype=setting.dtype, device=setting.device
        )


def lengths_of(replay: Replay, setting: Setting) -> list[int]:
    """Return the lengths of a replay's documents."""
    (batch,) = (each for each in read_batches() if each["id"] == replay.batch)
    tokens, found = 0, []
    for row in batch["rows"]:
        if tokens < replay.ranks * batch["T"]:
            found += row
            tokens += sum(row)
    return [max(length // setting.replay_scale, 1) for length in found]


def longest_first(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return [ranks] whole documents: each, the longest first, goes to the rank with the fewest
    pairs.
    """
    placed: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0, rank) for rank in range(ranks)]
    for length in sorted(lengths, reverse=True):
        load, rank = least[0]
        placed[rank].append(length)
        heapq.heapreplace(least, (load + pairs(0, length), rank))
    return placed


def calls_of_plan(
    plan: MicroBatchPlan, kind: AttentionKind, rank: int, direction: Direction, device: torch.device
) -> list[Call]:
    """Return the kernel calls of a rank, as its schedules run them."""
    buffer, turns = IndexBuffer(device), _turns(plan)
    bound = [
        BoundNanoBatch(n, nano, rank, turns[n], set(), buffer)
        for n, nano in enumerate(plan.nano_batches)
    ]
    buffer.send()
    found = []
    for nano in bound:
        routes = nano.routes[kind]
        for phase in routes.schedules[direction]:
            for call in phase.run:
                tasks: BoundTasks = routes.tasks[call.key]
                found.append(Call(tasks.shapes, tasks.pairs, call.causal))
    return found


def _turns(plan: MicroBatchPlan) -> tuple[Turn, ...]:
    return ("alone",) if len(plan.nano_batches) == 1 else ("first", "second")


def settings_of(setting: Setting, replay: Replay, profile: DeviceProfile) -> PlanSettings:
    """Return the settings by which `hf-distca simulate` chooses a plan on nodes of 8."""
    wide, scale = setting.wide, setting.replay_scale
    model = ModelShape.llama(
        wide["num_hidden_layers"],
        wide["hidden_size"],
        wide["intermediate_size"],
        wide["num_attention_heads"],
        wide["num_key_value_heads"],
        wide["vocab_size"],
        wide["head_dim"],
    )
    tokens = -(-replay.tokens_per_rank // scale)
    nodes = min(RANKS_PER_NODE, replay.ranks)
    planning = {
        "bytes_per_value": setting.dtype.itemsize,
        "balance_block_size": max(128 // scale, 1),
    }
    return simulated_run(model, replay.ranks, tokens, nodes, profile, planning=planning).plans


def replayed(
    setting: Setting, replay: Replay, profile: DeviceProfile, device: Device
) -> dict[str, Any]:
    """Replay a plan and whole documents, and return the figures of both."""
    lengths, kind = lengths_of(replay, setting), device.kind
    plan = plan_micro_batch(lengths, settings_of(setting, replay, profile))
    assert plan.choice is not None
    ranks: list[dict[str, Any]] = []
    whole_s, whole_pairs = np.zeros(replay.ranks), 0
    for rank, documents in enumerate(longest_first(lengths, replay.ranks)):
        seconds = {}
        for direction in _DIRECTIONS:
            calls = calls_of_plan(plan, kind, rank, direction, setting.device)
            seconds[direction] = device.seconds(calls, direction)
            if direction == "forward":
                ranks.append(_counts(calls))
            if documents:
                whole = Call(TaskShapes.build(documents, documents, setting.device), 0)
                whole_s[rank] += device.seconds([whole], direction)
        ranks[-1] |= {f"{direction}_s": value for direction, value in seconds.items()}
        whole_pairs += sum(pairs(0, length) for length in documents)
    planned_s = np.array([each["forward_s"] + each["backward_s"] for each in ranks])
    # Predictions are of all layers of the model.
    predicted_s = np.array(plan.choice.attention) / setting.wide["num_hidden_layers"]
    for each, seconds_of_rank in zip(ranks, predicted_s.tolist(), strict=True):
        each["predicted_s"] = seconds_of_rank
    off = predicted_s / planned_s
    return {
        "documents": len(lengths),
        "longest": max(lengths),
        "ranks": replay.ranks,
        "tasks": sum(len(each.plans[kind].tasks) for each in plan.nano_batches),
        "nano_batches": len(plan.nano_batches),
        "pairs": sum(each["pairs"] for each in ranks),
        "whole_pairs": whole_pairs,
        "busiest_over_mean": float(planned_s.max() / planned_s.mean()),
        "whole_busiest_over_mean": float(whole_s.max() / whole_s.mean()),
        "predicted_busiest_over_mean": float(predicted_s.max() / predicted_s.mean()),
        "speed_up_of_busiest": float(whole_s.max() / planned_s.max()),
        "seconds_over_whole": float(planned_s.sum() / whole_s.sum()),
        "predicted_over_measured": float(predicted_s.sum() / planned_s.sum()),
        "predicted_over_measured_least": float(off.min()),
        "predicted_over_measured_most": float(off.max()),
        "of_ranks": ranks,
    }


_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def _counts(calls: Sequence[Call]) -> dict[str, Any]:
    """Return what costs of short tasks are fitted to: counts of a rank's calls in the forward."""
    lens: Iterator[tuple[int, int]] = (
        each for call in calls for each in zip(call.shapes.q_lens, call.shapes.k_lens, strict=True)
    )
    q_lens, k_lens = np.array([*lens] or [(0, 0)]).T
    return {
        "calls": len(calls),
        "tasks": len(q_lens),
        "rows": int(q_lens.sum()),
        "keys": int(k_lens.sum()),
        "pairs": sum(call.pairs for call in calls),
    }


def check_replays(setting: Setting) -> Findings:
    """Plans of typical documents, rank by rank, beside whole documents and predictions."""
    findings, wide = Findings(), setting.wide
    kernel = get_kernel("auto", setting.device)
    heads, head_dim = (wide["num_attention_heads"], wide["num_key_value_heads"]), wide["head_dim"]
    kind = AttentionKind(None, *heads, head_dim, head_dim)
    profile = measured_profile(kernel, kind, wide["hidden_size"], setting.dtype, setting.device)
    findings.figures["kernel"] = kernel.name
    findings.figures["costs"] = {
        "forward": vars(profile.forward),
        "backward": vars(profile.backward),
    }
    device = Device(setting, kernel, kind)
    plans = findings.figures["plans"] = {}
    for replay in setting.replays:
        with findings.trying(replay.name):
            found = plans[replay.name] = replayed(setting, replay, profile, device)
            same = found["pairs"] == found["whole_pairs"]
            findings.check(
                same,
                f"{replay.name}: {found['pairs']} pairs are computed, not {found['whole_pairs']}",
            )
            if setting.on_cuda:  # times of tiny tasks say nothing
                check_times(findings, replay.name, found)
    return findings


def check_times(findings: Findings, name: str, found: dict[str, Any]) -> None:
    """Note a plan whose busiest rank gains nothing, and predictions that are too far off."""
    taken = 1 / found["speed_up_of_busiest"]
    findings.check(
        taken < 1, f"{name}: the busiest rank takes {taken:.2f} of its time with whole documents"
    )
    for end in ("least", "most"):
        ratio = found[f"predicted_over_measured_{end}"]
        findings.check(
            abs(ratio - 1) <= MOST_OFF,
            f"{name}: predicted seconds of a rank are {ratio:.2f} of the measured",
        )

"""A trace of planned steps: kernels of a layer, time between them, and where the host waits for the device."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import hf_distca
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.models import settings_of
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.training import make_model, micro_batches, tokens_of
from benchmarks.harness.models import rows_of_rank
from hf_distca import Dispatcher, plan_layers
from hf_distca.dispatch.bound import BoundPlan
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch

STEPS = 2
LARGEST = 12
"""So many kernels are named, those that take the most time."""
LIBRARY = str(Path(hf_distca.__file__).parent)
"""Where the library's files are."""


def busy_and_span(intervals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Time in which at least one of the intervals runs, and from the first begin to the last end."""
    busy, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy, reached - min(begin for begin, _ in intervals)


class Trace:
    """What the device did in a few steps.

    Attributes:
        kernels: how many, a step.
        busy_ms: time in which one ran, a step.
        idle: share of the time from the first to the last in which none ran.
        largest: milliseconds a step by name, of those that take the most.
    """

    def __init__(self, recorded: profile, device: torch.device) -> None:
        events = [event for event in recorded.events() if _is_kernel(event, device)]
        if not events:
            raise RuntimeError("the profiler saw no kernel")
        self.kernels = len(events) / STEPS
        busy, span = busy_and_span([(event.time_range.start, event.time_range.end) for event in events])
        self.busy_ms, self.idle = busy / 1e3 / STEPS, 1 - busy / span
        spent: Counter[str] = Counter()
        for event in events:
            spent[event.name[:100]] += event.time_range.elapsed_us() / 1e3 / STEPS
        self.largest = dict(spent.most_common(LARGEST))


def _is_kernel(event: object, device: torch.device) -> bool:
    """Whether it ran on the device; on the CPU operators that no other called stand for kernels."""
    if device.type == "cuda":
        return event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    return event.name.startswith("aten::") and event.cpu_parent is None


def check_trace(setting: Setting, folder: Path | None = None) -> Findings:
    """Traces of steps with stock attention, and planned with one nano-batch and two, on one layer and on two.

    Args:
        setting: sizes and device.
        folder: where the trace of two nano-batches is left; None: nowhere.
    """
    findings = Findings()
    for way in ("sdpa", "one nano-batch", "two nano-batches"):
        with findings.trying(way):
            traces = [_trace(setting, way, layers, folder, findings) for layers in (1, 2)]
            findings.figures[way] = {
                "kernels_per_layer": traces[1].kernels - traces[0].kernels,
                "busy_ms_per_layer": traces[1].busy_ms - traces[0].busy_ms,
                "idle_share": traces[1].idle,
                "largest_ms": traces[1].largest,
            }
    return findings


def _trace(setting: Setting, way: str, layers: int, folder: Path | None, findings: Findings) -> Trace:
    wide = replace(
        setting, wide={**setting.wide, "num_hidden_layers": layers}, lengths=tuple(micro_batches(setting)[0])
    )
    step = _stock_step(wide) if way == "sdpa" else _planned_step(wide, findings, ping_pong=way == "two nano-batches")
    step()  # warms up
    if way != "sdpa":
        with _waits(setting.device) as waits:
            step()
            setting.synchronize()
        ours = sorted({place for place in waits if place.startswith(LIBRARY)})
        findings.check(not ours, f"{way}: the host waits for the device in {ours}")
        findings.figures[f"waits of {way}"] = sorted(set(waits))
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (setting.device.type == "cuda")
    with profile(activities=activities) as recorded:
        for _ in range(STEPS):
            step()
        setting.synchronize()
    if folder is not None and way == "two nano-batches" and layers == 2:
        folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(folder / "trace.json.gz"))
    return Trace(recorded, setting.device)


def _planned_step(setting: Setting, findings: Findings, *, ping_pong: bool) -> Callable[[], None]:
    """Forward and backward of one micro-batch; binding it is no part of the step, and is looked at by itself."""
    model = make_model(setting, "distca").train()
    settings = settings_of(model, setting, ping_pong=ping_pong)
    if ping_pong:
        plan_layers(model)
    dispatcher = Dispatcher(settings, setting.device)
    documents = [torch.tensor(ids) for ids in tokens_of([list(setting.lengths)], setting.wide["vocab_size"])[0]]
    plan = plan_micro_batch(setting.lengths, settings)
    if len(plan.nano_batches) != 1 + ping_pong:
        raise RuntimeError(f"the plan has {len(plan.nano_batches)} nano-batches")
    batch = rows_of_rank(plan, 0, documents, setting.device)
    targets = sum(len(document) - 1 for document in documents)
    bound = _bound(dispatcher, plan, findings, f"binding of {len(plan.nano_batches)} nano-batches")

    def step() -> None:
        model(**batch, num_items_in_batch=targets, distca_plan=bound).loss.backward()
        model.zero_grad()

    return step


def _bound(dispatcher: Dispatcher, plan: MicroBatchPlan, findings: Findings, what: str) -> BoundPlan:
    """The plan bound; how long the host takes, and where it waits for the device, is noted."""
    dispatcher.bind(plan)  # warms up
    with _waits(dispatcher.device) as waits:
        begin = time.perf_counter()
        bound = dispatcher.bind(plan)
        findings.figures[f"{what}, ms of the host"] = (time.perf_counter() - begin) * 1e3
    findings.figures[f"waits in {what}"] = sorted(set(waits))
    return bound


def _stock_step(setting: Setting) -> Callable[[], None]:
    """Forward and backward of one document of as many tokens: without a mask, which sdpa is slow with."""
    model = make_model(setting, "sdpa").train()
    (ids,) = tokens_of([[setting.tokens]], setting.wide["vocab_size"])[0]
    tokens = torch.tensor([ids], device=setting.device)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()

    return step


@contextmanager
def _waits(device: torch.device) -> Iterator[list[str]]:
    """Where the host waits for the device: file and line of each time."""
    places: list[str] = []
    if device.type != "cuda":
        yield places
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
            places += [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)]

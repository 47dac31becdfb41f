"""A trace of real steps of two ranks: nested, joined, drawn, and compared with clocks."""

import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import pytest
from transformers import TrainerCallback

from hf_distca.cli.main import main
from hf_distca.dispatch.recorder import ALWAYS
from hf_distca.timeline.steps import read_traces, steps_of
from tests.trainer.small_trainers import make_trainer

BEFORE, TRACED = 3, 2


class Stopwatch(TrainerCallback):
    """Times of steps and of their waits by the process's clock: from when batches are asked for to the step's end.

    It is told of the end before whoever else is.
    """

    def __init__(self, trainer) -> None:
        self.seconds, self.waits = [], []
        self._recorder, self._get = trainer.dispatcher.recorder, trainer.get_batch_samples
        trainer.get_batch_samples = self._asked
        trainer.callback_handler.callbacks.insert(0, self)

    def _asked(self, *args, **kwargs):
        self.began, self.waited = time.perf_counter(), self._recorder.seconds("wait")
        return self._get(*args, **kwargs)

    def on_step_end(self, *args, **kwargs) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.waits.append(self._recorder.seconds("wait") - self.waited)


def _trained(folder: str, trace_steps: int, steps: int) -> tuple[list[float], list[float], bool, frozenset]:
    """Under DDP with bfloat16, checkpoints and ping-pong; documents that leave two nano-batches with exchanges."""
    trainer = make_trainer(
        folder,
        lengths=[70, 60, 60, 50, 30, 30] * steps,
        max_steps=steps,
        bf16=True,
        gradient_checkpointing=True,
        document_layout="fixed",
        save_strategy="no",
        logging_strategy="no",
        trace_steps=trace_steps,
    )
    watch = Stopwatch(trainer)
    trainer.train()
    return watch.seconds, watch.waits, trainer.model_wrapped is not trainer.model, trainer.dispatcher.recorder._kinds


@pytest.fixture(scope="module")
def traced(rank_pools, tmp_path_factory):
    """The folder of a training, and what its ranks measured of it."""
    folder = tmp_path_factory.mktemp("traced")
    return folder, rank_pools[2].run(_trained, str(folder), TRACED, BEFORE + TRACED)


def joined_of(folder: Path) -> dict:
    return read_traces(sorted(folder.glob("trace_rank_*.json")))


@dataclass
class Slice:
    """A slice in nanoseconds, and those that lie in it."""

    name: str
    category: str
    begin: int
    end: int
    arguments: dict
    within: list["Slice"] = field(default_factory=list)

    def all_within(self):
        for inner in self.within:
            yield inner
            yield from inner.all_within()


def nested(events: list[dict], rank: int, track: str) -> list[Slice]:
    """The outermost slices of a track; no slice sticks out of another one."""
    named = [event for event in events if event["pid"] == rank and event["name"] == "thread_name"]
    (number,) = (event["tid"] for event in named if event["args"]["name"] == track)
    outermost, around = [], []
    mine = [event for event in events if (event["ph"], event["pid"], event.get("tid")) == ("X", rank, number)]
    for event in sorted(mine, key=lambda event: (event["ts"], -event["dur"])):
        begin = round(event["ts"] * 1000)
        end = begin + round(event["dur"] * 1000)
        found = Slice(event["name"], event["cat"], begin, end, event["args"])
        while around and around[-1].end <= begin:
            around.pop()
        assert not around or end <= around[-1].end
        (around[-1].within if around else outermost).append(found)
        around.append(found)
    return outermost


def steps_of_rank(events: list[dict], rank: int) -> list[Slice]:
    return [found for found in nested(events, rank, "compute") if found.category == "step"]


def arrows_of(events: list[dict]) -> list[tuple[int, int, float, float]]:
    """(sender, receiver, when it left, when it came) of each arrow; both ends of every one are there."""
    ends = {
        phase: {event["id"]: (event["pid"], event["ts"]) for event in events if event["ph"] == phase} for phase in "sf"
    }
    assert ends["s"].keys() == ends["f"].keys()
    assert sum(event["ph"] in "sf" for event in events) == 2 * len(ends["s"])
    return [(ends["s"][key][0], ends["f"][key][0], ends["s"][key][1], ends["f"][key][1]) for key in ends["s"]]


def test_slices_nest_and_arrows_connect(traced):
    folder, results = traced
    assert all(wrapped for *_, wrapped, _ in results)  # by DDP
    assert {path.name for path in folder.glob("*.json")} == {"trace_rank_0.json", "trace_rank_1.json"}
    trace = joined_of(folder)
    events, arrows = trace["traceEvents"], arrows_of(trace["traceEvents"])
    for rank in (0, 1):
        steps = steps_of_rank(events, rank)
        assert [step.name for step in steps] == ["step 4", "step 5"]
        for step in steps:
            assert [inner.name for inner in step.within] == ["batches", "forward", "backward", "between", "optimizer"]
            assert {inner.category for inner in step.within} == {"section"}
            _check_sections(step)
        crossing = [e for e in events if e["pid"] == rank and e.get("cat") == "exchange" and e["args"]["rows_sent"]]
        assert len([arrow for arrow in arrows if arrow[0] == rank]) == len(crossing) > 8
    assert {arrow[:2] for arrow in arrows} == {(0, 1), (1, 0)}
    # Viewers take these tracks for the main thread, and draw an arrow to the enclosing slice only if asked.
    assert not {event["tid"] for event in events} & {0, *(event["pid"] for event in events)}
    assert {event.get("bp") for event in events if event["ph"] == "f"} == {"e"}
    clock_error = trace["otherData"]["clock_error_us"]
    assert 0 < clock_error < 50e3
    for _, _, left, came in arrows:  # rows do not arrive before they have left
        assert left < came + clock_error
    inside = {"s": "send", "f": "wait"}
    for event in events:
        if event["ph"] in inside:
            at = event["ts"]
            assert any(
                other.get("cat") == inside[event["ph"]] and other["ts"] <= at <= other["ts"] + other["dur"]
                for other in events
                if other["pid"] == event["pid"]
            )


def _check_sections(step) -> None:
    """Phases lie in forward and backward; kernel calls, waits and starts of exchanges lie in phases."""
    for section in step.within:
        phases = section.within
        assert {phase.category for phase in phases} <= {"phase"}
        directions = {phase.arguments["direction"] for phase in phases}
        # With checkpoints the backward computes forwards again, but for what was kept of core attention.
        assert directions == {"forward": {"forward"}, "backward": {"backward"}}.get(section.name, set())
        assert {phase.arguments["nano_batch"] for phase in phases} == ({0, 1} if phases else set())
        for phase in phases:
            assert {inner.category for inner in phase.within} <= {"kernel", "wait", "send"}
            told = [inner.name for inner in phase.within]
            named = re.sub(r"(wait|run|send) ", "", phase.name).replace("; ", ", ").split(", ")
            assert set(told) <= set(named), (told, named)
            assert {inner.name for inner in phase.within if inner.category == "kernel"}.issubset(named)


def test_times_add_up_to_the_step(traced):
    folder, results = traced
    events = joined_of(folder)["traceEvents"]
    for rank, (seconds, waits, *_) in enumerate(results):
        for step, by_clock, waited in zip(steps_of_rank(events, rank), seconds[BEFORE:], waits[BEFORE:], strict=True):
            took = step.end - step.begin
            assert sum(inner.end - inner.begin for inner in step.within) == pytest.approx(took, rel=0.02)
            if step.name == "step 5":  # the other's batches were asked for before ranks met for a common zero
                assert took / 1e9 == pytest.approx(by_clock, rel=0.02)
            of_waits = sum(inner.end - inner.begin for inner in step.all_within() if inner.category == "wait")
            assert of_waits / 1e9 == pytest.approx(waited, rel=0.02)


def test_nothing_is_measured_when_nobody_asks(rank_pools, tmp_path):
    for *_, kinds in rank_pools[2].run(_trained, str(tmp_path), 0, BEFORE + 1):
        assert kinds == ALWAYS
    assert not list(tmp_path.glob("trace*"))


def test_a_training_that_ends_early_says_so(rank_pools, tmp_path):
    (_, _, _, kinds), *_ = rank_pools[1].run(_trained, str(tmp_path), 3, BEFORE + 1)
    assert kinds == ALWAYS
    assert list(steps_of(joined_of(tmp_path))) == ["step 4"]


def test_the_command_joins_and_draws(traced, tmp_path, capsys):
    folder, _ = traced
    joined, picture = tmp_path / "joined.json", tmp_path / "step.svg"
    assert main(["timeline", str(folder), "--joined", str(joined), "--svg", str(picture)]) == 0
    title, header, *of_ranks = capsys.readouterr().out.splitlines()
    assert re.match(r"step 5: [\d.]+ ms, 2 ranks, clocks within [\d.e-]+ ms", title)
    assert header.split() == ["ms", "step", "attention", "waits", "other"]
    assert [line.split()[:2] for line in of_ranks] == [["rank", "0"], ["rank", "1"]]
    assert read_traces([joined]) == joined_of(folder)
    boxes = ElementTree.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}rect")
    assert {"mark attention", "mark waits", "mark other"} <= {box.get("class") for box in boxes}
    assert main(["timeline", str(folder / "trace_rank_1.json")]) == 0
    assert "1 ranks" in capsys.readouterr().out
    assert main(["timeline", str(joined), "--step", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == "step 4"
    for rank in told["ranks"]:
        parts = rank["attention_ms"] + rank["waits_ms"] + rank["other_ms"]
        assert parts == pytest.approx(rank["step_ms"])
        assert sum(rank["sections_ms"].values()) == pytest.approx(rank["step_ms"], rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--step", "9"], "the trace has no step 9; choose one of step 4, step 5"),
        (["{folder}/trace_rank_0.json"], "are both of rank 0; give one file per rank"),
        (["{folder}/nothing.json"], "No such file"),
        (["{folder}", "--joined", "/nonexistent/x"], "cannot write /nonexistent/x: there is no such folder"),
        (["tests"], "tests has no trace_rank_*.json"),
        ([__file__], "is not a trace that training wrote with trace_steps"),
        (["{folder}/../broken.json"], "is not a trace that training wrote with trace_steps: KeyError('dur')"),
    ],
)
def test_what_cannot_be_drawn(traced, capsys, arguments, told):
    folder, _ = traced
    step = {"ph": "X", "pid": 5, "tid": 6, "name": "step 4", "cat": "step", "ts": 0.0}
    broken = {"traceEvents": [step], "otherData": {"ranks": 2, "clock_error_us": 1.0}}
    (folder.parent / "broken.json").write_text(json.dumps(broken))
    assert main(["timeline", str(folder), *(argument.format(folder=folder) for argument in arguments)]) == 2
    assert told in capsys.readouterr().err

"""A trace of literal spans, and a trace of real steps of two ranks: nested, joined and drawn."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hf_distca.cli.main import main
from hf_distca.dispatch.recorder import ALWAYS, Rows, Span, Work
from hf_distca.timeline.events import rank_trace
from hf_distca.timeline.steps import read_traces, steps_of
from tests.trainer.small_trainers import make_trainer

BEFORE, TRACED = 3, 2


def _trained(folder: str, trace_steps: int, steps: int) -> tuple[bool, frozenset]:
    """Under DDP with bfloat16, checkpoints and ping-pong; documents that leave two nano-batches with exchanges."""
    settings = {"bf16": True, "gradient_checkpointing": True, "document_layout": "fixed"}
    settings |= {"save_strategy": "no", "logging_strategy": "no", "trace_steps": trace_steps, "max_steps": steps}
    trainer = make_trainer(folder, lengths=[70, 60, 60, 50, 30, 30] * steps, **settings)
    trainer.train()
    return trainer.model_wrapped is not trainer.model, trainer.dispatcher.recorder._kinds


@pytest.fixture(scope="module")
def traced(rank_pools, tmp_path_factory) -> Path:
    """The folder of a training."""
    folder = tmp_path_factory.mktemp("traced")
    results = rank_pools[2].run(_trained, str(folder), TRACED, BEFORE + TRACED)
    assert all(wrapped for wrapped, _ in results)  # by DDP
    return folder


def test_times_of_spans():
    work = Work(3, 0, "forward")
    spans = [
        Span("step", "step 4", None, 10.0, 10.5),
        Span("wait", "keys", work, 10.3, 10.4),
        Span("send", "keys", work, 10.1, 10.2, rows=Rows((7, 2, 0), (7, 0, 5))),
        Span("kernel", "local", work, 10.2, 10.25, pairs=9),
    ]
    trace = rank_trace(spans, rank=5, world=8, members=(5, 6, 7), zero=(9.5, 0.002))
    assert trace["otherData"] == {"rank": 5, "ranks": 8, "clock_error_us": 2000.0}
    shown = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert [(each["ph"], each["name"], each["ts"], each.get("dur")) for each in shown] == [
        ("X", "step 4", 500_000.0, 500_000.0),
        ("X", "keys", 600_000.0, 100_000.0),
        ("X", "local", 700_000.0, 50_000.0),
        ("X", "keys", 800_000.0, 100_000.0),
        ("X", "keys", 600_000.0, 300_000.0),  # the exchange
        ("s", "keys", 600_000.001, None),  # an arrow to rank 6, and one from rank 7
        ("f", "keys", 899_999.999, None),
    ]
    of_work = {"layer": 3, "nano_batch": 0, "direction": "forward"}
    assert shown[2]["args"] == of_work | {"pairs": 9}
    assert shown[4]["args"] == of_work | {"rows_sent": 2, "rows_received": 5, "number": 0}


def joined_of(folder: Path) -> dict:
    return read_traces(sorted(folder.glob("trace_rank_*.json")))


def slices_of(events: list[dict], rank: int) -> list[dict]:
    """The slices of a rank's computation with their ends, outer before inner ones; none sticks out of another one."""
    named = [event for event in events if event["pid"] == rank and event["name"] == "thread_name"]
    (track,) = (event["tid"] for event in named if event["args"]["name"] == "compute")
    found = [
        {**event, "begin": (begin := round(event["ts"] * 1000)), "end": begin + round(event["dur"] * 1000)}
        for event in events
        if (event["ph"], event["pid"], event["tid"]) == ("X", rank, track)
    ]
    found.sort(key=lambda each: (each["begin"], -each["end"]))
    around: list[dict] = []
    for each in found:
        while around and around[-1]["end"] <= each["begin"]:
            around.pop()
        assert not around or each["end"] <= around[-1]["end"]
        around.append(each)
    return found


def within(outer: dict, slices: list[dict], *categories: str) -> list[dict]:
    """The slices of these categories that lie in another one."""
    inside = [each for each in slices if outer["begin"] <= each["begin"] and each["end"] <= outer["end"]]
    return [each for each in inside if each["cat"] in categories]


def seconds(slices: list[dict]) -> float:
    return sum(each["end"] - each["begin"] for each in slices) / 1e9


def test_slices_nest_and_arrows_connect(traced):
    trace = joined_of(traced)
    events = trace["traceEvents"]
    # Both ends of every arrow are there, each inside the slice of its sending or waiting.
    ends = {phase: {event["id"]: event for event in events if event["ph"] == phase} for phase in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    assert sum(event["ph"] in "sf" for event in events) == 2 * len(ends["s"])
    arrows = [(ends["s"][key], ends["f"][key]) for key in ends["s"]]
    assert {(left["pid"], came["pid"]) for left, came in arrows} == {(0, 1), (1, 0)}
    for rank in (0, 1):
        slices = slices_of(events, rank)
        steps = [each for each in slices if each["cat"] == "step"]
        assert [step["name"] for step in steps] == ["step 4", "step 5"]
        for step in steps:
            sections = within(step, slices, "section")
            assert [each["name"] for each in sections] == ["batches", "forward", "backward", "between", "optimizer"]
            assert seconds(sections) == pytest.approx(seconds([step]), rel=0.02)
            for section in sections:
                _check_phases(section, slices)
        crossing = [e for e in events if e["pid"] == rank and e.get("cat") == "exchange" and e["args"]["rows_sent"]]
        assert sum(left["pid"] == rank for left, _ in arrows) == len(crossing) > 8
        for phase, category in (("s", "send"), ("f", "wait")):
            times = [each for each in slices if each["cat"] == category]
            for event in (event for event in ends[phase].values() if event["pid"] == rank):
                assert any(each["begin"] <= event["ts"] * 1000 <= each["end"] for each in times)
    # Viewers take these tracks for the main thread, and draw an arrow to the enclosing slice only if asked.
    assert not {event["tid"] for event in events} & {0, *(event["pid"] for event in events)}
    assert {event.get("bp") for event in ends["f"].values()} == {"e"}
    clock_error = trace["otherData"]["clock_error_us"]
    assert 0 < clock_error < 50e3
    assert all(left["ts"] < came["ts"] + clock_error for left, came in arrows)  # rows leave before they arrive


def _check_phases(section: dict, slices: list[dict]) -> None:
    """Phases lie in forward and backward; kernel calls, waits and starts of exchanges lie in phases."""
    phases = within(section, slices, "phase")
    # With checkpoints the backward computes forwards again, but for what was kept of core attention.
    directions = {"forward": {"forward"}, "backward": {"backward"}}.get(section["name"], set())
    assert {phase["args"]["direction"] for phase in phases} == directions
    assert {phase["args"]["nano_batch"] for phase in phases} == ({0, 1} if phases else set())
    parts = [within(phase, slices, "kernel", "wait", "send") for phase in phases]
    for phase, inner in zip(phases, parts, strict=True):
        named = re.sub(r"(wait|run|send) ", "", phase["name"]).replace("; ", ", ").split(", ")
        assert {part["name"] for part in inner} <= set(named)
    assert sum(map(len, parts)) == len(within(section, slices, "kernel", "wait", "send"))


def test_traces_end_with_a_training_and_are_only_written_if_asked_for(rank_pools, tmp_path):
    for _, kinds in rank_pools[2].run(_trained, str(tmp_path), 0, BEFORE + 1):
        assert kinds == ALWAYS
    assert not list(tmp_path.glob("trace*"))
    ((_, kinds),) = rank_pools[1].run(_trained, str(tmp_path), 3, BEFORE + 1)
    assert kinds == ALWAYS
    assert list(steps_of(joined_of(tmp_path))) == ["step 4"]


def test_the_command_joins_and_draws(traced, tmp_path, capsys):
    folder, joined, picture = traced, tmp_path / "joined.json", tmp_path / "step.svg"
    assert main(["timeline", str(folder), "--joined", str(joined), "--svg", str(picture)]) == 0
    title, header, *of_ranks = capsys.readouterr().out.splitlines()
    assert re.match(r"step 5: [\d.]+ ms, 2 ranks, clocks within [\d.e-]+ ms", title)
    assert header.split() == ["ms", "step", "attention", "waits", "other"]
    assert [line.split()[:2] for line in of_ranks] == [["rank", "0"], ["rank", "1"]]
    assert read_traces([joined]) == joined_of(folder)
    boxes = ElementTree.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}rect")
    assert {"mark attention", "mark waits", "mark other"} <= {box.get("class") for box in boxes}
    assert main(["timeline", str(joined), "--step", "4", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["step"] == "step 4"
    for rank in printed["ranks"]:
        parts = rank["attention_ms"] + rank["waits_ms"] + rank["other_ms"]
        assert parts == pytest.approx(rank["step_ms"])
        assert sum(rank["sections_ms"].values()) == pytest.approx(rank["step_ms"], rel=0.02)


def test_what_cannot_be_drawn(traced, capsys):
    folder = traced
    step = {"ph": "X", "pid": 5, "tid": 6, "name": "step 4", "cat": "step", "ts": 0.0}
    broken = {"traceEvents": [step], "otherData": {"ranks": 2, "clock_error_us": 1.0}}
    (folder.parent / "broken.json").write_text(json.dumps(broken))
    for arguments, message in (
        (["--step", "9"], "the trace has no step 9; choose one of step 4, step 5"),
        (["{folder}/trace_rank_0.json"], "are both of rank 0; give one file per rank"),
        (["{folder}/nothing.json"], "No such file"),
        (["{folder}", "--joined", "/nonexistent/x"], "cannot write /nonexistent/x: there is no such folder"),
        (["tests"], "tests has no trace_rank_*.json"),
        ([__file__], "is not a trace that training wrote with trace_steps"),
        (["{folder}/../broken.json"], "is not a trace that training wrote with trace_steps: KeyError('dur')"),
    ):
        assert main(["timeline", str(folder), *(argument.format(folder=folder) for argument in arguments)]) == 2
        assert message in capsys.readouterr().err

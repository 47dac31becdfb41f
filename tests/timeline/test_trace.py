"""A trace of literal spans, and a trace of real steps of two ranks: nested, joined and drawn."""

import gc
import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from hf_distca.checks.setting_names import CHECKPOINTING
from hf_distca.cli.main import main
from hf_distca.dispatch.recorder import ALWAYS, Rows, Span, Work
from hf_distca.sim.drawing import LETTER
from hf_distca.timeline import tracing
from hf_distca.timeline.events import rank_trace
from hf_distca.timeline.steps import RankStep, read_traces, runs, shown, steps_of, svg_of
from hf_distca.timeline.tracing import StepTracer
from tests.trainer.small_trainers import make_trainer

BEFORE, TRACED = 3, 2
SECTIONS = ["batches", "forward", "backward", "between", "optimizer"]


def _trained(folder: str, trace_steps: int, steps: int) -> tuple[bool, frozenset]:
    """Under DDP with bfloat16, checkpoints and ping-pong; documents that leave two nano-batches
    with exchanges.
    """
    settings = {"bf16": True, CHECKPOINTING: True, "document_layout": "fixed"}
    settings |= {
        "save_strategy": "no",
        "logging_strategy": "no",
        "trace_steps": trace_steps,
        "max_steps": steps,
    }
    trainer = make_trainer(folder, lengths=[70, 60, 60, 50, 30, 30] * steps, **settings)
    trainer.train()
    # Spans are many, so that none is kept once it is written.
    assert not any(isinstance(thing, Span) and thing.kind == "step" for thing in gc.get_objects())
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
    assert [(event["ph"], event["name"], event["ts"], event.get("dur")) for event in shown] == [
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


def test_rows_of_a_pod_go_to_its_ranks():
    spans = [
        Span("send", "keys", None, 10.1, 10.2, rows=Rows((7, 2), (7, 5), 2)),
        Span("wait", "keys", None, 10.3, 10.4),
    ]
    trace = rank_trace(spans, rank=5, world=8, members=(3, 4, 5, 6), zero=(9.5, 0.0))
    (exchange,) = (event for event in trace["traceEvents"] if event.get("cat") == "exchange")
    assert exchange["args"] == {"rows_sent": 2, "rows_received": 5, "number": 0}
    other = rank_trace(
        [spans[0]._replace(rows=Rows((2, 7), (5, 7), 2)), spans[1]],
        rank=6,
        world=8,
        members=(3, 4, 5, 6),
        zero=(9.5, 0.0),
    )
    ids = [
        {event["id"] for event in each["traceEvents"] if event["ph"] in "sf"}
        for each in (trace, other)
    ]
    assert len(ids[0]) == 2
    assert ids[0] == ids[1]


def test_simultaneous_exchanges_lie_on_several_tracks_and_later_ones_on_the_first_that_is_free():
    spans = []
    for part, begin, end in (
        ("a", 1.0, 3.0),
        ("b", 2.0, 5.0),
        ("c", 3.0, 4.0),
        ("d", 4.5, 6.0),
        ("e", 4.75, 7.0),
    ):
        spans.append(Span("send", part, None, begin, begin, rows=Rows((0, 2), (0, 5))))
        spans.append(Span("wait", part, None, end - 0.25, end))
    events = rank_trace(spans, rank=0, world=2, members=(0, 1), zero=(0.0, 0.0))["traceEvents"]
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    tracks = {
        event["name"]: names[event["tid"]] for event in events if event.get("cat") == "exchange"
    }
    first, second, third = "exchange", "exchange 2", "exchange 3"
    assert tracks == {"a": first, "b": second, "c": first, "d": first, "e": third}
    assert list(names.values()) == ["compute", first, second, third]


def test_ranks_may_differ_by_the_largest_clock_error_of_any_file(tmp_path):
    step = Span("step", "step 1", None, 1.0, 2.0)
    for rank, error_s in enumerate((0.001, 0.003, 0.002)):
        trace = rank_trace([step], rank, world=3, members=(0, 1, 2), zero=(0.0, error_s))
        (tmp_path / f"trace_rank_{rank}.json").write_text(json.dumps(trace))
    assert joined_of(tmp_path)["otherData"] == {"ranks": 3, "clock_error_us": 3000.0}


def joined_of(folder: Path) -> dict:
    return read_traces(sorted(folder.glob("trace_rank_*.json")))


def nested_slices(events: list[dict], rank: int) -> list[dict]:
    """The slices of a rank's computation with their ends and the slices around them; none sticks
    out of another.
    """
    named = [event for event in events if event["pid"] == rank and event["name"] == "thread_name"]
    (track,) = (event["tid"] for event in named if event["args"]["name"] == "compute")
    slices = []
    for event in events:
        if (event["ph"], event["pid"], event["tid"]) == ("X", rank, track):
            begin = round(event["ts"] * 1000)
            slices.append({**event, "begin": begin, "end": begin + round(event["dur"] * 1000)})
    slices.sort(key=lambda part: (part["begin"], -part["end"]))
    around: list[dict] = []
    for part in slices:
        while around and around[-1]["end"] <= part["begin"]:
            around.pop()
        assert not around or part["end"] <= around[-1]["end"]
        part["around"] = {outer["cat"]: outer for outer in around}
        around.append(part)
    return slices


@pytest.fixture
def events(traced) -> list[dict]:
    return joined_of(traced)["traceEvents"]


def arrows_of(events: list[dict]) -> list[tuple[dict, dict]]:
    """The start and the end of every arrow."""
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert sum(event["ph"] in "sf" for event in events) == 2 * len(starts)
    return [(start, ends[key]) for key, start in starts.items()]


def slices_by_category(events: list[dict], rank: int) -> dict[str, list[dict]]:
    slices: dict[str, list[dict]] = {}
    for piece in nested_slices(events, rank):
        slices.setdefault(piece["cat"], []).append(piece)
    return slices


def nanoseconds(slices: list[dict]) -> int:
    return sum(piece["end"] - piece["begin"] for piece in slices)


@pytest.mark.parametrize("rank", [0, 1])
def test_sections_are_parts_of_steps(events, rank):
    slices = slices_by_category(events, rank)
    assert [step["name"] for step in slices["step"]] == ["step 4", "step 5"]
    assert [section["name"] for section in slices["section"]] == SECTIONS * 2
    in_steps = [piece for piece in nested_slices(events, rank) if "step" in piece["around"]]
    assert all("section" in piece["around"] for piece in in_steps if piece["cat"] != "section")
    # Two sections lie side by side, but the process may be suspended between them.
    of_steps = pytest.approx(nanoseconds(slices["step"]), rel=0.1)
    assert nanoseconds(slices["section"]) == of_steps


@pytest.mark.parametrize("rank", [0, 1])
def test_phases_lie_in_sections_of_their_direction(events, rank):
    """What was kept of core attention is not computed again."""
    phases = slices_by_category(events, rank)["phase"]
    directions = {
        (phase["around"]["section"]["name"], phase["args"]["direction"]) for phase in phases
    }
    assert directions == {("forward", "forward"), ("backward", "backward")}
    assert {phase["args"]["nano_batch"] for phase in phases} == {0, 1}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("category", ["kernel", "wait", "send"])
def test_parts_lie_in_the_phase_that_names_them(events, rank, category):
    parts = slices_by_category(events, rank)[category]
    assert parts
    for part in parts:
        phase = re.sub(r"(wait|run|send) ", "", part["around"]["phase"]["name"])
        assert part["name"] in re.split("[;,] ", phase)


@pytest.mark.parametrize("rank", [0, 1])
def test_arrows_begin_in_sends_and_end_in_waits(events, rank):
    arrows = arrows_of(events)
    assert {(start["pid"], end["pid"]) for start, end in arrows} == {(0, 1), (1, 0)}
    slices = slices_by_category(events, rank)
    starts = [start for start, _ in arrows if start["pid"] == rank]
    ends = [end for _, end in arrows if end["pid"] == rank]
    assert [start for start in starts if not lies_in(start, slices["send"])] == []
    assert [end for end in ends if not lies_in(end, slices["wait"])] == []
    exchanges = [
        event for event in events if event["pid"] == rank and event.get("cat") == "exchange"
    ]
    sending = [event for event in exchanges if event["args"]["rows_sent"]]
    assert len(starts) == len(sending) > 8


def lies_in(event: dict, slices: list[dict]) -> bool:
    return any(piece["begin"] <= event["ts"] * 1000 <= piece["end"] for piece in slices)


def test_viewers_draw_tracks_and_arrows(events):
    # Viewers take these tracks for the main thread.
    assert not {event["tid"] for event in events} & {0, *(event["pid"] for event in events)}
    # They draw an arrow to the enclosing slice only if asked.
    assert {end.get("bp") for _, end in arrows_of(events)} == {"e"}


def test_rows_leave_before_they_arrive(traced, events):
    clock_error = joined_of(traced)["otherData"]["clock_error_us"]
    assert 0 < clock_error < 50e3
    late = [
        (start, end) for start, end in arrows_of(events) if start["ts"] >= end["ts"] + clock_error
    ]
    assert late == []


def test_traces_end_with_a_training_and_are_only_written_if_asked_for(rank_pools, tmp_path):
    kinds_by_rank = [
        kinds for _, kinds in rank_pools[2].run(_trained, str(tmp_path), 0, BEFORE + 1)
    ]
    assert kinds_by_rank == [ALWAYS, ALWAYS]
    assert not list(tmp_path.glob("trace*"))
    ((_, kinds),) = rank_pools[1].run(_trained, str(tmp_path), 3, BEFORE + 1)
    assert kinds == ALWAYS
    assert list(steps_of(joined_of(tmp_path))) == ["step 4"]


def test_a_training_that_ends_before_the_first_recorded_step_writes_nothing(rank_pools, tmp_path):
    rank_pools[1].run(_trained, str(tmp_path), 3, BEFORE)
    assert not list(tmp_path.glob("trace*"))


def test_clocks_are_compared_in_the_quickest_of_some_rounds(monkeypatch):
    """This rank spends 4, 1 and 2 seconds in the rounds, another one 1, 5 and 2: the third is the
    quickest for all.
    """
    moments = iter([0.0, 4.0, 10.0, 11.0, 20.0, 22.0])
    gathered = []

    def all_gather(
        mine: tuple[list[float], float], in_world: bool
    ) -> list[tuple[list[float], float]]:
        gathered.append((mine, in_world))
        return [mine, ([1.0, 5.0, 2.0], 0.25)]

    groups = SimpleNamespace(meet=lambda: None, all_gather=all_gather)
    dispatcher: Any = SimpleNamespace(
        groups=groups, recorder=SimpleNamespace(clock=lambda: (100.0, 0.5))
    )
    monkeypatch.setattr(tracing, "ROUNDS", 3)
    monkeypatch.setattr(tracing, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    tracer = StepTracer(dispatcher, 1, Path(), processes=2)
    assert tracer._common_zero() == (
        100.0 + 22.0,
        2.0 + 0.5,
    )
    assert gathered == [(([4.0, 1.0, 2.0], 0.5), True)]


def test_the_command_joins_and_draws(traced, tmp_path, capsys):
    joined = tmp_path / "joined.json"
    picture = tmp_path / "step.svg"
    assert main(["timeline", str(traced), "--joined", str(joined), "--svg", str(picture)]) == 0
    title, header, *of_ranks = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert re.match(r"step 5: [\d.]+ ms, 2 ranks, clocks within [\d.e-]+ ms", title)
    assert header.split() == ["ms", "step", "attention", "waits", "other", "=", *SECTIONS]
    for line in of_ranks:  # the sections are the parts of what is other, as far as they meet
        other, parts = line.split(" =")
        assert sum(map(float, parts.split())) == pytest.approx(float(other.split()[-1]), rel=0.2)
    assert [line.split()[:2] for line in of_ranks] == [["rank", "0"], ["rank", "1"]]
    assert read_traces([joined]) == joined_of(traced)
    boxes = ElementTree.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}rect")
    assert {"mark attention", "mark waits", "mark other"} <= {box.get("class") for box in boxes}
    assert main(["timeline", str(joined), "--step", "4", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["step"] == "step 4"
    for rank in printed["ranks"]:
        parts = rank["attention_ms"] + rank["waits_ms"] + rank["other_ms"]
        assert parts == pytest.approx(rank["step_ms"])
        assert sum(rank["sections_ms"].values()) == pytest.approx(rank["step_ms"], rel=0.02)


def test_what_cannot_be_drawn(traced, tmp_path, capsys, subtests):
    step = {"ph": "X", "pid": 5, "tid": 6, "name": "step 4", "cat": "step", "ts": 0.0}
    broken = {"traceEvents": [step], "otherData": {"ranks": 2, "clock_error_us": 1.0}}
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    for arguments, message in (
        (["--step", "9"], "the trace has no step 9; choose one of step 4, step 5"),
        (
            [f"{traced}/trace_rank_0.json"],
            "are both of rank 0, but a picture has one row for each rank",
        ),
        ([f"{traced}/nothing.json"], "No such file"),
        (["--joined", "/nonexistent/x"], "cannot write /nonexistent/x: there is no such folder"),
        (["tests"], "tests has no trace_rank_*.json"),
        ([__file__], "is not a trace that training wrote with trace_steps"),
        (
            [f"{tmp_path}/broken.json"],
            "is not a trace that training wrote with trace_steps: KeyError('dur')",
        ),
    ):
        with subtests.test(message):
            assert main(["timeline", str(traced), *arguments]) == 2
            assert message in capsys.readouterr().err


def drawn(step: RankStep, begin: int, end: int, count: int) -> str:
    """The first letter of the activity of each cell."""
    return "".join(
        (activity or "-")[0] * (last - first)
        for first, last, activity in runs(step, begin, end, count)
    )


def piece(rank: int, name: str, category: str, begin: int, end: int) -> dict:
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return {"ph": "X", "pid": rank, "tid": 9, "name": name, "cat": category, **times}


def test_a_step_of_a_rank():
    events = [
        piece(0, "step 1", "step", 0, 9),
        piece(0, "forward", "section", 10, 40),
        piece(0, "step 2", "step", 10, 70),
        piece(0, "run local", "phase", 15, 40),
        piece(0, "local", "kernel", 20, 35),
        piece(0, "between", "section", 40, 45),
        piece(0, "forward", "section", 45, 70),
        piece(0, "q", "wait", 50, 60),
        piece(0, "late", "wait", 70, 80),
    ]
    (step,) = steps_of({"traceEvents": events})["step 2"]
    activities = [(20, 35, "attention"), (50, 60, "waits")]
    others = {"forward": 30 - 15 + 25 - 10, "between": 5}
    assert step == RankStep(
        0, 10, 70, activities, {"forward": 30 + 25, "between": 5}, others, "forward"
    )
    assert step.totals() == {"attention": 15, "waits": 10, "other": 35}


def test_steps_that_all_ranks_have():
    steps = ((1, 2), (0, 2), (0, 1), (1, 3), (0, 10), (1, 10))
    common_steps = steps_of(
        {"traceEvents": [piece(rank, f"step {at}", "step", at, at + 1) for rank, at in steps]}
    )
    assert list(common_steps) == ["step 2", "step 10"]
    assert [step.rank for step in common_steps["step 2"]] == [0, 1]
    assert [step.rank for step in common_steps["step 10"]] == [0, 1]
    assert steps_of({"traceEvents": []}) == {}


def test_cells_show_what_a_rank_did_in_their_middle():
    # A step from 115 to 190 in cells of 10: the middle of the second cell is the step's first
    # moment.
    activities = [
        (120, 127, "attention"),
        (127, 134, "waits"),
        (134, 137, "waits"),
        (145, 185, "attention"),
    ]
    step = RankStep(0, 115, 190, activities)
    assert drawn(step, 100, 200, 10) == "-oawaaaao-"
    assert list(runs(step, 100, 200, 2)) == [(0, 2, "attention")]
    # Stretches that begin before the time, or lie outside it.
    assert drawn(RankStep(0, -10, 20, [(-10, 8, "waits")]), 0, 20, 2) == "wo"
    assert drawn(RankStep(0, -50, 90, [(-50, -30, "waits"), (60, 90, "waits")]), 0, 20, 2) == "oo"


def test_of_many_ranks_those_that_wait_the_least_and_the_most_are_shown():
    steps = [RankStep(rank, 0, 1000, [(0, rank * 7 % 100, "waits")]) for rank in range(100)]
    rows, words = shown(steps)
    assert sorted(rank.rank * 7 % 100 for rank in rows) == [*range(32), *range(68, 100)]
    assert [step.rank for step in rows] == sorted(step.rank for step in rows)
    assert words == "100 ranks; shown are 32 that wait the least and 32 that wait the most"
    rows_drawn = re.findall(r">rank \d+</text>", svg_of("step 4", steps))
    assert len(rows_drawn) == 64
    assert shown(steps[:64]) == (steps[:64], "64 ranks")


@pytest.mark.parametrize(
    ("nanoseconds", "marks"),
    [(237_300_000, "0 50 100 150 200 250"), (2_400_000, "0 0.5 1 1.5 2 2.5")],
)
def test_a_picture_has_round_ticks_and_a_view_box(nanoseconds, marks):
    picture = ElementTree.fromstring(
        svg_of("step 4", [RankStep(rank, 0, nanoseconds) for rank in range(3)])
    )
    width, height = (float(picture.get(name)) for name in ("width", "height"))
    assert picture.get("viewBox") == f"0 0 {width:g} {height:g}"
    texts = list(picture.iter("{http://www.w3.org/2000/svg}text"))
    ticks = [text.text.removesuffix(" ms") for text in texts if float(text.get("y")) > height - 30]
    assert " ".join(ticks).startswith(marks)
    assert all(0 < float(text.get("x")) < width and float(text.get("y")) < height for text in texts)
    # It shrinks to a narrow window, and fills none that is wider than usual.
    (style,) = picture.iter("{http://www.w3.org/2000/svg}style")
    assert "svg { max-width: 100%; height: auto; }" in style.text
    assert width <= 1200
    # The totals of a rank, to the right of its row, stand in columns that do not touch.
    of_lines: dict[str, list[tuple[float, float]]] = {}
    for text in texts:
        size = LETTER * len(text.text)
        x = float(text.get("x"))
        left = x - {"start": 0, "middle": size / 2, "end": size}[text.get("text-anchor")]
        assert left >= 0
        assert left + size <= width
        of_lines.setdefault(text.get("y"), []).append((left, left + size))
    for spans in of_lines.values():
        assert all(before < after for (_, before), (after, _) in pairwise(sorted(spans)))
    (y,) = {text.get("y") for text in texts if text.text == "rank 1"}
    took = f"{nanoseconds / 1e6:,.1f}"
    assert [text.text for text in texts if text.get("y") == y] == [
        "rank 1",
        took,
        "0.0",
        "0.0",
        took,
    ]

"""What ranks do in a step, and its picture, on traces of a hundred nanoseconds."""

from xml.etree import ElementTree

import pytest

from hf_distca.timeline.steps import RankStep, runs, steps_of, svg_of


def drawn(step: RankStep, begin: int, end: int, count: int) -> str:
    """The first letter of the activity of each cell."""
    return "".join((activity or "-")[0] * (last - first) for first, last, activity in runs(step, begin, end, count))


def piece(rank: int, name: str, category: str, begin: int, end: int) -> dict:
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return {"ph": "X", "pid": rank, "tid": 9, "name": name, "cat": category, **times}


def test_a_step_of_a_rank():
    events = [
        piece(0, "step 1", "step", 0, 9), piece(0, "step 2", "step", 10, 70), piece(0, "forward", "section", 10, 40),
        piece(0, "run local", "phase", 15, 40), piece(0, "local", "kernel", 20, 35),
        piece(0, "between", "section", 40, 45),
        piece(0, "forward", "section", 45, 70), piece(0, "q", "wait", 50, 60), piece(0, "late", "wait", 71, 80),
    ]  # fmt: skip
    (step,) = steps_of({"traceEvents": events})["step 2"]
    assert step == RankStep(0, 10, 70, [(20, 35, "attention"), (50, 60, "waits")], {"forward": 30 + 25, "between": 5})
    assert step.totals() == {"attention": 15, "waits": 10, "other": 35}


def test_steps_that_all_ranks_have():
    steps = ((1, 2), (0, 2), (0, 1), (1, 3), (0, 10), (1, 10))
    found = steps_of({"traceEvents": [piece(rank, f"step {at}", "step", at, at + 1) for rank, at in steps]})
    assert [(name, [step.rank for step in ranks]) for name, ranks in found.items()] == [
        ("step 2", [0, 1]),
        ("step 10", [0, 1]),
    ]
    assert steps_of({"traceEvents": []}) == {}


def test_cells_show_what_a_rank_did_in_their_middle():
    # A step from 115 to 190 in cells of 10: the middle of the second cell is the step's first moment.
    stretches = [(120, 127, "attention"), (127, 134, "waits"), (134, 137, "waits"), (145, 185, "attention")]
    step = RankStep(0, 115, 190, stretches)
    assert drawn(step, 100, 200, 10) == "-oawaaaao-"
    assert list(runs(step, 100, 200, 2)) == [(0, 2, "attention")]
    # Stretches that begin before the time, or lie outside it.
    assert drawn(RankStep(0, -10, 20, [(-10, 8, "waits")]), 0, 20, 2) == "wo"
    assert drawn(RankStep(0, -50, 90, [(-50, -30, "waits"), (60, 90, "waits")]), 0, 20, 2) == "oo"


@pytest.mark.parametrize(
    ("nanoseconds", "marks"), [(237_300_000, "0 50 100 150 200 250"), (2_400_000, "0 0.5 1 1.5 2 2.5")]
)
def test_a_picture_has_round_ticks_and_a_view_box(nanoseconds, marks):
    picture = ElementTree.fromstring(svg_of("step 4", [RankStep(rank, 0, nanoseconds) for rank in range(3)]))
    width, height = (float(picture.get(name)) for name in ("width", "height"))
    assert picture.get("viewBox") == f"0 0 {width:g} {height:g}"
    texts = list(picture.iter("{http://www.w3.org/2000/svg}text"))
    ticks = [text.text.removesuffix(" ms") for text in texts if float(text.get("y")) > height - 30]
    assert " ".join(ticks).startswith(marks)
    assert all(0 < float(text.get("x")) < width and float(text.get("y")) < height for text in texts)

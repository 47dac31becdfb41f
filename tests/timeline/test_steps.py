"""What ranks do in a step, on traces of a hundred nanoseconds."""

import pytest

from hf_distca.timeline.steps import RankStep, cells, ranks_of_step, runs, step_names
from hf_distca.timeline.trace import Slice, Trace, TraceError

LETTERS = {"attention": "a", "waits": "w", "other": "o", None: "-"}


def drawn(step: RankStep, begin: int, end: int, count: int) -> str:
    """A letter a cell."""
    return "".join(LETTERS[doing] for doing in cells(step, begin, end, count))


def piece(name: str, category: str, begin: int, end: int, *within: Slice) -> Slice:
    return Slice(name, category, begin, end, {}, list(within))


def trace_of(*ranks: list[Slice]) -> Trace:
    return Trace([*range(len(ranks))], {(rank, "compute"): steps for rank, steps in enumerate(ranks)}, [], 0)


def test_a_step_of_a_rank():
    kernel, wait = piece("own", "kernel", 20, 35), piece("q", "wait", 50, 60)
    sections = [
        piece("forward", "section", 10, 40, piece("run own", "phase", 15, 40, kernel)),
        piece("between", "section", 40, 45),
        piece("forward", "section", 45, 70, piece("wait q", "phase", 45, 65, wait)),
    ]
    trace = trace_of([piece("step 1", "step", 0, 9), piece("step 2", "step", 10, 70, *sections)])
    (step,) = ranks_of_step(trace, "step 2")
    assert step == RankStep(0, 10, 70, [(20, 35, "attention"), (50, 60, "waits")], {"forward": 30 + 25, "between": 5})
    assert step.totals() == {"attention": 15, "waits": 10, "other": 35}


def test_steps_that_all_ranks_have():
    first, second, third = (piece(f"step {number}", "step", number, number + 1) for number in (1, 2, 3))
    trace = trace_of([first, second], [second, third])
    assert step_names(trace) == ["step 2"]
    with pytest.raises(TraceError, match="there is no step 1 in the trace; it has step 2"):
        ranks_of_step(trace, "step 1")
    assert step_names(trace_of()) == []


def test_cells_say_what_a_rank_did_for_the_most_of_their_time():
    # A step from 115 to 190 in cells of 10: half of the second is in it, and two waits are the most of the fourth.
    stretches = [(120, 127, "attention"), (127, 134, "waits"), (136, 140, "waits"), (145, 185, "attention")]
    step = RankStep(0, 115, 190, stretches)
    assert drawn(step, 100, 200, 10) == "-oawoaaao-"
    assert drawn(step, 100, 200, 2) == "aa"
    assert drawn(RankStep(0, 0, 30, []), 0, 100, 4) == "o---"  # 5 of 25 are less than half
    assert drawn(RankStep(0, 0, 40, []), 0, 100, 4) == "oo--"  # 15 of 25 are more than half
    # As long each: attention, then what is neither.
    assert drawn(RankStep(0, 0, 10, [(0, 5, "attention"), (5, 10, "waits")]), 0, 10, 1) == "a"
    assert drawn(RankStep(0, 0, 10, [(0, 5, "attention")]), 0, 10, 1) == "o"
    # A stretch that began before the time.
    assert drawn(RankStep(0, -10, 20, [(-10, 8, "waits")]), 0, 20, 2) == "wo"


def test_runs_are_neighbours_that_are_alike():
    assert list(runs(["other", "other", None, "waits", "attention", "attention"])) == [
        (0, 2, "other"),
        (3, 4, "waits"),
        (4, 6, "attention"),
    ]
    assert list(runs([])) == []

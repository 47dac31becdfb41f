"""Micro-batches are read, planned and bound ahead, and errors end the step that needs the batch."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hf_distca.dispatch.upcoming import UpcomingBatches
from hf_distca.plan import PLAN_KEY


@pytest.mark.parametrize(
    ("remote", "count", "expected"),
    [(None, 1, ["a", "b"]), (object(), 2, ["a"])],
    ids=["without servers", "with servers"],
)
def test_nothing_is_bound_ahead_of_another_loader_or_of_servers(remote, count, expected):
    # A pool of servers is asked when it is time.
    bound: list[str] = []
    binder: Any = SimpleNamespace(
        remote=remote, bind=lambda plan, to=bound: to.append(plan) or f"{plan} bound"
    )
    upcoming = UpcomingBatches(binder)
    upcoming.fetch(iter([{PLAN_KEY: "a"}, {PLAN_KEY: "b"}]), count, planned=True)
    assert upcoming.bind("a") == "a bound"
    upcoming.prepare_next()
    assert bound == expected
    other = [{PLAN_KEY: "c"}, {PLAN_KEY: "d"}]
    assert upcoming.fetch(iter(other), 2, planned=True) == other
    assert upcoming.bind("of an evaluation") == "of an evaluation bound"


class Planner:
    """A dispatcher of one of two ranks, whose batches are planned in lockstep: the other rank has
    `others` of them.
    """

    def __init__(self, others: int, failing: int | None = None) -> None:
        self.groups = self
        self.remote = None
        self.others = others
        self.failing = failing
        self.asked = 0

    def any_of(self, flags: list[bool]) -> list[bool]:
        self.asked += 1
        return [flags[0] or self.asked == self.failing]

    def raise_together(self, error: Exception | None) -> None:
        raise ValueError(f"raised by both ranks: {error}")

    def plan_batches(
        self, batches: list[dict[str, Any]], at_least: int = 0
    ) -> list[dict[str, Any]]:
        if not batches and self.others > 0:
            batches = [{PLAN_KEY: "filler"}]
        self.others -= 1
        return [*batches, *([{PLAN_KEY: "filler"}] * (at_least - len(batches)))]

    def bind(self, plan: str) -> str:
        return f"{plan} bound"


def _steps(
    upcoming: UpcomingBatches, loader: Iterator[Any], count: int, *, planned: bool
) -> Iterator[list[str]]:
    """The plans of each step of a training that prepares something after each micro-batch."""
    while batches := upcoming.fetch(loader, count, planned=planned):
        yield [batch[PLAN_KEY] for batch in batches]
        for batch in batches:
            upcoming.bind(batch[PLAN_KEY])
            upcoming.prepare_next()


def _batches(names: str, error: Exception | None = None) -> Iterator[dict[str, Any]]:
    yield from ({PLAN_KEY: name} for name in names)
    if error is not None:
        raise error


def test_the_next_step_is_read_and_no_more():
    upcoming = UpcomingBatches(Planner(0))  # type: ignore[arg-type]  # a stand-in
    loader = _batches("abcdefg")
    steps = _steps(upcoming, loader, 2, planned=True)
    assert next(steps) == ["a", "b"]
    assert next(steps) == ["c", "d"]  # after both micro-batches of the first step
    upcoming.prepare_next()
    upcoming.prepare_next()
    upcoming.prepare_next()  # as for a step that was interrupted
    assert [batch[PLAN_KEY] for batch in loader] == ["g"]
    assert list(steps) == [["e", "f"]]


def test_the_last_step_of_a_data_set_may_have_fewer_micro_batches():
    upcoming = UpcomingBatches(Planner(0))  # type: ignore[arg-type]  # a stand-in
    assert list(_steps(upcoming, _batches("abc"), 2, planned=True)) == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    ("micro_batches_elsewhere", "expected"),
    [
        (1, [["a", "b"], ["c", "filler"]]),
        (3, [["a", "b"], ["c", "filler"]]),
        (4, [["a", "b"], ["c", "filler"]]),
        (5, [["a", "b"], ["c", "filler"], ["filler", "filler"]]),
    ],
)
def test_steps_of_a_stream_end_on_all_ranks_at_once(micro_batches_elsewhere, expected):
    # This rank has three micro-batches, and the other rank has as many as it says.
    upcoming = UpcomingBatches(Planner(micro_batches_elsewhere))  # type: ignore[arg-type]
    assert list(_steps(upcoming, _batches("abc"), 2, planned=False)) == expected


@pytest.mark.parametrize("planned", [True, False])
def test_a_batch_that_cannot_be_read_ends_the_step_that_needs_it(planned):
    error = OSError("stale file handle")
    upcoming = UpcomingBatches(Planner(9))  # type: ignore[arg-type]
    steps = _steps(upcoming, _batches("abc", error), 2, planned=planned)
    assert next(steps) == ["a", "b"]
    raised = "^stale" if planned else "^raised by both ranks: stale"
    with pytest.raises(OSError if planned else ValueError, match=raised):
        next(steps)


def test_a_batch_that_another_rank_cannot_read_ends_the_step():
    planner = Planner(9, failing=4)
    upcoming = UpcomingBatches(planner)  # type: ignore[arg-type]
    steps = _steps(upcoming, _batches("abcdef"), 2, planned=False)
    assert next(steps) == ["a", "b"]
    with pytest.raises(ValueError, match="raised by both ranks: None"):
        next(steps)
    # No rank asks or plans after that.
    assert planner.asked == 4

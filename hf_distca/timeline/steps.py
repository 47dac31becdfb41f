"""One step of all ranks: what each did when, and totals."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hf_distca.timeline.trace import Slice, Trace, TraceError

Doing = Literal["attention", "waits", "other"]
"""What a rank does: it computes core attention, stands in a wait for rows of others, or does anything else."""

CATEGORIES: dict[str, Doing] = {"kernel": "attention", "wait": "waits"}
"""Of slices, by what they tell of the rank."""


@dataclass
class RankStep:
    """A step of one rank; times are nanoseconds.

    Attributes:
        rank: whose.
        begin, end: of the step.
        stretches: (begin, end, what) of attention and waits, in the order of time; the rest of the step is other.
        sections: how long each section took.
    """

    rank: int
    begin: int
    end: int
    stretches: list[tuple[int, int, Doing]]
    sections: dict[str, int] = field(default_factory=dict)

    def totals(self) -> dict[Doing, int]:
        """How long the rank did what, the step together."""
        totals: dict[Doing, int] = {"attention": 0, "waits": 0, "other": 0}
        for begin, end, doing in self.stretches:
            totals[doing] += end - begin
        totals["other"] = self.end - self.begin - totals["attention"] - totals["waits"]
        return totals


def step_names(trace: Trace) -> list[str]:
    """The steps that every rank has, in the order of time."""
    of_ranks = [{step.name for step in trace.steps(rank)} for rank in trace.ranks]
    shared = set.intersection(*of_ranks) if of_ranks else set()
    return [step.name for rank in trace.ranks[:1] for step in trace.steps(rank) if step.name in shared]


def ranks_of_step(trace: Trace, name: str) -> list[RankStep]:
    """What every rank did in a step.

    Raises:
        TraceError: there is no such step.
    """
    if name not in step_names(trace):
        raise TraceError(f"there is no {name} in the trace; it has {', '.join(step_names(trace)) or 'no steps'}")
    return [_of_rank(rank, next(s for s in trace.steps(rank) if s.name == name)) for rank in trace.ranks]


def _of_rank(rank: int, step: Slice) -> RankStep:
    stretches = [
        (inner.begin, inner.end, CATEGORIES[inner.category])
        for inner in step.all_within()
        if inner.category in CATEGORIES
    ]
    found = RankStep(rank, step.begin, step.end, stretches)
    for inner in step.within:
        if inner.category == "section":
            found.sections[inner.name] = found.sections.get(inner.name, 0) + inner.end - inner.begin
    return found


def cells(step: RankStep, begin: int, end: int, count: int) -> list[Doing | None]:
    """What a rank did for the most of each of so many equal parts of a time; None outside of its step.

    Args:
        step: of the rank.
        begin: of the time.
        end: of the time.
        count: of the parts.
    """
    width = (end - begin) / count
    taken = {doing: [0.0] * count for doing in ("attention", "waits")}
    for start, stop, doing in step.stretches:
        for cell, share in _shares(start - begin, stop - begin, width, count):
            taken[doing][cell] += share
    inside = [0.0] * count
    for cell, share in _shares(step.begin - begin, step.end - begin, width, count):
        inside[cell] = share
    return [_most(inside[cell], taken["attention"][cell], taken["waits"][cell]) for cell in range(count)]


def _most(inside: float, attention: float, waits: float) -> Doing | None:
    if inside < 0.5:
        return None
    other = inside - attention - waits
    if other >= max(attention, waits):
        return "other"
    return "attention" if attention >= waits else "waits"


def _shares(start: float, stop: float, width: float, count: int) -> Iterator[tuple[int, float]]:
    """The cells that a stretch lies in, and how much of each it takes."""
    for cell in range(max(int(start / width), 0), count):
        if cell * width >= stop:
            return
        yield cell, (min(stop, (cell + 1) * width) - max(start, cell * width)) / width


def runs(found: Sequence[Doing | None]) -> Iterator[tuple[int, int, Doing]]:
    """Neighbours that are alike, together: (first, one past the last, what)."""
    first = 0
    for cell in range(1, len(found) + 1):
        if cell == len(found) or found[cell] != found[first]:
            doing = found[first]
            if doing is not None:
                yield first, cell, doing
            first = cell

"""Runs of a recurrence's kernel over the segments of one rank."""

from typing import NamedTuple

from hf_distca.plan.cuts import Chains


class Run(NamedTuple):
    """Segments that one run of a kernel computes."""

    segments: tuple[int, ...]  # of the rank; several are packed
    link: int | None  # number among the linked segments, if the state before it arrives
    early: bool  # whether it comes before states are sent

    @property
    def is_contiguous(self) -> bool:
        """Whether the rows of the segments follow each other."""
        return self.segments[-1] - self.segments[0] == len(self.segments) - 1


def runs_of(chains: Chains, *, packs: bool, starts: bool) -> list[Run]:
    """Return the runs of a rank in the order of their computation.

    A segment comes after the complete segment from whose state it starts. All that is sent comes
    first; the rest is computed while states travel.

    Args:
        packs: whether the kernel keeps packed documents apart.
        starts: whether it does so too if documents start from states or return their last ones.
    """
    link_of = {segment: link for link, segment in enumerate(chains.linked.tolist())}
    incomplete = {segment: link for segment, link in link_of.items() if chains.earlier[link]}
    early = _up_to(set(link_of) - set(incomplete), chains.before)
    runs: list[Run] = []
    together: dict[tuple[bool, int, bool, int], list[int]] = {}
    for segment, before in enumerate(chains.before):
        if segment in incomplete:
            runs.append(Run((segment,), incomplete[segment], early=True))
            continue
        has_later = chains.has_later[segment]
        is_packed = packs and (starts or (before < 0 and not has_later))
        depth = _depth(segment, chains.before)
        key = segment in early, depth, has_later, -1 if is_packed else segment
        together.setdefault(key, []).append(segment)
    complete: dict[bool, list[Run]] = {True: [], False: []}
    for (is_early, *_), segments in sorted(
        together.items(), key=lambda item: (item[0][1], item[1])
    ):
        complete[is_early].append(Run(tuple(segments), None, is_early))
    return [*complete[True], *runs, *complete[False]]


def _up_to(segments: set[int], before: tuple[int, ...]) -> set[int]:
    """Return complete segments, and those before them on their paths."""
    found = set(segments)
    waiting = list(segments)
    while waiting:
        segment = before[waiting.pop()]
        if segment >= 0 and segment not in found:
            found.add(segment)
            waiting.append(segment)
    return found


def _depth(segment: int, before: tuple[int, ...]) -> int:
    """Return how many segments come before a complete segment on its path."""
    depth = 0
    while before[segment] >= 0:
        segment = before[segment]
        depth += 1
    return depth

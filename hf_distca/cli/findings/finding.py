"""Findings, and how those of several ranks are told together."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of the thing.
        found: what it is.
        change: what to do about it; empty where nothing is to be done.
        needed: whether training fails, or is not what was asked for, until that is done.
    """

    name: str
    found: str
    change: str = ""
    needed: bool = False

    @property
    def state(self) -> str:
        """In one word: ok, advice (better changed) or wrong (to be changed)."""
        return "wrong" if self.needed else "advice" if self.change else "ok"


@dataclass(frozen=True)
class Told:
    """A finding, and whose it is.

    Attributes:
        finding: the finding.
        ranks: whose; None where it is that of all.
    """

    finding: Finding
    ranks: tuple[int, ...] | None = None


def told_together(by_rank: Sequence[Sequence[Finding]]) -> list[Told]:
    """The findings of all ranks, each once.

    Args:
        by_rank: [ranks] the findings of each, in their order; a rank has one of a name.

    Returns:
        By name, in the order in which names come up. What differs between ranks is there in each form, with its ranks.
    """
    ranks_of: dict[str, dict[Finding, list[int]]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            ranks_of.setdefault(finding.name, {}).setdefault(finding, []).append(rank)
    return [
        Told(finding, None if len(ranks) == len(by_rank) else tuple(ranks))
        for forms in ranks_of.values()
        for finding, ranks in forms.items()
    ]


def table(told: Sequence[Told]) -> str:
    """Findings for people: state, name, what was found, and below it what to do."""
    width = max((len(each.finding.name) for each in told), default=0)
    lines = []
    for each in told:
        finding = each.finding
        of_ranks = "" if each.ranks is None else f" ({_named(each.ranks)})"
        lines.append(f"{finding.state:<6}  {finding.name:<{width}}  {finding.found}{of_ranks}")
        if finding.change:
            lines.append(f"{'':<{width + 8}}  -> {finding.change}")
    return "\n".join(lines)


def _named(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0-3, 8"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"

"""Advice from the figures of a simulation, in sentences."""

from collections.abc import Iterator, Sequence

from hf_distca.sim.figures import WayFigures

NOT_WORTH = 1.02
"""Least speed-up that counts as a gain; runs differ by as much."""
MOST_WAITS = 0.05
"""Share of a step in waits for exchanges, above which the advice mentions them."""


def advice(
    ways: Sequence[WayFigures], by_plain: WayFigures, by_plan: WayFigures, tokens_per_rank: int
) -> tuple[str, ...]:
    """Return sentences of advice."""
    return (
        _outcome(by_plain, by_plan, tokens_per_rank),
        *_of_waits(by_plan),
        *_of_cuts(by_plain),
        *_of_what_cuts_more(ways, by_plain),
    )


def _outcome(by_plain: WayFigures, by_plan: WayFigures, tokens_per_rank: int) -> str:
    gain = by_plain.step_seconds / by_plan.step_seconds
    speed = f"{gain:.2f}× the speed of {by_plain.name}, the best other strategy."
    if gain < NOT_WORTH:
        share = by_plan.attention_mean_seconds / by_plan.step_seconds
        return (
            f"No gain expected: {speed} Core attention is {share:.0%} of a step. Longer documents beside short ones "
            "would gain more."
        )
    layout = "" if by_plan.document_layout == "auto" else f"document_layout={by_plan.document_layout!r}, "
    return f"{speed} Set {layout}tokens_per_rank={tokens_per_rank}."


def _of_waits(by_plan: WayFigures) -> Iterator[str]:
    share = by_plan.exchange_seconds / by_plan.step_seconds
    if share > MOST_WAITS:
        yield (
            f"Ranks wait {share:.0%} of a step for exchanges. A larger tokens_per_rank hides more of them behind "
            "computation."
        )
        if by_plan.document_layout != "auto":
            yield "A larger balance_tolerance moves fewer rows."


def _of_cuts(by_plain: WayFigures) -> Iterator[str]:
    if by_plain.documents_cut:
        yield (
            f"Every other strategy cuts documents: {by_plain.name} cuts {by_plain.documents_cut:.1%} of them. "
            "A document that is cut trains on less context."
        )


def _of_what_cuts_more(ways: Sequence[WayFigures], by_plain: WayFigures) -> Iterator[str]:
    fastest = min((way for way in ways if way.document_layout is None), key=lambda way: way.step_seconds)
    if fastest.documents_cut > by_plain.documents_cut and fastest.step_seconds < by_plain.step_seconds:
        yield (
            f"{fastest.name} takes {fastest.step_seconds:.3f} s a step, but it cuts {fastest.documents_cut:.1%} of "
            "the documents. The comparison leaves it out, because a document that is cut trains on less context."
        )

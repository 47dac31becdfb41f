"""Errors of one rank's input, which every rank raises together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from hf_distca.checks.refusal import RefusedError, SentenceError, told

ERRORS_OF_INPUT = (ValueError, TypeError, ImportError, OSError)
"""Errors of a rank's input."""


class Report(NamedTuple):
    """What other ranks learn of an error."""

    message: str
    is_sentence: bool


def report_of(error: Exception | None) -> Report | None:
    """Return the report of an error, if there is one."""
    return None if error is None else Report(told(error), isinstance(error, SentenceError))


@contextmanager
def raised_together(gather: Callable[[Report | None], list[Report | None]]) -> Iterator[None]:
    """Raise an error of input inside the context on every rank that gathers the reports."""
    error = None
    try:
        yield
    except ERRORS_OF_INPUT as caught:
        error = caught
    raise_any(error, gather(report_of(error)))


def raise_any(error: Exception | None, reports: Sequence[Report | None]) -> None:
    """Raise if any rank has an error: this rank's own if all have the same, else all messages.

    Args:
        reports: of each rank, from `report_of`.
    """
    if error is not None and len(set(reports)) == 1:
        raise error
    failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
    if failed:
        error_class = (
            RefusedError if all(report.is_sentence for _, report in failed) else ValueError
        )
        messages = [f"rank {rank}: {report.message}" for rank, report in failed]
        raise error_class("; ".join(messages)) from error

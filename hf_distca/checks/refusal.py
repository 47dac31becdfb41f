"""Errors whose message is a whole sentence, and the form of what hf_distca refuses.

The tables are beside this file, one for each subject; the reference page "What is refused" is
written from them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


class SentenceError(Exception):
    """Error whose message is a whole sentence that needs no traceback."""

    is_of_every_rank = True
    """Whether all ranks raise it, so that the first one alone prints it."""


def told(error: BaseException) -> str:
    """Return what other ranks are told of an error: its sentence, or its class and message."""
    return str(error) if isinstance(error, SentenceError) else f"{type(error).__name__}: {error}"


class RefusedError(SentenceError, ValueError):
    """What is given cannot work; the message is the same on every rank."""


class PackageError(RefusedError, ImportError):
    """A package that a setting needs is missing or cannot be imported."""


@dataclass(frozen=True)
class Refusal:
    """A case that is refused. Texts are format strings; the values come from the case.

    Attributes:
        found: what was found.
        reason: why it cannot work.
        remedy: what to set.
        condition: the case as the reference page names it, in Markdown, where `found` is not
            general enough.
    """

    found: str
    reason: str
    remedy: str
    condition: str = field(default="", kw_only=True)

    def error(self, *subject: Any, **values: Any) -> RefusedError:
        """Return the error with the message "found, but reason; remedy"."""
        return RefusedError(self._message(*subject, **values))

    def error_here(self, **values: Any) -> ValueError:
        """Return the same error with a traceback: one rank alone may raise it, in a step."""
        return ValueError(self._message(**values))

    def _message(self, *subject: Any, **values: Any) -> str:
        return f"{self.found}, but {self.reason}; {self.remedy}".format(*subject, **values)


@dataclass(frozen=True)
class Rule(Refusal):
    """A refusal with its test `when`; `{0}` in its texts is the subject."""

    when: Callable[[Any], object]


def errors_of(rules: Iterable[Rule], subject: Any) -> list[RefusedError]:
    """Return the errors of all rules that refuse a subject."""
    return [rule.error(subject) for rule in rules if rule.when(subject)]


def check_first(rules: Iterable[Rule], subject: Any) -> None:
    """Raise the error of the first rule that refuses a subject; later rules may rest on it."""
    for rule in rules:
        if rule.when(subject):
            raise rule.error(subject)


def raised_by(function: Callable[..., object], *args: Any) -> list[RefusedError]:
    """Return the error that a function raises, if it refuses its arguments."""
    try:
        function(*args)
    except RefusedError as error:
        return [error]
    return []


def raise_all(errors: Sequence[RefusedError]) -> None:
    """Raise an error, or one that lists several, if there are any."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        listed = "".join(f"\n- {error}" for error in errors)
        raise RefusedError(f"{len(errors)} settings cannot be used:{listed}")


def check(rules: Iterable[Rule], subject: Any) -> None:
    """Raise one error for all rules that refuse a subject."""
    raise_all(errors_of(rules, subject))


def given_as(given: Any) -> str:
    """Return how an error names an object that is of a wrong type."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if given is None or isinstance(given, str | int | float):
        return repr(given)
    return f"of the type {type(given).__name__}"

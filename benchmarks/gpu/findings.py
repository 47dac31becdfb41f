"""What a part finds: figures, and what is wrong."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Findings:
    """The findings of one part. What is wrong does not end the part: the rest is looked at too.

    Attributes:
        figures: by name; ready for JSON.
        wrong: what is wrong, a sentence each.
        skipped: why the part has nothing to do here; empty if it has.
    """

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.wrong: list[str] = []
        self.skipped = ""

    def check(self, right: bool, otherwise: str) -> None:
        """Take note of a sentence unless something is right; it is printed at once, should the part never end."""
        if not right:
            self.wrong.append(otherwise)
            print("wrong:", otherwise, flush=True)

    def at_most(self, value: float, bound: float, what: str) -> None:
        """Take note unless a number is at most its bound; NaN never is."""
        self.check(value <= bound, f"{what}: {value:.3g}, at most {bound:.3g} is expected")

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Go on where what is done inside fails."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.check(False, f"{what}: {type(error).__name__}: {str(error)[:500]}")

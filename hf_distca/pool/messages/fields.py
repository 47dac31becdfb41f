"""How every message is checked: its fields are read one by one, each with what it must be."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from hf_distca.pool.wire.errors import ProtocolError

LARGEST = 2**62
"""Of ids and other numbers that have no other bound."""


class Fields:
    """The fields of a message's header. What is not as it must be raises ProtocolError, which names it.

    Args:
        message: what the message is, for errors.
        header: its JSON object.
    """

    def __init__(self, message: str, header: Mapping[str, Any]) -> None:
        self._message = message
        self._header = header

    def whole(self, name: str, least: int = 0, most: int = LARGEST) -> int:
        """A whole number within bounds."""
        value = self._header.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most}")
        return value

    def whole_or_none(self, name: str, least: int, most: int = LARGEST) -> int | None:
        """A whole number within bounds, or null."""
        return None if self._header.get(name) is None else self.whole(name, least, most)

    def real(self, name: str, *, positive: bool = False, most: float = 1e30) -> float:
        """A finite number of at most this magnitude."""
        value = self._header.get(name)
        number: float = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if not abs(number) <= most or (positive and number <= 0):
            raise self.wrong(name, f"a {'positive ' if positive else ''}number of at most {most:g}")
        return float(number)

    def real_or_none(self, name: str, *, positive: bool = False) -> float | None:
        """A finite number, or null."""
        return None if self._header.get(name) is None else self.real(name, positive=positive)

    def text(self, name: str, most: int) -> str:
        """A text of so many characters at most."""
        value = self._header.get(name)
        if not isinstance(value, str) or len(value) > most:
            raise self.wrong(name, f"a text of at most {most} characters")
        return value

    def one_of(self, name: str, choices: Collection[str]) -> str:
        """One of some texts."""
        value = self._header.get(name)
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(name, f"one of {', '.join(choices)}")
        return value

    def rows(self, name: str, least: int, most: int) -> list[list[Any]]:
        """A list of lists, so many of them."""
        value = self._header.get(name)
        if (
            not isinstance(value, list)
            or not least <= len(value) <= most
            or not all(isinstance(row, list) for row in value)
        ):
            raise self.wrong(name, f"a list of {least} to {most} lists")
        return value

    def require(self, good: bool, name: str, what: str) -> None:
        """Raise ProtocolError unless a field is as it must be beside others."""
        if not good:
            raise self.wrong(name, what)

    def wrong(self, name: str, what: str) -> ProtocolError:
        """The error for a field that is not what it must be."""
        return ProtocolError(f"{name} of {self._message} must be {what}, got {self._header.get(name)!r:.60}")

"""Read values, and write numbers with their nouns, as people write them.

Values are tokens such as "32k", bytes such as "128MiB", and on, off or "auto".
"""

import re
from argparse import ArgumentTypeError
from dataclasses import fields
from decimal import Decimal
from math import inf
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from hf_distca.checks.refusal import RefusedError

TOKENS = {"": 1, "k": 2**10, "m": 2**20}
"""Suffixes of token numbers: 32k is 32,768 tokens, as in names of models."""
SWITCHED = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
"""Forms of on and off, in lower case."""
BYTES = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
AUTO: Final = "auto"
"""Value that lets the library choose."""
EXTERNAL: Final = "external"
"""Value for attention servers that are started separately."""


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number and a noun, whose plural is `plural` or ends in s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


class UnitError(ArgumentTypeError, RefusedError):
    """Error of a value that cannot be read; argparse shows the message."""


def read_values(settings: Any) -> None:
    """Replace field values of a settings dataclass by the read values of the fields' types.

    Raises:
        UnitError: a value cannot be read; names the field and what is expected.
    """
    for field in fields(settings):
        if field.type in _READERS:
            try:
                read_value: Any = field.type
                setattr(settings, field.name, read_value(getattr(settings, field.name)))
            except UnitError as error:
                raise UnitError(f"{field.name} {error}") from None


def read_tokens(value: Any) -> int:
    """Return a number of tokens from 32768, "32768" or "32k"; k is 1,024 and M is 1,048,576."""
    return _number(value, TOKENS, "a number of tokens, such as 32768 or '32k'")


def _read_tokens_or_auto(value: Any) -> int | Literal["auto"]:
    return AUTO if value == AUTO else read_tokens(value)


A_NUMBER_OF_BYTES = "a number of bytes, such as 134217728 or '128MiB'"


def _read_bytes(value: Any) -> int:
    return _number(value, BYTES, A_NUMBER_OF_BYTES)


def _read_bytes_or_auto(value: Any) -> int | Literal["auto"]:
    return AUTO if value == AUTO else _number(value, BYTES, f"{A_NUMBER_OF_BYTES}, or {AUTO!r}")


def _read_rows_or_auto(value: Any) -> int | Literal["auto"]:
    return AUTO if value == AUTO else _number(value, {"": 1}, f"a number of rows or {AUTO!r}")


def _read_servers(value: Any) -> int | Literal["external"]:
    if value == EXTERNAL:
        return EXTERNAL
    return _number(value, {"": 1}, f"a number of processes or {EXTERNAL!r}")


def _read_tolerance(value: Any) -> float | Literal["auto"]:
    if value == AUTO:
        return AUTO
    try:
        tolerance = float(value)
    except (TypeError, ValueError):
        tolerance = -1.0
    if not 0 <= tolerance < inf:
        raise UnitError(f"must be 0 or more (0.05 is 5 %), or {AUTO!r}, got {value!r}")
    return tolerance


def _read_switch(value: Any) -> bool | Literal["auto"]:
    if value == AUTO:
        return AUTO
    if str(value).lower() not in SWITCHED:
        raise UnitError(f"must be true, false or {AUTO!r}, got {value!r}")
    return SWITCHED[str(value).lower()]


NUMBER_AND_SUFFIX = re.compile(r"\s*(-?\d[\d_]*(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def _number(value: Any, suffixes: dict[str, int], expected: str) -> int:
    """Return an integer, or the product of a number in a text and its suffix.

    Raises:
        UnitError: the value is neither, or the product is no integer; says what is expected.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    parts = NUMBER_AND_SUFFIX.fullmatch(value) if isinstance(value, str) else None
    factor = suffixes.get(parts[2].lower()) if parts else None
    number = Decimal(parts[1]) * factor if parts and factor else None
    if number is None or number % 1:
        raise UnitError(f"must be {expected}, got {value!r}")
    return int(number)


_READERS: list[Any] = [
    _read_tokens_or_auto,
    _read_bytes,
    _read_bytes_or_auto,
    _read_rows_or_auto,
    _read_servers,
    _read_tolerance,
    _read_switch,
]

if TYPE_CHECKING:
    Held = TypeVar("Held", covariant=True)
    Given = TypeVar("Given", contravariant=True)

    class Read(Generic[Held, Given]):
        """Type of a setting that accepts every form and holds the read value."""

        def __get__(self, owner: object, kind: type | None = None) -> Held: ...
        def __set__(self, owner: object, given: Given) -> None: ...

    TokensOrAuto = Read[int, int | str]  # "auto" becomes a number
    Bytes = Read[int, int | str]
    BytesOrAuto = Read[int | Literal["auto"], int | str]
    RowsOrAuto = Read[int | Literal["auto"], int | str]
    Servers = Read[int | Literal["external"], int | str]
    Tolerance = Read[float | Literal["auto"], float | str]
    Switch = Read[bool | Literal["auto"], bool | str]
else:
    # HfArgumentParser calls the type of a field with what is on the command line.
    TokensOrAuto, Bytes, Servers = _read_tokens_or_auto, _read_bytes, _read_servers
    BytesOrAuto, RowsOrAuto = _read_bytes_or_auto, _read_rows_or_auto
    Tolerance, Switch = _read_tolerance, _read_switch

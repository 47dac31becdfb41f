"""Read values as people write them.

These are tokens such as "32k", bytes such as "128MiB", and on, off or "auto".
"""

import re
from argparse import ArgumentTypeError
from dataclasses import fields
from decimal import Decimal
from math import inf
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from hf_distca.refusal import RefusedError

TOKENS = {"": 1, "k": 2**10, "m": 2**20}
"""Suffixes of token numbers: 32k is 32,768 tokens, as in names of models."""
SWITCHED = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
"""Forms of on and off, in lower case."""
BYTES = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
AUTO: Final = "auto"
"""Value that lets the library choose."""
EXTERNAL: Final = "external"
"""Value for attention servers that are started separately."""


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
                read: Any = field.type
                setattr(settings, field.name, read(getattr(settings, field.name)))
            except UnitError as error:
                raise UnitError(f"{field.name} {error}") from None


def read_tokens(given: Any) -> int:
    """Return a number of tokens from 32768, "32768" or "32k"; k is 1,024 and M is 1,048,576."""
    return _number(given, TOKENS, "a number of tokens, such as 32768 or '32k'")


A_NUMBER_OF_BYTES = "a number of bytes, such as 134217728 or '128MiB'"


def _read_bytes(given: Any) -> int:
    return _number(given, BYTES, A_NUMBER_OF_BYTES)


def _read_bytes_or_auto(given: Any) -> int | Literal["auto"]:
    return AUTO if given == AUTO else _number(given, BYTES, f"{A_NUMBER_OF_BYTES}, or {AUTO!r}")


def _read_servers(given: Any) -> int | Literal["external"]:
    return (
        EXTERNAL
        if given == EXTERNAL
        else _number(given, {"": 1}, f"a number of processes or {EXTERNAL!r}")
    )


def _read_tolerance(given: Any) -> float | Literal["auto"]:
    if given == AUTO:
        return AUTO
    try:
        tolerance = float(given)
    except (TypeError, ValueError):
        tolerance = -1.0
    if not 0 <= tolerance < inf:
        raise UnitError(f"must be 0 or more (0.05 is 5 %), or {AUTO!r}, got {given!r}")
    return tolerance


def _read_switch(given: Any) -> bool | Literal["auto"]:
    if given == AUTO:
        return AUTO
    if str(given).lower() not in SWITCHED:
        raise UnitError(f"must be true, false or {AUTO!r}, got {given!r}")
    return SWITCHED[str(given).lower()]


def _number(given: Any, suffixes: dict[str, int], expected: str) -> int:
    if isinstance(given, int) and not isinstance(given, bool):
        return int(given)
    found = (
        re.fullmatch(r"\s*(-?\d[\d_]*(?:\.\d+)?)\s*([a-zA-Z]*)\s*", given)
        if isinstance(given, str)
        else None
    )
    factor = suffixes.get(found[2].lower()) if found else None
    number = Decimal(found[1]) * factor if found and factor else None
    if number is None or number % 1:
        raise UnitError(f"must be {expected}, got {given!r}")
    return int(number)


_READERS: list[Any] = [
    read_tokens,
    _read_bytes,
    _read_bytes_or_auto,
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

    Tokens = Read[int, int | str]
    Bytes = Read[int, int | str]
    BytesOrAuto = Read[int | Literal["auto"], int | str]
    Servers = Read[int | Literal["external"], int | str]
    Tolerance = Read[float | Literal["auto"], float | str]
    Switch = Read[bool | Literal["auto"], bool | str]
else:
    # HfArgumentParser calls the type of a field with what is on the command line.
    Tokens, Bytes, Servers = read_tokens, _read_bytes, _read_servers
    BytesOrAuto, Tolerance, Switch = _read_bytes_or_auto, _read_tolerance, _read_switch

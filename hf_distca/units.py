"""Read and check values of settings, and write numbers with their nouns, as people write them.

Values are tokens such as "32k", bytes such as "128MiB", and on, off or "auto". A group of settings
is a frozen dataclass that is read from a dictionary or JSON.
"""

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import Field, field, fields
from decimal import Decimal
from math import inf, isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from hf_distca.checks.refusal import RefusedError

TOKENS = {"": 1, "k": 2**10, "m": 2**20}
"""Suffixes of token numbers: 32k is 32,768 tokens, as in names of models."""
SWITCHED = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
"""Forms of on and off, in lower case."""
Group = TypeVar("Group")
"""Class of a group of settings."""
BYTES = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
AUTO: Final = "auto"
"""Value that lets the library choose."""


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number and a noun, whose plural is `plural` or ends in s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


class UnitError(ArgumentTypeError, RefusedError):
    """Error of a value that cannot be read, without the setting's name, which argparse adds."""


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """Return a field with a default, a help text and `choices`, as HfArgumentParser reads them."""
    return field(default=default, metadata={"help": help, **metadata})


def read_values(settings: Any, *readers: Callable[[Any], Any]) -> dict[str, RefusedError]:
    """Replace field values of a settings dataclass by the read values of the fields' types.

    Return the errors of values that cannot be read, by field.

    Args:
        readers: types that read values, besides those of this module.
    """
    errors: dict[str, RefusedError] = {}
    for setting in fields(settings):
        if setting.type in (*_READERS, *readers):
            try:
                read_value: Any = setting.type
                value = read_value(getattr(settings, setting.name))
                object.__setattr__(settings, setting.name, value)  # groups are frozen
            except UnitError as error:
                errors[setting.name] = RefusedError(f"{setting.name} {error}")
    return errors


def unusable_values(
    settings: Any, kind: type, zero: Mapping[str, str], skipped: Container[str] = ()
) -> list[RefusedError]:
    """Return the errors of values that do not fit the types and choices of a dataclass's fields.

    Args:
        kind: the dataclass, or a base class of it whose fields alone are checked.
        zero: meaning of 0 for the fields that may be 0; all other numbers must be positive.
        skipped: names of fields that are not checked.
    """
    errors = []
    for setting in fields(kind):
        value = getattr(settings, setting.name)
        expected = None if setting.name in skipped else _expected(setting, value, zero)
        if expected is not None:
            errors.append(RefusedError(f"{setting.name} must be {expected}, got {value!r}"))
    return errors


def _expected(setting: Field[Any], value: Any, zero: Mapping[str, str]) -> str | None:
    """Return what a setting must be, if a value cannot be used for it."""
    name = setting.name
    valid = setting.metadata.get("choices")
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    # HfArgumentParser leaves only `str` of `str | None`.
    may_be_none = value is None and setting.default is None
    is_text = setting.type in (str, str | None)
    expected = None
    if valid and value not in valid:
        expected = f"one of {list(valid)}"
    elif setting.type is float and not (is_number and isfinite(value)):
        expected = "a finite number"
    elif setting.type is int and not (is_number and isinstance(value, Integral)):
        expected = "a whole number"
    elif setting.type is bool and not isinstance(value, bool):
        expected = "true or false"
    elif is_text and not (isinstance(value, str) or may_be_none):
        expected = "text"
    elif is_number and (value < 0 or (value == 0 and name not in zero)):
        expected = f"0 ({zero[name]}) or more" if name in zero else "positive"
    return expected


def members_given(value: Any) -> Mapping[str, Any] | None:
    """Return the members of a group of settings, from a dictionary or JSON; None for other values.

    Raises:
        UnitError: a text begins like JSON and is not JSON.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UnitError(f"begins with a brace but is no JSON ({error}): {value!r}") from None
    return value if isinstance(value, Mapping) else None


def group_of(members: Mapping[str, Any], kind: Callable[..., Group]) -> Group:
    """Return a group of settings from its members.

    Args:
        kind: the dataclass. Its UnitErrors are of members that need no name.

    Raises:
        UnitError: there is no such member, or a value cannot be used.
    """
    names = [member.name for member in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    unknown = [name for name in members if name not in names]
    if unknown:
        raise UnitError(f"has no member {unknown[0]!r}; the members are {', '.join(names)}")
    try:
        return kind(**members)
    except UnitError:
        raise
    except RefusedError as error:
        raise UnitError(f"member {error}") from None


def changed_members(group: Any) -> dict[str, Any]:
    """Return the members of a group of settings that differ from the defaults."""
    default = type(group)()
    return {name: value for name, value in vars(group).items() if value != getattr(default, name)}


def raise_first(errors: Sequence[RefusedError]) -> None:
    """Raise the first error, if there is one: the sentence on a group has one reason."""
    if errors:
        raise errors[0]


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


def _read_number_or_auto(value: Any) -> int | Literal["auto"]:
    return AUTO if value == AUTO else _number(value, {"": 1}, f"a number or {AUTO!r}")


def read_whole_number(value: Any, expected: str) -> int:
    """Return a whole number from 2 or "2"; `expected` says what else the value may be."""
    return _number(value, {"": 1}, expected)


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
    _read_number_or_auto,
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
    NumberOrAuto = Read[int | Literal["auto"], int | str]
    Tolerance = Read[float | Literal["auto"], float | str]
    Switch = Read[bool | Literal["auto"], bool | str]
else:
    # HfArgumentParser calls the type of a field with what is on the command line.
    TokensOrAuto, Bytes = _read_tokens_or_auto, _read_bytes
    BytesOrAuto, NumberOrAuto = _read_bytes_or_auto, _read_number_or_auto
    Tolerance, Switch = _read_tolerance, _read_switch

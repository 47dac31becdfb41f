"""Reading document lengths that a user wrote."""

import json
from pathlib import Path
from typing import Any

EXPECTED = "expected a JSON list of document lengths, or a list of such lists, one per rank"


class InputError(ValueError):
    """Something a user gave cannot be used; the message says what and how to fix it, in one line."""


def read_lengths(path: str) -> list[int] | list[list[int]]:
    """Document lengths from a JSON file: all in one list, or one list per rank (of which some may be empty).

    Raises:
        InputError: the file cannot be read, is not JSON, or is not one of the two forms.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error}); {EXPECTED}") from error
    if not isinstance(content, list):
        raise InputError(f"{path} holds {_described(content)}; {EXPECTED}")
    nested = [isinstance(item, list) for item in content]
    if any(nested) and not all(nested):
        odd = nested.index(not nested[0])
        raise InputError(
            f"{path} mixes rows and lengths: item 0 is {_described(content[0])}, "
            f"item {odd} is {_described(content[odd])}; {EXPECTED}"
        )
    for where, length in _all_lengths(content):
        _check_length(path, where, length)
    if not any(True for _ in _all_lengths(content)):
        raise InputError(f"{path} holds no documents; {EXPECTED}")
    return content


def _all_lengths(content: list[Any]) -> list[tuple[str, Any]]:
    """Every length with its place in the file."""
    if content and isinstance(content[0], list):
        return [(f"row {r}, item {i}", item) for r, row in enumerate(content) for i, item in enumerate(row)]
    return [(f"item {i}", item) for i, item in enumerate(content)]


def _check_length(path: str, where: str, length: Any) -> None:
    if isinstance(length, bool) or not isinstance(length, int):
        raise InputError(f"{path}: {where} is {_described(length)}, not a number of tokens; {EXPECTED}")
    if length < 1:
        raise InputError(f"{path}: {where} is {length}; a document has at least 1 token, leave empty ones out")


def _described(value: Any) -> str:
    """A value as a message shows it: what it is, and the value where that is short."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."

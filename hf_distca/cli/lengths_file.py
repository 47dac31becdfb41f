"""Read document lengths from a JSON file, a table or a data set."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_distca.cli.input_error import InputError

EXPECTED = "expected a JSON list of document lengths, or a list of such lists, one per rank"
TABLES = {".csv": "csv", ".jsonl": "json", ".parquet": "parquet"}
"""Formats of `datasets` for tables of lengths or tokens, by file suffix."""
COLUMNS = ("length", "input_ids")
"""Columns that are tried if none is named."""


def is_lengths_file(path: str) -> bool:
    """Return whether `read_lengths` accepts a file of this name."""
    return Path(path).suffix in (".json", *TABLES) or Path(path).is_file()


def read_lengths(path: str, column: str | None = None) -> list[int] | list[list[int]]:
    """Read document lengths from a file.

    Args:
        path: a table (.csv, .jsonl or .parquet); else JSON with one list of lengths, or one list per rank. Lists of
            ranks may be empty.
        column: of a table, with lengths or lists of tokens; None takes the first of `COLUMNS` in the table.

    Raises:
        InputError: the file cannot be read, has another format than its name says, or holds no lengths.
    """
    kind = TABLES.get(Path(path).suffix)
    if kind is not None:
        lengths: list[int] = _of_table(path, kind, column).tolist()
        return lengths
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


def lengths_of(source: str, load: Callable[[], Any], column: str | None, expected: str) -> NDArray[np.int64]:
    """Return the document lengths of a data set of `datasets`.

    Args:
        column: as in `read_lengths`.
        expected: valid sources, for the error.

    Raises:
        InputError: there is no such data set, or it holds no lengths.
    """
    try:
        data = load()
    except Exception as error:  # from the hub, a file system or a parser
        cause = error.__cause__ or error  # `datasets` wraps a parser's error
        why = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        raise InputError(f"no document lengths at {source!r}: expected {expected} ({why})") from error
    names = [column] if column else list(COLUMNS)
    found = next((name for name in names if name in data.column_names), None)
    if found is None:
        raise InputError(
            f"{source} has columns {data.column_names}, none of {names}: name one with lengths, or with lists of "
            "tokens, by --column"
        )
    return _of_column(f"{source}: column {found}", data.with_format("arrow").data.column(found).combine_chunks())


def _of_table(path: str, kind: str, column: str | None) -> NDArray[np.int64]:
    from datasets import load_dataset

    if not Path(path).is_file():
        raise InputError(f"cannot read {path}: no such file")
    return lengths_of(path, lambda: load_dataset(kind, data_files=path, split="train"), column, f"a {kind} file")


def _of_column(where: str, values: Any) -> NDArray[np.int64]:
    """Return the lengths in an Arrow array of lengths or of lists."""
    import pyarrow

    lengths = values.value_lengths() if hasattr(values, "value_lengths") else values
    if not pyarrow.types.is_integer(lengths.type):
        raise InputError(f"{where} holds {values.type}; expected whole numbers of tokens, or lists of tokens")
    if lengths.null_count:
        row = lengths.is_null().index(True).as_py()
        raise InputError(f"{where} is empty in row {row}; leave such rows out")
    found: NDArray[np.int64] = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    if not len(found):
        raise InputError(f"{where} holds no documents")
    if found.min() < 1:
        row = int(found.argmin())
        raise InputError(f"{where}: row {row} is {found[row]}; a document has at least 1 token, leave empty ones out")
    return found


def _all_lengths(content: list[Any]) -> list[tuple[str, Any]]:
    """Return every length with its place in the file."""
    if content and isinstance(content[0], list):
        return [(f"row {r}, item {i}", item) for r, row in enumerate(content) for i, item in enumerate(row)]
    return [(f"item {i}", item) for i, item in enumerate(content)]


def _check_length(path: str, where: str, length: Any) -> None:
    if isinstance(length, bool) or not isinstance(length, int):
        raise InputError(f"{path}: {where} is {_described(length)}, not a number of tokens; {EXPECTED}")
    if length < 1:
        raise InputError(f"{path}: {where} is {length}; a document has at least 1 token, leave empty ones out")


def _described(value: Any) -> str:
    """Describe a value for a message: its type, and the value if it is short."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."

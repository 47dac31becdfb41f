"""Sources of document lengths for `plan` and `simulate`: files, data sets and distributions."""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_distca.cli import InputError
from hf_distca.cli.options import seed
from hf_distca.planner.cost import as_lengths
from hf_distca.sim.lengths import Draw, IntArray, corpora, lognormal, micro_batches, of_documents

LONG_AND_SHORT = "one-long"
LOGNORMAL = "lognormal:MEDIAN,SIGMA"
SOURCES = f"""\
--lengths takes one of these:

- a .json file: a list of document lengths in tokens, or a list of such lists, one for each rank
- a .csv, .jsonl or .parquet file with a column of lengths, or of lists of tokens (--column)
- a data set: its name on the Hub or its folder (--split, --column)
- a distribution of the package: {", ".join(corpora())}
- {LONG_AND_SHORT}: one document with half of all ranks' tokens, beside short ones
- {LOGNORMAL}, such as lognormal:4000,1.5
"""
EXPECTED = "expected a JSON list of document lengths, or a list of such lists, one per rank"
TABLES = {".csv": "csv", ".jsonl": "json", ".parquet": "parquet"}
"""Formats of `datasets` for tables of lengths or tokens, by file suffix."""
COLUMNS = ("length", "input_ids")
"""Columns that are tried if none is named."""


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the source of document lengths."""
    add = parser.add_argument
    add("--lengths", required=True, metavar="SOURCE", help="where document lengths come from, see above")
    add("--split", default="train", help="split of a data set (default: train)")
    add("--column", help="column with lengths or lists of tokens (default: length, or input_ids)")
    add("--seed", type=seed, default=0, help="seed for drawing documents (default: 0)")


def one_micro_batch(options: argparse.Namespace, tokens: int) -> list[int] | list[list[int]]:
    """Return the documents of a file, or a micro-batch drawn from any other source.

    Args:
        tokens: maximum number of a micro-batch's tokens, on all ranks together.

    Returns:
        Length of each document in tokens; a list per rank if a file has rows.

    Raises:
        InputError: there is no such source, or it holds no lengths.
    """
    if (read := _of_file(options.lengths, options.column)) is not None:
        return read
    drawn: list[int] = next(drawn_micro_batches(options, tokens)).tolist()
    return drawn


def drawn_micro_batches(options: argparse.Namespace, tokens: int) -> Iterator[IntArray]:
    """Yield micro-batches without end: [documents] lengths in tokens, drawn from the source.

    Args:
        tokens: maximum number of a micro-batch's tokens, on all ranks together.

    Raises:
        InputError: there is no such source, or it holds no lengths.
    """
    source: str = options.lengths
    known = corpora()
    first = None
    draw: Draw
    if source in known:
        draw = known[source]
    elif source == LONG_AND_SHORT:
        draw, first = lognormal(2048, 1.0), np.array([tokens // 2])
    elif source.startswith("lognormal:"):
        draw = _lognormal(source)
    elif (read := _of_file(source, options.column)) is not None:
        draw = of_documents(as_lengths(documents_of(read)))
    else:
        expected = f"a .json, .csv, .jsonl or .parquet file, one of {', '.join([*sorted(known), LONG_AND_SHORT])}, "
        expected += f"{LOGNORMAL}, or a data set"
        draw = of_documents(_of_data(source, lambda: _data_set(source, options.split), options.column, expected))
    return micro_batches(draw, tokens, options.seed, first)


def documents_of(lengths: list[int] | list[list[int]]) -> list[int]:
    """Return the lengths of all documents, in order."""
    return [length for row in lengths for length in (row if isinstance(row, list) else [row])]


def _lognormal(source: str) -> Draw:
    try:
        median, sigma = map(float, source.removeprefix("lognormal:").split(","))
        return lognormal(median, sigma)
    except ValueError as error:
        raise InputError(
            f"{source!r} is not a distribution: expected {LOGNORMAL}, such as lognormal:4000,1.5 ({error})"
        ) from error


def _of_file(path: str, column: str | None) -> list[int] | list[list[int]] | None:
    """Read document lengths from a file; None if the name is not that of a file.

    A table (.csv, .jsonl or .parquet) has a column; JSON has a list of lengths, or a list of lists.
    """
    if kind := TABLES.get(Path(path).suffix):
        from datasets import load_dataset

        if not Path(path).is_file():
            raise InputError(f"cannot read {path}: no such file")
        lengths: list[int] = _of_data(
            path, lambda: load_dataset(kind, data_files=path, split="train"), column, f"a {kind} file"
        ).tolist()
        return lengths
    if Path(path).suffix != ".json" and not Path(path).is_file():
        return None
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error}); {EXPECTED}") from error
    if not isinstance(content, list):
        raise InputError(f"{path} holds {_described(content)}; {EXPECTED}")
    nested = any(isinstance(item, list) for item in content)
    for number, row in enumerate(content if nested else [content]):
        if not isinstance(row, list):
            raise InputError(f"{path} mixes rows and lengths: item {number} is {_described(row)}; {EXPECTED}")
        for index, length in enumerate(row):
            place = f"row {number}, item {index}" if nested else f"item {index}"
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise InputError(f"{path}: {place} is {_described(length)}, not 1 or more tokens; {EXPECTED}")
    if not content or content == [[]] * len(content):
        raise InputError(f"{path} holds no documents; {EXPECTED}")
    return content


def _data_set(source: str, split: str) -> Any:
    """Load a data set from the hub, a folder of files or a saved folder."""
    from datasets import load_dataset, load_from_disk

    saved = Path(source, "state.json").exists() or Path(source, "dataset_dict.json").exists()
    data = load_from_disk(source) if saved else load_dataset(source, split=split)
    return data[split] if isinstance(data, dict) else data


def _of_data(source: str, load: Callable[[], Any], column: str | None, expected: str) -> NDArray[np.int64]:
    """Return the document lengths of a data set of `datasets`.

    Args:
        column: with lengths or lists of tokens; None takes the first of `COLUMNS` in the data set.
        expected: valid sources, for the error.
    """
    import pyarrow

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
            f"{source} has columns {data.column_names}, but none of {names}; set --column to a column of lengths, or "
            "of lists of tokens"
        )
    where, values = f"{source}: column {found}", data.with_format("arrow").data.column(found).combine_chunks()
    lengths = values.value_lengths() if hasattr(values, "value_lengths") else values
    if not pyarrow.types.is_integer(lengths.type):
        raise InputError(f"{where} holds {values.type}; expected whole numbers of tokens, or lists of tokens")
    if lengths.null_count:
        raise InputError(f"{where} is empty in row {lengths.is_null().index(True).as_py()}; leave such rows out")
    numbers: NDArray[np.int64] = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    if not len(numbers):
        raise InputError(f"{where} holds no documents")
    if numbers.min() < 1:
        row = int(numbers.argmin())
        raise InputError(
            f"{where}: row {row} is {numbers[row]}, but a document has at least 1 token; leave empty documents out"
        )
    return numbers


def _described(value: Any) -> str:
    """Describe a value for a message: its type, and the value if it is short."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."

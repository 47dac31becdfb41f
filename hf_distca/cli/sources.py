"""Sources of document lengths for `plan` and `simulate`: files, data sets and distributions."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hf_distca.cli import InputError
from hf_distca.planner.cost import as_lengths
from hf_distca.sim.lengths import IntArray, corpora, lognormal, micro_batches, of_documents

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


def one_micro_batch(options: argparse.Namespace, tokens: int) -> list[int] | list[list[int]]:
    """Return the document lengths of a file, a list per rank if it has rows, or at most `tokens` tokens of documents.

    Raises:
        InputError: there is no such source, or it holds no lengths.
    """
    read = _of_file(options.lengths, options.column)
    return next(drawn_micro_batches(options, tokens)).tolist() if read is None else read


def drawn_micro_batches(options: argparse.Namespace, tokens: int) -> Iterator[IntArray]:
    """Yield [documents] lengths of micro-batches without end, drawn from the source as in `one_micro_batch`."""
    source: str = options.lengths
    first = np.array([tokens // 2]) if source == LONG_AND_SHORT else None
    if source in corpora():
        draw = corpora()[source]
    elif source == LONG_AND_SHORT:
        draw = lognormal(2048, 1.0)
    elif source.startswith("lognormal:"):
        try:
            median, sigma = map(float, source.removeprefix("lognormal:").split(","))
            draw = lognormal(median, sigma)
        except ValueError as error:
            raise InputError(
                f"{source!r} is not a distribution: expected {LOGNORMAL}, such as lognormal:4000,1.5 ({error})"
            ) from error
    elif (read := _of_file(source, options.column)) is not None:
        draw = of_documents(as_lengths(documents_of(read)))
    else:
        draw = of_documents(_of_data(source, options.column, split=options.split))
    return micro_batches(draw, tokens, options.seed, first)


def documents_of(lengths: list[int] | list[list[int]]) -> list[int]:
    """Return the lengths of all documents, in order."""
    return [length for row in lengths for length in (row if isinstance(row, list) else [row])]


def _of_file(path: str, column: str | None) -> list[int] | list[list[int]] | None:
    """Read document lengths from a table or from JSON; None if no file has the name."""
    suffix = Path(path).suffix
    if not Path(path).is_file():
        if suffix in (".json", *TABLES):
            raise InputError(f"cannot read {path}: no such file")
        return None
    if suffix in TABLES:
        return list(map(int, _of_data(path, column, table=TABLES[suffix])))
    try:
        content: list[Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error}); {EXPECTED}") from error
    nested = isinstance(content, list) and any(isinstance(item, list) for item in content)
    for number, row in enumerate(content if nested else [content]):
        where = f"{path}, row {number}" if nested else path
        if not isinstance(row, list):
            raise InputError(f"{where}: found {row!r:.40}, not a list of lengths; {EXPECTED}")
        for index, length in enumerate(row):
            if type(length) is not int or length < 1:
                raise InputError(f"{where}: item {index} is {length!r:.40}, not 1 or more tokens; {EXPECTED}")
    if not documents_of(content):
        raise InputError(f"{path} holds no documents; {EXPECTED}")
    return content


def _of_data(source: str, column: str | None, *, table: str | None = None, split: str = "train") -> Any:
    """Return the document lengths of a data set, or of a table of this format of `datasets`."""
    import pyarrow
    from datasets import load_dataset, load_from_disk

    try:
        if table is not None:
            data = load_dataset(table, data_files=source, split=split)
        elif Path(source, "state.json").exists() or Path(source, "dataset_dict.json").exists():
            data = load_from_disk(source)
            data = data[split] if isinstance(data, dict) else data
        else:
            data = load_dataset(source, split=split)
    except Exception as error:  # from the hub, a file system or a parser
        cause = error.__cause__ or error  # `datasets` wraps a parser's error
        why = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        names = ", ".join([*sorted(corpora()), LONG_AND_SHORT])
        others = f"a .json, .csv, .jsonl or .parquet file, one of {names}, {LOGNORMAL}, or a data set"
        expected = others if table is None else f"a {table} file"
        raise InputError(f"no document lengths at {source!r}: expected {expected} ({why})") from error
    tried = [column] if column else ["length", "input_ids"]
    found = [name for name in tried if name in data.column_names]
    if not found:
        raise InputError(
            f"{source} has columns {data.column_names}, but none of {tried}; set --column to a column of lengths, or "
            "of lists of tokens"
        )
    where, values = f"{source}: column {found[0]}", data.with_format("arrow").data.column(found[0]).combine_chunks()
    lengths = values.value_lengths() if hasattr(values, "value_lengths") else values
    if not pyarrow.types.is_integer(lengths.type):
        raise InputError(f"{where} holds {values.type}; expected whole numbers of tokens, or lists of tokens")
    if lengths.null_count:
        raise InputError(f"{where} is empty in row {lengths.is_null().index(True).as_py()}; leave such rows out")
    numbers = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    if not len(numbers):
        raise InputError(f"{where} holds no documents")
    row = int(numbers.argmin())
    if numbers[row] < 1:
        raise InputError(
            f"{where}: row {row} is {numbers[row]}, but a document has at least 1 token; leave empty documents out"
        )
    return numbers

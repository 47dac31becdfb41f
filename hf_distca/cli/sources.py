"""Sources of document lengths for `plan` and `simulate`: files, data sets and distributions."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hf_distca.cli.input_error import InputError
from hf_distca.cli.lengths_file import is_lengths_file, lengths_of, read_lengths
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
    if is_lengths_file(options.lengths):
        return read_lengths(options.lengths, options.column)
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
    elif is_lengths_file(source):
        rows = read_lengths(source, options.column)
        draw = of_documents(as_lengths([n for row in rows for n in (row if isinstance(row, list) else [row])]))
    else:
        expected = f"a .json, .csv, .jsonl or .parquet file, one of {', '.join([*sorted(known), LONG_AND_SHORT])}, "
        expected += f"{LOGNORMAL}, or a data set"
        draw = of_documents(lengths_of(source, lambda: _data_set(source, options.split), options.column, expected))
    return micro_batches(draw, tokens, options.seed, first)


def _lognormal(source: str) -> Draw:
    try:
        median, sigma = map(float, source.removeprefix("lognormal:").split(","))
        return lognormal(median, sigma)
    except ValueError as error:
        raise InputError(
            f"{source!r} is no distribution: expected {LOGNORMAL}, such as lognormal:4000,1.5 ({error})"
        ) from error


def _data_set(source: str, split: str) -> Any:
    """Load a data set from the hub, a folder of files or a saved folder."""
    from datasets import load_dataset, load_from_disk

    saved = Path(source, "state.json").exists() or Path(source, "dataset_dict.json").exists()
    data = load_from_disk(source) if saved else load_dataset(source, split=split)
    return data[split] if isinstance(data, dict) else data

"""Sources of document lengths for `plan` and `simulate`: files, data sets and distributions."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_distca.cli import InputError
from hf_distca.cli.names import check_on_hub, check_tokenizer
from hf_distca.collator.formats import ROWS, is_hub_name, is_pattern, suffix_of
from hf_distca.plan.arrays import IntArray
from hf_distca.plan.cost import as_lengths
from hf_distca.predict.shapes import MODELS
from hf_distca.progress import TORCH_AND_TRANSFORMERS, importing
from hf_distca.sim.compare import too_long_advice
from hf_distca.sim.lengths import Draw, corpora, lognormal, micro_batches, of_documents
from hf_distca.sim.trees import DrawnBatch, turn_lengths, turns_of_ranks

if TYPE_CHECKING:
    from hf_distca.cli.image_sources import ImageDocuments

LONG_AND_SHORT = "one-long"
AGENTS_TREE = "agents-tree"
LOGNORMAL = "lognormal:MEDIAN,SIGMA"
SOURCES = f"""\
--lengths takes one of these:

- a .json file: a list of document lengths in tokens, or a list of such lists, one for each rank
- a file of rows, such as .csv, .jsonl, .jsonl.gz or .parquet, with a column of lengths, of lists
  of tokens, or of text (--column, --tokenizer)
- a data set: its name on the Hub or its folder (--split, --column, --tokenizer). One with images is
  counted with its patches if --model names a model that sees them: chats with pictures, or fields
  that a processor made
- a .txt or .md file, a pattern such as 'data/*.md', or a folder of such files, each one document
  (--tokenizer, --sample-by)
- a distribution of the package: {", ".join(corpora())}
- {AGENTS_TREE}: the turns of agents' sessions, each a sequence that begins with all turns before it
- {LONG_AND_SHORT}: one document with half of all ranks' tokens, beside short ones
- {LOGNORMAL}, such as lognormal:4000,1.5
"""
EXPECTED = "expected a JSON list of document lengths, or a list of such lists, one per rank"
SEED = 0
"""Seed for drawing documents: a command draws the same ones every time."""
TEXTS_AT_ONCE = 100
"""Enough for all cores, and few enough for a bar that moves."""
WITHOUT_IMAGES = (".json", ".txt", ".md", ".csv")
"""Suffixes of files that hold no images."""
LENGTHS, TEXTS = ("length", "input_ids"), ("text", "messages")
"""Columns that are looked for: lengths or tokens, and text or chats that a tokenizer makes tokens
of."""


def one_micro_batch(
    options: argparse.Namespace, tokens: int
) -> tuple[list[int] | list[list[int]], str | None]:
    """Return the document lengths of one micro-batch, and a sentence on documents that are cut.

    A file gives all its lengths, in a list per rank if it has rows. Any other source gives at most
    `tokens` tokens of documents. The sentence is None where no document is longer than `tokens`.

    Raises:
        InputError: there is no such source, or it holds no lengths.
    """
    lengths = _of_file(options)
    if lengths is not None:
        return lengths, None
    uncut = next(drawn_micro_batches(options, tokens))
    drawn: list[int] = np.minimum(uncut, tokens).tolist()
    return drawn, too_long_advice(uncut, tokens) if uncut.max() > tokens else None


def drawn_micro_batches(options: argparse.Namespace, tokens: int) -> Iterator[IntArray]:
    """Yield [documents] lengths of micro-batches without end, drawn from the source.

    Documents are drawn as `micro_batches` draws them. A document that is longer than `tokens`
    comes alone, with its own length.
    """
    first = np.array([tokens // 2]) if options.lengths == LONG_AND_SHORT else None
    return micro_batches(_draw_of(options), tokens, SEED, first, cut=False)


def drawn_padded_batches(
    options: argparse.Namespace, ranks: int, sequences: int, count: int
) -> list[DrawnBatch]:
    """Return `count` batches of so many sequences on each rank, drawn from the source."""
    if options.lengths == AGENTS_TREE:
        return list(islice(turns_of_ranks(SEED, ranks, sequences), count))
    random = np.random.default_rng(SEED)
    draw = _draw_of(options)
    drawn = np.maximum(draw(random, count * ranks * sequences), 1)
    batches = drawn.reshape(count, ranks, sequences)
    return [DrawnBatch(lengths.tolist()) for lengths in batches]


def documents_with_images(options: argparse.Namespace) -> "ImageDocuments | None":
    """Return the documents of a data set with images; None for all other sources.

    Raises:
        InputError: the images cannot be read, or the model does not see them.
    """
    source: str = options.lengths
    names = (*corpora(), AGENTS_TREE, LONG_AND_SHORT)
    if (
        options.model in MODELS
        or options.column is not None
        or source in names
        or source.startswith("lognormal:")
        or source.endswith(WITHOUT_IMAGES)
    ):
        return None
    with importing(TORCH_AND_TRANSFORMERS):
        from hf_distca.cli.image_sources import image_documents

    with bars_on_terminals():
        return image_documents(options)


def _draw_of(options: argparse.Namespace) -> Draw:
    source: str = options.lengths
    if source in corpora():
        draw = corpora()[source]
    elif source == AGENTS_TREE:
        draw = turn_lengths()
    elif source == LONG_AND_SHORT:
        draw = lognormal(2048, 1.0)
    elif source.startswith("lognormal:"):
        try:
            median, sigma = map(float, source.removeprefix("lognormal:").split(","))
            draw = lognormal(median, sigma)
        except ValueError as error:
            raise InputError(
                f"{source!r} is not a distribution: expected {LOGNORMAL}, such as "
                f"lognormal:4000,1.5 ({error})"
            ) from error
    else:
        lengths = _of_file(options)
        if lengths is not None:
            draw = of_documents(as_lengths(documents_of(lengths)))
        else:
            draw = of_documents(_of_data(options))
    return draw


def documents_of(lengths: list[int] | list[list[int]]) -> list[int]:
    """Return the lengths of all documents, in order."""
    return [length for row in lengths for length in (row if isinstance(row, list) else [row])]


def _of_file(options: argparse.Namespace) -> list[int] | list[list[int]] | None:
    """Return the lengths that a file lists, in order.

    None for texts, data sets and distributions.
    """
    path: str = options.lengths
    if suffix_of(path) not in ROWS or is_pattern(path):
        return None
    if not Path(path).is_file():
        raise InputError(f"cannot read {path}: no such file")
    if Path(path).suffix.lower() == ".json":
        content = _json_of(path)
        is_table = isinstance(content, list) and content and isinstance(content[0], dict)
        if not is_table:
            return _checked_lengths(path, content)
    return list(map(int, _of_data(options)))


def _json_of(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error}); {EXPECTED}") from error


def _checked_lengths(path: str, content: Any) -> list[int] | list[list[int]]:
    """Return the content of a JSON file if it is a list of lengths, or a list of such lists."""
    nested = isinstance(content, list) and any(isinstance(item, list) for item in content)
    for number, row in enumerate(content if nested else [content]):
        place = f"{path}, row {number}" if nested else path
        if not isinstance(row, list):
            raise InputError(f"{place}: found {row!r:.40}, not a list of lengths; {EXPECTED}")
        for index, length in enumerate(row):
            if type(length) is not int or length < 1:
                raise InputError(
                    f"{place}: item {index} is {length!r:.40}, not 1 or more tokens; {EXPECTED}"
                )
    lengths: list[int] | list[list[int]] = content
    if not documents_of(lengths):
        raise InputError(f"{path} holds no documents; {EXPECTED}")
    return lengths


@contextmanager
def bars_on_terminals() -> Iterator[None]:
    """Let data sets draw bars on a terminal only, as the bars of commands are."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hides = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if hides:
        disable_progress_bars()
    try:
        yield
    finally:
        if hides:
            enable_progress_bars()


def _of_data(options: argparse.Namespace) -> IntArray:
    """Return the document lengths of what `load_documents` reads: tables, texts and data sets."""
    try:
        if is_hub_name(options.lengths):
            check_on_hub(options.lengths, "dataset")
    except ValueError as error:
        raise _no_lengths(options.lengths, error) from error
    if options.tokenizer:
        check_tokenizer(options.tokenizer)
    return _lengths_of_data(options)


def _no_lengths(source: str, error: ValueError) -> InputError:
    names = ", ".join([*sorted(corpora()), AGENTS_TREE, LONG_AND_SHORT])
    return InputError(
        f"no document lengths at {source!r}: {error}. Or give one of {names}, {LOGNORMAL}"
    )


@bars_on_terminals()
def _lengths_of_data(options: argparse.Namespace) -> IntArray:
    """Return the document lengths of a source that may be there."""
    with importing("datasets"):
        import pyarrow

        from hf_distca.collator.sources import load_documents

    source: str = options.lengths
    try:
        data = load_documents(source, split=options.split, sample_by=options.sample_by)
    except ValueError as error:
        raise _no_lengths(source, error) from error
    default_columns = LENGTHS + TEXTS if options.tokenizer else LENGTHS
    candidates = [options.column] if options.column else [*default_columns]
    columns = [name for name in candidates if name in data.column_names]
    if not columns:
        raise InputError(
            f"{source} has columns {data.column_names}, but none of {candidates}; set --column to "
            "a column of lengths, of lists of tokens or of text, and for text --tokenizer to the "
            "name of the model"
        )
    column = columns[0]
    if options.tokenizer and column not in LENGTHS:
        data = _tokenized(data, column, options.tokenizer)
        column = "length"
    place = f"{source}: column {column}"
    values = data.with_format("arrow").data.column(column).combine_chunks()
    lengths = values.value_lengths() if hasattr(values, "value_lengths") else values
    if not pyarrow.types.is_integer(lengths.type):
        raise InputError(
            f"{place} holds {values.type}; expected whole numbers of tokens, lists of tokens, or "
            "text with --tokenizer"
        )
    if lengths.null_count:
        raise InputError(
            f"{place} is empty in row {lengths.is_null().index(True).as_py()}; leave such rows out"
        )
    numbers: IntArray = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    if not len(numbers):
        raise InputError(f"{place} holds no documents")
    row = int(numbers.argmin())
    if numbers[row] < 1:
        raise InputError(
            f"{place}: row {row} is {numbers[row]}, but a document has at least 1 token; leave "
            "empty documents out"
        )
    return numbers


def _tokenized(data: Any, column: str, name: str) -> Any:
    """Return a data set with the column `length`: tokens of each text or chat.

    `datasets` caches it.
    """
    with importing(TORCH_AND_TRANSFORMERS):
        from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        return data.map(
            _count_tokens,
            batched=True,  # a tokenizer in Rust uses all cores for a batch
            batch_size=TEXTS_AT_ONCE,
            fn_kwargs={"tokenizer": tokenizer, "column": column},
            remove_columns=data.column_names,
            desc="Counting tokens",
        )
    except (OSError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())  # transformers breaks lines
        raise InputError(
            f"--tokenizer {name} cannot make tokens of the column {column!r}: {reason}"
        ) from error


def _count_tokens(
    batch: Mapping[str, list[Any]], tokenizer: Any, column: str
) -> dict[str, list[int]]:
    from hf_distca.collator.texts import tokenize

    documents = batch[column]
    if documents and isinstance(documents[0], list):  # chats
        chats = (
            tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)
            for chat in documents
        )
        return {"length": [len(chat["input_ids"]) for chat in chats]}
    return {"length": [len(tokens) for tokens in tokenize(documents, tokenizer)]}

"""Load documents from files, folders and the Hub: one loader for examples, commands and scripts."""

import codecs
import json
import logging
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape, glob
from importlib.util import find_spec
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, NamedTuple, get_args

import datasets
import pyarrow as pa
from datasets.load import infer_module_for_data_files_list

from hf_distca.checks.data_rules import Source
from hf_distca.checks.refusal import RefusedError
from hf_distca.collator.formats import COMPRESSED, ROWS, TEXTS, WILDCARDS, is_hub_name, is_pattern
from hf_distca.collator.texts import bytes_around
from hf_distca.progress import is_first_rank

logger = logging.getLogger(__name__)

SampleBy = Literal["document", "paragraph"]
"""Documents of a text file: the file, or its paragraphs."""
TEXT = "text"
"""Format of text files."""
TABLES = ("arrow", "csv", "json", "parquet")
"""Formats of `datasets` for files with one document a row."""
SAVED = "saved"
"""Format of folders that `save_to_disk` wrote."""
NAMED = "named"
"""Format of what `datasets` finds by a name."""
SAVED_FILES = ("state.json", "dataset_dict.json")
"""Files that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write."""
ABOUT_THE_DATA = ("README", "LICENSE")
"""Names of text files that are no documents in a folder with tables."""
HEAD_BYTES = 8192
"""Bytes of a file that show whether it is text."""
CONTROLS = frozenset(range(32)) - frozenset(b"\a\b\t\n\v\f\r\x1b")
"""Bytes that no text has, in whatever encoding of 8 bits."""
REASON_CHARACTERS = 200
"""Most characters of a reason in an error."""
UNNAMED_COLUMN = "__index_level_"
"""Beginning of the names that columns of a table without a name get."""


class SourcePart(NamedTuple):
    """A file, folder or name of a source that is read in one go."""

    format: str
    path: str
    options: tuple[tuple[str, Any], ...] = ()  # of the format, such as what separates columns


@contextmanager
def _quiet_parsers() -> Iterator[None]:
    """Let parsers of `datasets` log nothing: what is wrong with a file is raised as well."""
    parsers = logging.getLogger(datasets.packaged_modules.__name__)
    level = parsers.level
    parsers.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        parsers.setLevel(level)


@_quiet_parsers()
def load_documents(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    split: str = "train",
    sample_by: SampleBy = "document",
) -> datasets.Dataset:
    """Load a data set with one document a row.

    A source is one of these:

    - a .jsonl, .json, .csv, .tsv, .parquet or .arrow file, also compressed, such as .jsonl.gz:
      each row is a document;
    - any other file that is text, in the column `text`: the file is one document, or each paragraph
      is one;
    - a pattern such as data/*.md: the files that match, in the order of their names;
    - a folder that `save_to_disk` wrote;
    - a folder with tables: what `datasets.load_dataset` makes of it;
    - a folder without tables: the text files in it and in its folders; hidden files, empty files
      and files in folders such as __pycache__ are left out;
    - a name on the Hub.

    For anything else use `datasets.load_dataset`: a trainer takes its data sets as well.

    Args:
        sources: one source, or several with the same columns.
        split: split of a data set from a folder with tables or from the Hub.
        sample_by: "paragraph" divides text files at blank lines.

    Raises:
        ValueError: a source cannot be read. The message names the file.
    """
    if sample_by not in get_args(SampleBy):
        raise Source.NO_WAY_TO_DIVIDE.error(given=sample_by)
    if isinstance(sources, str | os.PathLike):
        sources = [sources]
    parts: list[SourcePart] = []
    for source in sources:
        parts += _parts_of_source(os.fspath(source))
    if not parts:
        raise Source.NONE.error()
    # Neighbouring files of one format are loaded together.
    loaded: list[tuple[str, datasets.Dataset]] = []  # with the first path of each group
    for (kind, options), group in groupby(parts, key=attrgetter("format", "options")):
        paths = [part.path for part in group]
        if kind in (SAVED, NAMED):
            loaded += [(path, _load_named(kind, path, split)) for path in paths]
        else:
            by_documents = {"sample_by": sample_by} if kind == TEXT else {}
            files = _load_files(kind, paths, {**dict(options), **by_documents})
            loaded.append((paths[0], files))
    return _joined(loaded)


def _joined(loaded: Sequence[tuple[str, datasets.Dataset]]) -> datasets.Dataset:
    """Return several data sets as one, with the types of the first, such as of strings.

    Raise ValueError if they have other columns, or values that no such type holds.

    Args:
        loaded: paths and data sets.
    """
    first_path, first = loaded[0]
    parts = []
    for path, dataset in loaded:
        try:
            has_types = dataset.features == first.features
            parts.append(dataset if has_types else dataset.cast(first.features))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise Source.OTHER_COLUMNS.error(
                path=path,
                columns=_columns_of(dataset),
                first_path=first_path,
                first=_columns_of(first),
            ) from error
    return datasets.concatenate_datasets(parts)


def _columns_of(dataset: datasets.Dataset) -> str:
    """Return names and types of columns."""
    return ", ".join(f"{field.name} ({field.type})" for field in dataset.features.arrow_schema)


def _parts_of_source(source: str) -> list[SourcePart]:
    """Return the files of a source, or the folder or name that `datasets` reads as a whole."""
    path = Path(source)
    if path.is_file():
        return [_part_of_file(source)]
    if path.is_dir():
        return _parts_of_folder(path, source)
    if is_pattern(source):
        files = [file for file in sorted(glob(source, recursive=True)) if Path(file).is_file()]
        if not files:
            raise Source.NO_MATCH.error(pattern=source)
        return [_part_of_file(file) for file in files]
    if not is_hub_name(source):
        raise Source.MISSING.error(path=source)
    return [SourcePart(NAMED, source)]


def _parts_of_folder(folder: Path, source: str) -> list[SourcePart]:
    """Return a folder as a whole, or its text files."""
    if any((folder / name).exists() for name in SAVED_FILES):
        return [SourcePart(SAVED, source)]
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not _is_left_out(file.relative_to(folder))
    ]
    parts = [_format_of(str(file)) for file in files]
    tables = [part for part in parts if part.format in TABLES]
    texts = [
        file.name for file in files if file.suffix in TEXTS and file.stem not in ABOUT_THE_DATA
    ]
    if tables and texts:  # `datasets` would read one kind only, and a text file line by line
        table = Path(tables[0].path).name
        raise Source.MIXED_FOLDER.error(path=source, text=texts[0], table=table)
    for part in tables:
        _check_package(part)
    if tables:
        if any(character in str(folder.absolute()) for character in WILDCARDS):
            raise Source.WILDCARDS.error(path=source)
        return [SourcePart(NAMED, source)]
    documents = [file for file in files if file.stat().st_size > 0]
    if not documents:
        raise Source.EMPTY_FOLDER.error(path=source)
    if is_first_rank() and (empty := len(files) - len(documents)):
        logger.warning("empty files of the folder %r, which are left out: %s", source, empty)
    return [_part_of_file(str(file)) for file in documents]


def _is_left_out(path: Path) -> bool:
    """Return whether a file in a folder is hidden or in a special folder, as in `datasets`."""
    is_hidden = any(part.startswith(".") for part in path.parts)
    return is_hidden or any(part.startswith("__") for part in path.parent.parts)


def _format_of(path: str) -> SourcePart:
    """Return a file with the format that `datasets` knows its suffix by; "" for none."""
    suffix = Path(path).suffix.lower()
    # `datasets` looks at all suffixes of a name. Before the last one there may be dots of a title.
    name = path if suffix in COMPRESSED else f"file{suffix}"
    try:
        kind, options = infer_module_for_data_files_list([name])
    except (zipfile.BadZipFile, OSError) as error:  # it looks at names in archives
        raise _unreadable("zip", path, error) from error
    return SourcePart(kind or "", path, tuple(options.items()))


def _part_of_file(path: str) -> SourcePart:
    """Return a file with its format. Raise ValueError if it is empty, or has none that is read."""
    if Path(path).stat().st_size == 0:
        raise Source.EMPTY_FILE.error(path=path)
    part = _format_of(path)
    _check_package(part)
    is_compressed = Path(path).suffix.lower() in COMPRESSED
    if part.format in TABLES or (part.format == TEXT and is_compressed):
        return part
    why = "is compressed" if is_compressed else _why_no_text(path, named=part.format == TEXT)
    if why:
        raise Source.UNKNOWN_FORMAT.error(path=path, why=why, suffixes=", ".join(ROWS))
    return SourcePart(TEXT, path)


def _check_package(part: SourcePart) -> None:
    """Raise ValueError if the package that decompresses a file is missing."""
    package = COMPRESSED.get(Path(part.path).suffix.lower())
    if part.format and package and find_spec(package) is None:
        raise Source.NEEDS_PACKAGE.error(path=part.path, package=package)


def _why_no_text(path: str, *, named: bool) -> str:
    """Return why a file is no document of text; empty if it is one, or in another encoding.

    Args:
        named: whether its suffix says that it is text, so that JSON is meant as text.
    """
    with Path(path).open("rb") as file:
        head = file.read(HEAD_BYTES)
        file.seek(0)
        first_line = file.readline() if head.startswith(b"{") and not named else b""
    if 0 in head or (not _is_utf8(head) and not CONTROLS.isdisjoint(head)):
        return "is binary (or UTF-16)"
    return "has rows of JSON" if _is_json(first_line) else ""


def _is_utf8(head: bytes) -> bool:
    """Return whether the beginning of a file is UTF-8, but for a character that is cut off."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _load_files(kind: str, paths: list[str], options: dict[str, Any]) -> datasets.Dataset:
    """Load files of one format."""
    try:
        return _loaded(kind, paths, options)
    except RefusedError:
        raise
    # `datasets` wraps some errors of parsers, decompressors and the file system, and others not.
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno is not None:  # such as a full disk
            raise
        if len(paths) == 1:
            raise _unreadable(kind, paths[0], error) from error
    # A file cannot be read, or files have other columns.
    return _joined([(path, _load_files(kind, [path], options)) for path in paths])


def _loaded(kind: str, paths: list[str], options: dict[str, Any]) -> datasets.Dataset:
    """Load files of one format as `datasets` does, but for rows whose fields have no names."""
    # `datasets` takes a path for a pattern.
    files = [escape(str(Path(path).absolute())) for path in paths]
    builder = datasets.load_dataset_builder(kind, data_files=files, **options)
    builder.download_and_prepare()
    splits = builder.info.splits
    if splits is None or splits["train"].num_examples == 0:
        raise Source.NO_ROWS.error(paths=", ".join(paths))
    loaded = builder.as_dataset(split="train")
    # pandas takes the first fields of such rows for names of rows.
    if kind == "csv" and any(name.startswith(UNNAMED_COLUMN) for name in loaded.column_names):
        raise ValueError("rows have more fields than the first line; does a field lack quotes?")
    return loaded


def _unreadable(kind: str, path: str, error: Exception) -> ValueError:
    """Return the refusal of a file that cannot be read."""
    cause = error.__cause__ or error
    if isinstance(cause, UnicodeDecodeError):
        return Source.NOT_UTF8.error(path=path, kind=kind, found=bytes_around(cause))
    return Source.UNREADABLE.error(path=path, kind=kind, why=_reason(error))


def _load_named(kind: str, name: str, split: str) -> datasets.Dataset:
    """Load a split of a saved folder, of a folder with tables, or of a data set on the Hub."""
    if kind == SAVED:
        saved = datasets.load_from_disk(name)
        if isinstance(saved, datasets.Dataset):
            return saved
        if split not in saved:
            raise Source.NO_SPLIT.error(path=name, split=split, splits=sorted(saved))
        return saved[split]
    try:
        return datasets.load_dataset(name, split=split)
    except Exception as error:  # from the Hub, the network, a file system or a parser
        folder = Path(name)
        if type(error) is not ValueError:  # that is one of a wrong split
            _check_tables(folder)
        refusal = Source.FOLDER_NOT_LOADED if folder.is_dir() else Source.NOT_LOADED
        raise refusal.error(path=name, why=_reason(error)) from error


def _check_tables(folder: Path) -> None:
    """Raise ValueError for the first table in a folder that cannot be read alone."""
    for file in filter(Path.is_file, sorted(folder.rglob("*"))):
        kind, path, options = _format_of(str(file))
        if kind in TABLES:
            _load_files(kind, [path], dict(options))


def _reason(error: BaseException) -> str:
    """Return an error's cause in a line: `datasets` wraps the errors of parsers."""
    cause = error.__cause__ or error
    return shorten(str(cause), REASON_CHARACTERS, placeholder=" …") or type(cause).__name__

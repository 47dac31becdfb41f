"""Load documents from files, folders and the Hub: `datasets` reads, and what fails has a name."""

import os
import zipfile
from collections.abc import Sequence
from errno import ENOSPC
from glob import escape, glob
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, get_args

import datasets
import pyarrow as pa
from datasets.load import infer_module_for_data_files_list

from hf_distca.checks.data_rules import Source
from hf_distca.collator.formats import (
    COMPRESSED,
    TEXTS,
    WILDCARDS,
    is_hub_name,
    is_pattern,
    suffix_of,
)
from hf_distca.collator.texts import SHOWN_BYTES, bytes_around

HEAD_BYTES = 4096
"""Bytes at the beginning of a text among which a NUL byte is looked for."""
SampleBy = Literal["document", "paragraph"]
"""Documents of a text file: the file, or its paragraphs."""
Format = tuple[str, dict[str, Any]]
"""Loader of `datasets` that reads a file, and its options, such as what separates columns."""
TEXT = "text"
"""Loader of text files."""
WHOLE: Format = ("", {})
"""What `datasets` loads as a whole: a folder, or a name on the Hub."""
SAVED_FILES = ("state.json", "dataset_dict.json")
"""Files that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write."""
ABOUT_THE_DATA = ("README", "LICENSE")
"""Names of text files that are no documents in a folder with tables."""
REASON_CHARACTERS = 200
"""Most characters of a reason in an error."""
UNNAMED_COLUMN = "__index_level_"
"""Beginning of the names that columns of a table without a name get."""


def load_documents(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    split: str = "train",
    sample_by: SampleBy = "document",
) -> datasets.Dataset:
    """Load a data set with one document a row, by `datasets.load_dataset`.

    A source is one of these:

    - a .txt or .md file: it is one document, or each of its paragraphs is, in the column `text`;
    - a file with another suffix that `datasets` knows, such as .jsonl, .csv, .tsv or .parquet: each
      row is a document;
    - one of these compressed, such as .jsonl.gz;
    - a pattern such as data/*.md: the files that match, in the order of their names;
    - a folder of text files: those in it and in its folders, but for hidden ones;
    - any other folder, such as one that `save_to_disk` wrote, or a name on the Hub: what `datasets`
      makes of it.

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
    names = [name for source in sources for name in _names_of(os.fspath(source))]
    if not names:
        raise Source.NONE.error()
    loaded: list[tuple[str, datasets.Dataset]] = []  # with the first name of each group
    for (kind, options), group in groupby(names, key=_format_of):
        paths = list(group)
        if (kind, options) == WHOLE:
            loaded += [(path, _load_whole(path, split)) for path in paths]
        else:
            by_documents = {"sample_by": sample_by} if kind == TEXT else {}
            loaded.append((paths[0], _load_files(paths, kind, {**options, **by_documents})))
    return _joined(loaded)


def _names_of(source: str) -> list[str]:
    """Return the files that a pattern or a folder of texts stands for, or the source itself."""
    if is_pattern(source):
        files = _files_of(source)
        if not files:
            raise Source.NO_MATCH.error(pattern=source)
        return files
    if not Path(source).is_dir() or _is_saved(source):
        return [source]
    files = _files_of(f"{escape(source)}/**")
    if not files:
        raise Source.EMPTY_FOLDER.error(path=source)
    tables = _tables_among(files)
    if not tables:
        return files
    for text in map(Path, files):  # `datasets` would read one kind only, and texts line by line
        if text.suffix in TEXTS and text.stem not in ABOUT_THE_DATA:
            table = Path(tables[0]).name
            raise Source.MIXED_FOLDER.error(path=source, text=text.name, table=table)
    if any(character in str(Path(source).absolute()) for character in WILDCARDS):
        raise Source.WILDCARDS.error(path=source)
    return [source]


def _files_of(pattern: str) -> list[str]:
    # Patterns of `datasets` do the same, but leave out files such as README.md.
    return [name for name in sorted(glob(pattern, recursive=True)) if Path(name).is_file()]


def _tables_among(files: Sequence[str]) -> list[str]:
    return [file for file in files if _loader_of(file)[0] not in ("", TEXT)]


def _is_saved(folder: str) -> bool:
    return any(Path(folder, name).exists() for name in SAVED_FILES)


def _format_of(name: str) -> Format:
    """Return the format of a file; WHOLE for a folder, or for a name on the Hub."""
    path = Path(name)
    if path.is_dir() or is_hub_name(name):
        return WHOLE
    if not path.is_file():
        raise Source.MISSING.error(path=name)
    kind, options = _loader_of(name)
    if not kind:
        raise Source.UNKNOWN_FORMAT.error(path=name)
    return kind, options


def _loader_of(file: str) -> Format:
    """Return the format that a file's suffix stands for, with the loader "" if there is none."""
    if suffix_of(file) in TEXTS:  # not all versions of `datasets` take .md for text
        return TEXT, {}
    suffix = Path(file).suffix.lower()
    # `datasets` looks at all suffixes of a name. Before the last one there may be dots of a title.
    name = file if suffix in COMPRESSED else f"file{suffix}"
    try:
        kind, options = infer_module_for_data_files_list([name])
    except (zipfile.BadZipFile, OSError) as error:  # it looks at names in archives
        raise _unreadable(file, "zip", error) from error
    return kind or "", options


def _load_files(paths: Sequence[str], kind: str, options: dict[str, Any]) -> datasets.Dataset:
    """Load files of one format; name the first that cannot be read."""
    if kind == "text":
        for path in paths:
            _check_no_nul(path)
    # `datasets` takes a path for a pattern.
    files = [escape(str(Path(path).absolute())) for path in paths]
    try:
        loaded = datasets.load_dataset(kind, data_files=files, split="train", **options)
        # pandas takes the first fields of rows that have too many for names of rows.
        if kind == "csv" and any(name.startswith(UNNAMED_COLUMN) for name in loaded.column_names):
            raise ValueError("rows have more fields than the first line; does a field lack quotes?")
        return loaded
    # `datasets` wraps some errors of parsers, decompressors and the file system, and others not.
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno == ENOSPC:  # the file is not to blame
            raise
        if len(paths) == 1:
            raise _unreadable(paths[0], kind, error) from error
    # A file cannot be read, or files have other columns.
    return _joined([(path, _load_files([path], kind, options)) for path in paths])


def _check_no_nul(path: str) -> None:
    """Raise ValueError if a text has a NUL byte near its beginning, as UTF-16 has.

    NUL is valid UTF-8, so nobody else would say so. Compressed files have NUL bytes themselves.
    """
    with Path(path).open("rb") as file:
        head = file.read(HEAD_BYTES)
    if b"\0" in head and Path(path).suffix.lower() not in COMPRESSED:
        raise Source.NOT_UTF8.error(path=path, kind="text", found=head[:SHOWN_BYTES])


def _load_whole(name: str, split: str) -> datasets.Dataset:
    """Load a split of a folder, or of a data set on the Hub."""
    if _is_saved(name):
        saved = datasets.load_from_disk(name)
        if isinstance(saved, datasets.Dataset):
            return saved
        if split not in saved:
            raise Source.NO_SPLIT.error(path=name, split=split, splits=sorted(saved))
        return saved[split]
    is_folder = Path(name).is_dir()
    try:
        return datasets.load_dataset(name, split=split)
    except Exception as error:  # from the Hub, the network, a file system or a parser
        if is_folder and type(error) is not ValueError:  # that is one of a wrong split
            for table in _tables_among(_files_of(f"{escape(name)}/**")):
                _load_files([table], *_loader_of(table))
        refusal = Source.FOLDER_NOT_LOADED if is_folder else Source.NOT_LOADED
        raise refusal.error(path=name, why=_reason(error)) from error


def _joined(loaded: Sequence[tuple[str, datasets.Dataset]]) -> datasets.Dataset:
    """Return several data sets, by name, as one with the types of the first, such as of strings."""
    first_name, first = loaded[0]
    parts = []
    for name, dataset in loaded:
        try:
            has_types = dataset.features == first.features
            parts.append(dataset if has_types else dataset.cast(first.features))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise Source.OTHER_COLUMNS.error(
                path=name,
                columns=_columns_of(dataset),
                first_path=first_name,
                first=_columns_of(first),
            ) from error
    return datasets.concatenate_datasets(parts)


def _columns_of(dataset: datasets.Dataset) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in dataset.features.arrow_schema)


def _unreadable(path: str, kind: str, error: Exception) -> ValueError:
    """Return the refusal of a file that cannot be read."""
    cause = error.__cause__ or error
    if Path(path).stat().st_size == 0:
        return Source.EMPTY_FILE.error(path=path)
    if isinstance(cause, UnicodeDecodeError):
        return Source.NOT_UTF8.error(path=path, kind=kind, found=bytes_around(cause))
    return Source.UNREADABLE.error(path=path, kind=kind, why=_reason(error))


def _reason(error: BaseException) -> str:
    """Return an error's cause in a line: `datasets` wraps the errors of parsers."""
    cause = error.__cause__ or error
    return shorten(str(cause), REASON_CHARACTERS, placeholder=" …") or type(cause).__name__

"""Load documents from files, folders and the Hub: one loader for examples, commands and scripts."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import datasets

from hf_distca.collator.formats import TABLES, TEXT_SUFFIXES, is_hub_name
from hf_distca.collator.refusals import Source
from hf_distca.progress import is_first_rank

logger = logging.getLogger(__name__)

TEXT = "text"
"""Format of text files."""
SAVED = "saved"
"""Format of folders that `save_to_disk` wrote."""
NAMED = "named"
"""Format of what `datasets` finds by a name."""
SAVED_FILES = ("state.json", "dataset_dict.json")
"""Files that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write."""
ABOUT_THE_DATA = ("README", "LICENSE")
"""Names of text files that are no documents in a folder with tables."""


class SourcePart(NamedTuple):
    """A file, folder or name of a source that is read in one go."""

    format: str
    path: str


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
    sample_by: Literal["document", "paragraph"] = "document",
) -> datasets.Dataset:
    """Load a data set with one document a row.

    A source is one of these:

    - a .jsonl, .json, .csv, .parquet or .arrow file: each row is a document;
    - any other file: text, in the column `text`; the file is one document, or each paragraph is
      one;
    - a folder that `save_to_disk` wrote;
    - a folder with tables: what `datasets.load_dataset` makes of it;
    - a folder without tables: the text files in it and in its folders; hidden files, empty files
      and files in folders such as __pycache__ are left out;
    - a name on the Hub.

    Args:
        sources: one source, or several with the same columns.
        split: split of a data set from a folder with tables or from the Hub.
        sample_by: "paragraph" divides text files at blank lines.

    Raises:
        ValueError: a source cannot be read. The message names the file.
    """
    if isinstance(sources, str | os.PathLike):
        sources = [sources]
    parts: list[SourcePart] = []
    for source in sources:
        parts += _parts_of_source(os.fspath(source))
    if not parts:
        raise Source.NONE.error()
    # Neighbouring files of one format are loaded together.
    loaded: dict[str, datasets.Dataset] = {}  # by the first path of each group
    for kind, group in groupby(parts, key=attrgetter("format")):
        paths = [part.path for part in group]
        if kind in (SAVED, NAMED):
            for path in paths:
                loaded[path] = _load_named(kind, path, split)
        else:
            loaded[paths[0]] = _load_files(kind, paths, sample_by)
    first_path, first_dataset = next(iter(loaded.items()))
    for path, dataset in loaded.items():
        if dataset.column_names != first_dataset.column_names:
            raise Source.OTHER_COLUMNS.error(
                path=path,
                columns=dataset.column_names,
                first_path=first_path,
                first=first_dataset.column_names,
            )
    if len(loaded) == 1:
        return first_dataset
    return datasets.concatenate_datasets(list(loaded.values()))


def _parts_of_source(source: str) -> list[SourcePart]:
    """Return the files of a source, or the folder or name that `datasets` reads as a whole."""
    path = Path(source)
    if path.is_file():
        return [SourcePart(TABLES.get(path.suffix, TEXT), source)]
    if path.is_dir():
        return _parts_of_folder(path, source)
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
    tables = [file.name for file in files if file.suffix in TABLES]
    texts = [
        file.name
        for file in files
        if file.suffix in TEXT_SUFFIXES and file.stem not in ABOUT_THE_DATA
    ]
    if tables and texts:  # `datasets` would read one kind only, and a text file line by line
        raise Source.MIXED_FOLDER.error(path=source, text=texts[0], table=tables[0])
    if tables:
        return [SourcePart(NAMED, source)]
    documents = [file for file in files if file.stat().st_size > 0]
    if not documents:
        raise Source.EMPTY_FOLDER.error(path=source)
    if is_first_rank() and (empty := len(files) - len(documents)):
        logger.warning("empty files of the folder %r, which are left out: %s", source, empty)
    return [SourcePart(TEXT, str(file)) for file in documents]


def _is_left_out(path: Path) -> bool:
    """Return whether a file in a folder is hidden or in a special folder, as in `datasets`."""
    is_hidden = any(part.startswith(".") for part in path.parts)
    return is_hidden or any(part.startswith("__") for part in path.parent.parts)


def _load_files(kind: str, paths: list[str], sample_by: str) -> datasets.Dataset:
    """Load files of one format."""
    options: dict[str, Any] = {}
    if kind == TEXT:
        options = {"sample_by": sample_by, "keep_linebreaks": True}
    for path in paths:
        if Path(path).stat().st_size == 0:
            raise Source.EMPTY_FILE.error(path=path)
    try:
        return datasets.load_dataset(kind, data_files=paths, split="train", **options)
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        path = paths[0]
        if len(paths) > 1:  # find out which file it is
            path = next((path for path in paths if _unreadable(kind, path)), path)
        reason = _unreadable(kind, path) or _reason(error)
        raise Source.UNREADABLE.error(path=path, kind=kind, why=reason) from error


def _unreadable(kind: str, path: str) -> str:
    """Return why a file of this format cannot be read alone; empty if it can be read."""
    try:
        if kind == TEXT:
            Path(path).read_text(encoding="utf-8")
        else:
            datasets.load_dataset(kind, data_files=path)
    except UnicodeDecodeError as error:
        return f"byte {error.start} is {error.object[error.start]:#04x}, which is not UTF-8"
    except (datasets.exceptions.DatasetGenerationError, ValueError, OSError) as error:
        return _reason(error)
    return ""


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
        if isinstance(error, datasets.exceptions.DatasetGenerationError):
            _check_tables(folder)
        place = "a folder" if folder.is_dir() else "no file here"
        raise Source.NOT_LOADED.error(path=name, place=place, why=_reason(error)) from error


def _check_tables(folder: Path) -> None:
    """Raise ValueError for the first table in a folder that cannot be read alone."""
    for file in sorted(folder.rglob("*")):
        kind = TABLES.get(file.suffix)
        if kind is not None and (reason := _unreadable(kind, str(file))):
            raise Source.UNREADABLE.error(path=file, kind=kind, why=reason)


def _reason(error: BaseException) -> str:
    """Return the first line of an error's cause: `datasets` wraps the errors of parsers."""
    cause = error.__cause__ or error
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)

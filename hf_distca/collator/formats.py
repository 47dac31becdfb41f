"""Formats of files with documents, for what must not wait for `datasets`."""

from pathlib import Path

TABLES = {
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
}
"""Formats of `datasets` for files with one document a row, by suffix. All other files are text."""
TEXT_SUFFIXES = (".txt", ".md")
"""Suffixes that tell names of files from names on the Hub, besides the suffixes of tables."""


def is_hub_name(source: str) -> bool:
    """Return whether a name is no file or folder, and does not look like the path of one."""
    path = Path(source)
    has_suffix_of_files = path.suffix in (*TABLES, *TEXT_SUFFIXES)
    is_path = path.is_absolute() or source.startswith(".") or len(path.parts) > 2
    return not (has_suffix_of_files or is_path or path.exists())

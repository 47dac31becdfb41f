"""Names of files with documents, for what must not wait for `datasets`."""

from pathlib import Path

ROWS = (".arrow", ".csv", ".json", ".jsonl", ".ndjson", ".parquet", ".tsv")
"""Suffixes of files with one document a row."""
TEXTS = (".txt", ".md")
"""Suffixes of files with text alone."""
COMPRESSED = (".bz2", ".gz", ".lz4", ".xz", ".zip", ".zst")
"""Suffixes of compressed files."""
WILDCARDS = "*?["
"""Characters of a pattern, which stands for several files."""


def suffix_of(name: str) -> str:
    """Return the suffix of a file, or of what a compressed file holds."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def is_pattern(source: str) -> bool:
    """Return whether a name is no file or folder, and stands for several files."""
    return any(character in source for character in WILDCARDS) and not Path(source).exists()


def is_hub_name(source: str) -> bool:
    """Return whether a name is no file or folder, and does not look like the path of one."""
    path = Path(source)
    is_file_name = path.suffix.lower() in (*ROWS, *TEXTS, *COMPRESSED) or is_pattern(source)
    is_path = path.is_absolute() or source.startswith(".") or len(path.parts) > 2
    return not (is_file_name or is_path or path.exists())

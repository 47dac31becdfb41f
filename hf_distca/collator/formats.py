"""Formats of files with documents, for what must not wait for `datasets`."""

TABLES = {
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
}
"""Formats of `datasets` for files with one document a row, by suffix. All other files are text."""

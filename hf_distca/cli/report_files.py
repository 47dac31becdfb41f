"""Check that files can be written before work begins, and write them."""

import argparse
import os
from pathlib import Path

from hf_distca.cli.input_error import InputError


def add_report_option(parser: argparse.ArgumentParser) -> None:
    """Add `--report` to a subcommand."""
    parser.add_argument(
        "--report", metavar="FILE.html", help="write a report: one file with pictures and tables, for a browser"
    )


def check_writable(*names: str | None) -> None:
    """Raise InputError unless files can be written; called before the work whose results they take."""
    for name in filter(None, names):
        path = Path(name).absolute()
        if not path.parent.is_dir():
            raise InputError(f"cannot write {name}: no such folder; make it first")
        if path.is_dir():
            raise InputError(f"cannot write {name}: it is a folder; name a file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InputError(f"cannot write {name}: no permission")


def write_report(path: str, content: bytes) -> None:
    """Write a file; raise InputError if the file cannot be written."""
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error

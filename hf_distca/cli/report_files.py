"""Files that are written: whether they can be, before anything is computed; reports, and their options."""

import argparse
import importlib.util
import os
from pathlib import Path

from hf_distca.cli.input_error import InputError


def add_report_options(parser: argparse.ArgumentParser, png: bool) -> None:
    """Add the options.

    Args:
        parser: takes them.
        png: whether there is a picture too.
    """
    parser.add_argument(
        "--report", metavar="FILE.html", help="write a report: one file with pictures and tables, for a browser"
    )
    if png:
        parser.add_argument(
            "--png", metavar="FILE.png", help="write the report's main pictures; needs matplotlib (extra: report)"
        )


def check_report_options(options: argparse.Namespace) -> None:
    """Before anything is computed.

    Raises:
        InputError: a file cannot be written, or what writes it is not installed.
    """
    check_writable(options.report, getattr(options, "png", None))
    if getattr(options, "png", None) and importlib.util.find_spec("matplotlib") is None:
        raise InputError("--png needs matplotlib, which is not installed: pip install 'hf-distca[report]'")


def check_writable(*names: str | None) -> None:
    """Raise unless files can be written; to be called before the work whose outcome they take.

    Raises:
        InputError: a file's folder does not exist, or it is a folder itself, or writing is not allowed.
    """
    for name in filter(None, names):
        path = Path(name).absolute()
        if not path.parent.is_dir():
            raise InputError(f"cannot write {name}: no such folder; make it first")
        if path.is_dir():
            raise InputError(f"cannot write {name}: it is a folder; name a file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InputError(f"cannot write {name}: no permission")


def write_report(path: str, content: bytes) -> None:
    """Write a file.

    Raises:
        InputError: it cannot be written.
    """
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error

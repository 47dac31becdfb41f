"""Reports as files: the options that ask for them, and writing them."""

import argparse
import importlib.util
from pathlib import Path

from hf_distca.cli.lengths_file import InputError


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
        InputError: a file's folder does not exist, or what writes it is not installed.
    """
    for name in filter(None, (options.report, getattr(options, "png", None))):
        if not Path(name).absolute().parent.is_dir():
            raise InputError(f"cannot write {name}: no such folder; make it first")
    if getattr(options, "png", None) and importlib.util.find_spec("matplotlib") is None:
        raise InputError("--png needs matplotlib, which is not installed: pip install 'hf-distca[report]'")


def write_report(path: str, content: bytes) -> None:
    """Write a file.

    Raises:
        InputError: it cannot be written.
    """
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error

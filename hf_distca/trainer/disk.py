"""A full disk, reported with the file: writers in C++ and Rust name no file, and some not even the cause."""

import errno
import os
import re
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO))
"""What the system answers where a disk is full, a quota or a limit is reached, or a disk is broken."""

_NUMBER_IN_RUST = re.compile(r"os error (\d+)")
_PROBE_BYTES = 1 << 20


@contextmanager
def disk_errors_named(folder: Path) -> Iterator[None]:
    """Name the file and the cause where writing into a folder fails because of its disk.

    Args:
        folder: may not be there yet.

    Raises:
        OSError: the disk takes no more; its `filename` is the file, or the folder where that is not known.
    """
    try:
        yield
    except Exception as error:
        if getattr(error, "filename", None) is not None:
            raise  # it is named already
        number = _number(error, folder)
        if number not in DISK_ERRORS:
            raise
        remedy = f"{folder} is incomplete: remove it, and free disk space or set another output_dir"
        raise OSError(number, f"{os.strerror(number)}; {remedy}", str(_file(error, folder))) from error


def _number(error: Exception, folder: Path) -> int:
    """The number of the system's error behind an error; 0 where there is none."""
    if isinstance(error, OSError):
        return error.errno or 0
    if match := _NUMBER_IN_RUST.search(str(error)):
        return int(match[1])
    try:  # torch.save says "basic_ios::clear", or that a position is not as expected: does the disk take some bytes?
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as refusal:
        return refusal.errno or 0
    return 0


def _file(error: Exception, folder: Path) -> Path:
    """The file that was being written, by what the innermost call that has one was given."""
    found = folder
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, str | Path) and folder.absolute() in Path(value).absolute().parents:
                found = Path(value)
    return found

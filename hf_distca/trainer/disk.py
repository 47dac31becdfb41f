"""Report a full or broken disk with the name of the file.

Writers in C++ and Rust name no file, and some not even the cause.
"""

import errno
import os
import re
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO))
"""System errors of a disk that is full, over its quota or limit, read-only or broken."""

_NUMBER_IN_RUST = re.compile(r"os error (\d+)")
_PROBE_BYTES = 1 << 20


@contextmanager
def disk_errors_named(folder: Path) -> Iterator[None]:
    """Name the file and the cause if writing into a folder fails because of the disk.

    Raises:
        OSError: the disk takes no more; `filename` is the file, or the folder if the file is unknown.
    """
    try:
        yield
    except Exception as error:
        if getattr(error, "filename", None) is not None:
            raise  # the file is named already
        number = _number(error, folder)
        if number not in DISK_ERRORS:
            raise
        remedy = f"{folder} is incomplete: remove it, and free disk space or set another output_dir"
        raise OSError(number, f"{os.strerror(number)}; {remedy}", str(_file(error, folder))) from error


def _number(error: Exception, folder: Path) -> int:
    """Return the system's error number behind an error; 0 if there is none."""
    if isinstance(error, OSError):
        return error.errno or 0
    if match := _NUMBER_IN_RUST.search(str(error)):
        return int(match[1])
    try:  # torch.save reports "basic_ios::clear" or a wrong position: check whether the disk takes some bytes
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as refusal:
        return refusal.errno or 0
    return 0


def _file(error: Exception, folder: Path) -> Path:
    """Return the file being written, taken from the innermost call with a path inside the folder."""
    found = folder
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, str | Path) and folder.absolute() in Path(value).absolute().parents:
                found = Path(value)
    return found

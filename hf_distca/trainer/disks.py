"""Errors of a disk that is full or fails, in one sentence."""

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from hf_distca.refusal import SentenceError

PROBE_BYTES = 2**20
"""Bytes that are written to find out whether a disk is full."""
FULL_DISK = frozenset((errno.ENOSPC, errno.EDQUOT))
"""System errors of a disk that is full or over its quota."""
DISK_ERRORS = FULL_DISK | {errno.EFBIG, errno.EROFS, errno.EIO}
"""System errors of a disk that is full, over a limit of files, read-only or broken."""


class DiskError(SentenceError, OSError):
    """A disk that is full or fails; `filename` is the folder that lacks files."""

    is_of_every_rank = False

    def __str__(self) -> str:
        return str(self.strerror)


@contextmanager
def disk_errors_named(folder: Path) -> Iterator[None]:
    """Name the folder and the remedy in errors of the disk, while files are written into it.

    Raises:
        DiskError: the disk is full or fails.
    """
    try:
        yield
    except DiskError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        filename = getattr(error, "filename", None)
        if isinstance(filename, str) and not Path(filename).is_relative_to(folder):
            raise  # of another place
        number = _disk_error_number(error, folder)
        if number not in DISK_ERRORS:
            raise
        name = "disk full" if number in FULL_DISK else "disk error"
        sentence = (
            f"{name}: {folder} is incomplete ({os.strerror(number)}); free disk space or set "
            "another output_dir"
        )
        # torch's error names positions in a file.
        raise DiskError(number, sentence, str(folder)) from None


def _disk_error_number(error: BaseException, folder: Path) -> int | None:
    """Return the number of the system error that was the cause of an error; None without one."""
    if isinstance(error, CheckpointException):  # with the errors of all ranks
        numbers = [_disk_error_number(failure, folder) for failure, _ in error.failures.values()]
        return next(filter(None, numbers), None)
    error_of_rust = re.search(r"os error (\d+)", str(error))
    if error_of_rust is not None:
        return int(error_of_rust[1])
    if isinstance(error, OSError):
        return error.errno
    # torch.save reports "basic_ios::clear" or a wrong position, without a number.
    number = _number_of_failing_write(folder)
    return getattr(error, "errno", None) if number is None else number


def _number_of_failing_write(folder: Path) -> int | None:
    """Return the number of the system error if a folder's disk does not take some bytes."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno
    return None

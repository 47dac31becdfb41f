"""Processes that end with the one that started them, however that ends."""

import ctypes
import os
import signal
from multiprocessing import parent_process

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when the one that started it has ended."""
_LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Have Linux kill this process when the one that started it ends, killed or not, whatever is done here then.

    Daemonic processes end with a parent that exits, but not with one that is killed.
    """
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent_process()
    if parent is not None and not parent.is_alive():  # it ended while this process was starting
        os._exit(1)

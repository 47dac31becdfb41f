"""What is known of the Python that runs."""

import sys
from collections.abc import Sequence

FORK_HANGS = "Python 3.11.0 to 3.11.9 can hang in a fork (gh-112275); install 3.11.10 or newer"
"""Fault of some versions, and its remedy."""


def fork_can_hang(version: Sequence[int] = sys.version_info[:3]) -> bool:
    """Return whether a forked process can wait for a lock for ever.

    Another thread held the lock at the fork.
    """
    return (3, 11, 0) <= tuple(version) < (3, 11, 10)

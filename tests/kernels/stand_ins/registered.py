"""Stand-ins that are registered with torch, for as long as a test needs them."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def removed_afterwards(stand_in) -> Iterator:
    try:
        yield stand_in
    finally:
        stand_in.remove()

"""Progress of long work, for whoever waits at a terminal."""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")

TORCH_AND_TRANSFORMERS = "torch and transformers"
"""Libraries that most commands import."""


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of its launch, before any group of ranks exists."""
    return os.environ.get("RANK", "0") == "0"


def terminal_bar(items: Sequence[Item], description: str) -> Iterator[Item]:
    """Yield the items under a bar on stderr, which goes at the end.

    Without a bar if stderr is no terminal.
    """
    yield from tqdm(items, description, disable=None, leave=False)


@contextmanager
def terminal_status(text: str) -> Iterator[None]:
    """Show a line on stderr while a block runs, which goes at the end.

    Nothing is shown if stderr is no terminal, nor on other ranks than 0.
    """
    hidden = None if is_first_rank() else True
    with tqdm(bar_format=f"{text} ...", disable=hidden, leave=False):
        yield


@contextmanager
def importing(libraries: str) -> Iterator[None]:
    """Import libraries in a block, and say so on a terminal.

    No garbage is collected meanwhile: modules leave little, and to look for it takes a tenth of the
    time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with terminal_status(f"Importing {libraries}"):
            yield
    finally:
        if collects:
            gc.enable()

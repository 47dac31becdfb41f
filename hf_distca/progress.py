"""Progress of long work, for whoever waits at a terminal."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


def terminal_bar(items: Sequence[Item], description: str) -> Iterator[Item]:
    """Yield the items under a bar on stderr, which goes at the end.

    Without a bar if stderr is no terminal.
    """
    yield from tqdm(items, description, disable=None, leave=False)

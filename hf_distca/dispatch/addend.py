"""Addends of a sum of rows as numbers: which row of which source; what makes them and what reads them agree here."""

import numpy as np
from numpy.typing import NDArray

MAX_SOURCES = 6
SOURCE_BITS = 3
"""An addend is one number: its row in the source, shifted by so many bits, and the index of the source."""


def addends_of(source: int, rows: int) -> NDArray[np.int32]:
    """[rows] int32: each row of a source as an addend, in order."""
    return np.arange(rows, dtype=np.int32) << SOURCE_BITS | source

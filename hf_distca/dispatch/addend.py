"""Encoding of a sum's addends as numbers: the index of a source and the row in that source."""

import numpy as np
from numpy.typing import NDArray

MAX_SOURCES = 6
SOURCE_BITS = 3
"""Low bits of an addend that hold the index of its source; the bits above hold its row."""


def addends_of(source: int, rows: int) -> NDArray[np.int32]:
    """Return each row of a source as an addend, in order: [rows] int32."""
    return np.arange(rows, dtype=np.int32) << SOURCE_BITS | source

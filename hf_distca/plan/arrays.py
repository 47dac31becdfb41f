"""Types of NumPy arrays in plans and predictions."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Table = NDArray[np.void]
"""Entries of a structured dtype; each field is a column."""

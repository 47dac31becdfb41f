"""Where numbers may begin in memory."""

ALIGNMENT = 16
"""Bytes that kernels load at once: rows, columns and tables begin at multiples of it."""


def aligned(size: int) -> int:
    """The least multiple of ALIGNMENT that is not below a size in bytes.

    >>> aligned(20)
    32
    """
    return -(-size // ALIGNMENT) * ALIGNMENT

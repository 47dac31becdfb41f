"""Numbers that options of the command line take."""

import argparse
from math import inf

MOST_RANKS = 4096
"""Planned in 16 s where each has 32768 tokens (two busy cores); the time grows with the square of the ranks."""


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text!r}")
    return number


def ranks(text: str) -> int:
    """A number of ranks that can be planned for."""
    number = positive(text)
    if number > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_RANKS}, got {text}: planning would not end in time")
    return number


def gigabytes(text: str) -> float:
    """A positive number."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of gigabytes, got {text!r}")
    return number

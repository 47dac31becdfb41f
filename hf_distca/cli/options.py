"""Parse and check numbers of command-line options."""

import argparse
from collections.abc import Callable
from math import inf

from hf_distca.cli.input_error import InputError
from hf_distca.planner.settings import PlanSettings
from hf_distca.units import read_tokens

MOST_RANKS = 4096
"""Planning 4096 ranks of 32768 tokens takes 16 s on two busy cores; time grows with ranks squared."""
MOST_TOKENS = 2**27
"""Maximum number of tokens of a rank, more than any device holds."""
MOST_BATCHES = 100_000
LARGEST = 2**31 - 1
LEAST_STAGE = 128
"""Minimum number of K/V rows in a stage: shorter stages are too many to plan."""
LONGEST_WAIT = 1e8
"""Seconds of the longest wait: three years."""


def whole(least: int, most: int = LARGEST, why: str = "", read: Callable[[str], int] = int) -> Callable[[str], int]:
    """Return a parser of whole numbers.

    Args:
        least: 0 or 1.
        why: reason for the maximum, for the error.
        read: converts the text; raises ValueError if the text is no number.
    """

    def number(text: str) -> int:
        try:
            found = read(text)
        except ValueError:
            found = least - 1
        if found < least:
            expected = "a positive whole number" if least else "0 or a positive whole number"
            raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")
        if found > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {text}{why}")
        return found

    return number


positive = whole(1)
ranks = whole(1, MOST_RANKS, ": planning would not end in time")
servers = whole(0, MOST_RANKS, ": planning would not end in time")
batches = whole(1, MOST_BATCHES, ": simulating would not end in time")
tokens = whole(1, MOST_TOKENS, ": no device holds so many", read_tokens)
seed = whole(0)


def seconds(text: str) -> float:
    """Parse the seconds of a wait, 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= LONGEST_WAIT:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0 to {LONGEST_WAIT:g}, got {text!r}")
    return number


def positive_seconds(text: str) -> float:
    """Parse the seconds of a wait, more than 0."""
    if not (number := seconds(text)):
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds, got {text!r}")
    return number


def check_stages(settings: PlanSettings) -> None:
    """Raise InputError if exchange buffers hold too few rows to plan their stages in time."""
    rows = settings.exchange_buffer_bytes // settings.row_bytes(settings.dominant_kind).kv
    if rows < LEAST_STAGE:
        raise InputError(
            f"--exchange-buffer-bytes {settings.exchange_buffer_bytes} holds {rows} rows of K and V, and stages of "
            f"fewer than {LEAST_STAGE} are too many to plan; raise it"
        )


def gigabytes(text: str) -> float:
    """Parse a positive number."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of gigabytes, got {text!r}")
    return number

"""What benchmarks share: ranks on this machine, rounds and what is told of them, what figures belong to."""

from .figures import Spread, print_json, rounded, spread, table
from .machine import provenance
from .parent import end_with_parent
from .ranks import Ranks, free_port, run_ranks
from .rounds import PROBE, Measured, Round, over, report, rounds_parser, take_rounds
from .timing import Probe, median_seconds

__all__ = [
    "PROBE",
    "Measured",
    "Probe",
    "Ranks",
    "Round",
    "Spread",
    "end_with_parent",
    "free_port",
    "median_seconds",
    "over",
    "print_json",
    "provenance",
    "report",
    "rounded",
    "rounds_parser",
    "run_ranks",
    "spread",
    "table",
    "take_rounds",
]

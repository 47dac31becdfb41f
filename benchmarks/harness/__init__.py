"""Parts that benchmarks share: ranks on this machine, rounds and their reports, memory, provenance
of figures.
"""

from .figures import Spread, options_parser, print_json, print_rows, rounded, spread, table
from .machine import provenance
from .ranks import Ranks, end_with_parent, free_port, run_ranks
from .resident import begin_peak, follow_tensors, keep_freed_memory, peak
from .rounds import Measured, Round, over, report, rounds_parser, slowest, take_rounds
from .timing import median_seconds, most_megabytes

"""hf-distca doctor: check installation and launch, and list what to change before training."""

import argparse

from hf_distca.cli.options import positive_seconds
from hf_distca.progress import TORCH_AND_TRANSFORMERS, importing

DESCRIPTION = """\
Check versions, GPU, kernel, memory, threads, network and settings that contradict each other, and
list what to change. Launched as training will be, it also connects the ranks and measures their
links:

  accelerate launch --config_file examples/configs/ddp.yaml --module hf_distca.cli.main doctor
  torchrun --nproc-per-node 8 --no-python hf-distca doctor

Findings are "ok", "advice" (could be better) or "wrong" (must be changed). The exit status is 1 if
anything is wrong, else 0.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object and nothing else")
    wait = "time that ranks wait for each other (default: 60)"
    add("--timeout", type=positive_seconds, default=60.0, metavar="SECONDS", help=wait)


def run(options: argparse.Namespace) -> int:
    """Check everything and print the findings on rank 0; return 1 if anything is wrong."""
    with importing(TORCH_AND_TRANSFORMERS):
        from hf_distca.cli.findings import check_all

    return check_all(timeout=options.timeout, as_json=options.json)

"""Runs all parts, or some of them, on the GPU of this machine.

Writes what was found as JSON, and prints a table of it. The exit status is 0 if nothing is wrong, 1 if something is
(a part that failed, hung or was not run), and 3 where there is no GPU: nothing was checked then.
"""

import argparse
import faulthandler
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.devices import NO_CUDA, cuda_devices, why_none

LOGS = Path("runs/gpu")
RESULTS = Path("benchmarks/results/gpu.json")
SECONDS = 500
"""For all parts and the start of this process; with the set-up before it a command of 600 s is enough."""
START_S = 30
"""Of these, what goes by before the first part begins: torch's first import takes long."""


def main() -> int:
    """Run what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="these alone: a name, or how names begin")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all parts together (default: {SECONDS})")
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"where results are written (default: {RESULTS})")
    parser.add_argument("--findings", type=Path, help=argparse.SUPPRESS)  # one part, in this process
    options = parser.parse_args()
    if not cuda_devices():
        print(why_none())
        return NO_CUDA
    if options.findings is not None:
        return run_here(options.parts[0], options.findings)

    begin = time.monotonic()
    import torch

    if not torch.cuda.is_available():
        print(f"no CUDA: this torch, {torch.__version__}, cannot use the GPU, so nothing was checked")
        return NO_CUDA
    from benchmarks.gpu.parts import parts_of
    from benchmarks.gpu.report import print_table
    from benchmarks.gpu.runner import chosen, run_parts
    from benchmarks.gpu.setting import setting_of_this_gpu
    from benchmarks.harness import provenance

    setting = setting_of_this_gpu()
    try:
        parts = chosen(parts_of(setting), options.parts)
    except ValueError as error:
        parser.error(str(error))
    results: dict[str, Any] = {
        **provenance(),
        "setting": {
            name: value if isinstance(value, int | float | dict) else str(value)
            for name, value in asdict(setting).items()
        },
    }
    left = options.seconds - (time.monotonic() - begin)
    right = run_parts(parts, command_of, results, options.output, LOGS, left)
    print_table(results)
    print(f"results: {options.output}; what the parts printed: {LOGS}")
    return 0 if right else 1


def command_of(name: str, findings: Path) -> list[str]:
    """The command that runs one part."""
    return [sys.executable, "-m", "benchmarks.gpu", name, "--findings", str(findings)]


def run_here(name: str, path: Path) -> int:
    """Run one part in this process and leave its findings in a file."""
    from benchmarks.gpu.findings import Findings
    from benchmarks.gpu.parts import parts_of
    from benchmarks.gpu.runner import TELL_WHERE
    from benchmarks.gpu.setting import setting_of_this_gpu

    faulthandler.register(TELL_WHERE)
    setting = setting_of_this_gpu()
    (part,) = (part for part in parts_of(setting) if part.name == name)
    findings = Findings()
    with findings.trying(name):
        findings = part.check(setting)
    told = {"figures": findings.figures, "wrong": findings.wrong, "skipped": findings.skipped}
    path.write_text(json.dumps(told))
    return 1 if findings.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs all parts, or some of them, on the GPU of this machine.

Writes what was found as JSON, and prints a table of it. The exit status is 0 if nothing is wrong, 1
if something is (a part that failed, hung or was not run), and 3 where there is no GPU: nothing was
checked then.
"""

import argparse
import faulthandler
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.devices import NO_CUDA, cuda_devices, why_none

if TYPE_CHECKING:
    from benchmarks.gpu.runner import Part
    from benchmarks.gpu.setting import Setting

LOGS = Path("runs/gpu")
RESULTS = Path("benchmarks/results/gpu.json")
SECONDS = 500
"""For all parts and the start of this process; with the set-up before it a command of 600 s is
enough."""
START_S = 30
"""Seconds before the first part begins: torch's first import takes long."""


def parts_of(setting: "Setting", gpus: int = 1) -> "list[Part]":
    """All parts: first what must be right, then how fast it is; and the most seconds that each may
    take on an H100.
    """
    from benchmarks.gpu.exchange import check_exchange
    from benchmarks.gpu.kernels import check_kernel, check_profile, kernel_names, why_missing
    from benchmarks.gpu.padded import check_padded
    from benchmarks.gpu.prefixes import check_prefixes
    from benchmarks.gpu.replay import check_replays
    from benchmarks.gpu.runner import Part
    from benchmarks.gpu.server import check_server
    from benchmarks.gpu.steps import check_planned_steps, check_two_ranks
    from benchmarks.gpu.training import check_loss_chunks, check_training

    kernels = kernel_names(setting.device)
    return [
        *(
            Part(f"kernel {name}", partial(check_kernel, name=name), 60, why_missing(name))
            for name in kernels
        ),
        Part("planned steps", check_planned_steps, 60),
        Part("two ranks", check_two_ranks, 60),
        Part("exchange", partial(check_exchange, ranks=gpus), 60, all_gpus=True),
        Part("server", check_server, 80),
        Part("training", check_training, 130),
        Part("loss chunks", check_loss_chunks, 60),
        Part("profile", check_profile, 60),
        Part("replays", check_replays, 60),
        Part("padded", check_padded, 100),
        Part("prefixes", check_prefixes, 60),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="these alone: a name, or how names begin"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help=f"for all parts together (default: {SECONDS})",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        help=f"where results are written (default: {RESULTS})",
    )
    parser.add_argument(
        "--findings", type=Path, help=argparse.SUPPRESS
    )  # one part, in this process
    options = parser.parse_args()
    gpus = cuda_devices()
    if not gpus:
        print(why_none())
        return NO_CUDA
    begin = time.monotonic()
    import torch

    if not torch.cuda.is_available():
        print(
            f"no CUDA: this torch, {torch.__version__}, cannot use the GPU, so nothing was checked"
        )
        return NO_CUDA
    from benchmarks.gpu.runner import chosen, print_table, run_parts
    from benchmarks.gpu.setting import setting_of_this_gpu
    from benchmarks.harness import provenance

    setting = setting_of_this_gpu()
    try:
        parts = chosen(parts_of(setting, gpus), options.parts)
    except ValueError as error:
        parser.error(str(error))
    if options.findings is not None:
        return run_here(parts[0], setting, options.findings)
    shown = {
        name: value if isinstance(value, int | float | dict) else str(value)
        for name, value in vars(setting).items()
    }
    results: dict[str, Any] = {**provenance(), "setting": shown}
    left = options.seconds - (time.monotonic() - begin)
    right = run_parts(parts, command_of, results, options.output, LOGS, left)
    print_table(results)
    print(f"results: {options.output}; what the parts printed: {LOGS}")
    return 0 if right else 1


def command_of(name: str, findings: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", name, "--findings", str(findings)]


def run_here(part: "Part", setting: "Setting", path: Path) -> int:
    from benchmarks.gpu.findings import Findings
    from benchmarks.gpu.runner import SHOW_STACK

    faulthandler.register(SHOW_STACK)
    findings = Findings()
    with findings.trying(part.name):
        findings = part.check(setting)
    path.write_text(json.dumps(vars(findings)))
    return 1 if findings.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

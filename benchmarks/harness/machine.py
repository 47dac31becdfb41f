"""Provenance of results: the machine, the versions, the commit and the command."""

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import hf_distca

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "triton",
    "kernels",
)
"""Whose versions results depend on."""
CHECKOUT = Path(hf_distca.__file__).resolve().parents[1]
"""Checkout of the hf_distca that runs; the benchmark may lie in another."""


def provenance() -> dict[str, Any]:
    """The command that runs and the machine that it runs on; `machine` names the commit."""
    return {"command": command(), "machine": machine()}


def command() -> str:
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        return shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    return shlex.join(["python", f"benchmarks/{script.name}", *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """The processor, the GPU, if there is one, the versions and the commit."""
    found: dict[str, Any] = {
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "commit": commit(),
        "cuda": torch.version.cuda,
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "memory_gib": round(gpu.total_memory / 2**30, 1),
            "multiprocessors": gpu.multi_processor_count,
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


def commit() -> str | None:
    """The commit of the hf_distca that runs, and whether files differ from it; None outside a
    checkout.
    """
    found = _output("git", "-C", str(CHECKOUT), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(CHECKOUT), "status", "--porcelain")
    return f"{found} with changes" if found and changed else found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str | None:
    """The processor's name, where Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None
    )


def _output(*words: str) -> str | None:
    """Output of a program; None without the program, or if it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

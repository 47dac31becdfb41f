"""What was found, as JSON for programs and as a table for people."""

import json
import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.harness import table

PACKAGES = ("torch", "transformers", "accelerate", "flash-attn", "flash-attn-3", "flash-attn-4", "triton", "kernels")
PASSED, FAILED, TIMED_OUT, SKIPPED, NOT_REACHED = "passed", "FAILED", "TIMED OUT", "skipped", "NOT REACHED"
GOOD = (PASSED, SKIPPED)


def machine() -> dict[str, Any]:
    """The GPU and the versions that results belong to."""
    import torch

    found: dict[str, Any] = {
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "commit": _commit(),
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


def command() -> str:
    """What was run."""
    return shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])


def write(path: Path, results: dict[str, Any]) -> None:
    """Write results, never half of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(results, indent=2) + "\n")
    draft.replace(path)


def print_table(results: dict[str, Any]) -> None:
    """Print one line a part, then everything that is wrong."""
    parts = results["parts"]
    table(
        ["part", "result", "seconds", "wrong"],
        [
            [name, part["status"], f"{part['seconds']:.0f}", str(len(part["wrong"])) if part["wrong"] else ""]
            for name, part in parts.items()
        ],
    )
    for name, part in parts.items():
        for sentence in part["wrong"]:
            print(f"{name}: {sentence}")
        if part["skipped"]:
            print(f"{name}: skipped: {part['skipped']}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    commit = _output("git", "rev-parse", "HEAD")
    return f"{commit} with changes" if commit and _output("git", "status", "--porcelain") else commit


def _output(*words: str) -> str | None:
    """What a program prints; None where there is none, or it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

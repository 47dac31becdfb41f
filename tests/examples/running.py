"""Running examples as users do, on the CPU."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch import cpu_environment, run_in_forks

EXAMPLES = Path(__file__).parents[2] / "examples"
NOISE = ("`gradient_checkpointing", "find_unused_parameters", "pin_memory", "missing keys")
"""Parts of warnings of other libraries that our own calls and defaults would cause."""


def run(command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """Output of a command."""
    given = {**cpu_environment(), **environment}
    done = subprocess.run(
        command, cwd=folder, env=given, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_forked(
    command: list[str], folder: Path, ranks: int = 2, config: str = "ddp", **environment: str
) -> str:
    """Output of an example, in processes that have imported everything; it lies in `folder`."""
    folder.mkdir(exist_ok=True)
    codes = run_in_forks(config, EXAMPLES / command[0], command[1:], folder, ranks, **environment)
    printed = "".join(
        (folder / f"output-{rank}").read_text(errors="replace") for rank in range(ranks)
    )
    assert set(codes) == {0}, printed
    assert not [noise for noise in NOISE if noise in printed], printed
    return printed


def finetune(checkpoint: Path, output: Path, options: str) -> list[str]:
    """The command of examples/finetune_llama.py with small settings."""
    settings = "--learning_rate 1e-2 --save_strategy no --report_to none"
    paths = ["--model_name_or_path", str(checkpoint), "--output_dir", str(output)]
    return ["finetune_llama.py", *paths, *settings.split(), *options.split()]


def summary_of(output: Path) -> dict[str, float]:
    """Summary that the example wrote, of a training that begins as a new model of 512 tokens does
    and learns.
    """
    summary: dict[str, float] = json.loads((output / "summary.json").read_text())
    assert summary["loss_last"] < summary["loss_first"] == pytest.approx(6.2, abs=0.3)  # ln 512
    return summary

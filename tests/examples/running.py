"""Running examples as users do, on the CPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.launch import cpu_environment, launcher, run_in_forks

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(
    command: list[str],
    folder: Path = EXAMPLES,
    ranks: int = 1,
    config: str = "ddp",
    python: str = sys.executable,
    **environment: str,
) -> str:
    """Output of an example."""
    done = subprocess.run(
        [*(launcher(config, ranks, python) if ranks > 1 else [python]), *command],
        cwd=folder,
        env={**cpu_environment(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_forked(command: list[str], folder: Path, ranks: int = 2, config: str = "ddp", **environment: str) -> str:
    """Output of rank 0 of an example, in processes that have imported everything; `folder` is for the output."""
    folder.mkdir(exist_ok=True)
    codes = run_in_forks(config, EXAMPLES / command[0], command[1:], folder, ranks, **environment)
    printed = (folder / "output-0").read_text(errors="replace")
    assert set(codes) == {0}, printed
    return printed


def finetune(checkpoint: Path, output: Path, options: str, **how: Any) -> tuple[dict[str, float], str]:
    """The summary of a training by examples/finetune_llama.py, and what it printed; `how` as `run` takes it."""
    printed = run(finetune_command(checkpoint, output, options), **how)
    return summary_of(output), printed


def finetune_command(checkpoint: Path, output: Path, options: str) -> list[str]:
    """The example with small settings."""
    settings = "--learning_rate 1e-2 --save_strategy no --report_to none"
    paths = ["--model_name_or_path", str(checkpoint), "--output_dir", str(output)]
    return ["finetune_llama.py", *paths, *settings.split(), *options.split()]


def summary_of(output: Path) -> dict[str, float]:
    """Summary that the example wrote."""
    summary: dict[str, float] = json.loads((output / "summary.json").read_text())
    return summary

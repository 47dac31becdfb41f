"""Running examples as users do, on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import cpu_environment, launcher, run_in_forks

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(
    command: list[str],
    folder: Path = EXAMPLES,
    ranks: int = 1,
    python: str = sys.executable,
    **environment: str,
) -> str:
    """Output of an example."""
    done = subprocess.run(
        [*(launcher("ddp", ranks, python) if ranks > 1 else [python]), *command],
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
    """Output of an example, in processes that have imported everything; `folder` is for the output."""
    folder.mkdir(exist_ok=True)
    codes = run_in_forks(config, EXAMPLES / command[0], command[1:], folder, ranks, **environment)
    printed = "".join((folder / f"output-{rank}").read_text(errors="replace") for rank in range(ranks))
    assert set(codes) == {0}, printed
    return printed


def finetune(checkpoint: Path, output: Path, options: str) -> list[str]:
    """The command of examples/finetune_llama.py with small settings."""
    settings = "--learning_rate 1e-2 --save_strategy no --report_to none"
    paths = ["--model_name_or_path", str(checkpoint), "--output_dir", str(output)]
    return ["finetune_llama.py", *paths, *settings.split(), *options.split()]


def summary_of(output: Path) -> dict[str, float]:
    """Summary that the example wrote, of a training that begins as a new model of 512 tokens does and learns."""
    summary: dict[str, float] = json.loads((output / "summary.json").read_text())
    assert summary["loss_last"] < summary["loss_first"] == pytest.approx(6.2, abs=0.3)  # ln 512
    return summary

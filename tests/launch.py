"""Launching scripts as users do, on CPU processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.ranks import free_port

ROOT = Path(__file__).parent.parent

CONFIGS = ROOT / "examples" / "configs"
"""A file for each way to train in parallel, by its name."""
LOG = "log"
"""File in the folder of a launch, with both streams as they come."""


def launch(strategy: str, script: Path, run: dict[str, Any], folder: Path, ranks: int = 2) -> dict[str, Any]:
    """The result of one training; see `run_launch`."""
    process = run_launch(strategy, script, {"run": run}, folder, ranks)
    print(process.stdout[-6000:])
    assert process.returncode == 0
    return results_of(folder)["run"]


def results_of(folder: Path) -> dict[str, Any]:
    """What the script wrote of each run that it came to the end of."""
    file = folder / "result.json"
    return json.loads(file.read_text()) if file.exists() else {}


def run_launch(
    strategy: str, script: Path, runs: dict[str, dict[str, Any]], folder: Path, ranks: int = 2
) -> subprocess.CompletedProcess[str]:
    """Launch a script that does the runs one after another in the same processes; stdout holds both streams.

    Args:
        strategy: a file in CONFIGS, without its ending.
        script: see `tests/trainer/train_script.py`.
        runs: what it is to do, by name. Each is given its own output folder.
        folder: for the files of the launch.
        ranks: how many processes.
    """
    options = write_options(runs, folder)
    with (folder / LOG).open("w") as log:
        process: subprocess.CompletedProcess[str] = subprocess.run(
            [*launcher(strategy, ranks), str(script), str(options)],
            env=cpu_environment(),
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=280,
        )
    process.stdout = (folder / LOG).read_text()
    return process


def write_options(runs: dict[str, dict[str, Any]], folder: Path) -> Path:
    """Write the file of runs for a script; each run gets an output folder."""
    runs = {
        name: {**run, "arguments": {"output_dir": str(folder / name), **run.get("arguments", {})}}
        for name, run in runs.items()
    }
    options = folder / "options.json"
    options.write_text(json.dumps({"output": str(folder / "result.json"), "runs": runs}))
    return options


def launcher(strategy: str, ranks: int, python: str = sys.executable) -> list[str]:
    """The command that launches a script, without the script.

    Args:
        strategy: a file in CONFIGS, without its ending.
        ranks: how many processes.
        python: that runs it.
    """
    command = [python, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{strategy}.yaml")]
    return [*command, f"--num_processes={ranks}", f"--main_process_port={free_port()}"]


def cpu_environment() -> dict[str, str]:
    """The environment of a launch on the CPU, with a thread for each process."""
    # Trainers that tests make in this process leave settings for accelerate behind.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    return environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

"""Launching scripts as users do, on CPU processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.ranks import free_port

ROOT = Path(__file__).parent.parent

STRATEGIES: dict[str, list[str]] = {
    "ddp": ["--multi_gpu"],
    "fsdp2": [
        "--use_fsdp",
        "--fsdp_version=2",
        "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
        "--fsdp_reshard_after_forward=true",
    ],
    "zero1": ["--use_deepspeed", "--zero_stage=1", "--zero3_init_flag=false"],
    "zero2": ["--use_deepspeed", "--zero_stage=2", "--zero3_init_flag=false"],
    "zero3": ["--use_deepspeed", "--zero_stage=3", "--zero3_init_flag=false"],
}
"""`accelerate launch` options of each way to train in parallel."""


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
        strategy: a name in STRATEGIES.
        script: see `tests/trainer/train_script.py`.
        runs: what it is to do, by name. Each is given its own output folder.
        folder: for the files of the launch.
        ranks: how many processes.
    """
    # Trainers that tests make in this process leave settings for accelerate behind.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    defaults: dict[str, str] = {}
    if strategy == "ddp":
        environment["ACCELERATE_USE_CPU"] = "true"
    else:
        environment["ACCELERATE_TORCH_DEVICE"] = "cpu"
        environment["DS_ACCELERATOR"] = "cpu"
        defaults["ddp_backend"] = "gloo"
    runs = {
        name: {**run, "arguments": {"output_dir": str(folder / name), **defaults, **run.get("arguments", {})}}
        for name, run in runs.items()
    }
    options = {"output": str(folder / "result.json"), "fsdp2": strategy == "fsdp2", "runs": runs}
    (folder / "options.json").write_text(json.dumps(options))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(ranks)]
    command += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    command += [f"--main_process_port={free_port()}", *STRATEGIES[strategy]]
    return subprocess.run(
        [*command, str(script), str(folder / "options.json")],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )

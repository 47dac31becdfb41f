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


def launch(strategy: str, script: Path, options: dict[str, Any], folder: Path, ranks: int = 2) -> dict[str, Any]:
    """Run a script that takes a JSON file of options and writes its results to options["output"]."""
    process = run_launch(strategy, script, options, folder, ranks)
    print(process.stdout[-6000:])
    assert process.returncode == 0
    return json.loads((folder / "result.json").read_text())


def run_launch(
    strategy: str, script: Path, options: dict[str, Any], folder: Path, ranks: int = 2
) -> subprocess.CompletedProcess[str]:
    """The same, whatever the exit code; stdout holds both streams."""
    arguments = dict(options.get("arguments", {}), output_dir=str(folder / "output"))
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    if strategy == "ddp":
        environment["ACCELERATE_USE_CPU"] = "true"
    else:
        environment["ACCELERATE_TORCH_DEVICE"] = "cpu"
        environment["DS_ACCELERATOR"] = "cpu"
        arguments["ddp_backend"] = "gloo"
    options = dict(options, output=str(folder / "result.json"), arguments=arguments, fsdp2=strategy == "fsdp2")
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

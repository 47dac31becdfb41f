"""Launches of scripts, as users make them, on CPU processes."""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ranks import free_port, own_processes

ROOT = Path(__file__).parent.parent

CONFIGS = ROOT / "examples" / "configs"
"""A file for each strategy, by its name."""


def cpu_environment() -> dict[str, str]:
    """The environment of a launch on the CPU."""
    # Trainers that tests make in this process leave settings for accelerate behind.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")
    }
    return environment | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def run_in_forks(
    strategy: str,
    script: Path,
    arguments: Sequence[str],
    folder: Path,
    ranks: int = 2,
    **environment: str,
) -> list[int | None]:
    """Run a script as `accelerate launch` does, in processes that have imported everything; return
    their exit codes.

    What a rank prints is in the file `output-RANK` of the folder.
    """
    environment = {"CUDA_VISIBLE_DEVICES": "", **launch_environment(strategy, ranks), **environment}
    with own_processes(
        ranks, _run_script, environment, script, arguments, folder=folder
    ) as processes:
        for process in processes:
            process.join(280)
        return [process.exitcode for process in processes]


def launch_environment(strategy: str, ranks: int) -> dict[str, str]:
    """Variables that `accelerate launch` sets for a file in CONFIGS."""
    import accelerate.commands.launch as accelerate_launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    environments: list[dict[str, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in [
            name for name in os.environ if name.startswith("ACCELERATE_")
        ]:  # which other tests left behind
            patch.delenv(name)
        patch.setattr(
            accelerate_launch,
            "multi_gpu_launcher",
            lambda args: environments.append(prepare_multi_gpu_env(args)),
        )
        patch.setattr(
            accelerate_launch,
            "deepspeed_launcher",
            lambda args: environments.append(prepare_deepspeed_cmd_env(args)[1]),
        )
        config = ["--config_file", str(CONFIGS / f"{strategy}.yaml")]
        size = [f"--num_processes={ranks}", f"--main_process_port={free_port()}"]
        parser = accelerate_launch.launch_command_parser()
        accelerate_launch.launch_command(parser.parse_args([*config, *size, "script.py"]))
        (environment,) = environments
        changed = {
            name: value for name, value in environment.items() if os.environ.get(name) != value
        }
    return {name: value for name, value in changed.items() if not name.startswith("MASTER_")}


def _run_script(environment: dict[str, str], script: Path, arguments: Sequence[str]) -> None:
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ.update(environment)
    os.chdir(script.parent)
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")

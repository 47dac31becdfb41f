"""What the comparisons of axolotl and ms-swift share: a checkpoint, data, launches and losses."""

import argparse
import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHARACTERS = (300, 900, 2500, 150, 600, 4200, 1200, 80, 2000, 700, 450, 1500, 260, 3000, 500, 1000)
"""Lengths of the documents. The longest one has more tokens than a rank holds."""
DPO_BOUND = 1e-4
"""Bound of DPO: its log-probs are sums of up to 2,000 numbers, which are rounded to 5e-4."""
OFFLINE = {
    "ACCELERATE_USE_CPU": "true",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def folder_of(script: str) -> Path:
    """Folder that a comparison's command line names, made if it is not there."""
    parser = argparse.ArgumentParser(description=script)
    parser.add_argument("folder", type=Path, help="folder for the checkpoint, data and trainings")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    return folder.absolute()


def run(folder: Path, name: str, *command: str, **environment: str) -> None:
    """Run a command in a folder, with its output in a file; end with that output if it fails."""
    print("$", " ".join(command), flush=True)
    paths = [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PYTHONPATH": ":".join(filter(None, paths)), "PATH": programs}
    output = folder / f"{name}.log"
    with output.open("w") as file:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **OFFLINE, **variables, **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        sys.exit(f"{output.read_text()[-20_000:]}\nthe command failed with {done.returncode}")


def free_port() -> str:
    """A port of this host that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def make_inputs(folder: Path) -> None:
    """Make the checkpoint, and the documents as text, as messages and as preferences."""
    script = str(ROOT / "examples" / "make_checkpoint.py")
    sizes = ("--hidden_size", "64", "--layers", "2", "--vocab_size", "1024")
    run(folder, "checkpoint", sys.executable, script, "--output", "checkpoint", *sizes)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    long = [path for path in sources if path.stat().st_size > max(CHARACTERS)]
    texts = [
        path.read_text(encoding="utf-8")[:size]
        for path, size in zip(long, CHARACTERS, strict=False)
    ]
    write(folder / "documents.jsonl", [{"text": text} for text in texts])
    write(folder / "messages.jsonl", [{"messages": [answer(text)]} for text in texts])
    preferences = [
        {"prompt": first[:100], "chosen": first[100:], "rejected": second}
        for first, second in zip(texts[::2], texts[1::2], strict=True)
    ]
    write(folder / "preferences.jsonl", preferences)
    chats = [
        {
            "messages": [{"role": "user", "content": pair["prompt"]}, answer(pair["chosen"])],
            "rejected_response": pair["rejected"],
        }
        for pair in preferences
    ]
    write(folder / "chats.jsonl", chats)


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def losses(folder: Path) -> list[float]:
    """Losses of a training's steps, from its last checkpoint."""
    steps = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    state = json.loads((steps[-1] / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def compare(title: str, trainings: dict[str, Path], bound: float) -> None:
    """Print the losses of trainings side by side; end if they differ by more than a bound."""
    columns = {name: losses(folder) for name, folder in trainings.items()}
    print(f"\n{title}\nstep  " + "  ".join(f"{name:>22}" for name in columns))
    for step, row in enumerate(zip(*columns.values(), strict=True), 1):
        print(f"{step:4}  " + "  ".join(f"{loss:22.6f}" for loss in row))
    first, *others = columns.values()
    worst = max(abs(a - b) for other in others for a, b in zip(first, other, strict=True))
    print(f"largest difference {worst:.1e}, bound {bound:.0e}\n", flush=True)
    if len(first) < 4 or worst > bound:
        sys.exit(f"{title}: the losses differ")


def compare_with_trainers(
    title: str, folder: Path, train: Callable[[], None], bound: float
) -> None:
    """Compare a training of a program with `DistCATrainer` and with one process of `Trainer`.

    Args:
        train: runs the program, which writes to the folder `program`.
    """
    script = str(HERE / "trained.py")
    launch = ("torchrun", "--nproc_per_node", "2", "--master_port", free_port())
    run(folder, "distca", *launch, script, "distca")
    run(folder, "stock", sys.executable, script, "stock")
    train()
    trainings = {
        title.split(",")[0]: folder / "program",
        "DistCATrainer": folder / "distca",
        "Trainer, one process": folder / "stock",
    }
    compare(title, trainings, bound)

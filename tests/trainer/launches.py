"""A training under `accelerate launch`, and the same in one process with "sdpa"."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.trainer.comparison import LENGTHS as LENGTHS
from tests.trainer.comparison import PLANNED, Run, train_alone

SCRIPT = Path(__file__).parent / "train_script.py"
STEPS = 10
TRAINED = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "optim": "adamw_torch"}
ARGUMENTS: dict[str, Any] = {
    **PLANNED,
    **TRAINED,
    "train_sampling_strategy": "sequential",
    "bf16": False,
    "save_strategy": "no",
}


def reference_losses() -> list[float]:
    """The losses of `ARGUMENTS` in one process."""
    with TemporaryDirectory() as folder:
        losses: list[float] = train_alone(folder, Run(TRAINED))["logged"]["loss"]
    return losses

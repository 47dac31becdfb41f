"""Runs that end before their time: every process ends, says why, and what was saved before goes on to the last bit."""

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import TrainerCallback

from tests.ranks import own_processes
from tests.trainer.small_trainers import make_trainer
from tests.trainer.train_script import parameters_hash

ARGUMENTS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
WAIT_S = 90.0
"""Much less than the seconds after which an exchange fails by itself, and more than a busy machine needs."""


class Ends(TrainerCallback):
    """Does to the process of a rank, in the third step, what its end is to be."""

    def __init__(self, end: str, folder: Path) -> None:
        self.end, self.folder = end, folder

    def on_step_begin(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        """Wait for Ctrl-C on rank 0, whose partner waits for it in an exchange."""
        if state.global_step != 2 or dist.get_rank() != 0:
            return
        if self.end == "Ctrl-C":
            (self.folder / "reached").touch()
            time.sleep(WAIT_S)


def _full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _ends(folder: Path, end: str) -> None:
    """A rank that trains, from its beginning to its end."""
    trainer = make_trainer(str(folder), **ARGUMENTS)
    trainer.add_callback(Ends(end, folder))
    if end == "disk full" and dist.get_rank() == 0:
        save = trainer._save_optimizer_and_scheduler
        trainer._save_optimizer_and_scheduler = lambda to: (_full if trainer.state.global_step == 3 else save)(to)
    trainer.train()


def _train(folder: str, resume: bool) -> tuple[int, str] | str:
    """Steps and parameters in the end; or the error."""
    trainer = make_trainer(folder, **ARGUMENTS)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except ValueError as error:
        return str(error)
    return trainer.state.global_step, parameters_hash(trainer.model)


@pytest.fixture(scope="module")
def whole(rank_pools, tmp_path_factory):
    """What the run comes to where nothing ends it."""
    return rank_pools[2].run(_train, str(tmp_path_factory.mktemp("whole")), False)


@pytest.mark.parametrize(
    ("end", "last", "codes", "told"),
    [
        ("Ctrl-C", 2, (1, 1), ("KeyboardInterrupt", "KeyboardInterrupt")),
        (
            "disk full",
            3,
            (1, 1),
            ("OSError: [Errno 28]", "RuntimeError: rank 0 failed: OSError: [Errno 28] No space left on device"),
        ),
    ],
)
def test_all_ranks_end_and_another_launch_goes_on(rank_pools, whole, tmp_path, end, last, codes, told):
    with own_processes(2, _ends, tmp_path, end, folder=tmp_path) as ranks:
        if end == "Ctrl-C":
            until = time.monotonic() + WAIT_S
            while not (tmp_path / "reached").exists() and time.monotonic() < until:
                time.sleep(0.05)
            for rank in ranks:
                os.kill(rank.pid, signal.SIGINT)
        for rank in ranks:
            rank.join(WAIT_S)
        assert tuple(rank.exitcode for rank in ranks) == codes
    for rank, message in enumerate(told):
        assert message in (tmp_path / f"output-{rank}").read_text(errors="replace")
    newest = tmp_path / f"checkpoint-{last}"
    if end == "disk full":
        for error in rank_pools[2].run(_train, str(tmp_path), True):
            assert f"{newest} is to be resumed, but it has no trainer_state.json" in error
        newest.rename(tmp_path / "half")
        newest = tmp_path / f"checkpoint-{last - 1}"
    assert max(tmp_path.glob("checkpoint-*")) == newest
    assert rank_pools[2].run(_train, str(tmp_path), True) == whole

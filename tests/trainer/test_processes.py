"""Processes that read for a rank: one that stops, hangs or ends is named, and the run ends on all
ranks.
"""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import TrainerCallback

from hf_distca.interpreter import fork_can_hang
from hf_distca.trainer import processes
from hf_distca.trainer.refusals import IMPORTED_AGAIN
from tests.logged import Messages
from tests.ranks import own_processes
from tests.refused import refused
from tests.trainer.small_trainers import LENGTHS, make_trainer

TIMEOUT_S = 8.0
ENDS_WITHIN_S = 40.0
"""Much less than the half hour after which gloo's groups of DDP give up."""


class Stops(TrainerCallback):
    """Stops the process that reads for rank 1 after the first step, as a file system that hangs
    does.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if dist.get_rank() == 1 and state.global_step == 1:
            (process,) = multiprocessing.active_children()
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
            (self._folder / "stopped").write_text(str(process.pid))


def _train_with_a_process_that_stops(folder: Path, source: str) -> None:
    options = {
        "dataloader_num_workers": 1,
        "exchange_timeout": TIMEOUT_S,
        "save_strategy": "no",
        "max_steps": 50,
    }
    trainer = make_trainer(str(folder), source, lengths=LENGTHS * 4, **options)
    trainer.add_callback(Stops(folder))
    trainer.train()


@pytest.mark.parametrize("source", ["packed", "stream"])
def test_a_process_that_is_stopped_ends_the_run_on_all_ranks(tmp_path, source):
    with own_processes(
        2, _train_with_a_process_that_stops, tmp_path, source, folder=tmp_path
    ) as ranks:
        until = time.monotonic() + 200
        while not (tmp_path / "stopped").exists() and time.monotonic() < until:
            time.sleep(0.05)
        stopped_at = time.monotonic()
        for rank in ranks:
            rank.join(100)
        took = time.monotonic() - stopped_at
        assert [rank.exitcode for rank in ranks] == [1, 1]
    assert took < ENDS_WITHIN_S
    stopped = (tmp_path / "stopped").read_text()
    for rank in range(2):
        printed = (tmp_path / f"output-{rank}").read_text(errors="replace")
        assert (
            f"rank 1 waits for a batch from process {stopped}, but none has come within 4 s"
            in printed
        )
        assert "set dataloader_num_workers=0, which starts no process" in printed
    assert not Path(f"/proc/{stopped}").exists()


def _hang(_worker_id: int) -> None:
    time.sleep(600)


def test_a_process_without_a_sign_of_life_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(processes.Signs, "__call__", lambda self, worker_id: _hang(worker_id))
    monkeypatch.setattr(processes, "START_S", 0.5)
    trainer = make_trainer(str(tmp_path), dataloader_num_workers=1, save_strategy="no")
    with pytest.raises(
        RuntimeError, match=r"rank 0 started .* process \d+ gave no sign of life within 0.5 s"
    ):
        trainer.train()
    assert multiprocessing.active_children() == []


def test_a_process_leaves_its_sign_and_is_set_up_as_before():
    seen: list[int] = []
    signs = processes.Signs(2, seen.append)
    assert signs.pids() == {0}
    signs(1)
    assert signs.pids() == {0, os.getpid()}
    assert seen == [1]


@pytest.mark.parametrize(
    ("version", "can_hang"),
    [
        ((3, 10, 13), False),
        ((3, 11, 0), True),
        ((3, 11, 9), True),
        ((3, 11, 10), False),
        ((3, 12, 0), False),
    ],
)
def test_versions_in_which_a_fork_can_hang(version, can_hang):
    assert fork_can_hang(version) is can_hang


@pytest.mark.parametrize(
    ("workers", "rank", "can_hang", "method", "warns"),
    [
        (0, 0, True, "fork", False),
        (1, 0, True, "fork", True),
        (1, 1, True, "fork", False),
        (1, 0, False, "fork", False),
        (1, 0, True, "spawn", False),
    ],
)
def test_a_warning_names_the_version_to_install(
    monkeypatch, workers, rank, can_hang, method, warns
):
    monkeypatch.setattr(processes, "fork_can_hang", lambda: can_hang)
    messages = Messages("hf_distca.trainer")
    processes.ReadingProcesses(workers, rank, 60, method)
    messages.end()
    assert any("3.11.10" in line for line in messages.lines) is warns


@pytest.mark.parametrize("source", ["packed", "flattened"])
def test_evaluation_loaders_are_made_once(tmp_path, source):
    lasting = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = make_trainer(str(tmp_path), source, lengths=[40, 30, 20], **lasting)
    own = trainer.eval_dataset
    trainer.eval_dataset = {"a": own, "b": own.select([0])}
    losses = []
    pids = []
    before = {process.pid for process in multiprocessing.active_children()}
    for _ in range(2):
        losses.append(trainer.evaluate())
        pids.append({process.pid for process in multiprocessing.active_children()} - before)
    assert pids[0] == pids[1]
    assert len(pids[0]) == 2
    assert losses[0]["eval_a_loss"] == losses[1]["eval_a_loss"] != losses[0]["eval_b_loss"]
    # Another data set gets a loader of its own, which is not kept.
    other = trainer.evaluate(own.select([2]))["eval_loss"]
    assert other not in losses[0].values()
    del trainer


def test_arguments_are_refused_while_a_process_imports_the_script_again(tmp_path, monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with refused(IMPORTED_AGAIN):
        make_trainer(str(tmp_path))

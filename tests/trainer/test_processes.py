"""Processes that read for a rank: one that hangs or dies ends the run, with the reason."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import get_worker_info

from hf_distca.checks.launch_rules import PROCESSES
from hf_distca.collator.forking import fork_can_hang
from hf_distca.trainer import loaders
from tests.ranks import own_processes
from tests.refused import refused
from tests.trainer.small_trainers import make_trainer

ENDS_WITHIN_S = 40.0
"""Much less than the half hour after which gloo's groups of DDP give up."""


class Faulty(list[Any]):
    """Documents of which a process of the last rank can read only some."""

    def __init__(self, fail: Callable[[], None]) -> None:
        super().__init__({"input_ids": [3 + index] * 100} for index in range(40))
        self._fail = fail
        self._reads = 0

    def __getitem__(self, index: Any) -> Any:
        if get_worker_info() is not None and dist.get_rank() == dist.get_world_size() - 1:
            self._reads += 1
            if self._reads > 10:
                self._fail()
        return super().__getitem__(index)


def _train(folder: Path, fail: Callable[[], None]) -> None:
    options = {"dataloader_num_workers": 1, "exchange_timeout": 8.0, "save_strategy": "no"}
    trainer = make_trainer(str(folder), given={"train_dataset": Faulty(fail)}, **options)
    try:
        trainer.train()
    except RuntimeError:
        (folder / f"failed-{dist.get_rank()}").write_text(str(time.monotonic()))
        raise


def _hang() -> None:
    """Hang, as a file system that does not answer."""
    time.sleep(600)


@pytest.mark.launches
def test_a_process_that_hangs_ends_the_run_on_all_ranks(tmp_path):
    with own_processes(2, _train, tmp_path, _hang, folder=tmp_path) as ranks:
        for rank in ranks:
            rank.join(200)
        assert [rank.exitcode for rank in ranks] == [1, 1]
    assert time.monotonic() - float((tmp_path / "failed-1").read_text()) < ENDS_WITHIN_S
    first, second = ((tmp_path / f"output-{rank}").read_text(errors="replace") for rank in (0, 1))
    error = "RuntimeError: DataLoader timed out after 4.0 seconds\n"
    assert f"OtherRankError: rank 1 failed: {error}" in first
    assert f"\n{error}" in second


def _die() -> None:
    """End this process, as the system does when it lacks memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_ends_the_run(rank_pools, tmp_path):
    with pytest.raises(AssertionError, match=r"RuntimeError: DataLoader worker \(pid.*\) \w+"):
        rank_pools[1].run(_train, tmp_path, _die)


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
        (1, 0, True, None, True),
        (1, 0, True, "fork", True),
        (0, 0, True, None, False),
        (1, 1, True, None, False),
        (1, 0, False, None, False),
        (1, 0, True, "forkserver", False),
    ],
)
def test_a_warning_names_the_version_to_install(
    monkeypatch, caplog, workers, rank, can_hang, method, warns
):
    monkeypatch.setattr(loaders, "fork_can_hang", lambda: can_hang)
    monkeypatch.setattr(loaders, "get_start_method", lambda allow_none: None)
    args: Any = SimpleNamespace(
        dataloader_num_workers=workers,
        process_index=rank,
        dataloader_multiprocessing_context=method,
    )
    loaders.warn_of_forks(args)
    assert ["3.11.10" in message for message in caplog.messages] == [True] * warns


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
    with refused(PROCESSES[0]):
        make_trainer(str(tmp_path))

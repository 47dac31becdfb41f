"""What a training prints where it resumes, and where SIGTERM or Ctrl-C ends it."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerState

from hf_distca.trainer.resuming import Continuation
from tests.ranks import own_processes
from tests.trainer.small_trainers import make_trainer

NO_STEP = "interrupted before the first step; there is no checkpoint to continue from"


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Signals that the handler of a user's script gets."""
    numbers: list[int] = []

    def note(number: int, frame: Any) -> None:
        numbers.append(number)

    before = signal.signal(signal.SIGTERM, note)
    yield numbers
    assert signal.signal(signal.SIGTERM, before) is note  # none is left behind


def arguments(**changed: Any) -> Any:
    given = {"process_index": 0, "enable_jit_checkpoint": False, "save_only_model": False}
    return SimpleNamespace(output_dir="out", **{**given, **changed})


class Terminated(TrainerCallback):
    """Sends SIGTERM twice to its own process, at the end of step 2."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)


def test_a_training_says_how_it_continues_and_where_it_resumed(tmp_path, capfd, received):
    trainer = make_trainer(str(tmp_path), max_steps=3, save_strategy="steps", save_steps=1)
    trainer.add_callback(Terminated())
    trainer.train()
    printed, told = capfd.readouterr()
    continues = f"continue with resume_from_checkpoint='{tmp_path}/checkpoint-1'"
    assert told.count(f"\ninterrupted after step 2 of 3; {continues}\n") == 1
    assert told.count("interrupted") == 1
    assert received == [signal.SIGTERM] * 2
    assert "resumed" not in printed
    trainer.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")
    printed, told = capfd.readouterr()
    assert f"\nresumed from {tmp_path}/checkpoint-2, step 2 of 3\n" in f"\n{printed}"
    assert "interrupted" not in told


def test_what_can_be_continued(capfd, received):
    def told(checkpoint: str | None, saved: list[int], **changed: Any) -> str:
        continuation, args = Continuation(), arguments(**changed)
        with continuation.of(checkpoint, args):
            for step in saved:
                state = TrainerState(global_step=step, max_steps=9)
                continuation.on_train_begin(args, state, Any)
                continuation.on_save(args, state, Any)
            signal.raise_signal(signal.SIGTERM)
        return capfd.readouterr().err.strip()

    assert told(None, []) == NO_STEP
    given = "in/checkpoint-4"
    before = "interrupted before the first step; continue with resume_from_checkpoint"
    assert told(given, []) == f"{before}='{given}'"
    after = "interrupted after step 6 of 9; "
    assert told(given, [6]) == f"{after}continue with resume_from_checkpoint='out/checkpoint-6'"
    weights_alone = told(given, [6], save_only_model=True)
    assert weights_alone == f"{after}continue with resume_from_checkpoint='{given}'"
    assert (
        told(None, [6], save_only_model=True) == f"{after}there is no checkpoint to continue from"
    )


@pytest.mark.parametrize("changed", [{"process_index": 1}, {"enable_jit_checkpoint": True}])
def test_other_ranks_and_transformers_own_checkpoint_are_left_alone(capfd, received, changed):
    with Continuation().of(None, arguments(**changed)):
        signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr() == ("", "")
    assert received == [signal.SIGTERM]


def test_the_handler_is_of_the_main_thread_and_its_process(capfd, received, monkeypatch):
    def in_a_thread() -> None:
        with Continuation().of(None, arguments()):
            pass

    with ThreadPoolExecutor(1) as pool:
        pool.submit(in_a_thread).result()
    with Continuation().of(None, arguments()):
        monkeypatch.setattr(os, "getpid", lambda: 0)  # as in a process forked for data
        signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr() == ("", "")
    assert received == [signal.SIGTERM]


def test_an_ignored_signal_stays_ignored(capfd, received):
    note = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Continuation().of(None, arguments()):
        signal.raise_signal(signal.SIGTERM)
    assert signal.signal(signal.SIGTERM, note) is signal.SIG_IGN
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_says_the_same():
    with (
        pytest.raises(KeyboardInterrupt, match=f"^{NO_STEP}$"),
        Continuation().of(None, arguments()),
    ):
        raise KeyboardInterrupt


def _terminated() -> None:
    with Continuation().of(None, arguments()):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.launches
def test_sigterm_ends_the_process_as_before(tmp_path: Path):
    with own_processes(1, _terminated, folder=tmp_path) as (process,):
        process.join(60)
        assert process.exitcode == -signal.SIGTERM
    assert NO_STEP in (tmp_path / "output-0").read_text().splitlines()

"""Trainings that end before their time: all processes end with the reason; other processes go on to
the last bit.
"""

import errno
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from transformers import TrainerCallback

from hf_distca.checks.run_rules import Resume
from hf_distca.dispatch import waits
from hf_distca.dispatch.waits import Waits
from hf_distca.trainer.resuming import FullDiskError, full_disk_named
from tests.ranks import own_processes
from tests.refused import refused
from tests.trainer.comparison import CHECKPOINTING, STRATEGIES, Run, launched
from tests.trainer.features import lora
from tests.trainer.small_trainers import make_trainer, parameters_hash

SAVED = 1
"""Step of the last whole checkpoint, in the middle of the first of two passes."""
MODELS = {"ddp": Run(adapter=lora("q_proj", "o_proj", "up_proj", lora_dropout=0.1)), "fsdp2": Run()}
ARGUMENTS: dict[str, Any] = {
    "max_steps": 3,
    "save_strategy": "steps",
    "save_steps": 1,
    "gradient_accumulation_steps": 2,
    "tokens_per_rank": 96,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "bf16": True,
    CHECKPOINTING: True,
}
ENDS_WITHIN_S = 20.0
"""Much less than the seconds after which an exchange fails by itself."""
WAIT_S = 200.0


class Ends(TrainerCallback):
    """End the process of rank 0 between two micro-batches of the first step after the checkpoint,
    or in its save.
    """

    def __init__(self, end: str, trainer: Any) -> None:
        self._end = end
        self._trainer = trainer
        self._reached = Path(trainer.args.output_dir, "reached")

    def on_substep_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        """Note the time and end; the partner waits in an exchange."""
        if state.global_step != SAVED or dist.get_rank() != 0:
            return
        self._reached.write_text(str(time.monotonic()))
        if self._end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._end == "Ctrl-C":
            time.sleep(WAIT_S)
        self._trainer._save_optimizer_and_scheduler = self._full

    def _full(self, *args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _train(folder: Path, strategy: str, end: str = "", resume: bool = False) -> dict[str, Any]:
    """Train to an end; what this rank logged, and its parameters."""
    with launched(strategy, {}):
        model = MODELS[strategy].make_model("distca", {}, "")
        trainer = make_trainer(
            str(folder), model=model, environment=STRATEGIES[strategy].environment, **ARGUMENTS
        )
        assert STRATEGIES[strategy].type in str(trainer.accelerator.distributed_type)
        if end:
            trainer.add_callback(Ends(end, trainer))
        trainer.train(resume_from_checkpoint=resume)
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        return {
            "loss": [entry["loss"] for entry in logs],
            "grad_norm": [entry["grad_norm"] for entry in logs],
            "learning_rate": [entry["learning_rate"] for entry in logs],
            "hash": parameters_hash(trainer.model),
        }


@pytest.mark.parametrize(
    ("strategy", "end", "codes", "messages"),
    [
        ("fsdp2", "killed", [-signal.SIGKILL, 1], ("", "")),
        ("ddp", "Ctrl-C", [1, 1], ("KeyboardInterrupt: interrupted after step 1 of 3; ",) * 2),
        (
            "ddp",
            "disk full",
            [1, 1],
            ("DiskError: disk full: ", "OtherRankError: rank 0 failed: disk full: "),
        ),
    ],
)
def test_all_ranks_end_and_others_go_on(rank_pools, tmp_path, strategy, end, codes, messages):
    reached = tmp_path / "reached"
    with own_processes(2, _train, tmp_path, strategy, end, folder=tmp_path) as ranks:
        if end == "Ctrl-C":
            until = time.monotonic() + WAIT_S
            while not reached.exists() and time.monotonic() < until:
                time.sleep(0.05)
            for rank in ranks:
                os.kill(rank.pid, signal.SIGINT)
        for rank in ranks:
            rank.join(WAIT_S)
        ended = time.monotonic()
        assert [rank.exitcode for rank in ranks] == codes
    assert ended - float(reached.read_text()) < ENDS_WITHIN_S
    for rank, message in enumerate(messages):
        assert message in (tmp_path / f"output-{rank}").read_text(errors="replace")
    half = tmp_path / f"checkpoint-{SAVED + 1}"
    assert half.exists() is (end == "disk full")
    shutil.rmtree(half, ignore_errors=True)
    resumed = rank_pools[2].run(_train, tmp_path, strategy, "", True)
    assert resumed == rank_pools[2].run(_train, tmp_path / "whole", strategy)
    assert [len(result["loss"]) for result in resumed] == [3, 3]


PLACES = {
    "plan": "the loading of data for step 3",
    "forward": "the forward of step 4",
    "backward": "the backward of step 5",
    "evaluation": "micro-batch 1 of an evaluation",
    "save": "the saving of checkpoint-6",
}
"""Places in which a rank is stopped, one after another, by what the other rank says of them."""


def _train_with_stops(folder: Path, ends_at: str, stopped: int, limit_s: float) -> None:
    """Train on ranks of which one is stopped: at every place until it is let go on, or for good at
    one place.
    """
    logging.basicConfig(level=logging.WARNING)
    if not ends_at:
        waits.REPORT_S, waits.SIGN_S = 1.0, 0.1
    if stopped == 0:  # the rank with the store of the run, as without a launcher's store
        os.environ.update(
            TORCHELASTIC_USE_AGENT_STORE="False",
            MASTER_PORT=str(int(os.environ["MASTER_PORT"]) + 1),
        )
    arguments = {
        "save_strategy": "steps",
        "save_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 5,
    }
    trainer = make_trainer(str(folder), max_steps=6, exchange_timeout=limit_s, **arguments)
    seen = set()

    def stop(place: str, step: int) -> None:
        at_its_step = (
            trainer.state.global_step >= step and place not in seen and ends_at in ("", place)
        )
        if dist.get_rank() == stopped and at_its_step:
            seen.add(place)
            time.sleep(
                5 * min(waits.SIGN_S, limit_s / 20)
            )  # so that the last sign of life is from here
            (folder / f"stopped-{place}").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    def before(name: str, place: str, step: int) -> None:
        method = getattr(trainer, name)

        def stopping(*args: Any, **kwargs: Any) -> Any:
            if place == "plan":
                trainer._at("the loading of data for step {step}")
            elif place == "save":
                trainer._at("the saving of checkpoint-6")
            elif place == "evaluation":
                trainer._at("micro-batch 1 of an evaluation")
            stop(place, step)
            return method(*args, **kwargs)

        setattr(trainer, name, stopping)

    before("get_batch_samples", "plan", 2)
    before("prediction_step", "evaluation", 5)
    before("_save_checkpoint", "save", 6)

    def before_a_layer(layer: Any, *_: Any) -> None:
        if layer.training:
            stop("forward", 3)

    trainer.model.model.layers[1].register_forward_pre_hook(before_a_layer)
    next(trainer.model.parameters()).register_hook(lambda _: stop("backward", 4))
    trainer.train()


def _wait_for(has_happened: Callable[[], bool], ranks: list[Any]) -> None:
    until = time.monotonic() + WAIT_S
    while not has_happened():
        assert all(rank.is_alive() for rank in ranks)
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.launches
def test_a_rank_that_waits_for_a_stopped_one_says_where_that_one_is(tmp_path):
    """In planning, in the forward, in DDP's backward, in an evaluation and while saving, until the
    rank goes on.
    """
    output = tmp_path / "output-0"
    with own_processes(2, _train_with_stops, tmp_path, "", 1, 120.0, folder=tmp_path) as ranks:
        for name, place in PLACES.items():
            stopped = tmp_path / f"stopped-{name}"
            _wait_for(stopped.exists, ranks)
            silence = r"has given no sign of life for \d+ s, and was last seen in"
            silent = rf"rank 1 \(process {ranks[1].pid} .*\) {silence} {place}"
            _wait_for(
                lambda said=silent: re.search(said, output.read_text(errors="replace")) is not None,
                ranks,
            )
            os.kill(ranks[1].pid, signal.SIGCONT)
        for rank in ranks:
            rank.join(WAIT_S)
        assert [rank.exitcode for rank in ranks] == [0, 0]


STOPPED_FOR_GOOD = [
    (
        "forward",
        1,
        r"RankLost: rank 0 has waited for rows of other ranks in the forward .*: "
        r"rank 1 \(process",
    ),
    (
        "backward",
        1,
        r"rank 0 has been in the backward of step .*: rank 1 \(process .*\. This process ends",
    ),
    (
        "backward",
        0,
        r"rank 1 has been in the backward of step .*: the run's store, .* This process ends",
    ),
]
"""Where a rank is stopped, which rank it is, and what the other one says when it ends."""


@pytest.mark.launches
def test_all_ranks_end_when_one_is_stopped_for_good(tmp_path):
    """In several launches at once: most of their time they wait."""
    limit_s = 15.0  # connections of gloo take 5 s on machines whose resolver is slow
    launches = []
    with ExitStack() as stack:
        for place, stopped, _ in STOPPED_FOR_GOOD:
            folder = tmp_path / f"{place}-{stopped}"
            folder.mkdir()
            ranks = own_processes(
                2, _train_with_stops, folder, place, stopped, limit_s, folder=folder
            )
            launches.append((folder, stack.enter_context(ranks)))
        for (place, stopped, says), (folder, ranks) in zip(STOPPED_FOR_GOOD, launches, strict=True):
            _wait_for((folder / f"stopped-{place}").exists, ranks)
            begin = (folder / f"stopped-{place}").stat().st_mtime
            ranks[1 - stopped].join(WAIT_S)
            assert ranks[1 - stopped].exitcode == 1
            assert time.time() - begin < limit_s + 30
            assert re.search(says, (folder / f"output-{1 - stopped}").read_text(errors="replace"))


def test_an_evaluation_reports_the_failed_rank(tmp_path):
    store, place = dist.HashStore(), "the start of an evaluation"
    with pytest.raises(ValueError, match="boom"), Waits(store, 1, 2, 60.0).watched(place):
        raise ValueError("boom")
    trainer = make_trainer(str(tmp_path))
    trainer.dispatcher.groups.waits = Waits(store, 0, 2, 60.0)
    trainer.get_eval_dataloader = Mock(
        side_effect=dist.DistBackendError("Connection closed by peer")
    )
    with pytest.raises(RuntimeError, match=r"^rank 1 failed: ValueError: boom$"):
        trainer.evaluate()


@pytest.mark.parametrize("file", ["optimizer.pt", "trainer_state.json"])
def test_a_full_disk_is_reported_with_the_folder(tmp_path, file):
    def train(resume: bool = False) -> None:
        trainer = make_trainer(str(tmp_path), max_steps=1, save_strategy="steps", save_steps=1)
        trainer.train(resume_from_checkpoint=resume)

    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    (checkpoint / file).symlink_to("/dev/full")  # a device that is always full
    sentence = f"^disk full: {checkpoint} is incomplete; free disk space or set another output_dir$"
    with pytest.raises(FullDiskError, match=sentence) as caught:
        train()
    assert caught.value.__suppress_context__
    with refused(Resume.NO_CHECKPOINT, found="none", folder=tmp_path):
        train(resume=True)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        CheckpointException("", {0: (ValueError("boom"), []), 1: (FULL, [])}),
    ],
    ids=["quota", "safetensors", "another rank"],
)
def test_errors_of_a_full_disk(error):
    with pytest.raises(FullDiskError), full_disk_named(Path("checkpoint-1")):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("boom"), OSError(errno.EIO, "Input/output error")])
def test_other_errors_stay(error):
    with pytest.raises(type(error)) as caught, full_disk_named(Path("checkpoint-1")):
        raise error
    assert caught.value is error

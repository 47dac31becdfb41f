"""Which checkpoint a training resumes from: the last complete one, the same on every rank."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_distca.checks.run_rules import Resume
from hf_distca.dispatch.process_groups import Groups
from hf_distca.trainer.resuming import agreed_checkpoint
from tests.logged import Messages
from tests.refused import refused

STATE = "trainer_state.json"
RANDOM = "rng_state_0.pth rng_state_1.pth"
COMPLETE = f"{STATE} optimizer.pt scheduler.pt {RANDOM}"


def save(checkpoint: Path, files: str = COMPLETE) -> Path:
    """Save a checkpoint with these files, which are empty."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    checkpoint.mkdir(parents=True)
    for name in files.split():
        (checkpoint / name).touch()
    return checkpoint


def trainer_of(folder: Path, groups: Any, *, rank: int = 0, uses_deepspeed: bool = False) -> Any:
    """A trainer on two ranks, as far as a checkpoint is chosen for it."""
    return SimpleNamespace(
        args=SimpleNamespace(output_dir=str(folder), process_index=rank, world_size=2),
        dispatcher=SimpleNamespace(groups=groups),
        is_deepspeed_enabled=uses_deepspeed,
    )


def resume(folder: Path, asked: Any = True, *, uses_deepspeed: bool = False) -> str | None:
    """The checkpoint that two ranks agree on, which see the same files."""
    groups: Any = SimpleNamespace(
        raised_together=lambda **_: nullcontext(), all_gather=lambda value, **_: [value] * 2
    )
    return agreed_checkpoint(asked, trainer_of(folder, groups, uses_deepspeed=uses_deepspeed))


@pytest.mark.parametrize(
    ("files", "uses_deepspeed"),
    [
        (COMPLETE, False),
        (f"{STATE} optimizer_0 scheduler.pt {RANDOM}", False),
        (f"{STATE} optimizer.bin scheduler.pt {RANDOM}", False),
        (f"{STATE} {RANDOM}", True),
    ],
    ids=["DDP", "shards of FSDP", "FSDP in one file", "DeepSpeed"],
)
def test_complete_checkpoints(tmp_path, caplog, files, uses_deepspeed):
    checkpoint = save(tmp_path / "checkpoint-10", files)
    save(tmp_path / "checkpoint-9", files)
    save(tmp_path / "checkpoint-12-backup", files)
    for asked in (True, "True", str(checkpoint), checkpoint):
        assert resume(tmp_path, asked, uses_deepspeed=uses_deepspeed) == str(checkpoint)
    for asked in (None, False):
        assert resume(tmp_path, asked, uses_deepspeed=uses_deepspeed) is None
    best = save(tmp_path / "best", files)
    assert resume(tmp_path, best, uses_deepspeed=uses_deepspeed) == str(best)
    assert caplog.messages == []


def test_the_last_complete_one_is_taken(tmp_path, caplog):
    first = save(tmp_path / "checkpoint-9")
    for step in (11, 10):
        save(tmp_path / f"checkpoint-{step}", "optimizer.pt scheduler.pt")
    assert resume(tmp_path) == str(first)
    assert caplog.messages == [
        f"training resumes from {first}, because later checkpoints are not complete on every "
        "rank: checkpoint-10, checkpoint-11"
    ]
    for asked in (f"{tmp_path}/checkpoint-10", f"{tmp_path}/checkpoint-12", str(tmp_path)):
        with refused(Resume.NO_CHECKPOINT, given=asked, file=STATE, found="none", folder=tmp_path):
            resume(tmp_path, asked)
    shutil.rmtree(first)
    for folder in (tmp_path, tmp_path / "nothing"):
        with refused(Resume.NO_CHECKPOINT, given=True, found="none", folder=folder):
            resume(folder)


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ("model.safetensors scheduler.pt", "optimizer.pt or optimizer.bin or optimizer_0"),
        ("model.safetensors optimizer.pt", "scheduler.pt"),
        ("model.safetensors global_step3", "optimizer.pt or optimizer.bin or optimizer_0"),
    ],
    ids=["no optimizer", "no schedule", "of DeepSpeed"],
)
def test_state_that_trainer_would_begin_anew(tmp_path, files, missing):
    checkpoint = save(tmp_path / "checkpoint-3", f"{STATE} {files}")
    with refused(Resume.NO_STATE, checkpoint=checkpoint, files=missing):
        resume(tmp_path)


def test_random_states(tmp_path, caplog):
    save(tmp_path / "checkpoint-3", COMPLETE.replace("rng_state_0.pth", ""))
    resume(tmp_path)
    (warning,) = caplog.messages
    assert "has no rng_state_0.pth, rng_state_0.pth, so these ranks" in warning  # both are rank 0


def _agree(folder: Path) -> tuple[list[str], list[str]]:
    """What a rank resumes from, on a disk of its own, and what it warns of."""
    rank = dist.get_rank()
    groups = Groups(torch.device("cpu"), 20.0)
    trainer = trainer_of(folder / str(rank), groups, rank=rank)

    def answer(asked: Any) -> str:
        try:
            return Path(agreed_checkpoint(asked, trainer) or "anew").name
        except ValueError as error:
            return str(error)

    messages = Messages("hf_distca.trainer.resuming")
    answers = [answer(True)]
    (folder / str(rank) / f"checkpoint-{1 + rank}" / STATE).unlink()
    answers += [answer(True), answer(True if rank == 0 else None)]
    answers.append(answer(folder / f"{rank}/checkpoint-{4 - rank}"))
    best = save(folder / str(rank) / "best")
    answers.append(answer(best))
    if rank == 1:
        (best / "optimizer.pt").unlink()
    answers.append(answer(best))
    messages.end()
    groups.close()
    return answers, messages.lines


def test_ranks_with_disks_of_their_own_choose_the_same(rank_pools, tmp_path):
    for rank, steps in enumerate(((1, 2, 4), (1, 2, 3))):
        for step in steps:
            save(tmp_path / str(rank) / f"checkpoint-{step}")
    (first, warned), (second, not_warned) = rank_pools[2].run(_agree, tmp_path)
    assert first[0] == second[0] == "checkpoint-2"
    for answers in (first, second):
        assert "(found: checkpoint-2, checkpoint-4; checkpoint-1, checkpoint-3)" in answers[1]
        assert "resume_from_checkpoint=True is set" in answers[2]
        assert "(found: checkpoint-2, checkpoint-4; none)" in answers[2]
        assert "(found: checkpoint-4; checkpoint-3)" in answers[3]
        assert answers[4] == "best"
        assert answers[5].startswith(f"rank 1: the checkpoint {tmp_path}/1/best has no optimizer")
    assert warned == [
        f"WARNING training resumes from {tmp_path}/0/checkpoint-2, because later checkpoints are "
        "not complete on every rank: checkpoint-4"
    ]
    assert not_warned == []

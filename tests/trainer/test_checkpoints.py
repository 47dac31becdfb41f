"""Which checkpoint a training resumes from: complete ones, the same on every rank, and errors that
say what lacks.
"""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import checkpoint as shards
from transformers import TrainerState

from hf_distca.dispatch.groups import Groups
from hf_distca.trainer.checkpoints import agreed_checkpoint
from hf_distca.trainer.refusals import Resume, Run
from tests.logged import Messages
from tests.refused import pattern, refused

DEEPSPEED = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config={}))
WITH_SCHEDULER = SimpleNamespace(
    deepspeed_plugin=SimpleNamespace(deepspeed_config={"scheduler": {}})
)
DDP = SimpleNamespace()
FSDP = SimpleNamespace(fsdp_plugin=object())
STATE, PLACE, WEIGHTS = "trainer_state.json", "data_order.json", "model.safetensors"
COMPLETE = f"{STATE} {PLACE} {WEIGHTS} optimizer.pt scheduler.pt"
FILES = "model-00001-of-00002.safetensors model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "pytorch_model_fsdp_0 optimizer_0"


def save(checkpoint: Path, files: str = COMPLETE) -> Path:
    """Save a checkpoint with these files and folders."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    checkpoint.mkdir(parents=True)
    for name in files.split():
        path = checkpoint / name
        path.parent.mkdir(exist_ok=True)
        if name == STATE:
            TrainerState().save_to_json(str(path))
        elif name == PLACE:
            path.write_text(json.dumps({"order": {}}))
        elif name.endswith("index.json"):
            path.write_text(
                json.dumps({"weight_map": {f"weight in {shard}": shard for shard in FILES.split()}})
            )
        elif name.endswith(".safetensors"):
            save_file({"weight": torch.ones(8)}, path)
        elif name.endswith((".pt", ".bin")):
            torch.save({}, path)
        elif name in SHARDS.split():
            shards.save({"weight": torch.ones(8)}, checkpoint_id=path, no_dist=True)
        else:
            path.touch()
    return checkpoint


def halve(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def resume(
    folder: Path, asked: Any = True, strategy: Any = DDP, *, has_place: bool = True
) -> str | None:
    """The checkpoint that two ranks agree on, which see the same files."""
    args: Any = SimpleNamespace(output_dir=folder, process_index=0, ignore_data_skip=False)
    groups: Any = SimpleNamespace(
        ranks=2,
        raised_together=lambda **_: nullcontext(),
        all_gather=lambda value, **_: [value] * 2,
    )
    accelerator: Any = SimpleNamespace(state=strategy)
    return agreed_checkpoint(asked, args, accelerator, groups, has_place=has_place)


@pytest.mark.parametrize(
    ("strategy", "files"),
    [
        (DDP, "model.safetensors optimizer.pt scheduler.pt"),
        (DDP, f"{INDEX} {FILES} optimizer.pt scheduler.pt"),
        (DDP, "adapter_config.json adapter_model.safetensors optimizer.pt scheduler.pt"),
        (DDP, "one/adapter_model.safetensors optimizer.pt scheduler.pt"),
        (FSDP, f"{SHARDS} scheduler.pt"),
        (FSDP, "pytorch_model_fsdp.bin optimizer.bin scheduler.pt"),
        (DEEPSPEED, "global_step3/mp_rank_00_model_states.pt scheduler.pt"),
        (WITH_SCHEDULER, "global_step3/mp_rank_00_model_states.pt"),
    ],
    ids=[
        "weights",
        "weights in parts",
        "adapter",
        "named adapter",
        "shards",
        "FSDP in one file",
        "DeepSpeed",
        "DeepSpeed with its scheduler",
    ],
)
def test_complete_checkpoints(tmp_path, caplog, subtests, strategy, files):
    checkpoint = save(tmp_path / "checkpoint-3", f"{STATE} {PLACE} {files}")
    assert resume(tmp_path, True, strategy) == str(checkpoint)
    assert resume(tmp_path, "True", strategy) == str(checkpoint)
    assert resume(tmp_path, str(checkpoint), strategy) == str(checkpoint)
    assert resume(tmp_path, checkpoint, strategy) == str(checkpoint)
    assert resume(tmp_path, None, strategy) is None
    assert resume(tmp_path, False, strategy) is None
    assert [record for record in caplog.records if record.name.startswith("hf_distca")] == []
    # Each of its files and folders is needed.
    top_level = {file: file.split("/")[0] for file in files.split()}
    for missing in sorted({*top_level.values()} - {"adapter_config.json"}):
        others = [file for file, name in top_level.items() if name != missing]
        save(checkpoint, " ".join([STATE, PLACE, *others]))
        with (
            subtests.test(missing),
            pytest.raises(ValueError, match=f"^the checkpoint {checkpoint} has no "),
        ):
            resume(tmp_path, checkpoint, strategy)


@pytest.mark.parametrize(
    ("strategy", "files", "missing"),
    [
        (DDP, "scheduler.pt", "optimizer.pt"),
        (DDP, "optimizer.pt", "scheduler.pt"),
        (FSDP, "optimizer.pt scheduler.pt", "optimizer_0 or optimizer.bin"),
        (DEEPSPEED, "optimizer.pt scheduler.pt", "global_step*"),
        (DEEPSPEED, "global_step3/mp_rank_00_model_states.pt", "scheduler.pt"),
    ],
)
def test_checkpoints_without_state(tmp_path, strategy, files, missing):
    checkpoint = save(tmp_path / "checkpoint-3", f"{STATE} {PLACE} {WEIGHTS} {files}")
    peft = f"PeftModel.from_pretrained(model, '{checkpoint}', is_trainable=True)"
    for load in (f"from_pretrained('{checkpoint}')", peft):
        with refused(Resume.NO_STATE, checkpoint=checkpoint, files=missing, load=load):
            resume(tmp_path, checkpoint, strategy)
        (checkpoint / "adapter_config.json").touch()


def test_the_place_in_the_data(tmp_path):
    checkpoint = save(tmp_path / "checkpoint-3", COMPLETE.replace(PLACE, ""))
    with refused(Resume.NO_PLACE, checkpoint=checkpoint, file=PLACE):
        resume(tmp_path, checkpoint)
    assert resume(tmp_path, has_place=False) == str(checkpoint)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    f"has no {STATE}, but": lambda checkpoint: (checkpoint / STATE).unlink(),
    f"has no {PLACE}, but": lambda checkpoint: (checkpoint / PLACE).unlink(),
    f"has no {WEIGHTS} or other weights, but": lambda checkpoint: (checkpoint / WEIGHTS).unlink(),
    "has no optimizer.pt, which": lambda checkpoint: (checkpoint / "optimizer.pt").unlink(),
    f"{STATE} cannot be read": lambda checkpoint: halve(checkpoint / STATE),
    f"{PLACE} cannot be read": lambda checkpoint: halve(checkpoint / PLACE),
    f"{WEIGHTS} cannot be read": lambda checkpoint: halve(checkpoint / WEIGHTS),
    "optimizer.pt cannot be read": lambda checkpoint: halve(checkpoint / "optimizer.pt"),
    "model.safetensors.index.json cannot be read": lambda checkpoint: (
        checkpoint / INDEX
    ).write_text("{}"),
    "has no model-00001-of-00002.safetensors, but": lambda checkpoint: (
        checkpoint / INDEX
    ).write_text('{"weight_map": {"weight": "model-00001-of-00002.safetensors"}}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_last_complete_one_is_taken(tmp_path, caplog, damage):
    first, second = (save(tmp_path / f"checkpoint-{step}") for step in (9, 10))
    DAMAGES[damage](second)
    (tmp_path / "checkpoint-12-backup").mkdir()
    with pytest.raises(ValueError, match=damage):
        resume(tmp_path, second)
    assert caplog.messages == []
    assert resume(tmp_path) == str(first)
    (warning,) = caplog.messages
    assert warning.startswith(
        f"training resumes from {first}, because later checkpoints cannot be resumed: "
    )
    assert str(second) in warning
    assert damage in warning
    shutil.rmtree(first)
    with refused(Resume.NONE_COMPLETE, folder=tmp_path) as error:
        resume(tmp_path)
    assert damage in str(error.value)


@pytest.mark.parametrize("folder", SHARDS.split())
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".metadata", "cannot be read"),
        ("__0_0.distcp", "the end of __0_0.distcp is missing"),
    ],
)
def test_shards_that_were_cut_off(tmp_path, folder, name, message):
    files = f"{STATE} {PLACE} {SHARDS} scheduler.pt"
    first, second = (save(tmp_path / f"checkpoint-{step}", files) for step in (9, 10))
    halve(second / folder / name)
    with pytest.raises(ValueError, match=message):
        resume(tmp_path, second, FSDP)
    assert resume(tmp_path, strategy=FSDP) == str(first)
    (second / folder / name).unlink()
    assert resume(tmp_path, strategy=FSDP) == str(first)


def test_nothing_to_resume_from(tmp_path):
    for folder in (tmp_path, tmp_path / "other"):
        with refused(Resume.NO_CHECKPOINT, folder=folder):
            resume(folder)


def _agree(folder: Path) -> tuple[list[str], list[str]]:
    """What a rank resumes from, on a disk of its own, and what it warns of."""
    rank = dist.get_rank()
    groups = Groups(torch.device("cpu"), 20.0)
    args: Any = SimpleNamespace(
        output_dir=folder / str(rank), process_index=rank, ignore_data_skip=False
    )
    accelerator: Any = SimpleNamespace(state=DDP)

    def answer(asked: Any) -> str:
        try:
            checkpoint = agreed_checkpoint(asked, args, accelerator, groups, has_place=True)
        except ValueError as error:
            return str(error)
        return Path(checkpoint or "anew").name

    messages = Messages("hf_distca.trainer.checkpoints")
    answers = [answer(True)]
    if rank == 1:
        halve(args.output_dir / "checkpoint-1" / WEIGHTS)
    answers += [answer(True), answer(True if rank == 0 else None)]
    messages.end()
    groups.close()
    return answers, messages.lines


def test_ranks_with_disks_of_their_own_choose_the_same(rank_pools, tmp_path):
    for rank, steps in enumerate(((1, 2, 4), (1, 2, 3))):
        for step in steps:
            save(tmp_path / str(rank) / f"checkpoint-{step}")
    halve(tmp_path / "0/checkpoint-2/optimizer.pt")
    (first, warned), (second, not_warned) = rank_pools[2].run(_agree, tmp_path)
    assert first[0] == second[0] == "checkpoint-1"
    for rank, answers in enumerate((first, second)):
        assert re.fullmatch(pattern(Resume.NONE_COMPLETE, folder=tmp_path / str(rank)), answers[1])
        assert re.fullmatch(
            pattern(Run.DIFFERENT_ARGUMENTS, name="resume_from_checkpoint"), answers[2]
        )
    assert [line.split(", because")[0] for line in warned] == [
        f"WARNING training resumes from {tmp_path}/0/checkpoint-1"
    ]
    assert not_warned == []

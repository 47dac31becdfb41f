"""Choose the checkpoint that a training resumes from, the same on every rank, and check that it is complete.

Training may have ended while it saved, and files may have been copied in part. Trainer would begin
anew what it does not find, or fail on some ranks.
"""

import json
import logging
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from hf_distca.dispatch.groups import Groups, first_difference
from hf_distca.refusal import RefusedError
from hf_distca.trainer.arguments import DistCAPaddedArguments
from hf_distca.trainer.refusals import Resume, Run
from hf_distca.trainer.resuming import PLACE_FILE, read_place

logger = logging.getLogger(__name__)

RANDOM_STATE = "rng_state{}.pth"
"""File with the state of random numbers of a rank, or of a training on one rank."""
STATE_FILE = "trainer_state.json"
"""File that Trainer writes last into a checkpoint."""
SHARDED_WEIGHTS = "pytorch_model_fsdp_*"
"""Folder in which FSDP has a file of each rank."""
WEIGHTS: tuple[str, ...] = (
    *(
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ),
    *(
        "adapter_model.safetensors",
        "adapter_model.bin",
        "*/adapter_model.safetensors",
        "*/adapter_model.bin",
    ),
    *("pytorch_model_fsdp.bin", SHARDED_WEIGHTS),
)
"""Files and folders with weights, of which Trainer loads one."""
OF_DEEPSPEED = "global_step*"
"""Folder with DeepSpeed's weights and the state of its optimizer."""


def agreed_checkpoint(
    resume_from_checkpoint: str | Path | bool | None,
    args: DistCAPaddedArguments,
    accelerator: Accelerator,
    groups: Groups,
    *,
    has_place: bool,
) -> str | None:
    """Return the folder of the complete checkpoint to resume from; None to begin anew.

    A collective of the world.

    Args:
        has_place: whether checkpoints of this trainer record the place in the data.
    """
    check = partial(
        _check, accelerator=accelerator, needs_place=has_place and not args.ignore_data_skip
    )
    asked = resume_from_checkpoint or None
    if str(asked).lower() == "true":  # as text on a command line
        asked = True
    # Ranks may name different folders, each on the disk of its host.
    mine = {"resume_from_checkpoint": asked if asked in (True, None) else "a folder"}
    if found := first_difference(groups.all_gather(mine, in_world=True)):
        raise Run.DIFFERENT_ARGUMENTS.error(name=found[0], by_rank=found[1])
    if asked is None:
        return None
    if asked is True:
        checkpoint = _last_complete(args, groups, check)
    else:
        checkpoint = Path(asked)
        with groups.raised_together(in_world=True):
            _check_folder(checkpoint, Path(str(args.output_dir)))
            check(checkpoint)
    _check_shards_of_deepspeed(checkpoint, accelerator, groups)
    return str(checkpoint)


def _last_complete(
    args: DistCAPaddedArguments, groups: Groups, check: Callable[[Path], None]
) -> Path:
    """Return the last checkpoint that is complete on every rank; warn of those after it.

    A collective of the world.

    Args:
        check: raises ValueError if a checkpoint is not complete on this rank.
    """
    output_dir = Path(str(args.output_dir))
    steps: list[int] = []
    with groups.raised_together(in_world=True):
        steps = _steps(output_dir)
        if not steps:
            raise Resume.NO_CHECKPOINT.error(folder=output_dir)
    # Every rank looks at the same checkpoints in the same order, also where hosts have disks of
    # their own.
    steps = sorted(
        {step for of_rank in groups.all_gather(steps, in_world=True) for step in of_rank},
        reverse=True,
    )
    passed_over: list[str] = []
    for step in steps:
        checkpoint = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        problems = groups.all_gather(_problem(checkpoint, check), in_world=True)
        problem = next(filter(None, problems), None)
        if problem is None:
            if passed_over and args.process_index == 0:
                logger.warning(
                    "training resumes from %s, because later checkpoints cannot be resumed: %s",
                    *(checkpoint, ". ".join(passed_over)),
                )
            return checkpoint
        passed_over.append(problem)
    raise Resume.NONE_COMPLETE.error(folder=output_dir, why=passed_over[0])


def _steps(output_dir: Path) -> list[int]:
    """Return the steps of all checkpoints in a folder."""
    names = (
        re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name) for path in output_dir.glob("*/")
    )
    return [int(name[1]) for name in names if name is not None]


def _problem(checkpoint: Path, check: Callable[[Path], None]) -> str | None:
    """Return why a checkpoint is not complete on this rank; None if it is."""
    try:
        check(checkpoint)
    except (RefusedError, OSError) as error:
        return str(error)
    return None


def _check_folder(folder: Path, output_dir: Path) -> None:
    """Raise ValueError if there is no such folder, or if the folder only holds checkpoints."""
    if not folder.is_dir():
        last = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
        raise Resume.NO_FOLDER.error(
            folder=str(folder), example=last or f"{output_dir}/{PREFIX_CHECKPOINT_DIR}-500"
        )
    last = get_last_checkpoint(str(folder))
    if last is not None and not (folder / STATE_FILE).is_file():
        raise Resume.NOT_A_CHECKPOINT.error(folder=str(folder), example=last)


def _check(checkpoint: Path, *, accelerator: Accelerator, needs_place: bool) -> None:
    """Raise ValueError if a checkpoint lacks something that training needs, or if a file was cut off."""
    if not (checkpoint / STATE_FILE).is_file():
        raise Resume.INCOMPLETE.error(checkpoint=checkpoint, file=STATE_FILE)
    if needs_place and not (checkpoint / PLACE_FILE).is_file():
        raise Resume.NO_PLACE.error(checkpoint=checkpoint, file=PLACE_FILE)
    _check_state(checkpoint, accelerator)
    _check_weights(checkpoint, accelerator)
    _check_readable(checkpoint)


def _check_state(checkpoint: Path, accelerator: Accelerator) -> None:
    """Raise ValueError if a checkpoint lacks state, which Trainer would begin anew."""
    optimizer, schedule = ["optimizer.pt"], ["scheduler.pt"]
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    if deepspeed is not None:
        optimizer = [OF_DEEPSPEED]
        if (
            "scheduler" in deepspeed.deepspeed_config
        ):  # DeepSpeed saves the schedule beside the optimizer
            schedule = optimizer
    elif getattr(accelerator.state, "fsdp_plugin", None) is not None:
        optimizer = ["optimizer_0", "optimizer.bin"]
    load = f"from_pretrained('{checkpoint}')"
    if (checkpoint / "adapter_config.json").is_file():
        load = f"PeftModel.from_pretrained(model, '{checkpoint}', is_trainable=True)"
    for state, names in (
        ("the optimizer's state", optimizer),
        ("the learning rate's schedule", schedule),
    ):
        if not any(_found(checkpoint, names)):
            raise Resume.NO_STATE.error(
                checkpoint=checkpoint, files=" or ".join(names), state=state, load=load
            )


def _check_weights(checkpoint: Path, accelerator: Accelerator) -> None:
    """Raise ValueError if a checkpoint lacks weights, or one of several files of weights."""
    weights, file = WEIGHTS, "model.safetensors or other weights"
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        weights = (file := f"{OF_DEEPSPEED}/*model_states.pt",)
    if not any(_found(checkpoint, weights)):
        raise Resume.NO_WEIGHTS.error(checkpoint=checkpoint, file=file)
    for index in sorted(checkpoint.glob("*.index.json")):
        names: list[str] = []
        with _named_if_unreadable(index, checkpoint):
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        for name in names:
            if not (checkpoint / name).is_file():
                raise Resume.NO_WEIGHTS.error(checkpoint=checkpoint, file=name)


def _found(folder: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """Yield the files and folders with one of these names."""
    return (found for pattern in patterns for found in folder.glob(pattern))


def _check_readable(checkpoint: Path) -> None:
    """Raise ValueError with its name if a file of a checkpoint was cut off.

    Only beginnings and ends are read.
    """
    archives = (
        "optimizer.*",
        "scheduler.pt",
        "rng_state*.pth",
        "pytorch_model*.bin",
        f"{OF_DEEPSPEED}/*.pt",
    )
    readers: dict[str, Callable[[Path], Any]] = {
        STATE_FILE: lambda file: TrainerState.load_from_json(str(file)),
        PLACE_FILE: read_place,
        **dict.fromkeys(("*.safetensors", "*/adapter_model.safetensors"), _check_tensors),
        **dict.fromkeys((SHARDED_WEIGHTS, "optimizer_*"), _check_shards),
        **dict.fromkeys((*archives, "adapter_model.bin"), _check_archive),
    }
    for pattern, read in readers.items():
        for file in sorted(checkpoint.glob(pattern)):
            with _named_if_unreadable(file, checkpoint):
                read(file)


@contextmanager
def _named_if_unreadable(file: Path, checkpoint: Path) -> Iterator[None]:
    """Name the file in an error of what reads it."""
    try:
        yield
    except Exception as error:  # of JSON, of safetensors, of a wrong type
        why = f"{type(error).__name__}: {error}"
        raise Resume.UNREADABLE.error(file=file, why=why, checkpoint=checkpoint) from error


def _check_tensors(file: Path) -> None:
    """Raise SafetensorError if a file of tensors has not the length that its beginning states."""
    with safe_open(file, framework="pt"):
        pass


def _check_archive(file: Path) -> None:
    """Raise ValueError if a file of `torch.save` has no end."""
    if not zipfile.is_zipfile(file):
        raise ValueError("the end of the file is missing")


def _check_shards(folder: Path) -> None:
    """Raise ValueError or OSError if a folder of shards lacks its list of tensors, or bytes of a tensor."""
    for tensor in FileSystemReader(folder).read_metadata().storage_data.values():
        if (folder / tensor.relative_path).stat().st_size < tensor.offset + tensor.length:
            raise ValueError(f"the end of {tensor.relative_path} is missing")


def _check_shards_of_deepspeed(checkpoint: Path, accelerator: Accelerator, groups: Groups) -> None:
    """Raise ValueError if another number of ranks saved a checkpoint of DeepSpeed.

    A collective of the world.
    """
    deepspeed, saved_by = getattr(accelerator.state, "deepspeed_plugin", None), 0
    options = {} if deepspeed is None else deepspeed.deepspeed_config.get("checkpoint", {})
    if deepspeed is not None and not options.get("load_universal"):
        shards = (
            re.search(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$", file.name)
            for file in checkpoint.glob(f"{OF_DEEPSPEED}/*")
        )
        saved_by = max((int(shard[1]) + 1 for shard in shards if shard), default=0)
    saved_by = max(groups.all_gather(saved_by))  # a host may hold only the shards of its own ranks
    if saved_by not in (0, groups.ranks):
        raise Resume.OTHER_SHARDS.error(
            checkpoint=checkpoint, saved_by=saved_by, ranks=groups.ranks
        )


def warn_of_random_states(
    checkpoint: str | None, args: DistCAPaddedArguments, groups: Groups
) -> None:
    """Warn if a checkpoint lacks the random state of a rank. A collective of the world."""
    if checkpoint is None:
        return
    name = RANDOM_STATE.format(f"_{args.process_index}" if args.world_size > 1 else "")
    found = groups.all_gather(None if (Path(checkpoint) / name).is_file() else name, in_world=True)
    if (missing := [name for name in found if name is not None]) and args.process_index == 0:
        logger.warning(
            "the checkpoint %s has no %s, so these ranks draw other random numbers, as for "
            "dropout, than without the interruption. Resume on the number of ranks that saved the "
            "checkpoint, with all its files",
            *(checkpoint, ", ".join(missing)),
        )

"""Choose the checkpoint that a training resumes from, and check that it is complete.

All ranks choose the same one. Training may have ended while it saved, and files may have been
copied in part. Trainer would begin anew what it does not find, or fail on some ranks.
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
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "*/adapter_model.safetensors",
    "*/adapter_model.bin",
    "pytorch_model_fsdp.bin",
    SHARDED_WEIGHTS,
)
"""Files and folders with weights, of which Trainer loads one."""
DEEPSPEED_FOLDER = "global_step*"
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
    request = resume_from_checkpoint or None
    if str(request).lower() == "true":  # as text on a command line
        request = True
    # Ranks may name different folders, each on the disk of its host.
    comparable = request if request in (True, None) else "a folder"
    difference = first_difference(
        groups.all_gather({"resume_from_checkpoint": comparable}, in_world=True)
    )
    if difference is not None:
        name, values_of_ranks = difference
        raise Run.DIFFERENT_ARGUMENTS.error(name=name, by_rank=values_of_ranks)
    if request is None:
        return None
    if request is True:
        checkpoint = _last_complete(args, groups, check)
    else:
        checkpoint = Path(request)
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
    steps_of_ranks = groups.all_gather(steps, in_world=True)
    all_steps = set[int]().union(*steps_of_ranks)
    problems_of_later: list[str] = []
    for step in sorted(all_steps, reverse=True):
        checkpoint = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        problems_of_ranks = groups.all_gather(_problem(checkpoint, check), in_world=True)
        problem = next(filter(None, problems_of_ranks), None)
        if problem is None:
            if problems_of_later and args.process_index == 0:
                logger.warning(
                    "training resumes from %s, because later checkpoints cannot be resumed: %s",
                    checkpoint,
                    ". ".join(problems_of_later),
                )
            return checkpoint
        problems_of_later.append(problem)
    raise Resume.NONE_COMPLETE.error(folder=output_dir, why=problems_of_later[0])


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
    """Raise ValueError if a checkpoint lacks what training needs, or if a file was cut off."""
    if not (checkpoint / STATE_FILE).is_file():
        raise Resume.INCOMPLETE.error(checkpoint=checkpoint, file=STATE_FILE)
    if needs_place and not (checkpoint / PLACE_FILE).is_file():
        raise Resume.NO_PLACE.error(checkpoint=checkpoint, file=PLACE_FILE)
    _check_state(checkpoint, accelerator)
    _check_weights(checkpoint, accelerator)
    _check_readable(checkpoint)


def _check_state(checkpoint: Path, accelerator: Accelerator) -> None:
    """Raise ValueError if a checkpoint lacks state, which Trainer would begin anew."""
    # 1. The files that hold the state under this strategy; one of each suffices.
    optimizer_files = ["optimizer.pt"]
    schedule_files = ["scheduler.pt"]
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    if deepspeed is not None:
        optimizer_files = [DEEPSPEED_FOLDER]
        if "scheduler" in deepspeed.deepspeed_config:
            schedule_files = optimizer_files  # DeepSpeed saves the schedule beside the optimizer
    elif getattr(accelerator.state, "fsdp_plugin", None) is not None:
        optimizer_files = ["optimizer_0", "optimizer.bin"]
    # 2. What the checkpoint lacks, and how its weights can be used nevertheless.
    load = f"from_pretrained('{checkpoint}')"
    if (checkpoint / "adapter_config.json").is_file():
        load = f"PeftModel.from_pretrained(model, '{checkpoint}', is_trainable=True)"
    for state, names in (
        ("the optimizer's state", optimizer_files),
        ("the learning rate's schedule", schedule_files),
    ):
        if not any(_matching(checkpoint, names)):
            raise Resume.NO_STATE.error(
                checkpoint=checkpoint, files=" or ".join(names), state=state, load=load
            )


def _check_weights(checkpoint: Path, accelerator: Accelerator) -> None:
    """Raise ValueError if a checkpoint lacks weights, or one of several files of weights."""
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        file = f"{DEEPSPEED_FOLDER}/*model_states.pt"
        patterns: tuple[str, ...] = (file,)
    else:
        file = "model.safetensors or other weights"
        patterns = WEIGHTS
    if not any(_matching(checkpoint, patterns)):
        raise Resume.NO_WEIGHTS.error(checkpoint=checkpoint, file=file)
    # An index names the file of each weight.
    for index in sorted(checkpoint.glob("*.index.json")):
        names: list[str] = []
        with _named_if_unreadable(index, checkpoint):
            file_by_weight = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(file_by_weight.values()))
        for name in names:
            if not (checkpoint / name).is_file():
                raise Resume.NO_WEIGHTS.error(checkpoint=checkpoint, file=name)


def _matching(folder: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """Yield the files and folders with one of these names."""
    return (path for pattern in patterns for path in folder.glob(pattern))


def _check_readable(checkpoint: Path) -> None:
    """Raise ValueError with its name if a file of a checkpoint was cut off.

    Only beginnings and ends are read.
    """
    archives = (
        "optimizer.*",
        "scheduler.pt",
        "rng_state*.pth",
        "pytorch_model*.bin",
        f"{DEEPSPEED_FOLDER}/*.pt",
        "adapter_model.bin",
    )
    readers: dict[str, Callable[[Path], Any]] = {
        STATE_FILE: lambda file: TrainerState.load_from_json(str(file)),
        PLACE_FILE: read_place,
        **dict.fromkeys(("*.safetensors", "*/adapter_model.safetensors"), _check_tensors),
        **dict.fromkeys((SHARDED_WEIGHTS, "optimizer_*"), _check_shards),
        **dict.fromkeys(archives, _check_archive),
    }
    for pattern, check_file in readers.items():
        for file in sorted(checkpoint.glob(pattern)):
            with _named_if_unreadable(file, checkpoint):
                check_file(file)


@contextmanager
def _named_if_unreadable(file: Path, checkpoint: Path) -> Iterator[None]:
    """Name the file in errors that are raised while it is read."""
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
    """Raise ValueError or OSError if a folder of shards is not complete.

    It lacks its list of tensors, or a file's end.
    """
    for tensor in FileSystemReader(folder).read_metadata().storage_data.values():
        size = (folder / tensor.relative_path).stat().st_size
        if size < tensor.offset + tensor.length:
            raise ValueError(f"the end of {tensor.relative_path} is missing")


def _check_shards_of_deepspeed(checkpoint: Path, accelerator: Accelerator, groups: Groups) -> None:
    """Raise ValueError if another number of ranks saved a checkpoint of DeepSpeed.

    A collective of the world.
    """
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    shards = 0  # of this host
    if deepspeed is not None:
        options = deepspeed.deepspeed_config.get("checkpoint", {})
        if not options.get("load_universal"):
            shards = _shards_of_deepspeed(checkpoint)
    # A host may hold only the shards of its own ranks.
    all_shards = max(groups.all_gather(shards))
    if all_shards not in (0, groups.ranks):
        raise Resume.OTHER_SHARDS.error(
            checkpoint=checkpoint, saved_by=all_shards, ranks=groups.ranks
        )


def _shards_of_deepspeed(checkpoint: Path) -> int:
    """Return the number of shards of the optimizer's state, by the last one that is here."""
    shards = 0
    for file in checkpoint.glob(f"{DEEPSPEED_FOLDER}/*"):
        shard = re.search(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$", file.name)
        if shard is not None:
            shards = max(shards, int(shard[1]) + 1)
    return shards


def warn_of_random_states(
    checkpoint: str | None, args: DistCAPaddedArguments, groups: Groups
) -> None:
    """Warn if a checkpoint lacks the random state of a rank. A collective of the world."""
    if checkpoint is None:
        return
    name = RANDOM_STATE.format(f"_{args.process_index}" if args.world_size > 1 else "")
    missing_name = None if (Path(checkpoint) / name).is_file() else name
    names_of_ranks = groups.all_gather(missing_name, in_world=True)
    missing = [missing_name for missing_name in names_of_ranks if missing_name is not None]
    if missing and args.process_index == 0:
        logger.warning(
            "the checkpoint %s has no %s, so these ranks draw other random numbers, as for "
            "dropout, than without the interruption. Resume on the number of ranks that saved the "
            "checkpoint, with all its files",
            checkpoint,
            ", ".join(missing),
        )

"""Save and resume a training: its checkpoint, the order of its documents and the place in it.

Ranks that choose a checkpoint each for itself may resume from different ones. Trainer alone would
skip a number of batches: the wrong documents if batches have changed, and none if the number of
steps of a pass is unknown.
"""

import errno
import json
import logging
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_distca.checks.refusal import SentenceError
from hf_distca.checks.run_rules import Resume, Run
from hf_distca.collator.documents import is_stream
from hf_distca.collator.micro_batch_choice import draws_for_whole_ranks
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.process_groups import Groups, first_difference
from hf_distca.trainer.arguments import DistCAPaddedArguments
from hf_distca.trainer.loaders import PackedLoaders

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
"""File that Trainer writes last into a checkpoint."""
OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin", "optimizer_0")
"""Files and folders of which one holds the optimizer's state; the last two are of FSDP."""
RANDOM_STATE = "rng_state{}.pth"
"""File with the state of random numbers of a rank, or of a training on one rank."""
FULL_DISK = re.compile(
    "|".join((*map(os.strerror, (errno.ENOSPC, errno.EDQUOT)), "iostream error", "unexpected pos"))
)
"""What errors of a full disk say. The last two are torch's."""
PLACE_FILE = "data_order.json"
"""File of a checkpoint with the place in the data."""
CAPACITY = "ranks * tokens_per_rank"
"""Setting that may grow on resume: micro-batches keep their old size, and still fit."""
LAYOUT = "document_layout"
"""Setting that decides how documents are drawn for a micro-batch.

A layout that cuts documents may resume with micro-batches of either kind below. It takes those of
the checkpoint.
"""
CUTTING = "auto or fixed"
"""Value of the layout where the documents of a micro-batch fit into all ranks together."""
FITTING = "whole on {} ranks"
"""Value of the layout where the documents of a micro-batch fit into whole ranks."""
SHARED = "share_prefixes"
"""Setting that decides the order of documents where some begin alike: those come together. A
checkpoint without it has other documents, or is of an earlier version."""
WORKERS = "dataloader_num_workers"
"""Setting that decides the order of a stream."""
DIVIDED = "divided_streams"
"""Setting that decides which documents of a stream a rank takes. A checkpoint without it is of
streams that every rank was given whole."""
AGREED = (
    *("seed", "long_documents", "remove_unused_columns", "length_column_name", "divided_streams"),
    *("num_train_epochs", "max_steps", "trace_steps"),
)
"""Arguments that must be the same on all ranks, besides the order of documents.

They decide which micro-batches come, and when. Ranks that differ would exchange rows of different
micro-batches.
"""
DataOrder = dict[str, int | str]
"""Everything that decides which documents a step trains on, by the names of the user's settings."""


# The checkpoint


def agreed_checkpoint(request: str | Path | bool | None, trainer: Any) -> str | None:
    """Return the folder of the checkpoint that all ranks resume from; None to begin anew.

    Raise ValueError on every rank if ranks have no complete checkpoint in common, or if Trainer
    would begin its optimizer anew. A collective of the world.

    Args:
        request: a folder, True for the last complete checkpoint in the output folder, or a false
            value to begin anew.
    """
    args = trainer.args
    groups: Groups = trainer.dispatcher.groups
    asked = str(request or "")
    folders = [Path(asked)] if asked else []
    if asked.lower() == "true":  # also as text on a command line
        checkpoints = [path for path in Path(str(args.output_dir)).glob("*/") if _step(path) >= 0]
        folders = sorted(checkpoints, key=_step)
    # Hosts may have disks of their own, with checkpoints of the same names.
    complete = {path.name: path for path in folders if (path / STATE_FILE).is_file()}
    asked_of_ranks, names_of_ranks = zip(
        *groups.all_gather((asked, list(complete)), in_world=True), strict=True
    )
    if not any(asked_of_ranks):
        return None
    common = set.intersection(*map(set, names_of_ranks))
    if not common:
        found = dict.fromkeys(", ".join(names) or "none" for names in names_of_ranks)
        raise Resume.NO_CHECKPOINT.error(
            given=next(filter(None, asked_of_ranks)),
            file=STATE_FILE,
            found="; ".join(found),
            folder=args.output_dir,
        )
    checkpoint = max((complete[name] for name in common), key=_step)
    later = [path.name for path in folders if _step(path) > _step(checkpoint)]
    if later and args.process_index == 0:
        logger.warning(
            "training resumes from %s, because later checkpoints are not complete on every rank: "
            "%s",
            checkpoint,
            ", ".join(later),
        )
    with groups.raised_together(in_world=True):
        if not trainer.is_deepspeed_enabled:  # DeepSpeed raises errors itself
            _check_state(checkpoint)
    _warn_of_random_states(checkpoint, args, groups)
    return str(checkpoint)


def _step(checkpoint: Path) -> int:
    """Return the step of a checkpoint by the name of its folder; -1 for another name."""
    name = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", checkpoint.name)
    return -1 if name is None else int(name[1])


def _check_state(checkpoint: Path) -> None:
    """Raise ValueError if a checkpoint lacks state.

    Trainer would then load neither the optimizer's nor the schedule's.
    """
    for names in (OPTIMIZER_FILES, ("scheduler.pt",)):
        if not any((checkpoint / name).exists() for name in names):
            raise Resume.NO_STATE.error(checkpoint=checkpoint, files=" or ".join(names))


def _warn_of_random_states(checkpoint: Path, args: DistCAPaddedArguments, groups: Groups) -> None:
    """Warn if a checkpoint lacks the random state of a rank. A collective of the world."""
    name = RANDOM_STATE.format(f"_{args.process_index}" if args.world_size > 1 else "")
    lacking = "" if (checkpoint / name).is_file() else name
    missing = list(filter(None, groups.all_gather(lacking, in_world=True)))
    if missing and args.process_index == 0:
        logger.warning(
            "the checkpoint %s has no %s, so these ranks draw other random numbers, as for "
            "dropout, than without the interruption. Resume on the number of ranks that saved the "
            "checkpoint, with all its files",
            checkpoint,
            ", ".join(missing),
        )


class FullDiskError(SentenceError, OSError):
    """A disk has no room for the files of a folder."""

    is_of_every_rank = False


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Name the folder and the remedy if the disk is full while files are written into it."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        if FULL_DISK.search(str(error)) is None:
            raise
        # torch's error names positions in a file.
        raise FullDiskError(
            f"disk full: {folder} is incomplete; free disk space or set another output_dir"
        ) from None


# The data


def check_agreement(args: DistCAPaddedArguments, dispatcher: Dispatcher) -> None:
    """Raise ValueError on every rank if ranks differ in micro-batches or order.

    A collective of the world.
    """
    values: dict[str, Any] = {name: getattr(args, name, None) for name in AGREED}
    values |= _sampling_order(args)
    difference = first_difference(dispatcher.groups.all_gather(values, in_world=True))
    if difference is not None:
        name, values_of_ranks = difference
        raise Run.DIFFERENT_ARGUMENTS.error(name=name, by_rank=values_of_ranks)


def _sampling_order(args: DistCAPaddedArguments) -> DataOrder:
    """Return what decides how a data set with a length is drawn and divided into steps."""
    strategy = args.train_sampling_strategy
    if strategy != "sequential":
        strategy = f"{strategy} with seed {_data_seed(args)}"
    return {
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "train_sampling_strategy": strategy,
    }


def _data_seed(args: DistCAPaddedArguments) -> int:
    """Return the seed of the order of documents."""
    return args.seed if args.data_seed is None else args.data_seed


def data_order(
    trainer: Any, dispatcher: Dispatcher, loaders: PackedLoaders, *, packs: bool, shares: bool
) -> DataOrder:
    """Return the order of a trainer's documents.

    A collective of the world for a data set with a length.

    Args:
        packs: whether hf_distca packs documents.
        shares: whether documents that begin alike share rows.
    """
    args = trainer.args
    dataset = trainer.train_dataset
    ranks = dispatcher.groups.ranks
    if not packs:
        return _collated_order(args, dataset, ranks)
    if is_stream(dataset):
        return {
            "ranks": ranks,
            "tokens_per_rank": args.tokens_per_rank,
            "long_documents": args.long_documents,
            WORKERS: args.dataloader_num_workers,
            **({DIVIDED: True} if args.divided_streams else {}),
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "train_dataset": "a stream",
        }
    lengths, fingerprint = loaders.lengths(dataset)
    stay_whole = dispatcher.settings.document_layout == "whole"
    draws = args.train_sampling_strategy != "sequential"
    has_shared = draws and loaders.beginnings(dataset, shares=shares) is not None
    return {
        CAPACITY: ranks * args.tokens_per_rank,
        LAYOUT: FITTING.format(ranks) if stay_whole else CUTTING,
        "long_documents": args.long_documents,
        **_sampling_order(args),
        **({SHARED: True} if has_shared else {}),
        "train_dataset": (
            f"{len(lengths)} documents of {lengths.sum()} tokens, fingerprint {fingerprint[:16]}"
        ),
    }


def _collated_order(args: Any, dataset: Any, ranks: int) -> DataOrder:
    """Return the order of the examples of a custom collator, which Trainer draws and divides."""
    order: DataOrder = {
        "ranks * per_device_train_batch_size": ranks * args.per_device_train_batch_size,
        **_sampling_order(args),
    }
    if is_stream(dataset):
        # Streams of `datasets` shuffle differently in a worker process than in the rank itself.
        order[WORKERS] = args.dataloader_num_workers
    has_length = hasattr(dataset, "__len__")
    order["train_dataset"] = f"{len(dataset)} examples" if has_length else "a stream"
    return order


def chosen_order(
    order: DataOrder,
    trainer: Any,
    dispatcher: Dispatcher,
    loaders: PackedLoaders,
    *,
    shares: bool,
) -> DataOrder:
    """Return the order in which a new training draws its documents. A collective of the world.

    Micro-batches hold documents that fit into whole ranks if steps are then predicted to be faster.

    Args:
        order: order without that choice.
        shares: as in `data_order`.
    """
    args = trainer.args
    dataset = trainer.train_dataset
    groups = dispatcher.groups
    if is_stream(dataset) or args.train_sampling_strategy == "sequential":
        return order  # documents come in their own order
    lengths = loaders.drawn_rows(dataset, shares=shares)
    pays = False
    with groups.raised_together(in_world=True):
        pays = draws_for_whole_ranks(lengths, dispatcher.settings, _data_seed(args))
    rank_0_pays = groups.all_gather(pays, in_world=True)[0]
    if not rank_0_pays:
        return order
    logger.info(
        "micro-batches hold documents that fit into whole ranks, which is predicted to be faster "
        "than full micro-batches"
    )
    return {**order, LAYOUT: FITTING.format(groups.ranks)}


def capacity_and_bins(order: DataOrder) -> tuple[int, int]:
    """Return the maximum number of tokens of a micro-batch and its number of bins.

    Both are 0 before a training has begun.
    """
    if CAPACITY not in order:
        return 0, 0
    capacity = int(order[CAPACITY])
    fitting = re.fullmatch(FITTING.format(r"(\d+)"), str(order.get(LAYOUT, "")))
    bins = 1 if fitting is None else int(fitting[1])
    return capacity, bins


class DataPlace(NamedTuple):
    """Place in the training data between two optimizer steps."""

    order: DataOrder
    epoch: int = 0  # completed passes over the data
    steps: int = 0  # completed optimizer steps of the present pass


class DataProgress:
    """Place of a run in its data, from the number of its completed optimizer steps."""

    def __init__(self, start: DataPlace) -> None:
        self.start = start  # where this training began in its present pass
        # Completed steps of the whole run at that place. None before the first pass.
        self._step_at_start: int | None = None

    def begin_pass(self, step: int) -> None:
        """Note that a pass over the data begins, or goes on in a resumed training.

        Args:
            step: completed steps of the whole run.
        """
        if self._step_at_start is not None:
            self.start = DataPlace(self.start.order, self.start.epoch + 1)
        self._step_at_start = step

    def place(self, step: int) -> DataPlace:
        """Return the place in the data after a number of completed steps of the run."""
        step_at_start = step if self._step_at_start is None else self._step_at_start
        steps_since_start = step - step_at_start
        return self.start._replace(steps=self.start.steps + steps_since_start)

    def save(self, checkpoint: Path, step: int) -> None:
        """Write the place into a checkpoint folder, and make the folder if needed."""
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / PLACE_FILE).write_text(
            json.dumps(self.place(step)._asdict(), indent=2) + "\n"
        )


def agreed_place(
    order: DataOrder, checkpoint: str | None, args: DistCAPaddedArguments, groups: Groups
) -> DataPlace:
    """Return the place to train from: the checkpoint's, or the start, also with `ignore_data_skip`.

    A collective.
    """
    place = DataPlace(order)
    with groups.raised_together(in_world=True):
        if checkpoint is not None and not args.ignore_data_skip:
            place = _stored_place(Path(checkpoint), order, groups.ranks)
    if place.order.get(CAPACITY) != order.get(CAPACITY) and groups.rank == 0:
        logger.warning(
            "%s is %s, but micro-batches still hold at most %s tokens, as in the checkpoint. To "
            "use larger ones set ignore_data_skip=True, which begins a new pass over the data",
            CAPACITY,
            order[CAPACITY],
            place.order[CAPACITY],
        )
    return place


def _stored_place(checkpoint: Path, order: DataOrder, ranks: int) -> DataPlace:
    """Return a checkpoint's place; raise ValueError if documents would come in another order."""
    file = checkpoint / PLACE_FILE
    if not file.is_file():
        raise Resume.NO_PLACE.error(checkpoint=checkpoint, file=PLACE_FILE)
    place = DataPlace(**json.loads(file.read_text(encoding="utf-8")))
    stored = place.order
    if CAPACITY in stored:  # earlier versions stored only the layout "whole"
        stored = {LAYOUT: CUTTING, **stored}
    if WORKERS in order:  # earlier versions stored it for packed streams alone; the default was 1
        stored = {WORKERS: 1, **stored}
    for name in (SHARED, DIVIDED):  # stored only where they are True
        if name in stored or name in order:
            stored = {name: False, **stored}
            order = {name: False, **order}
    may_differ = {CAPACITY}
    # Layouts that cut documents plan any micro-batch, so they take those of the checkpoint.
    if order.get(LAYOUT) == CUTTING and LAYOUT in stored:
        may_differ.add(LAYOUT)
    differences = [
        f"{name} is {order.get(name)}, but must be {stored.get(name)}"
        for name in {**stored, **order}
        if name not in may_differ and order.get(name) != stored.get(name)
    ]
    # Micro-batches keep their size, so that the capacity may grow but not shrink.
    stored_capacity = int(stored.get(CAPACITY, 0))
    if int(order.get(CAPACITY, stored_capacity)) < stored_capacity:
        tokens_per_rank = math.ceil(stored_capacity / ranks)
        differences.append(
            f"{CAPACITY} is {order[CAPACITY]}, but must be at least {stored_capacity}: with "
            f"{ranks} ranks, tokens_per_rank={tokens_per_rank}"
        )
    if differences:
        raise Resume.OTHER_ORDER.error(differences="; ".join(differences))
    return place


def without_tied(model: nn.Module, missing: list[str]) -> list[str]:
    """Return the names of missing weights, except of weights that are tied to loaded ones."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for name, parameter in parameters.items() if name not in missing}
    return [name for name in missing if id(parameters.get(name)) not in loaded]

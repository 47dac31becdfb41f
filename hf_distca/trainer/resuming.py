"""Save and resume a training: the order of its documents and the place in it.

Trainer alone would skip a number of batches: the wrong documents if batches have changed, and none
if the number of steps of a pass is unknown.
"""

import errno
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from hf_distca.collator.whole_ranks import draws_for_whole_ranks
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.groups import Groups, first_difference
from hf_distca.trainer.arguments import DistCAPaddedArguments
from hf_distca.trainer.loaders import PackedLoaders, is_stream
from hf_distca.trainer.refusals import Resume, Run

logger = logging.getLogger(__name__)

PLACE_FILE = "data_order.json"
"""File of a checkpoint with the place in the data."""
CAPACITY = "ranks * tokens_per_rank"
"""Setting that may grow on resume: micro-batches keep their old size, and still fit."""
LAYOUT, CUTTING, FITTING = "document_layout", "joint or fixed", "whole on {} ranks"
"""Layout setting, and its values where documents of a micro-batch fit into all ranks together, or
into whole ranks.

A layout that cuts documents may resume with micro-batches of either kind. It takes those of the
checkpoint.
"""
WORKERS = "dataloader_num_workers"
"""Setting that decides the order of a stream."""
AGREED = (
    *("seed", "long_documents", "remove_unused_columns", "length_column_name"),
    *("num_train_epochs", "max_steps", "trace_steps", "attention_servers"),
)
"""Arguments that must be the same on all ranks, besides the order of documents.

They decide which micro-batches come, and when. Ranks that differ would exchange rows of different
micro-batches.
"""
DISK_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO))
"""System errors of a disk that is full, over its quota or limit, read-only or broken."""

DataOrder = dict[str, int | str]
"""Everything that decides which documents a step trains on, by the names of the user's settings."""


def read_place(file: Path) -> "DataPlace":
    """Return the place in the data that a checkpoint's file holds."""
    return DataPlace(**json.loads(file.read_text(encoding="utf-8")))


def check_agreement(args: DistCAPaddedArguments, dispatcher: Dispatcher) -> None:
    """Raise ValueError on every rank if ranks differ in micro-batches or order.

    A collective of the world.
    """
    mine: dict[str, Any] = {name: getattr(args, name) for name in AGREED}
    mine |= _drawn(args)
    if found := first_difference(dispatcher.groups.all_gather(mine, in_world=True)):
        raise Run.DIFFERENT_ARGUMENTS.error(name=found[0], by_rank=found[1])


def _drawn(args: DistCAPaddedArguments) -> DataOrder:
    """Return how documents are drawn from a data set with a length and divided into optimizer steps."""
    strategy, seed = (
        args.train_sampling_strategy,
        args.seed if args.data_seed is None else args.data_seed,
    )
    return {
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "train_sampling_strategy": strategy
        if strategy == "sequential"
        else f"{strategy} with seed {seed}",
    }


def data_order(
    trainer: Any, dispatcher: Dispatcher, loaders: PackedLoaders, *, packs: bool
) -> DataOrder:
    """Return the order of a trainer's documents.

    A collective of the world for a data set with a length.
    """
    args, dataset, ranks = trainer.args, trainer.train_dataset, dispatcher.groups.ranks
    if not packs:  # Trainer draws and divides the examples of a custom collator
        return {
            "ranks * per_device_train_batch_size": ranks * args.per_device_train_batch_size,
            **_drawn(args),
            # Streams of `datasets` shuffle differently in a worker process than in the rank itself.
            **({WORKERS: args.dataloader_num_workers} if is_stream(dataset) else {}),
            "train_dataset": f"{len(dataset)} examples"
            if hasattr(dataset, "__len__")
            else "a stream",
        }
    if is_stream(dataset):
        names = ("tokens_per_rank", "long_documents", WORKERS, "gradient_accumulation_steps")
        return {
            "ranks": ranks,
            **{name: getattr(args, name) for name in names},
            "train_dataset": "a stream",
        }
    lengths, fingerprint = loaders.lengths(dataset)
    return {
        CAPACITY: ranks * args.tokens_per_rank,
        LAYOUT: (
            FITTING.format(ranks) if dispatcher.settings.document_layout == "whole" else CUTTING
        ),
        "long_documents": args.long_documents,
        **_drawn(args),
        "train_dataset": (
            f"{len(lengths)} documents of {lengths.sum()} tokens, fingerprint {fingerprint[:16]}"
        ),
    }


def chosen_order(
    order: DataOrder, trainer: Any, dispatcher: Dispatcher, loaders: PackedLoaders
) -> DataOrder:
    """Return the order of a new training: for whole ranks where such micro-batches pay.

    A collective of the world.
    """
    args, dataset, groups = trainer.args, trainer.train_dataset, dispatcher.groups
    if (
        is_stream(dataset) or args.train_sampling_strategy == "sequential"
    ):  # documents come in their own order
        return order
    lengths, _ = loaders.lengths(dataset)
    pays = False
    with groups.raised_together(in_world=True):
        seed = args.seed if args.data_seed is None else args.data_seed
        pays = draws_for_whole_ranks(lengths, dispatcher.settings, seed)
    if not groups.all_gather(pays, in_world=True)[0]:
        return order
    logger.info(
        "micro-batches hold documents that fit into whole ranks, which is predicted to be faster "
        "than full micro-batches; document_layout='joint' keeps them full"
    )
    return {**order, LAYOUT: FITTING.format(groups.ranks)}


def capacity_and_bins(order: DataOrder) -> tuple[int, int]:
    """Return the maximum number of tokens and the number of bins of a micro-batch; 0 before a training has begun."""
    ranks = re.fullmatch(FITTING.format(r"(\d+)"), str(order.get(LAYOUT, "")))
    return int(order.get(CAPACITY, 0)), 0 if CAPACITY not in order else int(
        ranks[1]
    ) if ranks else 1


class DataPlace(NamedTuple):
    """Place in the training data between two optimizer steps."""

    order: DataOrder
    epoch: int = 0  # completed passes over the data
    steps: int = 0  # completed optimizer steps of the present pass


class DataProgress:
    """Place of a run in its data, from the number of its completed optimizer steps."""

    def __init__(self, start: DataPlace) -> None:
        self.start = start  # where this training began in its present pass
        self._step_at_start: int | None = (
            None  # completed steps of the whole run there; None before the first pass
        )

    def begin_pass(self, step: int) -> None:
        """Note that a pass over the data begins, or goes on in a resumed training.

        Args:
            step: completed steps of the whole run.
        """
        if self._step_at_start is not None:
            self.start = DataPlace(self.start.order, self.start.epoch + 1)
        self._step_at_start = step

    def place(self, step: int) -> DataPlace:
        """Return the place after so many completed steps of the whole run."""
        begun_at = step if self._step_at_start is None else self._step_at_start
        return self.start._replace(steps=self.start.steps + step - begun_at)

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
            place = _kept_place(Path(checkpoint), order, groups.ranks)
    if place.order.get(CAPACITY) != order.get(CAPACITY) and groups.rank == 0:
        logger.warning(
            "%s is %s, but micro-batches still hold at most %s tokens, as in the checkpoint. To "
            "use larger ones set ignore_data_skip=True, which begins a new pass over the data",
            *(CAPACITY, order[CAPACITY], place.order[CAPACITY]),
        )
    return place


def _kept_place(checkpoint: Path, order: DataOrder, ranks: int) -> DataPlace:
    """Return a checkpoint's place; raise ValueError if documents would come in another order."""
    place = read_place(checkpoint / PLACE_FILE)
    stored = place.order
    if CAPACITY in stored:  # earlier versions stored only the layout "whole"
        stored = {LAYOUT: CUTTING, **stored}
    if WORKERS in order:  # earlier versions stored it for packed streams alone; the default was 1
        stored = {WORKERS: 1, **stored}
    # Layouts that cut documents plan any micro-batch, so they take those of the checkpoint.
    free = (CAPACITY, LAYOUT) if order.get(LAYOUT) == CUTTING and LAYOUT in stored else (CAPACITY,)
    wrong = [
        f"{name} is {order.get(name)}, but must be {stored.get(name)}"
        for name in {**stored, **order}
        if name not in free and order.get(name) != stored.get(name)
    ]
    least = int(stored.get(CAPACITY, 0))
    if int(order.get(CAPACITY, least)) < least:
        tokens = f"with {ranks} ranks, tokens_per_rank={-(-least // ranks)}"
        wrong.append(f"{CAPACITY} is {order[CAPACITY]}, but must be at least {least}: {tokens}")
    if wrong:
        raise Resume.OTHER_ORDER.error(differences="; ".join(wrong))
    return place


def without_tied(model: nn.Module, missing: list[str]) -> list[str]:
    """Return the names of missing weights whose parameter is not tied to one of another name that is there."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for name, parameter in parameters.items() if name not in missing}
    return [name for name in missing if id(parameters.get(name)) not in loaded]


@contextmanager
def disk_errors_named(folder: Path) -> Iterator[None]:
    """Raise OSError with the folder and the remedy if writing into a folder fails because of the disk."""
    try:
        yield
    except Exception as error:
        if getattr(error, "filename", None) is not None:
            raise  # the file is named already
        number = getattr(error, "errno", None)
        if match := re.search(r"os error (\d+)", str(error)):  # an error of Rust
            number = int(match[1])
        elif not isinstance(error, OSError):
            # torch.save reports "basic_ios::clear" or a wrong position: check whether the disk
            # takes some bytes.
            try:
                with tempfile.TemporaryFile(dir=folder) as file:
                    file.write(bytes(1 << 20))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as refusal:
                number = refusal.errno
        if number not in DISK_ERRORS:
            raise
        remedy = f"{folder} is incomplete: remove it, and free disk space or set another output_dir"
        raise OSError(number, f"{os.strerror(number)}; {remedy}", str(folder)) from error

"""Resume a training: all ranks take one checkpoint, and its place in the same documents.

Ranks that choose a checkpoint each for itself may resume from different ones.
"""

import errno
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_distca.checks.refusal import SentenceError
from hf_distca.checks.run_rules import Resume
from hf_distca.collator.documents import is_stream
from hf_distca.collator.micro_batch_choice import draws_for_whole_ranks
from hf_distca.collator.place import (
    CAPACITY,
    CUTTING,
    DIVIDED,
    FITTING,
    LAYOUT,
    RANK_CAPACITY,
    SHARED,
    WORKERS,
    DataOrder,
    DataPlace,
    stored_place,
)
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.process_groups import Groups
from hf_distca.dispatch.world import check_alike
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
STDERR = 2
"""File descriptor, which may be written to while `sys.stderr` writes."""
AGREED = (
    *("seed", "long_documents", "remove_unused_columns", "length_column_name", "divided_streams"),
    *("num_train_epochs", "max_steps", "trace_steps"),
)
"""Arguments that must be the same on all ranks, besides the order of documents.

They decide which micro-batches come, and when. Ranks that differ would exchange rows of different
micro-batches.
"""
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


# Where a training resumes, and how it goes on


class Continuation(TrainerCallback):
    """Print on the first process where a training resumes, and how it continues after its end."""

    def __init__(self) -> None:
        self._state: TrainerState | None = None
        self._checkpoint: str | None = None  # the last one that can be resumed

    @contextmanager
    def of(self, checkpoint: str | None, args: TrainingArguments) -> Iterator[None]:
        """Explain SIGTERM and Ctrl-C to a training inside of the block.

        SIGTERM then does what it did before. With `enable_jit_checkpoint` it is transformers' own.

        Args:
            checkpoint: folder from which the training resumes.
        """
        self._state = None
        self._checkpoint = checkpoint
        explains = args.process_index == 0 and not args.enable_jit_checkpoint
        with _explained_sigterm(self._sentence, active=explains):
            try:
                yield
            except KeyboardInterrupt as error:
                error.args = (self._sentence(),)
                raise
            except BaseException as error:
                if checkpoint is not None:  # errors about a damaged file do not name it
                    error.add_note(f"The training resumes from {checkpoint}.")
                raise

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Print where a training resumes."""
        self._state = state
        if self._checkpoint is not None and args.process_index == 0:
            # print would write into a progress bar.
            tqdm.write(
                f"resumed from {self._checkpoint}, step {state.global_step} of {state.max_steps}"
            )

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note a checkpoint that is complete."""
        if not args.save_only_model:
            self._checkpoint = f"{args.output_dir}/{PREFIX_CHECKPOINT_DIR}-{state.global_step}"

    def _sentence(self) -> str:
        """Return after which step training is interrupted, and how it goes on."""
        state = self._state
        place = "before the first step"
        if state is not None and state.global_step > 0:
            place = f"after step {state.global_step} of {state.max_steps}"
        remedy = "there is no checkpoint to continue from"
        if self._checkpoint is not None:
            remedy = f"continue with resume_from_checkpoint={self._checkpoint!r}"
        return f"interrupted {place}; {remedy}"


@contextmanager
def _explained_sigterm(sentence: Callable[[], str], *, active: bool) -> Iterator[None]:
    """Print a sentence when SIGTERM comes, which then does what it did before.

    Python handles signals in its main thread alone.
    """
    before = signal.getsignal(signal.SIGTERM)
    in_main_thread = threading.current_thread() is threading.main_thread()
    # None: not a handler of Python, so that it could not be restored.
    if not active or not in_main_thread or before in (None, signal.SIG_IGN):
        yield
        return
    process = os.getpid()

    def explain(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:  # not one that was forked from it
            # Behind a progress bar.
            os.write(STDERR, f"\n{sentence()}\n".encode())
        signal.signal(number, before)
        if callable(before):
            before(number, frame)
        else:
            signal.raise_signal(number)

    signal.signal(signal.SIGTERM, explain)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is explain:
            signal.signal(signal.SIGTERM, before)


# The data


def check_agreement(args: DistCAPaddedArguments, dispatcher: Dispatcher) -> None:
    """Raise ValueError on every rank if ranks differ in micro-batches or order.

    A collective of the world.
    """
    values: dict[str, Any] = {name: getattr(args, name, None) for name in AGREED}
    values |= _sampling_order(args)
    check_alike(dispatcher.groups.all_gather(values, in_world=True))


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
        shares: whether documents share prefixes.
    """
    args = trainer.args
    dataset = trainer.train_dataset
    ranks = dispatcher.groups.ranks
    if not packs:
        return _collated_order(args, dataset, ranks)
    if is_stream(dataset):
        return {
            "ranks": ranks,
            RANK_CAPACITY: dispatcher.settings.rows_per_rank,
            "long_documents": args.long_documents,
            WORKERS: args.dataloader_num_workers,
            **({DIVIDED: True} if args.divided_streams else {}),
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "train_dataset": "a stream",
        }
    lengths, fingerprint = loaders.lengths(dataset)
    stay_whole = dispatcher.settings.document_layout == "whole"
    draws = args.train_sampling_strategy != "sequential"
    has_shared = draws and loaders.prefixes(dataset, shares=shares) is not None
    return {
        CAPACITY: dispatcher.settings.micro_batch_tokens,
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


def agreed_place(
    order: DataOrder, checkpoint: str | None, args: DistCAPaddedArguments, groups: Groups
) -> DataPlace:
    """Return the place to train from: the checkpoint's, or the start, also with `ignore_data_skip`.

    A collective.
    """
    place = DataPlace(order)
    with groups.raised_together(in_world=True):
        if checkpoint is not None and not args.ignore_data_skip:
            place = stored_place(Path(checkpoint), order, groups.ranks)
    if place.order.get(CAPACITY) != order.get(CAPACITY) and groups.rank == 0:
        logger.warning(
            "%s is %s, but micro-batches still hold at most %s tokens, as in the checkpoint. To "
            "use larger ones set ignore_data_skip=True, which begins a new pass over the data",
            CAPACITY,
            order[CAPACITY],
            place.order[CAPACITY],
        )
    return place


def without_tied(model: nn.Module, missing: list[str]) -> list[str]:
    """Return the names of missing weights, except of weights that are tied to loaded ones."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for name, parameter in parameters.items() if name not in missing}
    return [name for name in missing if id(parameters.get(name)) not in loaded]

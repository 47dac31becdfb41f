"""Which documents each step trains on, and how far a run has come in them: kept with every checkpoint.

Trainer keeps the number of steps and reckons from it how many batches to skip. That leaves out documents where batches
are no longer what they were, and starts a pass over again where it does not know how many steps a pass has.
"""

import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import TrainerCallback

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.groups import Groups
from hf_distca.planner.settings import PlanSettings
from hf_distca.trainer.arguments import DistCAArguments

logger = logging.getLogger(__name__)

FILE = "data_order.json"
CAPACITY = "ranks * tokens_per_rank"
"""The setting that may grow: micro-batches stay as large as they were, and fit."""

LAYOUT, CUTTING = "document_layout", "joint or fixed"
"""The setting, and what it is where nothing else is written: layouts that cut documents may follow one another."""

DataOrder = dict[str, int | str]
"""All that decides which documents a step trains on, by the names under which users set it."""


AGREED = (
    "seed",
    "long_documents",
    "remove_unused_columns",
    "length_column_name",
    "num_train_epochs",
    "max_steps",
    "trace_steps",
    "attention_servers",
)
"""Arguments that decide which micro-batches come, and when, besides how documents are drawn: ranks that differ in one
would exchange rows of others."""


def check_agreement(args: DistCAArguments, dispatcher: Dispatcher) -> None:
    """Raise unless every rank would train on the same micro-batches in the same order. A collective of the world.

    Raises:
        ValueError: on every rank, where an argument differs between ranks.
    """
    mine: dict[str, Any] = _drawn(args) | {name: getattr(args, name) for name in AGREED}
    mine["settings of plans"] = dispatcher.settings
    gathered = dispatcher.groups.all_gather(mine, in_world=True)
    for name in mine:
        by_rank = [values[name] for values in gathered]
        if len(set(by_rank)) > 1:
            raise ValueError(
                f"{name} differs between ranks, so they would train on different micro-batches; its values by rank "
                f"are {by_rank}. Start all ranks with the same arguments"
            )


def packed_order(
    args: DistCAArguments, settings: PlanSettings, lengths: NDArray[np.int64], fingerprint: str
) -> DataOrder:
    """The order of a data set with a length, packed into global micro-batches.

    Where documents stay whole, a micro-batch has a bin for each rank.
    """
    whole = {LAYOUT: f"whole on {settings.ranks} ranks"} if settings.document_layout == "whole" else {}
    return {
        CAPACITY: settings.ranks * args.tokens_per_rank,
        **whole,
        "long_documents": args.long_documents,
        **_drawn(args),
        "train_dataset": f"{len(lengths)} documents of {lengths.sum()} tokens, fingerprint {fingerprint[:16]}",
    }


def streamed_order(args: DistCAArguments, ranks: int) -> DataOrder:
    """The order of a stream that each rank packs its share of, provided that it gives the same once more.

    Streams of `datasets` shuffle otherwise in a process that reads for a rank than in the rank itself.
    """
    return {
        "ranks": ranks,
        "tokens_per_rank": args.tokens_per_rank,
        "long_documents": args.long_documents,
        "dataloader_num_workers": args.dataloader_num_workers,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "train_dataset": "a stream",
    }


def collated_order(args: DistCAArguments, ranks: int, dataset: Any) -> DataOrder:
    """The order of examples that Trainer draws and divides, for a collator of the user's own."""
    return {
        "ranks * per_device_train_batch_size": ranks * args.per_device_train_batch_size,
        **_drawn(args),
        "train_dataset": f"{len(dataset)} examples" if hasattr(dataset, "__len__") else "a stream",
    }


def _drawn(args: DistCAArguments) -> DataOrder:
    """How documents are drawn from a data set with a length and shared out to optimizer steps."""
    strategy = args.train_sampling_strategy
    if strategy != "sequential":
        strategy = f"{strategy} with seed {args.seed if args.data_seed is None else args.data_seed}"
    return {
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "train_sampling_strategy": strategy,
    }


@dataclass(frozen=True)
class DataPlace:
    """A place in the training data, between two optimizer steps.

    Attributes:
        order: the order that documents come in.
        epoch: passes over the data before the present one.
        steps: optimizer steps of the present pass that are done.
    """

    order: DataOrder
    epoch: int = 0
    steps: int = 0

    def save(self, checkpoint: Path) -> None:
        """Write it into the folder of a checkpoint, which is made if need be."""
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


class DataProgress(TrainerCallback):
    """Follows a run through its data.

    Attributes:
        place: where the run is.
    """

    def __init__(self) -> None:
        self.begin(DataPlace({}))

    def begin(self, place: DataPlace) -> None:
        """Set the place that training is about to go on from."""
        self.place = place
        self._in_pass = False

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        """Count a pass: here, since `on_epoch_end` comes as well where training stops within one."""
        if self._in_pass:
            self.place = replace(self.place, epoch=self.place.epoch + 1, steps=0)
        self._in_pass = True

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Count a step."""
        self.place = replace(self.place, steps=self.place.steps + 1)


def agreed_place(order: DataOrder, checkpoint: str | None, args: DistCAArguments, groups: Groups) -> DataPlace:
    """The place to train from: a checkpoint's, or the start where there is none. A collective.

    Args:
        order: the order of documents that is asked for.
        checkpoint: its folder; None to begin anew.
        args: under `ignore_data_skip` a checkpoint's place and order are not looked at.
        groups: the ranks that train.

    Returns:
        The place, in the order that the checkpoint was saved with: its micro-batches may be smaller than asked for.

    Raises:
        ValueError: on every rank, where the documents that are left would not come as they would have; says what must
            be set, and to what.
    """
    place, error = DataPlace(order), None
    if checkpoint is not None and not args.ignore_data_skip:
        try:
            place = _load(checkpoint)
            _check_same(place.order, order, groups.ranks)
        except (ValueError, OSError) as caught:
            error = caught
    groups.raise_together(error, in_world=True)
    if place.order.get(CAPACITY) != order.get(CAPACITY) and groups.rank == 0:
        logger.warning(
            "%s is %s, but micro-batches still hold at most %s tokens, as in the checkpoint. To use larger ones set "
            "ignore_data_skip=True, which begins a new pass over the data",
            CAPACITY,
            order[CAPACITY],
            place.order[CAPACITY],
        )
    return place


def _load(checkpoint: str) -> DataPlace:
    file = Path(checkpoint) / FILE
    if not file.is_file():
        raise ValueError(
            f"{checkpoint} has no {FILE}, which records the place in the training data: another trainer or an earlier "
            "version saved the checkpoint. Set ignore_data_skip=True to begin a new pass over the data"
        )
    return DataPlace(**json.loads(file.read_text()))


def _check_same(stored: DataOrder, present: DataOrder, ranks: int) -> None:
    stored, present = {LAYOUT: CUTTING, **stored}, {LAYOUT: CUTTING, **present}
    wrong = [
        f"{name} is {present.get(name)}, but must be {stored.get(name)}"
        for name in {**stored, **present}
        if name != CAPACITY and present.get(name) != stored.get(name)
    ]
    if CAPACITY in present and CAPACITY in stored and int(present[CAPACITY]) < int(stored[CAPACITY]):
        least = -(-int(stored[CAPACITY]) // ranks)
        wrong.append(
            f"{CAPACITY} is {present[CAPACITY]}, but must be at least {stored[CAPACITY]}: with {ranks} ranks, "
            f"tokens_per_rank={least}"
        )
    if wrong:
        raise ValueError(
            "training cannot resume with these settings: it would skip some documents or repeat others. "
            + "; ".join(wrong)
            + ". Or set ignore_data_skip=True to begin a new pass over the data"
        )

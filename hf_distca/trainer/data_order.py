"""Order of documents and progress of a run in it, saved with every checkpoint.

Trainer saves the number of steps and computes how many batches to skip. This skips the wrong documents if batches have
changed, and restarts a pass if the number of its steps is unknown.
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
"""Setting that may grow on resume: micro-batches keep their old size, and still fit."""

LAYOUT, CUTTING = "document_layout", "joint or fixed"
"""Layout setting, and its value for layouts that cut documents: a run may resume with either."""

DataOrder = dict[str, int | str]
"""Everything that decides which documents a step trains on, by the names of the user's settings."""


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
"""Arguments that must be the same on all ranks, besides the order of documents.

They decide which micro-batches come, and when. Ranks that differ would exchange rows of different micro-batches.
"""


def check_agreement(args: DistCAArguments, dispatcher: Dispatcher) -> None:
    """Raise ValueError on every rank if ranks differ in micro-batches or order. A collective of the world."""
    mine: dict[str, Any] = _drawn(args) | {name: getattr(args, name) for name in AGREED}
    mine["settings of plans"] = dispatcher.settings
    gathered = dispatcher.groups.all_gather(mine, in_world=True)
    for name in mine:
        by_rank = [values[name] for values in gathered]
        if len(set(by_rank)) > 1:
            raise ValueError(f"{name} differs between ranks, from rank 0 on it is {by_rank}; start all ranks alike")


def packed_order(
    args: DistCAArguments, settings: PlanSettings, lengths: NDArray[np.int64], fingerprint: str
) -> DataOrder:
    """Return the order of a data set with a length, packed into global micro-batches."""
    whole = {LAYOUT: f"whole on {settings.ranks} ranks"} if settings.document_layout == "whole" else {}
    return {
        CAPACITY: settings.ranks * args.tokens_per_rank,
        **whole,
        "long_documents": args.long_documents,
        **_drawn(args),
        "train_dataset": f"{len(lengths)} documents of {lengths.sum()} tokens, fingerprint {fingerprint[:16]}",
    }


def streamed_order(args: DistCAArguments, ranks: int) -> DataOrder:
    """Return the order of a stream of which each rank packs its share.

    The number of workers counts: streams of `datasets` shuffle differently in a worker process than in the rank
    itself.
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
    """Return the order of examples that Trainer draws and divides, for a custom collator."""
    return {
        "ranks * per_device_train_batch_size": ranks * args.per_device_train_batch_size,
        **_drawn(args),
        "train_dataset": f"{len(dataset)} examples" if hasattr(dataset, "__len__") else "a stream",
    }


def _drawn(args: DistCAArguments) -> DataOrder:
    """Return how documents are drawn from a data set with a length and divided into optimizer steps."""
    strategy = args.train_sampling_strategy
    if strategy != "sequential":
        strategy = f"{strategy} with seed {args.seed if args.data_seed is None else args.data_seed}"
    return {
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "train_sampling_strategy": strategy,
    }


@dataclass(frozen=True)
class DataPlace:
    """Place in the training data between two optimizer steps.

    Attributes:
        epoch: completed passes over the data.
        steps: completed optimizer steps of the present pass.
    """

    order: DataOrder
    epoch: int = 0
    steps: int = 0

    def save(self, checkpoint: Path) -> None:
        """Write the place into a checkpoint folder, and make the folder if needed."""
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


class DataProgress(TrainerCallback):
    """Follow a run through its data."""

    def __init__(self) -> None:
        self.begin(DataPlace({}))

    def begin(self, place: DataPlace) -> None:
        """Set the place from which training is about to continue."""
        self.place = place
        self._in_pass = False

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        """Count a completed pass.

        The pass is not counted in `on_epoch_end`, which is also called if training stops within a pass.
        """
        if self._in_pass:
            self.place = replace(self.place, epoch=self.place.epoch + 1, steps=0)
        self._in_pass = True

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Count a completed step."""
        self.place = replace(self.place, steps=self.place.steps + 1)


def agreed_place(order: DataOrder, checkpoint: str | None, args: DistCAArguments, groups: Groups) -> DataPlace:
    """Return the place to train from: the checkpoint's, or the start. A collective.

    Args:
        order: requested order of documents.
        checkpoint: folder; None to begin anew.
        args: with `ignore_data_skip`, the checkpoint's place and order are ignored.

    Returns:
        The place, in the order of the checkpoint, whose micro-batches may be smaller than requested.

    Raises:
        ValueError: on every rank, if the remaining documents would come in another order than before; names the
            settings and their required values.
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
            "%s is %s, but micro-batches stay of at most %s tokens as in the checkpoint; "
            "ignore_data_skip=True begins a new pass with larger ones",
            CAPACITY,
            order[CAPACITY],
            place.order[CAPACITY],
        )
    return place


def _load(checkpoint: str) -> DataPlace:
    file = Path(checkpoint) / FILE
    if not file.is_file():
        raise ValueError(
            f"{checkpoint} has no {FILE}, which lists the documents already seen: another trainer or an earlier "
            "version saved it. Set ignore_data_skip=True to begin a new pass over the data"
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

"""Place in the training data: what decides the order of documents, and how far they are read.

A checkpoint keeps it. Trainer alone would skip a number of batches: the wrong documents if batches
have changed, and none if the number of steps of a pass is unknown.
"""

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

from hf_distca.checks.run_rules import Resume

PLACE_FILE = "data_order.json"
"""File of a checkpoint with the place in the data."""
CAPACITY = "ranks * tokens_per_rank"
"""Setting that may grow on resume: micro-batches keep their old size, and still fit."""
RANK_CAPACITY = "tokens_per_rank"
"""Setting that decides the batches of a stream."""
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
"""Setting that decides the order of documents where some share prefixes: those come together. A
checkpoint without it has other documents, or is of an earlier version."""
WORKERS = "dataloader_num_workers"
"""Setting that decides the order of a stream."""
DIVIDED = "divided_streams"
"""Setting that decides which documents of a stream a rank takes. A checkpoint without it is of
streams that every rank was given whole."""
DataOrder = dict[str, int | str]
"""Everything that decides which documents a step trains on, by the names of the user's settings."""


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


def stored_place(checkpoint: Path, order: DataOrder, ranks: int) -> DataPlace:
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

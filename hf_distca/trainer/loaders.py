"""Data loaders of a trainer, which give a rank its rows of each global micro-batch, one micro-batch ahead."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
from accelerate.data_loader import prepare_data_loader
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset
from tqdm.auto import tqdm
from transformers import Trainer
from transformers.trainer_utils import seed_worker

from hf_distca.collator.collation import DistCACollator, RankDocuments
from hf_distca.collator.documents import (
    READ_BATCH,
    Columns,
    check_stored_documents,
    check_targets,
    dataset_fingerprint,
    document_lengths,
)
from hf_distca.collator.padding_free import CollatorWithLengths
from hf_distca.collator.refusals import Data
from hf_distca.collator.sampler import GlobalBatchSampler, fit_documents
from hf_distca.collator.streams import StreamPacker
from hf_distca.collator.summary import documents_summary
from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.plan import PLAN_KEY, MicroBatchPlan
from hf_distca.trainer.processes import Reading, ReadingProcesses


class PackedLoaders:
    """Make loaders of data sets that hf_distca packs."""

    def __init__(self, trainer: Any, dispatcher: Dispatcher) -> None:
        self._trainer, self._args, self._dispatcher = trainer, trainer.args, dispatcher
        model_inputs: frozenset[str] | None = None
        if self._args.remove_unused_columns:
            trainer._set_signature_columns_if_needed()
            model_inputs = frozenset(trainer._signature_columns or ())
        self._columns = Columns(self._args.length_column_name, model_inputs)
        self._have_targets: set[int] = set()  # ids of data sets
        self._summarized: set[int] = set()  # ids of data sets
        # Keeps the data set alive, so that no other object gets its id.
        self._lengths: dict[int, tuple[Any, tuple[NDArray[np.int64], str]]] = {}

    def lengths(self, dataset: Any) -> tuple[NDArray[np.int64], str]:
        """Return [documents] int64 lengths and the fingerprint of a data set, read once.

        A collective of the world.
        """
        if id(dataset) in self._lengths:
            return self._lengths[id(dataset)][1]
        groups, limits, name = self._dispatcher.groups, self._dispatcher.limits, self._name(dataset)
        progress = groups.rank == 0 and not self._args.disable_tqdm
        error, lengths, fingerprint = None, np.empty(0, np.int64), ""
        try:
            lengths = document_lengths(dataset, self._columns, progress, name=name, limits=limits)
            share = groups.rank, groups.ranks
            check_stored_documents(
                dataset, lengths, self._columns, progress, name=name, limits=limits, share=share
            )
            fingerprint = dataset_fingerprint(dataset, lengths, self._columns, name=name)
        # A data set may raise anything, and the other ranks must not wait for this rank.
        except Exception as caught:
            error = caught
        groups.raise_together(error, in_world=True)
        size = f"{len(lengths)} documents, {lengths.sum()} tokens"
        fingerprints, sizes = zip(
            *groups.all_gather((fingerprint, size), in_world=True), strict=True
        )
        if len(set(fingerprints)) > 1:
            raise Data.DIFFERENT.error(
                found="; ".join(f"rank {rank}: {size}" for rank, size in enumerate(sizes))
            )
        self._lengths[id(dataset)] = dataset, (lengths, fingerprint)
        return lengths, fingerprint

    def excerpts(
        self, dataset: Any, capacity: int = 0, bins: int = 0
    ) -> tuple[NDArray[np.void], int, int]:
        """Return the excerpts of a data set with a length, the capacity of a bin and the bins of a micro-batch.

        A collective of the world where the data set is new. Every rank raises ValueError for data
        that cannot train.

        Args:
            capacity: maximum number of tokens of a global micro-batch; 0 means ranks ·
                tokens_per_rank.
            bins: number of bins of a micro-batch; 0 means one for each rank if documents must stay
                whole, or else one.
        """
        groups, name = self._dispatcher.groups, self._name(dataset)
        lengths, _ = self.lengths(dataset)
        whole = self._dispatcher.settings.document_layout == "whole" or bins > 1
        bins = bins or (groups.ranks if whole else 1)
        limit_name = "tokens_per_rank" if whole else "ranks · tokens_per_rank"
        capacity = (capacity or groups.ranks * self._args.tokens_per_rank) // bins
        policy, limits = self._args.long_documents, self._dispatcher.limits
        excerpts = fit_documents(lengths, capacity, policy, limit_name, name=name, limits=limits)
        self._dispatcher.see_length(int((excerpts["stop"] - excerpts["start"]).max(initial=0)))
        if id(dataset) not in self._have_targets:
            error = None
            try:
                check_targets(dataset, excerpts, self._columns, name=name)
            except Exception as caught:
                error = caught
            groups.raise_together(error, in_world=True)
            self._have_targets.add(id(dataset))
        return excerpts, capacity, bins

    def print_summary(self, dataset: Any, capacity: int = 0, bins: int = 0) -> None:
        """Print once, on the first process, how many documents a data set has and which of them are cut.

        A collective of the world where the data set is new.

        Args:
            capacity, bins: as in `excerpts`.
        """
        lengths, _ = self.lengths(dataset)
        excerpts, _, _ = self.excerpts(dataset, capacity, bins)
        if self._args.process_index == 0 and id(dataset) not in self._summarized:
            tqdm.write(
                documents_summary(self._name(dataset), lengths, excerpts)
            )  # beside the bars of other ranks
        self._summarized.add(id(dataset))

    def check_evaluation_data(self) -> None:
        """Raise ValueError on every rank if an evaluation would fail because of its data.

        A collective of the world.

        Of a stream that can be read again the first documents of every rank are read.
        """
        groups = self._dispatcher.groups
        sets = named_datasets(self._trainer.eval_dataset, "eval_dataset")
        names = groups.all_gather(tuple(sets), in_world=True)
        if len(set(names)) > 1:
            raise Data.DIFFERENT.error(
                found="; ".join(f"rank {rank}: {each}" for rank, each in enumerate(names))
            )
        for dataset in sets.values():
            if not is_stream(dataset):
                self.excerpts(dataset)
                continue
            error, read = None, 0
            try:
                packer = self._packer(dataset)
                batches = iter(packer if packer.can_be_read_again else ())
                while read < READ_BATCH and (batch := next(batches, None)):
                    read += len(batch["document_lengths"])
            except Exception as caught:
                error = caught
            groups.raise_together(error, in_world=True)

    def _name(self, dataset: Any) -> str:
        """Return the name of a data set in errors: the trainer's argument that it is."""
        trainer = self._trainer
        named = {
            **named_datasets(trainer.train_dataset, "train_dataset"),
            **named_datasets(trainer.eval_dataset, "eval_dataset"),
        }
        return next((name for name, each in named.items() if each is dataset), "the data set")

    def _packer(self, dataset: Any) -> StreamPacker:
        """Return this rank's share of a stream, packed."""
        args, groups = self._args, self._dispatcher.groups
        place = groups.ranks, groups.rank, args.tokens_per_rank, args.long_documents, self._columns
        return StreamPacker(dataset, *place, self._name(dataset), self._dispatcher.limits)

    def loader(
        self, dataset: Any, *, shuffle: bool, capacity: int = 0, bins: int = 0
    ) -> DataLoader[Any]:
        """Return a loader of this rank's rows: of planned batches, or of a stream's, which are planned later.

        Args:
            capacity, bins: as in `excerpts`.
        """
        args, groups = self._args, self._dispatcher.groups
        options: dict[str, Any] = {"batch_size": None}
        if is_stream(dataset):
            dataset = self._packer(dataset)
        else:
            excerpts, capacity, bins = self.excerpts(dataset, capacity, bins)
            lengths, _ = self.lengths(dataset)
            name, settings = self._name(dataset), self._dispatcher.settings
            dataset = RankDocuments(dataset, lengths, settings, groups.rank, self._columns, name)
            sampler = GlobalBatchSampler(
                excerpts,
                capacity,
                shuffle=shuffle,
                seed=args.seed if args.data_seed is None else args.data_seed,
                bins=bins,
                choices=self._dispatcher.choices,
            )
            options = {"batch_sampler": sampler, "collate_fn": DistCACollator(groups.rank)}
        names = (
            "num_workers",
            "pin_memory",
            "persistent_workers",
            "prefetch_factor",
            "multiprocessing_context",
        )
        loader: DataLoader[Any] = DataLoader(
            dataset,
            worker_init_fn=partial(
                seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
            ),
            **{name: getattr(args, f"dataloader_{name}") for name in names},
            **options,
        )
        config: Any = args.accelerator_config
        # Undivided: the loader already knows its rank.
        alone = {"num_processes": 1, "process_index": 0, "dispatch_batches": False}
        prepared: DataLoader[Any] = prepare_data_loader(
            loader,
            self._dispatcher.device,
            put_on_device=True,
            non_blocking=config.non_blocking,
            **alone,
        )
        return prepared


def is_stream(dataset: Any) -> bool:
    """Return whether a data set has no length, so that its documents are unknown before they come."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")


def named_datasets(given: Any, name: str) -> dict[str, Any]:
    """Return a trainer's data set, or its dictionary of several data sets, by name.

    None for None.
    """
    if isinstance(given, dict):
        return {f"{name}[{key!r}]": dataset for key, dataset in given.items()}
    return {} if given is None else {name: given}


@contextmanager
def lengths_read_on_host(trainer: Trainer, dataset: Any) -> Iterator[None]:
    """Make a padding-free trainer's loaders report document lengths, read before batches go to the device."""
    collator, by_rank_0 = (
        trainer.data_collator,
        cast(Any, trainer.args.accelerator_config).dispatch_batches,
    )
    # Where accelerate has rank 0 read for all ranks, rank 0 can send tensors only.
    if not (isinstance(dataset, IterableDataset) if by_rank_0 is None else by_rank_0):
        trainer.data_collator = CollatorWithLengths(collator)
    try:
        yield
    finally:
        trainer.data_collator = collator


class UpcomingBatches:
    """Fetch the micro-batches of optimizer steps.

    Read, plan and bind the next ones while the device computes.

    The loader's batches are planned when they are read, or all ranks plan them here in lockstep:
    documents then lie on the rank that reads them, and batches follow until the data of every rank
    has ended.

    With dedicated servers nothing is bound ahead: a plan is made for the servers that are present
    when it is bound.
    """

    def __init__(self, dispatcher: Dispatcher, processes: ReadingProcesses) -> None:
        self._dispatcher, self._processes = dispatcher, processes
        self._reading: Reading | None = None  # None without processes
        self._plans: deque[MicroBatchPlan] = deque()  # plans of this step that have not begun
        self._count = 0  # micro-batches of a step
        self._loader: Iterator[dict[str, Any]] | None = None
        self._planned = False  # whether the loader plans
        self._read_ahead: list[dict[str, Any]] = []  # planned micro-batches of the next step
        self._ended = False  # on all ranks, or because a rank cannot read
        self._failed = (
            False  # a rank cannot read: on all ranks, or on this rank if the loader plans
        )
        self._error: Exception | None = None  # why this rank cannot read
        self._bound: tuple[MicroBatchPlan, BoundPlan] | None = None

    def fetch(
        self, loader: Iterator[dict[str, Any]], count: int, *, planned: bool
    ) -> list[dict[str, Any]]:
        """Return the planned micro-batches of a step, fewer than `count` at the end of the data.

        A collective if the loader's batches are not `planned`.

        Raises:
            Exception: This rank could not read a micro-batch of this step. Unless the loader plans,
                every rank raises.
        """
        if loader is not self._loader:
            self._loader, self._planned, self._read_ahead = loader, planned, []
            self._ended, self._failed, self._error = False, False, None
            self._end_reading()
            self._reading = self._processes.begin()
        self._count = count
        batches, self._read_ahead = self._read_ahead[:count], self._read_ahead[count:]
        while len(batches) < count and (batch := self._read()):
            batches += batch
        missing = count - len(batches)
        if missing and self._failed:
            self._raise()
        if missing and batches and not planned:  # a step of a stream has all its micro-batches
            batches += self._dispatcher.plan_batches([], at_least=missing)
        self._plans = deque(batch[PLAN_KEY] for batch in batches)
        return batches

    def bind(self, plan: MicroBatchPlan) -> BoundPlan:
        """Return a plan bound to this rank; a plan bound ahead is handed out once."""
        if self._plans and self._plans[0] is plan:
            self._plans.popleft()
        if self._bound is not None and self._bound[0] is plan:
            bound, self._bound = self._bound[1], None
            return bound
        return self._dispatcher.bind(plan)

    def prepare_next(self) -> None:
        """Read and plan one more micro-batch of the next step, and bind the plan of the next micro-batch.

        To be called once a micro-batch, after its work is launched. A collective if the loader does
        not plan.
        """
        if self._loader is not None and len(self._read_ahead) < self._count:
            self._read_ahead += self._read()
        upcoming = [*self._plans, *(batch[PLAN_KEY] for batch in self._read_ahead)]
        if upcoming and self._dispatcher.remote is None:
            self._bound = upcoming[0], self._dispatcher.bind(upcoming[0])

    def _read(self) -> list[dict[str, Any]]:
        """Return one more planned micro-batch.

        None if the data has ended or a rank could not read.
        """
        if self._ended or self._loader is None:
            return []
        batches: list[dict[str, Any]] = []
        try:
            with nullcontext() if self._reading is None else self._reading.batch():
                batches = list(islice(self._loader, 1))
        except Exception as error:  # raised by `fetch`: the steps before need no batch of this one
            self._error = error
        self._failed = self._error is not None
        if not self._planned:
            (self._failed,) = self._dispatcher.groups.any_of([self._failed])
            batches = [] if self._failed else self._dispatcher.plan_batches(batches)
        self._ended = not batches
        return batches

    def close(self) -> None:
        """Let an unfinished loader end, whose processes then stop."""
        self._end_reading()
        self._loader = None

    def _end_reading(self) -> None:
        if self._reading is not None:
            self._reading.end()

    def _raise(self) -> None:
        if self._planned and self._error is not None:
            raise self._error
        self._dispatcher.groups.raise_together(self._error)


class EvaluationLoader:
    """Loader of an evaluation's planned micro-batches, which come from the `upcoming` ones."""

    def __init__(
        self, loader: DataLoader[Any], upcoming: UpcomingBatches, *, planned: bool
    ) -> None:
        self._loader, self._upcoming, self._planned = loader, upcoming, planned
        self.dataset = loader.dataset
        # None where documents come in an order that only a stream or a collator knows.
        self.sampler = (
            loader.batch_sampler if isinstance(loader.batch_sampler, GlobalBatchSampler) else None
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        cast(Any, self._loader).set_epoch(0)  # every evaluation reads in the same order
        batches = iter(self._loader)
        while planned := self._upcoming.fetch(batches, 1, planned=self._planned):
            yield planned[0]

"""Data loaders of a trainer: they give a rank its rows of each global micro-batch.

They read and plan one micro-batch ahead, while the device computes.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing import get_start_method
from typing import Any, cast

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset
from tqdm.auto import tqdm
from transformers import Trainer
from transformers.trainer_utils import seed_worker

from hf_distca.checks.data_rules import Data
from hf_distca.collator.collation import DistCACollator, RankDocuments
from hf_distca.collator.documents import (
    READ_BATCH,
    Columns,
    check_stored_documents,
    check_targets,
    dataset_fingerprint,
    document_lengths,
    is_stored,
)
from hf_distca.collator.forking import FORK_HANGS, fork_can_hang
from hf_distca.collator.images import DocumentImages, PartOfDataset, may_have_images, read_images
from hf_distca.collator.padding_free import CollatorWithLengths
from hf_distca.collator.prefixes import (
    SharedBeginnings,
    block_hashes,
    first_hashes,
    repeated,
)
from hf_distca.collator.sampler import GlobalBatchSampler, fit_documents
from hf_distca.collator.streams import NOTHING_READ, StreamPacker
from hf_distca.collator.summary import documents_summary
from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.process_groups import Groups
from hf_distca.models.sharing import log_alone
from hf_distca.plan import PLAN_KEY, MicroBatchPlan
from hf_distca.trainer.arguments import DistCAPaddedArguments
from hf_distca.trainer.parallel import encoders_of

logger = logging.getLogger(__name__)

FEWER = (
    "%s is read by %s process(es) on each rank, although dataloader_num_workers=%s: only the "
    "shards of a datasets.IterableDataset are divided over processes"
)
LOADER_OPTIONS = (
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "prefetch_factor",
    "multiprocessing_context",
)
"""Options of a DataLoader that the trainer's arguments set, there with the prefix `dataloader_`."""


class PackedLoaders:
    """Make loaders of data sets that hf_distca packs."""

    def __init__(self, trainer: Any, dispatcher: Dispatcher) -> None:
        self._trainer = trainer
        self._args = trainer.args
        self._dispatcher = dispatcher
        model_inputs: frozenset[str] | None = None
        if self._args.remove_unused_columns:
            trainer._set_signature_columns_if_needed()
            model_inputs = frozenset(trainer._signature_columns or ())
        self._image_model = encoders_of(trainer.model, trainer.accelerator)
        fields = frozenset() if self._image_model is None else self._image_model.fields
        self._columns = Columns(self._args.length_column_name, model_inputs, fields)
        # By the id of a data set of those whose lengths are known: images of its documents.
        self._images: dict[int, DocumentImages | None] = {}
        # By the id of a data set: the data set, its lengths and its fingerprint. The data set is
        # kept alive, so that no other object gets its id.
        self._lengths: dict[int, tuple[Any, tuple[NDArray[np.int64], str]]] = {}
        # By the id of a data set of those: what its documents have in common.
        self._beginnings: dict[int, SharedBeginnings | None] = {}
        self._have_targets: set[int] = set()  # ids of data sets that are known to have targets
        self._summarized: set[int] = set()  # ids of data sets whose summary has been printed

    def lengths(self, dataset: Any) -> tuple[NDArray[np.int64], str]:
        """Return [documents] int64 lengths and the fingerprint of a data set, read once.

        A collective of the world.
        """
        if id(dataset) in self._lengths:
            return self._lengths[id(dataset)][1]
        groups = self._dispatcher.groups
        limits = self._dispatcher.limits
        name = self._name(dataset)
        # 1. Read the lengths of all documents on each rank, and check a share of the documents.
        progress = groups.rank == 0 and not self._args.disable_tqdm
        error: Exception | None = None
        lengths: NDArray[np.int64] = np.empty(0, np.int64)
        fingerprint = ""
        read = self._read_images(dataset)
        try:
            if read is None or is_stored(dataset):
                lengths = document_lengths(
                    dataset, self._columns, progress, name=name, limits=limits
                )
            else:
                lengths = np.frombuffer(b"".join(part.lengths for part in read), np.int64)
            share = groups.rank, groups.ranks
            check_stored_documents(
                dataset, lengths, self._columns, progress, name=name, limits=limits, share=share
            )
            fingerprint = dataset_fingerprint(dataset, lengths, self._columns, name=name)
        # A data set may raise anything, and the other ranks must not wait for this rank.
        except Exception as caught:
            error = caught
        groups.raise_together(error, in_world=True)
        # 2. Check that all ranks have the same documents.
        size = f"{len(lengths)} documents, {lengths.sum()} tokens"
        fingerprints, sizes = zip(
            *groups.all_gather((fingerprint, size), in_world=True), strict=True
        )
        if len(set(fingerprints)) > 1:
            raise Data.DIFFERENT.error(found=_listed_by_rank(sizes))
        self._lengths[id(dataset)] = dataset, (lengths, fingerprint)
        return lengths, fingerprint

    def _read_images(self, dataset: Any) -> list[PartOfDataset] | None:
        """Find the images of a data set, each rank those of a share of its documents.

        A collective of the world. Return what the ranks read, or None where there are no images.
        """
        model = self._image_model
        groups = self._dispatcher.groups
        has_fields = model is not None and may_have_images(dataset, model)
        if model is None or not any(groups.all_gather(has_fields, in_world=True)):
            self._images[id(dataset)] = None
            return None
        name = self._name(dataset)
        error: Exception | None = None
        mine: PartOfDataset | None = None
        try:
            share = groups.rank, groups.ranks
            limits = self._dispatcher.limits
            mine = read_images(dataset, model, self._columns, name, share, limits)
        except Exception as caught:
            error = caught
        groups.raise_together(error, in_world=True)
        parts: list[PartOfDataset] = groups.all_gather(mine)
        self._images[id(dataset)] = DocumentImages.of_parts(model, parts)
        return parts

    def images(self, dataset: Any) -> DocumentImages | None:
        """Return the images of a data set's documents; None without images.

        A collective of the world where the data set is new.
        """
        self.lengths(dataset)
        return self._images[id(dataset)]

    def known_tokens(self, dataset: Any) -> int | None:
        """Return the tokens of a data set whose lengths have been read; None otherwise."""
        known = self._lengths.get(id(dataset))
        return None if known is None else int(known[1][0].sum())

    def beginnings(self, dataset: Any, *, shares: bool) -> SharedBeginnings | None:
        """Return what the documents of a data set have in common, found once; None if nothing.

        A collective of the world. Each rank hashes a share of the documents, and hashes whole
        documents only where their first blocks are equal.

        Args:
            shares: whether documents that begin alike share rows; if not, None is returned.
        """
        if not shares or is_stream(dataset):
            return None
        lengths, _ = self.lengths(dataset)
        if id(dataset) in self._beginnings:
            return self._beginnings[id(dataset)]
        if self.images(dataset) is not None:
            return None  # equal tokens may stand for different images
        groups = self._dispatcher.groups
        name = self._name(dataset)
        beginnings: SharedBeginnings | None = None
        is_immutable = groups.all_gather(is_stored(dataset), in_world=True)
        if all(is_immutable):
            share = groups.rank, groups.ranks
            (hashes,) = self._gathered(lambda: (first_hashes(dataset, share),))
            documents = repeated(hashes)
            if len(documents):
                share_of_documents = np.array_split(documents, groups.ranks)[groups.rank]
                beginnings = SharedBeginnings.of(
                    lengths,
                    documents,
                    *self._gathered(
                        lambda: block_hashes(dataset, share_of_documents, self._columns, name)
                    ),
                )
        else:
            reason = (
                f"documents of {name}, a {type(dataset).__name__}, may change between two "
                "readings, other than those of a datasets.Dataset without a transform"
            )
            log_alone(reason, self._args.process_index)
        self._beginnings[id(dataset)] = beginnings
        return beginnings

    def _gathered(self, make_bytes: Callable[[], tuple[bytes, ...]]) -> tuple[bytes, ...]:
        """Return the bytes that all ranks read, joined in their order. A collective of the world.

        Processes that share the rows of a rank read the same.
        """
        groups = self._dispatcher.groups
        error: Exception | None = None
        mine: tuple[bytes, ...] = ()
        try:
            mine = make_bytes()
        except Exception as caught:
            error = caught
        groups.raise_together(error, in_world=True)
        return tuple(b"".join(parts) for parts in zip(*groups.all_gather(mine), strict=True))

    def excerpts(
        self, dataset: Any, capacity: int = 0, bins: int = 0
    ) -> tuple[NDArray[np.void], int, int]:
        """Return the excerpts of a data set that fit into bins, and the size of the bins.

        A collective of the world where the data set is new. Every rank raises ValueError for data
        that cannot train.

        Args:
            capacity: maximum number of tokens of a global micro-batch; 0 means ranks ·
                tokens_per_rank.
            bins: number of bins of a micro-batch; 0 means one for each rank if documents must stay
                whole, or else one.

        Returns:
            The [excerpts] of dtype EXCERPT, the maximum number of tokens of a bin, and the number
            of bins of a micro-batch.
        """
        groups = self._dispatcher.groups
        limits = self._dispatcher.limits
        name = self._name(dataset)
        lengths, _ = self.lengths(dataset)
        # 1. The size of a bin: all rows of a micro-batch, or those of a rank for whole documents.
        stay_whole = self._dispatcher.settings.document_layout == "whole" or bins > 1
        if bins == 0:
            bins = groups.ranks if stay_whole else 1
        if capacity == 0:
            capacity = groups.ranks * self._args.tokens_per_rank
        bin_capacity = capacity // bins
        limit_name = "tokens_per_rank" if stay_whole else "ranks · tokens_per_rank"
        # 2. The excerpts that fit.
        excerpts = fit_documents(
            lengths, bin_capacity, self._args.long_documents, limit_name, name=name, limits=limits
        )
        excerpt_lengths = excerpts["stop"] - excerpts["start"]
        images = self.images(dataset)
        if images is not None:
            images.check_whole(excerpts, lengths, name, limit_name, bin_capacity)
        self._dispatcher.see_length(int(excerpt_lengths.max(initial=0)))
        # 3. A data set without targets is refused once, on all ranks together.
        if id(dataset) not in self._have_targets:
            error: Exception | None = None
            try:
                check_targets(dataset, excerpts, self._columns, name=name)
            except Exception as caught:
                error = caught
            groups.raise_together(error, in_world=True)
            self._have_targets.add(id(dataset))
        return excerpts, bin_capacity, bins

    def drawn_rows(self, dataset: Any, *, shares: bool) -> NDArray[np.int64]:
        """Return the rows of what is drawn as a whole: documents, or groups that share rows.

        A collective of the world where the data set is new.
        """
        lengths, _ = self.lengths(dataset)
        beginnings = self.beginnings(dataset, shares=shares)
        if beginnings is None:
            return lengths
        excerpts, capacity, _ = self.excerpts(dataset)
        _, rows = beginnings.groups(excerpts, capacity)
        return rows

    def print_summary(self, dataset: Any, capacity: int = 0, bins: int = 0) -> None:
        """Print how many documents a data set has and which are cut, once, on the first process.

        A collective of the world where the data set is new.

        Args:
            capacity, bins: as in `excerpts`.
        """
        lengths, _ = self.lengths(dataset)
        excerpts, _, _ = self.excerpts(dataset, capacity, bins)
        if self._args.process_index == 0 and id(dataset) not in self._summarized:
            # print would write into the progress bars of other ranks.
            tqdm.write(documents_summary(self._name(dataset), lengths, excerpts))
        self._summarized.add(id(dataset))

    def check_evaluation_data(self) -> None:
        """Raise ValueError on every rank if an evaluation would fail because of its data.

        A collective of the world.
        """
        groups = self._dispatcher.groups
        datasets = named_datasets(self._trainer.eval_dataset, "eval_dataset")
        names = ", ".join(datasets) or "no eval_dataset"
        names_of_ranks = groups.all_gather(names, in_world=True)
        if len(set(names_of_ranks)) > 1:
            raise Data.DIFFERENT.error(found=_listed_by_rank(names_of_ranks))
        for dataset in datasets.values():
            if is_stream(dataset):
                self._check_stream(dataset)
            else:
                self.excerpts(dataset)

    def _check_stream(self, dataset: Any) -> None:
        """Raise an error on every rank if the first documents of a stream cannot be read.

        A collective of the world. A stream that can be read only once is left alone.
        """
        groups = self._dispatcher.groups
        packer = self._packer(dataset)
        error: Exception | None = None
        try:
            if packer.can_be_read_again:
                documents = 0
                for batch in packer:
                    documents += len(batch["document_lengths"])
                    if documents >= READ_BATCH:
                        break
        except Exception as caught:
            error = caught
        groups.raise_together(error, in_world=True)
        check_beginnings(packer, groups)

    def _name(self, dataset: Any) -> str:
        """Return the name of a data set in errors: the trainer's argument that holds it."""
        named = {
            **named_datasets(self._trainer.train_dataset, "train_dataset"),
            **named_datasets(self._trainer.eval_dataset, "eval_dataset"),
        }
        return next((name for name, value in named.items() if value is dataset), "the data set")

    def _packer(self, dataset: Any) -> StreamPacker:
        """Return this rank's share of a stream, packed."""
        args = self._args
        groups = self._dispatcher.groups
        return StreamPacker(
            dataset,
            groups.ranks,
            groups.rank,
            args.tokens_per_rank,
            args.long_documents,
            replace(self._columns, images=frozenset()),
            self._name(dataset),
            self._dispatcher.limits,
            args.divided_streams,
        )

    def loader(
        self,
        dataset: Any,
        *,
        shuffle: bool,
        capacity: int = 0,
        bins: int = 0,
        shares: bool = False,
    ) -> DataLoader[Any]:
        """Return a loader of this rank's rows.

        Batches of a data set with a length have a plan. Batches of a stream are planned later.

        Args:
            capacity, bins: as in `excerpts`.
            shares: whether documents that begin alike share rows.
        """
        args = self._args
        groups = self._dispatcher.groups
        seed = args.seed if args.data_seed is None else args.data_seed
        options: dict[str, Any] = {
            name: getattr(args, f"dataloader_{name}") for name in LOADER_OPTIONS
        }
        if is_stream(dataset):
            source: Any = self._packer(dataset)
            if args.dataloader_num_workers > source.most_processes and args.process_index == 0:
                logger.warning(FEWER, source.name, source.most_processes, options["num_workers"])
            options["num_workers"] = min(options["num_workers"], source.most_processes)
            # A stream that draws random numbers draws the same in the processes of all ranks.
            options |= {"batch_size": None, "generator": torch.Generator().manual_seed(seed)}
        else:
            excerpts, bin_capacity, bins = self.excerpts(dataset, capacity, bins)
            lengths, _ = self.lengths(dataset)
            beginnings = self.beginnings(dataset, shares=shares)
            source = RankDocuments(
                dataset,
                lengths,
                self._dispatcher.settings,
                groups.rank,
                self._columns,
                self._name(dataset),
                beginnings,
                self.images(dataset),
            )
            sampler = GlobalBatchSampler(
                excerpts,
                bin_capacity,
                shuffle=shuffle,
                seed=seed,
                bins=bins,
                costs=self._dispatcher.costs,
                beginnings=beginnings,
            )
            options |= {
                "batch_sampler": sampler,
                "collate_fn": DistCACollator(groups.rank),
                "worker_init_fn": partial(
                    seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
                ),
            }
        if options["num_workers"] > 0:
            options["timeout"] = batch_timeout(args)
        loader: DataLoader[Any] = DataLoader(source, **options)
        # One process alone: accelerate must not divide what the loader reads for its rank.
        prepared: DataLoader[Any] = prepare_data_loader(
            loader,
            self._dispatcher.device,
            num_processes=1,
            process_index=0,
            dispatch_batches=False,
            put_on_device=True,
            non_blocking=args.accelerator_config.non_blocking,
        )
        return prepared


def check_beginnings(packer: StreamPacker, groups: Groups) -> None:
    """Raise ValueError on every rank if ranks lose documents of a stream, or read them twice.

    A collective of the world, after the first batch of a pass.
    """
    beginnings = groups.all_gather((groups.rank, packer.beginning), in_world=True)
    # By what ranks share, a stream or rows: the process that is compared with others.
    first_by_rank: dict[int, tuple[int, int]] = {}
    first_by_beginning: dict[int, tuple[int, int]] = {}
    for process, (rank, beginning) in enumerate(beginnings):
        group = rank if packer.is_divided else 0
        first, expected = first_by_rank.setdefault(group, (process, beginning))
        if beginning != expected:
            refusal = Data.SHARED_ROWS if packer.is_divided else Data.STREAMS_DIFFER
            raise refusal.error(name=packer.name, first=first, other=process, ranks=groups.ranks)
        first, reader = first_by_beginning.setdefault(beginning, (process, group))
        if reader != group and beginning != NOTHING_READ:
            raise Data.STREAMS_EQUAL.error(name=packer.name, first=first, other=process)


def _listed_by_rank(descriptions: Iterable[Any]) -> str:
    """Return the text "rank 0: …; rank 1: …"."""
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(descriptions))


def warn_of_forks(args: DistCAPaddedArguments) -> None:
    """Warn on the first process if processes that read data can hang at their start."""
    method = args.dataloader_multiprocessing_context or get_start_method(allow_none=True)
    forks = args.dataloader_num_workers > 0 and method in (None, "fork")
    if forks and fork_can_hang() and args.process_index == 0:
        logger.warning(
            "dataloader_num_workers=%s starts processes by fork, but %s; or set "
            "dataloader_multiprocessing_context='forkserver', or dataloader_num_workers=0, which "
            "starts no process",
            args.dataloader_num_workers,
            FORK_HANGS,
        )


def batch_timeout(args: DistCAPaddedArguments) -> float:
    """Return the seconds after which a loader gives up waiting for a batch of its processes.

    It does so before other ranks give up waiting for this rank, so that all report its error.
    """
    return args.exchange_timeout / 2


def is_stream(dataset: Any) -> bool:
    """Return whether a data set has no length. Its documents are unknown before they come."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")


def named_datasets(argument: Any, name: str) -> dict[str, Any]:
    """Return the data sets of a trainer's argument by their names in errors.

    Args:
        argument: a data set, a dictionary of several, or None.
        name: name of the argument.
    """
    if argument is None:
        return {}
    if isinstance(argument, dict):
        return {f"{name}[{key!r}]": dataset for key, dataset in argument.items()}
    return {name: argument}


@contextmanager
def lengths_read_on_host(trainer: Trainer, dataset: Any) -> Iterator[None]:
    """Let the loaders that a trainer makes inside the block report document lengths.

    The lengths are read on the host, before a batch goes to the device. The trainer has a
    padding-free collator.
    """
    collator = trainer.data_collator
    config: Any = trainer.args.accelerator_config
    rank_0_reads = config.dispatch_batches
    if rank_0_reads is None:  # as accelerate decides
        rank_0_reads = isinstance(dataset, IterableDataset)
    # Where rank 0 reads for all ranks, it can send tensors only, and not the lengths.
    if not rank_0_reads:
        trainer.data_collator = CollatorWithLengths(collator)
    try:
        yield
    finally:
        trainer.data_collator = collator


class UpcomingBatches:
    """Fetch the micro-batches of optimizer steps, and prepare the next ones.

    While the device computes a micro-batch, the next one is read, planned and bound.

    - A loader may plan its batches. Each rank then reads its rows without the other ranks.
    - Otherwise all ranks plan together, one micro-batch at a time. Documents lie on the rank that
      reads them. Micro-batches follow until the data of every rank has ended.

    With remote workers nothing is bound ahead. A plan is made for the workers that are present when
    it is bound.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._loader: Iterator[dict[str, Any]] | None = None
        self._loader_plans = False
        self._count = 0  # micro-batches of a step
        self._plans: deque[MicroBatchPlan] = deque()  # plans of this step that have not begun
        self._read_ahead: list[dict[str, Any]] = []  # planned micro-batches of the next step
        # The plan that was bound ahead, and what it was bound to.
        self._bound: tuple[MicroBatchPlan, BoundPlan] | None = None
        self._ended = False  # the data of all ranks has ended, or a rank could not read
        self._failed = False  # a rank could not read; if the loader plans: this rank could not
        self._error: Exception | None = None  # why this rank could not read

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
            self._begin_pass(loader, planned=planned)
        self._count = count
        # 1. Take what has been read ahead, and read the rest.
        batches = self._read_ahead[:count]
        self._read_ahead = self._read_ahead[count:]
        while len(batches) < count:
            next_batch = self._read()
            if not next_batch:
                break
            batches += next_batch
        # 2. Fill up the last step, or say why a batch is missing.
        missing = count - len(batches)
        if missing and self._failed:
            self._raise()
        if missing and batches and not planned:  # a step of a stream has all its micro-batches
            batches += self._dispatcher.plan_batches([], at_least=missing)
        self._plans = deque(batch[PLAN_KEY] for batch in batches)
        return batches

    def _begin_pass(self, loader: Iterator[dict[str, Any]], *, planned: bool) -> None:
        """Begin to read another loader."""
        self._loader = loader
        self._loader_plans = planned
        self._read_ahead = []
        self._ended = False
        self._failed = False
        self._error = None

    def bind(self, plan: MicroBatchPlan) -> BoundPlan:
        """Return a plan bound to this rank; a plan bound ahead is handed out once."""
        if self._plans and self._plans[0] is plan:
            self._plans.popleft()
        if self._bound is not None and self._bound[0] is plan:
            _, bound = self._bound
            self._bound = None
            return bound
        return self._dispatcher.bind(plan)

    def prepare_next(self) -> None:
        """Read and plan one micro-batch of the next step.

        Bind the plan of the next micro-batch.

        To be called once a micro-batch, after its work is launched. A collective if the loader does
        not plan.
        """
        if self._loader is not None and len(self._read_ahead) < self._count:
            self._read_ahead += self._read()
        next_plan = self._next_plan()
        if next_plan is not None and self._dispatcher.remote is None:
            self._bound = next_plan, self._dispatcher.bind(next_plan)

    def _next_plan(self) -> MicroBatchPlan | None:
        """Return the plan of the next micro-batch, of this step or of the next one."""
        if self._plans:
            return self._plans[0]
        if self._read_ahead:
            plan: MicroBatchPlan = self._read_ahead[0][PLAN_KEY]
            return plan
        return None

    def _read(self) -> list[dict[str, Any]]:
        """Return one more planned micro-batch in a list.

        The list is empty if the data has ended or a rank could not read.
        """
        if self._ended or self._loader is None:
            return []
        batches: list[dict[str, Any]] = []
        try:
            batches = list(islice(self._loader, 1))
        except Exception as error:  # raised by `fetch`: the steps before need no batch of this one
            self._error = error
        self._failed = self._error is not None
        if not self._loader_plans:
            (self._failed,) = self._dispatcher.groups.any_of([self._failed])
            batches = [] if self._failed else self._dispatcher.plan_batches(batches)
        self._ended = not batches
        return batches

    def close(self) -> None:
        """Let an unfinished loader end, whose processes then stop."""
        self._loader = None

    def _raise(self) -> None:
        """Raise why a micro-batch could not be read. A collective if the loader does not plan."""
        if self._loader_plans and self._error is not None:
            raise self._error
        self._dispatcher.groups.raise_together(self._error)


class EvaluationLoader:
    """Loader of an evaluation's planned micro-batches.

    Args:
        loader: reads the batches.
        upcoming: fetches and prepares them.
        groups: ranks that evaluate together.
        planned: whether `loader` plans them.
    """

    def __init__(
        self, loader: DataLoader[Any], upcoming: UpcomingBatches, groups: Groups, *, planned: bool
    ) -> None:
        self._loader = loader
        self._upcoming = upcoming
        self._groups = groups
        self._planned = planned
        self.dataset = loader.dataset
        # None where documents come in an order that only a stream or a collator knows.
        self.sampler: GlobalBatchSampler | None = None
        if isinstance(loader.batch_sampler, GlobalBatchSampler):
            self.sampler = loader.batch_sampler

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        cast(Any, self._loader).set_epoch(0)  # every evaluation reads in the same order
        iterator = iter(self._loader)
        batches = self._upcoming.fetch(iterator, 1, planned=self._planned)
        if isinstance(self.dataset, StreamPacker):
            check_beginnings(self.dataset, self._groups)
        while batches:
            yield batches[0]
            batches = self._upcoming.fetch(iterator, 1, planned=self._planned)

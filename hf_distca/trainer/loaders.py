"""Data loaders of packed documents: they give a rank its rows of each global micro-batch."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from multiprocessing import get_start_method
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers.trainer_utils import seed_worker

from hf_distca.checks.capacity_rules import A_RANK, ALL_RANKS
from hf_distca.checks.data_rules import Data
from hf_distca.collator.collation import DistCACollator, RankDocuments
from hf_distca.collator.dataset_prefixes import (
    DatasetPrefixes,
    block_hashes,
    first_hashes,
    repeated,
)
from hf_distca.collator.documents import (
    READ_BATCH,
    Columns,
    check_stored_documents,
    check_targets,
    dataset_fingerprint,
    document_lengths,
    is_stored,
    is_stream,
    named_datasets,
)
from hf_distca.collator.forking import FORK_HANGS, fork_can_hang
from hf_distca.collator.images import DocumentImages, PartOfDataset, may_have_images, read_images
from hf_distca.collator.sampler import GlobalBatchSampler, fit_documents
from hf_distca.collator.streams import NOTHING_READ, StreamPacker
from hf_distca.collator.summary import documents_summary
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.process_groups import Groups
from hf_distca.models.images import image_model
from hf_distca.models.sharing import log_no_sharing
from hf_distca.trainer.arguments import DistCAPaddedArguments
from hf_distca.trainer.parallel import gathers_parameters

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
        self._image_model = image_model(trainer.model)
        fields = frozenset() if self._image_model is None else self._image_model.fields
        self._columns = Columns(self._args.length_column_name, model_inputs, fields)
        # By the id of a data set of those whose lengths are known: images of its documents.
        self._images: dict[int, DocumentImages | None] = {}
        # By the id of a data set: the data set, its lengths and its fingerprint. The data set is
        # kept alive, so that no other object gets its id.
        self._lengths: dict[int, tuple[Any, tuple[NDArray[np.int64], str]]] = {}
        # By the id of a data set of those: the equal prefixes of its documents.
        self._prefixes: dict[int, DatasetPrefixes | None] = {}
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
        images = DocumentImages.of_parts(model, parts)
        if images is not None and gathers_parameters(self._trainer.accelerator):
            # In a micro-batch without a gradient of an encoder, ZeRO-3 would take that of an
            # earlier step again. A filler has a gradient of 0.
            images = replace(images, always=images.modalities)
        self._images[id(dataset)] = images
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

    def prefixes(self, dataset: Any, *, shares: bool) -> DatasetPrefixes | None:
        """Return the equal prefixes of a data set's documents, found once; None if there are none.

        A collective of the world. Each rank hashes a share of the documents, and hashes whole
        documents only where their first blocks are equal.

        Args:
            shares: whether documents share prefixes; if not, None is returned.
        """
        if not shares or is_stream(dataset):
            return None
        lengths, _ = self.lengths(dataset)
        if id(dataset) in self._prefixes:
            return self._prefixes[id(dataset)]
        if self.images(dataset) is not None:
            return None  # equal tokens may stand for different images
        groups = self._dispatcher.groups
        name = self._name(dataset)
        prefixes: DatasetPrefixes | None = None
        is_immutable = groups.all_gather(is_stored(dataset), in_world=True)
        if all(is_immutable):
            share = groups.rank, groups.ranks
            (hashes,) = self._gathered(lambda: (first_hashes(dataset, share),))
            documents = repeated(hashes)
            if len(documents):
                share_of_documents = np.array_split(documents, groups.ranks)[groups.rank]
                prefixes = DatasetPrefixes.of(
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
            log_no_sharing(reason, self._args.process_index)
        self._prefixes[id(dataset)] = prefixes
        return prefixes

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

    def spans(
        self, dataset: Any, capacity: int = 0, bins: int = 0
    ) -> tuple[NDArray[np.void], int, int]:
        """Return the spans of a data set that fit into bins, and the size of the bins.

        A collective of the world where the data set is new. Every rank raises ValueError for data
        that cannot train.

        Args:
            capacity: maximum number of tokens of a global micro-batch; 0 means as
                many as all ranks hold.
            bins: number of bins of a micro-batch; 0 means one for each rank if documents must stay
                whole, or else one.

        Returns:
            The [spans] of dtype SPAN, the maximum number of tokens of a bin, and the number
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
            capacity = self._dispatcher.settings.micro_batch_tokens
        bin_capacity = capacity // bins
        limit_name = A_RANK if stay_whole else ALL_RANKS
        # 2. The spans that fit.
        spans = fit_documents(
            lengths, bin_capacity, self._args.long_documents, limit_name, name=name, limits=limits
        )
        span_lengths = spans["stop"] - spans["start"]
        images = self.images(dataset)
        if images is not None:
            images.check_whole(spans, lengths, name, limit_name, bin_capacity)
        self._dispatcher.see_length(int(span_lengths.max(initial=0)))
        # 3. A data set without targets is refused once, on all ranks together.
        if id(dataset) not in self._have_targets:
            error: Exception | None = None
            try:
                check_targets(dataset, spans, self._columns, name=name)
            except Exception as caught:
                error = caught
            groups.raise_together(error, in_world=True)
            self._have_targets.add(id(dataset))
        return spans, bin_capacity, bins

    def drawn_rows(self, dataset: Any, *, shares: bool) -> NDArray[np.int64]:
        """Return the rows of what is drawn as a whole: of each document, or each prefix tree.

        A collective of the world where the data set is new.
        """
        lengths, _ = self.lengths(dataset)
        prefixes = self.prefixes(dataset, shares=shares)
        if prefixes is None:
            return lengths
        spans, capacity, _ = self.spans(dataset)
        _, rows = prefixes.trees(spans, capacity)
        return rows

    def print_summary(self, dataset: Any, capacity: int = 0, bins: int = 0) -> None:
        """Print how many documents a data set has and which are cut, once, on the first process.

        A collective of the world where the data set is new.

        Args:
            capacity, bins: as in `spans`.
        """
        lengths, _ = self.lengths(dataset)
        spans, _, _ = self.spans(dataset, capacity, bins)
        if self._args.process_index == 0 and id(dataset) not in self._summarized:
            # print would write into the progress bars of other ranks.
            tqdm.write(documents_summary(self._name(dataset), lengths, spans))
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
                self.spans(dataset)

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
            self._dispatcher.settings.rows_per_rank,
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
            capacity, bins: as in `spans`.
            shares: whether documents share prefixes.
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
            spans, bin_capacity, bins = self.spans(dataset, capacity, bins)
            lengths, _ = self.lengths(dataset)
            prefixes = self.prefixes(dataset, shares=shares)
            source = RankDocuments(
                dataset,
                lengths,
                self._dispatcher.settings,
                groups.rank,
                self._columns,
                self._name(dataset),
                prefixes,
                self.images(dataset),
            )
            sampler = GlobalBatchSampler(
                spans,
                bin_capacity,
                shuffle=shuffle,
                seed=seed,
                bins=bins,
                costs=self._dispatcher.costs,
                prefixes=prefixes,
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

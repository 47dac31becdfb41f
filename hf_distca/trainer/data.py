"""Data loaders of DistCATrainer: each gives a rank its rows of one global micro-batch after another."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from hf_distca.collator.collation import DistCACollator
from hf_distca.collator.documents import Columns
from hf_distca.collator.lengths import dataset_fingerprint, document_lengths
from hf_distca.collator.long_documents import fit_documents
from hf_distca.collator.rank_documents import RankDocuments
from hf_distca.collator.sampler import GlobalBatchSampler
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.groups import Groups
from hf_distca.trainer.arguments import DistCATrainingArguments

AGREED = (
    "seed",
    "data_seed",
    "train_sampling_strategy",
    "long_documents",
    "remove_unused_columns",
    "length_column_name",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "attention_servers",
)
"""Arguments that decide which micro-batches come, and when: ranks that differ in one would exchange rows of others."""


def check_agreement(args: DistCATrainingArguments, groups: Groups) -> None:
    """Raise unless every rank would train on the same micro-batches in the same order. A collective.

    Raises:
        ValueError: on every rank, where an argument differs between ranks.
    """
    values = groups.all_gather(tuple(getattr(args, name) for name in AGREED))
    for name, by_rank in zip(AGREED, zip(*values, strict=True), strict=True):
        if len(set(by_rank)) > 1:
            raise ValueError(
                f"{name} differs between ranks, from rank 0 on it is {list(by_rank)}; start all ranks alike"
            )


def agreed_lengths(
    dataset: Any, columns: Columns, args: DistCATrainingArguments, groups: Groups
) -> tuple[NDArray[np.int64], str]:
    """Lengths of the documents, checked, and the fingerprint, those of every other rank. A collective.

    Raises:
        ValueError: on every rank, where the data set of any rank is faulty or differs from another's.
    """
    error, lengths, fingerprint = None, np.empty(0, np.int64), ""
    try:
        lengths = document_lengths(dataset, columns, progress=groups.rank == 0 and not args.disable_tqdm)
        fingerprint = dataset_fingerprint(dataset, lengths, columns)
    except Exception as caught:  # whatever a data set raises: the other ranks must not wait for this one
        error = caught
    groups.raise_together(error)
    others = groups.all_gather((fingerprint, len(lengths), int(lengths.sum())))
    if any(other[0] != others[0][0] for other in others):
        found = "; ".join(f"rank {rank}: {n} documents, {total} tokens" for rank, (_, n, total) in enumerate(others))
        raise ValueError(
            f"ranks were given different data sets ({found}); every rank needs the same documents in the same "
            "order: give them all the whole data set, shuffled with one seed"
        )
    return lengths, fingerprint


def packed_loader(
    dataset: Any,
    lengths: NDArray[np.int64],
    columns: Columns,
    args: DistCATrainingArguments,
    dispatcher: Dispatcher,
    loader_options: dict[str, Any],
    *,
    capacity: int,
    shuffle: bool,
) -> DataLoader[Any]:
    """A loader of planned global micro-batches of whole documents, each of at most `capacity` tokens."""
    rank, settings = dispatcher.groups.rank, dispatcher.settings
    excerpts = fit_documents(lengths, capacity, args.long_documents, "ranks · tokens_per_rank")
    seed = args.seed if args.data_seed is None else args.data_seed
    loader = DataLoader(
        RankDocuments(dataset, lengths, settings, rank, columns),
        batch_sampler=GlobalBatchSampler(excerpts, capacity, shuffle=shuffle, seed=seed),
        collate_fn=DistCACollator(rank),
        **loader_options,
    )
    return unsharded(loader, dispatcher.device, args)


def unsharded(loader: DataLoader[Any], device: torch.device, args: DistCATrainingArguments) -> DataLoader[Any]:
    """The loader as accelerate prepares it, but not divided among ranks: it knows its rank already."""
    config: Any = args.accelerator_config
    prepared: DataLoader[Any] = prepare_data_loader(
        loader,
        device=device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        dispatch_batches=False,
        non_blocking=config.non_blocking,
    )
    return prepared


def is_dispatched(dataset: Any, args: DistCATrainingArguments) -> bool:
    """Whether accelerate's loader has rank 0 read for all ranks and hand out tensors, which are all that it can."""
    config: Any = args.accelerator_config
    dispatches: bool | None = config.dispatch_batches
    return isinstance(dataset, IterableDataset) if dispatches is None else dispatches


class PlannedLoader:
    """Batches of a loader planned one by one, until the data of every rank has ended.

    Args:
        loader: gives batches whose documents already lie on this rank; ranks may have different numbers.
        dispatcher: plans them.
    """

    def __init__(self, loader: DataLoader[Any], dispatcher: Dispatcher) -> None:
        self._loader = loader
        self._dispatcher = dispatcher
        self.dataset = loader.dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self._loader)
        while planned := self._dispatcher.plan_batches(list(islice(batches, 1))):
            yield planned[0]

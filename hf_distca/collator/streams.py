"""Pack a stream of documents whose lengths are unknown beforehand."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import datasets
import numpy as np
import torch
from datasets.distributed import split_dataset_by_node
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from hf_distca.batches.limits import NO_LIMITS, Limits
from hf_distca.collator.collation import excerpt_rows, rows_batch
from hf_distca.collator.documents import ANY_COLUMNS, Columns, token_document
from hf_distca.collator.refusals import Data
from hf_distca.collator.sampler import fit_documents
from hf_distca.collator.texts import TextStream
from hf_distca.planner.bin_packing import pack_in_order
from hf_distca.units import counted

logger = logging.getLogger(__name__)

TRUNCATED = "Truncated %s to %s = %d tokens; %s dropped."


class EpochStream(IterableDataset[Any]):
    """A stream whose epoch reaches the processes that read it.

    A process that lives for several epochs has a copy of the stream, which learns of no new epoch.
    `datasets.IterableDataset` shares its epoch by itself.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @classmethod
    def around(cls, stream: Any) -> Any:
        """Return the stream, in an `EpochStream` where that is needed.

        It is needed if the stream has epochs and does not share them itself.
        """
        shares_epoch = isinstance(stream, datasets.IterableDataset)
        return cls(stream) if hasattr(stream, "set_epoch") and not shares_epoch else stream

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, in every process."""
        self._epoch.fill_(epoch)
        self.stream.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            self.stream.set_epoch(int(self._epoch))
        return iter(self.stream)


@dataclass(eq=False)
class StreamPacker(IterableDataset[dict[str, Any]]):
    """One rank's share of a stream, packed into batches of whole documents.

    It is for a DataLoader with `batch_size=None`. A batch has `input_ids`, `position_ids`, `labels`
    and `shift_labels`, each [1, rows] int64 with at most `tokens_per_rank` rows, as from
    DistCACollator. It also has `document_lengths`, a tuple of ints. A batch has no plan: documents
    stay on their rank, and ranks exchange lengths to plan their attention. Ranks may have different
    numbers of batches; `Dispatcher.plan_batches` fills in for ranks that end first.

    A `datasets.IterableDataset` is split over ranks by `split_dataset_by_node` and over DataLoader
    workers by its shards. It should have at least ranks · workers shards, and must be shuffled with
    the same seed on every rank. For any other iterable, every rank and worker reads all documents
    and takes every n-th one.
    """

    # A TextStream, or examples as `token_document` expects them; the same on every rank, once per
    # epoch.
    dataset: Any
    ranks: int
    rank: int
    tokens_per_rank: int
    long_documents: str = "error"  # policy for documents longer than tokens_per_rank
    columns: Columns = ANY_COLUMNS
    name: str = "the stream"  # in errors
    limits: Limits = NO_LIMITS

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(
                f"the rank is {self.rank} of {self.ranks}, but ranks count from 0; give one from 0 "
                f"to {self.ranks - 1}"
            )
        # Checks the limit and the policy before the first document is read.
        fit_documents(
            np.zeros(0, np.int64), self.tokens_per_rank, self.long_documents, "tokens_per_rank"
        )
        # Only this rank's share of a stream of texts is tokenized.
        self._texts = self.dataset if isinstance(self.dataset, TextStream) else None
        if self._texts is not None:
            self.dataset = self._texts.rows
            self.name = self._texts.name
        self.dataset = EpochStream.around(self.dataset)
        self._splits_itself = isinstance(self.dataset, datasets.IterableDataset)
        # Another stream may be one that ends for good.
        self.can_be_read_again = self._splits_itself
        if self._splits_itself:
            self.dataset = split_dataset_by_node(
                self.dataset, rank=self.rank, world_size=self.ranks
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of a data set with epochs."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        documents = ((document.shape[1], document) for document in self._documents())
        for packed in pack_in_order(documents, self.tokens_per_rank):
            lengths = tuple(document.shape[1] for document in packed)
            yield {
                **rows_batch([(0, document) for document in packed]),
                "document_lengths": lengths,
            }

    def _documents(self) -> Iterator[NDArray[np.int64]]:
        """Yield documents of this rank and process, [2, L] tokens and targets, within the limit."""
        limit = self.tokens_per_rank
        limit_name = "tokens_per_rank"
        if self.limits.positions is not None and self.limits.positions < limit:
            limit = self.limits.positions
            limit_name = "the positions of the model"
        truncated_documents = 0
        dropped_tokens = 0
        for number, example in enumerate(self._share()):
            name = f"document {number} of rank {self.rank}'s share of {self.name}"
            if self._texts is not None:
                example = self._texts.tokenized(example, name)
            document = token_document(example, name, self.columns)
            self.limits.check_document(document, name)
            # A document beyond the limit is refused, truncated or, below, split.
            end = document.shape[1]
            if end > limit and self.long_documents == "error":
                self.limits.check_length(end, name)
                raise Data.LONG_IN_STREAM.error(name=name, length=end, limit=limit)
            if end > limit and self.long_documents == "truncate":
                truncated_documents += 1
                dropped_tokens += end - limit
                end = limit
                # A stream may truncate many documents: report totals whenever their number has
                # doubled.
                is_power_of_two = truncated_documents.bit_count() == 1
                if is_power_of_two:
                    logger.warning(
                        TRUNCATED,
                        counted(truncated_documents, "document"),
                        limit_name,
                        limit,
                        counted(dropped_tokens, "token"),
                    )
            for start in range(0, end, limit):
                yield excerpt_rows(document, start, min(start + limit, end), end)

    def _share(self) -> Iterable[Any]:
        """Return the examples that this process reads for this rank."""
        if self._splits_itself:
            share: Iterable[Any] = self.dataset
            return share
        worker = get_worker_info()
        workers = 1 if worker is None else worker.num_workers
        worker_id = 0 if worker is None else worker.id
        readers = self.ranks * workers
        reader = self.rank + worker_id * self.ranks
        return islice(iter(self.dataset), reader, None, readers)

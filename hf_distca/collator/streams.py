"""Pack a stream of documents whose lengths are unknown beforehand."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import datasets
import torch
from datasets.distributed import split_dataset_by_node
from datasets.fingerprint import Hasher
from torch.utils.data import IterableDataset, get_worker_info

from hf_distca.batches.limits import NO_LIMITS, Limits
from hf_distca.checks.capacity_rules import A_RANK, Capacity
from hf_distca.collator.collation import rows_batch, span_rows
from hf_distca.collator.documents import ANY_COLUMNS, Columns, token_document
from hf_distca.collator.texts import TextStream
from hf_distca.plan.arrays import IntArray
from hf_distca.planner.bin_packing import pack_in_order
from hf_distca.units import counted

logger = logging.getLogger(__name__)

NOTHING_READ = 0
"""In place of the hash of a first document, where there was none."""
HEX_DIGITS = 15
"""Digits of a hash, which 64 bits with a sign can hold."""
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
    and `shift_labels`, each [1, rows] int64 with at most `capacity` rows, as from
    DistCACollator. It also has `document_lengths`, a tuple of ints. A batch has no plan: documents
    stay on their rank, and ranks exchange lengths to plan their attention. Ranks may have different
    numbers of batches; `Dispatcher.plan_batches` fills in for ranks that end first.

    Every rank is given the same stream and takes its share of it. With `is_divided` each rank's
    stream has documents of its own, and the rank takes all of them.

    - A `datasets.IterableDataset` is split over ranks by `split_dataset_by_node`, and over the
      processes of a DataLoader by its shards. It must be shuffled with the same seed on every rank.
    - Of any other stream, every rank reads all documents and takes every n-th one. One process
      reads them: the division of a stream by `get_worker_info` then has one part.

    Ranks compare `beginning`, which tells whether they read the same stream.
    """

    # A TextStream, or examples as `token_document` expects them; the same on every rank, once per
    # epoch.
    dataset: Any
    ranks: int
    rank: int
    capacity: int  # maximum number of rows of a batch
    long_documents: str = "error"  # policy for documents beyond the capacity
    columns: Columns = ANY_COLUMNS
    name: str = "the stream"  # in errors
    limits: Limits = NO_LIMITS
    is_divided: bool = False  # whether each rank's stream has documents of its own

    def __post_init__(self) -> None:
        # Only this rank's share of a stream of texts is tokenized.
        self._texts = self.dataset if isinstance(self.dataset, TextStream) else None
        if self._texts is not None:
            self.dataset = self._texts.rows
            self.name = self._texts.name
        self._has_shards = isinstance(self.dataset, datasets.IterableDataset)
        # Another stream may be one that ends for good.
        self.can_be_read_again = self._has_shards
        self.most_processes = max(self.dataset.num_shards, 1) if self._has_shards else 1
        # The process that reads notes the hash of the first document here.
        self._beginning = torch.full((), NOTHING_READ, dtype=torch.int64).share_memory_()
        self._whole_stream = self.dataset
        self.dataset = EpochStream.around(self.dataset)
        if self._has_shards and not self.is_divided:
            self.dataset = split_dataset_by_node(
                self.dataset, rank=self.rank, world_size=self.ranks
            )

    @property
    def beginning(self) -> int:
        """Hash of the first document of this rank's stream, before the stream is divided.

        It is known as soon as a pass has yielded a batch or has ended.
        """
        return int(self._beginning)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of a data set with epochs."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        documents = ((document.shape[1], document) for document in self._documents())
        for packed in pack_in_order(documents, self.capacity):
            lengths = tuple(document.shape[1] for document in packed)
            yield {
                **rows_batch([(0, document) for document in packed]),
                "document_lengths": lengths,
            }

    def _documents(self) -> Iterator[IntArray]:
        """Yield documents of this rank and process, [2, L] tokens and targets, within the limit."""
        limit = self.capacity
        limit_name = A_RANK
        if self.limits.positions is not None and self.limits.positions < limit:
            limit = self.limits.positions
            limit_name = "the positions of the model"
        truncated_documents = 0
        dropped_tokens = 0
        for number, example in enumerate(self._share()):
            name = f"document {number} of rank {self.rank}'s share of {self.name}"
            if self._texts is not None:
                example = self._texts.tokenized(example, name, is_first=number == 0)
            document = token_document(example, name, self.columns)
            self.limits.check_document(document, name)
            # A document beyond the limit is refused, truncated or, below, split.
            end = document.shape[1]
            if end > limit and self.long_documents == "error":
                self.limits.check_length(end, name)
                raise Capacity.LONG_IN_STREAM.error(name=name, length=end, limit=limit)
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
                yield span_rows(document, start, min(start + limit, end), end)

    def _share(self) -> Iterator[Any]:
        """Yield the examples that this process reads for this rank."""
        if self._has_shards:
            self._note_beginning_of_shards()
            yield from self.dataset
            return
        step = 1 if self.is_divided else self.ranks
        for number, example in enumerate(self.dataset):
            if number == 0:
                self._note_beginning(example)
            if number % step == self.rank % step:
                yield example

    def _note_beginning_of_shards(self) -> None:
        """Note the first document of a `datasets.IterableDataset`, where no share begins otherwise.

        Later passes follow from the first pass, so the document is read once.
        """
        worker = get_worker_info()
        is_first = worker is None or worker.id == 0
        if self.ranks > 1 and is_first and self.beginning == NOTHING_READ:
            # `iter` leaves out no shards in a worker.
            for example in islice(self._whole_stream.iter(batch_size=1), 1):
                self._note_beginning(example)

    def _note_beginning(self, example: Any) -> None:
        """Note the hash of a stream's first document for the process that trains."""
        hashed = example
        if isinstance(example, Mapping):
            field = "" if self._texts is None else self._texts.field
            hashed = [example.get(column) for column in ("input_ids", field)]
        self._beginning.fill_(1 + int(Hasher.hash(hashed)[:HEX_DIGITS], 16))

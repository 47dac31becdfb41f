"""An evaluation: its loader, its means over targets, and predictions by document.

Figures and predictions come from the logits of a rank's rows, where the loss computes the logits.

Logits stay on their rank and exist a chunk of rows at a time. A user's function
`preprocess_logits_for_metrics` makes something small of them, such as the token with the greatest
logit. The rows of a document may lie on several ranks, so the function gets parts of documents, and
its results are joined row by row.

Shape suffixes: T rows of this rank, C rows of a chunk, V vocabulary; 1 is a batch of one document.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import nested_numpify

from hf_distca.batches.limits import IGNORED_TARGET
from hf_distca.checks.run_rules import Run
from hf_distca.collator.sampler import GlobalBatchSampler
from hf_distca.collator.streams import StreamPacker
from hf_distca.dispatch.process_groups import Groups
from hf_distca.dispatch.upcoming import UpcomingBatches
from hf_distca.plan import MicroBatchPlan
from hf_distca.trainer.loaders import check_beginnings

ACCURACY = "mean_token_accuracy"
"""Name of a metric, as in TRL: share of the targets that have the greatest logit."""
ENTROPY = "entropy"
"""Name of a metric, as in TRL: mean entropy of the predicted tokens, in nats."""
Function = Callable[[Tensor, Tensor], Any]
"""`preprocess_logits_for_metrics`: logits [1, C, V] and labels [1, C] to tensors [1, C, ...]."""
FUNCTION = "preprocess_logits_for_metrics"
BLOCK_VALUES = {"cpu": 2**16}
"""Values of a block of rows whose entropy is computed at once, by type of device: they stay in a
CPU's cache."""
MOST_BLOCK_VALUES = 2**24
"""The same on other devices."""


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


class TokenFigures:
    """Sums over the rows with a target.

    They count the rows, and those whose target has the greatest logit. They add up entropies in
    nats.
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None  # [3] float64

    def see(self, logits_CV: Tensor, log_probs_CV: Tensor, target_C: Tensor) -> None:
        """Add a chunk of rows."""
        counts_C = target_C != IGNORED_TARGET
        # Like argmax, max returns the first of several greatest values; on CPUs it takes half of
        # argmax's time. No value has the index of an ignored target.
        hits_C = logits_CV.max(-1).indices == target_C
        entropy_C = torch.where(counts_C, entropies(log_probs_CV), 0.0)
        sums = torch.stack(
            [rows.sum(dtype=torch.float64) for rows in (counts_C, hits_C, entropy_C)]
        )
        self._sums = sums if self._sums is None else self._sums + sums

    def sums(self) -> list[float]:
        """Return the three sums; waits for the device."""
        return [0.0] * 3 if self._sums is None else self._sums.tolist()


def entropies(log_probs_CV: Tensor) -> Tensor:
    """Return the entropy [C] of each row in nats, a block of rows at a time."""
    block_values = BLOCK_VALUES.get(log_probs_CV.device.type, MOST_BLOCK_VALUES)
    block_rows = max(1, block_values // log_probs_CV.shape[1])
    lowest = torch.finfo(torch.float32).min  # a probability of 0 adds 0, not 0 · -inf
    entropy_of_blocks = []
    for block in log_probs_CV.split(block_rows):
        log_probs = block.float()
        entropy_of_blocks.append(-torch.linalg.vecdot(log_probs.exp(), log_probs.clamp(min=lowest)))
    return torch.cat(entropy_of_blocks)


class DocumentRows(NamedTuple):
    """Targets and results of rows of a document from `start` on."""

    document: int  # index in the data set
    start: int
    targets: NDArray[np.int64]  # [rows], shifted
    result: Any  # nested arrays [1, rows, ...]


class Predictions:
    """Results of a user's function and labels, by document of a data set.

    For each micro-batch call `begin`, `see` for each chunk of rows in order, and `end`.

    Args:
        spans: for each micro-batch, its [spans] of dtype SPAN.
        documents: number of documents in the data set.
    """

    def __init__(
        self,
        function: Function,
        spans: Iterator[NDArray[np.void]],
        documents: int,
        groups: Groups,
    ) -> None:
        self._function = function
        self._spans = spans
        self._documents = documents
        self._groups = groups
        self._document_rows: list[DocumentRows] = []
        self._compared = False  # whether results are known to depend on each row alone
        self._error: Exception | None = None

    def begin(self, plan: MicroBatchPlan, target_T: Tensor) -> None:
        """Note the rows of a micro-batch that this rank holds. A collective."""
        segments = list(plan.held_by(self._groups.rank))
        self._targets = target_T.cpu().numpy()
        self._seen = 0  # rows
        # Document of the micro-batch, start, row of the rank, and the function's result.
        self._results: list[tuple[int, int, int, Any]] = []
        # 1. The label of a segment's first row is the target of the row before, which another rank
        #    may hold. So ranks share the target of each segment's last row.
        last_targets: dict[tuple[int, int], int] = {}
        row = 0
        for document, start, stop in segments:
            row += stop - start
            last_targets[document, stop] = int(self._targets[row - 1])
        targets_before = ChainMap(*self._groups.all_gather(last_targets, contents="labels"))
        # 2. Other labels are targets of this rank, one row later.
        labels = np.full_like(self._targets, IGNORED_TARGET)
        # Document, start, first row of the rank and one past the last row.
        self._segments: list[tuple[int, int, int, int]] = []
        first_row = 0
        for document, start, stop in segments:
            end_row = first_row + stop - start
            labels[first_row] = targets_before.get((document, start), IGNORED_TARGET)
            labels[first_row + 1 : end_row] = self._targets[first_row : end_row - 1]
            self._segments.append((document, start, first_row, end_row))
            first_row = end_row
        self._label_T = torch.from_numpy(labels).to(target_T.device)

    def see(self, logits_CV: Tensor) -> None:
        """Give the next rows' logits to the function, document by document."""
        chunk_begin = self._seen
        chunk_end = chunk_begin + len(logits_CV)
        self._seen = chunk_end
        for document, start, begin, end in self._segments:
            low = max(chunk_begin, begin)
            high = min(chunk_end, end)
            if low < high and self._error is None:
                logits_1CV = logits_CV[None, low - chunk_begin : high - chunk_begin]
                label_1C = self._label_T[None, low:high]
                try:
                    result = self._result(logits_1CV, label_1C)
                except Exception as error:  # of the user's function: all ranks raise it together
                    self._error = error
                else:
                    self._results.append((document, start + low - begin, low, result))

    def _result(self, logits_1CV: Tensor, label_1C: Tensor) -> Any:
        """Return the function's result.

        Raise ValueError unless it has a value for each row, of that row alone.
        """

        def call(rows: slice) -> Any:
            result = self._function(logits_1CV[:, rows], label_1C[:, rows])
            expected = label_1C[:, rows].shape
            for leaf in tree_leaves(result):
                shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else None
                if shape is None or shape[:2] != expected:
                    problem = type(leaf).__name__ if shape is None else f"the shape {list(shape)}"
                    raise Run.OTHER_ROWS.error(
                        function=FUNCTION, what=problem, logits=list(logits_1CV[:, rows].shape)
                    )
            return result

        # Once, the rows are given in two halves too: a function that looks at other rows would give
        # other values, and values would depend on the chunk that a row is in.
        rows = label_1C.shape[1]
        result = call(slice(rows))
        if rows > 1 and not self._compared:
            self._compared = True
            parts = zip(
                tree_leaves(call(slice(rows // 2))),
                tree_leaves(call(slice(rows // 2, rows))),
                strict=True,
            )
            for leaf, halves in zip(tree_leaves(result), parts, strict=True):
                rejoined = torch.cat(halves, dim=1)
                is_same = torch.allclose(
                    leaf.float(), rejoined.float(), rtol=1e-2, atol=1e-3, equal_nan=True
                )
                if not is_same:
                    raise Run.NOT_BY_ROWS.error(function=FUNCTION)
        return result

    def end(self) -> None:
        """Keep a micro-batch's results on the host; raise ValueError on every rank after an error.

        A collective.
        """
        if self._error is None and self._seen != len(self._targets):
            self._error = Run.NO_LOGITS.error(
                function=FUNCTION, seen=self._seen, rows=len(self._targets)
            )
        self._groups.raise_together(self._error)
        spans = next(self._spans)
        for document, start, row, result in self._results:
            if document < len(spans):  # else a filler
                index, span_start, *_ = spans[document].tolist()
                arrays: Any = nested_numpify(result)
                rows = tree_leaves(arrays)[0].shape[1]
                targets = self._targets[row : row + rows]
                self._document_rows.append(DocumentRows(index, span_start + start, targets, arrays))

    def joined(self) -> tuple[Any, NDArray[np.int64]]:
        """Return predictions and labels of all documents. A collective.

        They are [documents, longest, ...], with -100 beyond a document's end. Labels are unshifted,
        as in a data set. The first token of a document has the label -100: nothing predicts it.
        """
        parts: Sequence[DocumentRows] = list(chain(*self._groups.all_gather(self._document_rows)))
        longest = max(part.start + len(part.targets) for part in parts)

        def join(*values_of_parts: NDArray[Any]) -> NDArray[Any]:
            example = values_of_parts[0]
            shape = (self._documents, longest, *example.shape[2:])
            documents = np.full(shape, IGNORED_TARGET, example.dtype)
            for part, values in zip(parts, values_of_parts, strict=True):
                documents[part.document, part.start : part.start + values.shape[1]] = values[0]
            return documents

        labels = np.full((self._documents, longest + 1), IGNORED_TARGET, np.int64)
        for part in parts:
            labels[part.document, part.start + 1 : part.start + 1 + len(part.targets)] = (
                part.targets
            )
        return tree_map(join, *(part.result for part in parts)), labels[:, :longest]


class Evaluated:
    """What an evaluation has computed: losses, figures of rows, and predictions if asked for."""

    def __init__(self, predictions: Predictions | None = None) -> None:
        self.figures = TokenFigures()
        self.predictions = predictions
        self.seen = 0  # rows of all micro-batches
        self.micro_batches = 0
        self._loss = 0.0  # sum over this rank's rows
        self._targets = 0.0  # of all ranks

    def see(self, logits_CV: Tensor, log_probs_CV: Tensor, target_C: Tensor) -> None:
        """Take a chunk of rows."""
        self.seen += len(logits_CV)
        self.figures.see(logits_CV, log_probs_CV, target_C)
        if self.predictions is not None:
            self.predictions.see(logits_CV)

    def see_all(self, logits_TV: Tensor, target_T: Tensor) -> None:
        """Take all rows of a micro-batch, in blocks."""
        rows = max(1, MOST_BLOCK_VALUES // logits_TV.shape[1])
        for logits_CV, target_C in zip(logits_TV.split(rows), target_T.split(rows), strict=True):
            self.see(logits_CV, logits_CV.float().log_softmax(-1), target_C)

    def add(self, loss: float, targets: float) -> None:
        """Add a micro-batch: this rank's sum of losses, and the targets of all ranks."""
        self.micro_batches += 1
        self._loss += loss
        self._targets += targets

    def means(self, groups: Groups) -> dict[str, float]:
        """Return loss, accuracy and entropy by name. A collective.

        Each is a mean over all targets. Accuracy and entropy are left out where not every target's
        logits were seen: the model has several losses, or computes none from logits, or TRL's
        trainer counts for itself.
        """
        sums_of_ranks = groups.all_gather((self._loss, *self.figures.sums()))
        loss, seen_targets, hits, entropy = map(sum, zip(*sums_of_ranks, strict=True))
        means = {"loss": loss / max(self._targets, 1)}
        if seen_targets == self._targets > 0:
            means[ACCURACY] = hits / self._targets
            means[ENTROPY] = entropy / self._targets
        return means

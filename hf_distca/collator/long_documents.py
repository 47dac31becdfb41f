"""Cut or refuse documents that are longer than a micro-batch can hold."""

import logging
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hf_distca.collator.refusals import Data

logger = logging.getLogger(__name__)

LongDocuments = Literal["error", "truncate", "split"]
"""Policy for a document longer than the limit.

"error" refuses the data set. "truncate" keeps the first tokens, up to the limit. "split" cuts the document into
consecutive excerpts, which do not attend to each other. The last row of an excerpt still predicts the first token of
the next one: splitting loses context, but no target.
"""

EXCERPT = np.dtype(
    [
        ("document", np.int64),  # index into the data set
        ("start", np.int64),  # first token of the excerpt
        ("stop", np.int64),  # one past its last token
        ("end", np.int64),  # one past the last token of the document that may be a target
    ]
)
"""Tokens [start, stop) of a document in the data set, which form a document of a micro-batch."""


def fit_documents(lengths: NDArray[np.int64], limit: int, policy: LongDocuments, limit_name: str) -> NDArray[np.void]:
    """Apply the policy for long documents; a document within the limit becomes one excerpt.

    "truncate" logs a warning with the number of documents and tokens that it drops.

    Args:
        lengths: [documents] int64 tokens of each document.
        limit: maximum number of tokens of an excerpt.
        limit_name: name of the limit in messages, such as "ranks · tokens_per_rank".

    Returns:
        [excerpts] of dtype EXCERPT, in the order of the data set.

    Raises:
        ValueError: a document is too long under the policy "error", or the limit or the policy is invalid.
    """
    if limit <= 0:
        raise Data.LIMIT.error(limit_name=limit_name, limit=limit)
    if policy not in ("error", "truncate", "split"):
        raise Data.POLICY.error(policy=policy)
    too_long = np.flatnonzero(lengths > limit)
    if len(too_long) and policy == "error":
        longest = int(np.argmax(lengths))
        raise Data.LONG.error(
            count=len(too_long),
            documents=len(lengths),
            limit_name=limit_name,
            limit=limit,
            longest=longest,
            length=lengths[longest],
        )
    if len(too_long) and policy == "truncate":
        warn_truncated(len(too_long), int((lengths[too_long] - limit).sum()), limit, limit_name)
    return cut_documents(lengths, limit, policy)


def cut_documents(lengths: NDArray[np.int64], limit: int, policy: LongDocuments) -> NDArray[np.void]:
    """Return the excerpts of documents under "truncate" or "split", without checks or warnings.

    Args:
        lengths: [documents] int64 tokens of each document.
        limit: maximum number of tokens of an excerpt.

    Returns:
        [excerpts] of dtype EXCERPT, in the order of the data set.
    """
    used = np.minimum(lengths, limit) if policy == "truncate" else lengths
    counts = -(-used // limit)
    excerpts = np.empty(int(counts.sum()), EXCERPT)
    excerpts["document"] = np.repeat(np.arange(len(lengths)), counts)
    # How many excerpts of the same document come before this one.
    before = np.arange(len(excerpts)) - np.repeat(np.cumsum(counts) - counts, counts)
    excerpts["end"] = np.repeat(used, counts)
    excerpts["start"] = before * limit
    excerpts["stop"] = np.minimum(excerpts["start"] + limit, excerpts["end"])
    return excerpts


def warn_truncated(documents: int, tokens: int, limit: int, limit_name: str) -> None:
    """Log how many documents and tokens the policy "truncate" drops."""
    logger.warning(
        "Truncated %d documents to %s = %d tokens; %d tokens are dropped.",
        documents,
        limit_name,
        limit,
        tokens,
    )

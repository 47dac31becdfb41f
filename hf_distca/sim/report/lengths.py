"""Section on document lengths, which all reports have."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from hf_distca.sim.report import pictures
from hf_distca.sim.report.page import figure, section
from hf_distca.sim.report.tables import Column, table
from hf_distca.sim.report.units import COUNT, SHARE


def lengths_section(figures: Mapping[str, Any]) -> str:
    """Return the section on documents by length, from figures with `histogram`."""
    bins = figures["histogram"]
    return section(
        "Document lengths",
        [_longest(bins)],
        figure(
            "Shares of documents and of tokens by document length",
            partial(pictures.lengths, bins),
            [("documents", "share of documents"), ("tokens", "share of tokens")],
        ),
        table(
            figures,
            "histogram",
            [
                Column("from, tokens", "shortest", COUNT),
                Column("to, tokens", "longest", COUNT),
                Column("documents", "documents", COUNT),
                Column("share", "document_share", SHARE),
                Column("tokens", "tokens", COUNT),
                Column("share", "token_share", SHARE),
            ],
            "Documents and tokens by document length",
        ),
    )


def _longest(bins: list[dict[str, Any]]) -> str:
    """Describe the longest documents that hold half of the tokens."""
    documents = tokens = 0.0
    for each in reversed(bins):
        documents, tokens = documents + each["document_share"], tokens + each["token_share"]
        if tokens >= 0.5:
            break
    return (
        f"{documents:.1%} of the documents have {each['shortest']:,} tokens or more; together they hold {tokens:.1%} "
        "of all tokens. The cost of core attention grows with the square of a document's length; the cost of all "
        "other layers grows with the length."
    )

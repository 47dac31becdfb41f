"""Page of a report: one HTML file that needs nothing else, with the parts that reports share."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hf_distca.sim.report.drawing import Drawing, lengths_picture, style_sheet

STYLE = Path(__file__).with_name("page.css")
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Content policy of the page: a browser runs no script and loads nothing from outside."""
MOST_RANKS = 256
"""Maximum number of ranks in a table; `--json` has all of them."""


def page(tool: str, title: str, source: str, lead: str, sections: Sequence[str]) -> str:
    """Return the text of the HTML file."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)} – {escape(tool)}</title>
<style>
{style_sheet()}{STYLE.read_text(encoding="utf-8")}</style>
</head>
<body><main>
<header><p class="eyebrow">{escape(tool)}</p><h1>{escape(title)}</h1>
<p><strong>Predictions, not measurements:</strong> {escape(source)}</p>
<p class="lead">{escape(lead)}</p></header>
{"".join(sections)}
</main></body>
</html>
"""


def section(title: str, sentences: Sequence[str], *parts: str) -> str:
    """Return a section: a title, sentences, and further parts."""
    paragraphs = "".join(f"<p>{escape(each)}</p>" for each in sentences)
    return f"<section><h2>{escape(title)}</h2>{paragraphs}{''.join(parts)}</section>"


def figure(label: str, drawing: Drawing, legend: Sequence[tuple[str, str]]) -> str:
    """Return a picture below its legend, which has a class and a name for each colour.

    Args:
        label: text for readers who do not see the picture.
    """
    keys = "".join(f'<li class="{style}">{escape(name)}</li>' for style, name in legend)
    picture = f'<div class="picture" tabindex="0">{drawing.markup(label)}</div>'
    return f'<figure><ul class="legend">{keys}</ul>{picture}</figure>'


def table(caption: str, titles: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[str] = ()) -> str:
    """Return a table whose first column heads the rows; rows whose first cell is in `marked` stand out."""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = []
    for first, *cells in rows:
        highlight = ' class="marked"' if first in marked else ""
        others = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body.append(f'<tr{highlight}><th scope="row">{escape(first)}</th>{others}</tr>')
    return (
        f'<p class="caption" aria-hidden="true">{escape(caption)}</p>'
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(caption)}"><table '
        f'aria-label="{escape(caption)}"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def table_of_ranks(caption: str, columns: Mapping[str, Sequence[float]], numbers: str = ",.3f") -> str:
    """Return a folded table with a row for each rank; empty if there are too many ranks to read.

    Args:
        columns: [ranks] values of each column, by its title.
    """
    of_ranks = list(zip(*columns.values(), strict=True))
    if len(of_ranks) > MOST_RANKS:
        return ""
    rows = [[str(rank), *(format(value, numbers) for value in values)] for rank, values in enumerate(of_ranks)]
    shown = table(caption, ["rank", *columns], rows)
    return f"<details><summary>{escape(caption)}</summary>{shown}</details>"


def code(text: str, label: str) -> str:
    """Return a block to copy: a click selects all of the text."""
    return f'<pre tabindex="0" aria-label="{escape(label)}">{escape(text)}</pre>'


def origin_section(given: Mapping[str, Any], sentences: Sequence[str] = ()) -> str:
    """Return the section on the settings that were given."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name.replace("_", " "))}</th><td>{escape(str(value))}</td></tr>'
        for name, value in given.items()
    )
    return section("Where this comes from", sentences, f'<table class="facts"><tbody>{rows}</tbody></table>')


def lengths_section(bins: Sequence[Mapping[str, Any]]) -> str:
    """Return the section on documents by length, from bins of `histogram`."""
    documents = tokens = 0.0
    for longest in reversed(bins):  # those that hold half of the tokens
        documents, tokens = documents + longest["document_share"], tokens + longest["token_share"]
        if tokens >= 0.5:
            break
    return section(
        "Document lengths",
        [
            f"{documents:.1%} of the documents have {longest['shortest']:,} tokens or more; together they hold "
            f"{tokens:.1%} of all tokens. The cost of core attention grows with the square of a document's length; "
            "the cost of all other layers grows with the length."
        ],
        figure(
            "Shares of documents and of tokens by document length",
            lengths_picture(bins),
            [("documents", "share of documents"), ("tokens", "share of tokens")],
        ),
    )

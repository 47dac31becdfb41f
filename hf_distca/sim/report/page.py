"""Page of a report: one self-contained HTML file."""

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hf_distca.sim.report.drawing import Drawing, in_both_widths, style_sheet
from hf_distca.sim.report.tables import at, cell
from hf_distca.sim.report.units import Unit

HERE = Path(__file__).parent
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Content policy of the page: a browser loads nothing from outside."""


def page(tool: str, title: str, source: str, lead: str, sections: Sequence[str], figures: Mapping[str, Any]) -> str:
    """Return the text of the HTML file.

    Args:
        title: the outcome in a few words.
        source: origin of the predictions.
        lead: documents and ranks of the report.
        figures: the figures that `--json` prints; the page contains them.
    """
    style, script = ((HERE / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    data = json.dumps(figures).replace("</", "<\\/")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)} – {escape(tool)}</title>",
            f"<style>\n{style_sheet()}{style}</style>",
            "</head>",
            "<body>",
            "<main>",
            f'<header><p class="eyebrow">{escape(tool)}</p><h1>{escape(title)}</h1>',
            f'<p class="predicted"><strong>Predictions, not measurements:</strong> {escape(source)}</p>',
            f'<p class="lead">{escape(lead)}</p></header>',
            *sections,
            "</main>",
            f'<script type="application/json" id="figures">{data}</script>',
            f"<script>\n{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def section(title: str, said: Sequence[str], *parts: str) -> str:
    """Return a section: a title, sentences, and further parts."""
    sentences = "".join(f"<p>{escape(each)}</p>" for each in said)
    return f"<section><h2>{escape(title)}</h2>{sentences}{''.join(parts)}</section>"


def key_figures(figures: Any, keys: Sequence[tuple[str, str, Unit]]) -> str:
    """Return the most important numbers, each with a title, a path and a unit.

    A speed-up is shown with its range over micro-batches.
    """
    shown = []
    for name, path, unit in keys:
        gain, _, field = path.rpartition("/")
        spread = ""
        if field == "speed_up" and at(figures, f"{gain}/least") != at(figures, f"{gain}/most"):
            least, most = (cell(at(figures, f"{gain}/{end}"), f"{gain}/{end}", unit) for end in ("least", "most"))
            spread = f"<br>{least} to {most} by micro-batch"
        value = cell(at(figures, path), path, unit)
        shown.append(f"<div><dt>{escape(name)}{spread}</dt><dd>{value}</dd></div>")
    return f'<dl class="keys">{"".join(shown)}</dl>'


def figure(label: str, draw: Callable[[int], Drawing], legend: Sequence[tuple[str, str]] = ()) -> str:
    """Return a picture with its legend.

    Args:
        label: text for readers who do not see the picture.
        draw: draws the picture for a width in pixels.
    """
    keys = "".join(f'<li class="{style}">{escape(name)}</li>' for style, name in legend)
    listed = f'<ul class="legend">{keys}</ul>' if keys else ""
    return f'<figure>{listed}{in_both_widths(draw, label)}<output class="readout"></output></figure>'


def folded(title: str, content: str) -> str:
    """Return content that is shown on demand, and on paper."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def code(text: str, label: str) -> str:
    """Return a block to copy."""
    return (
        f'<div class="code"><pre tabindex="0" aria-label="{escape(label)}">{escape(text)}</pre>'
        f'<button type="button" title="Copy: {escape(label)}">Copy</button></div>'
    )


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Return the settings that were given."""
    body = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
    return f'<div class="table"><table class="facts"><tbody>{body}</tbody></table></div>'

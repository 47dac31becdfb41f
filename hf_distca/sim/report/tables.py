"""Tables of figures; every cell carries the path of its value in the figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from hf_distca.sim.report.units import Unit

MOST_RANKS = 256
"""Maximum number of ranks in a table; `--json` has all of them."""


@dataclass(frozen=True)
class Column:
    """Column of a table.

    Attributes:
        unit: unit of numbers; None for names.
    """

    title: str
    field: str
    unit: Unit | None = None


def table(figures: Any, path: str, columns: Sequence[Column], caption: str, marked: Sequence[str] = ()) -> str:
    """Return a table with a row for each object of a list.

    Args:
        path: path of the list in the figures, such as `a/0/b`.
        columns: the first column heads the rows.
        marked: rows whose first cell is one of these stand out.
    """
    rows = []
    for index, row in enumerate(at(figures, path)):
        cells = [cell(row[column.field], f"{path}/{index}/{column.field}", column.unit) for column in columns]
        first, *others = cells
        highlight = ' class="marked"' if row[columns[0].field] in marked else ""
        rows.append(
            f'<tr{highlight}><th scope="row">{first}</th>{"".join(f"<td>{each}</td>" for each in others)}</tr>'
        )
    return _framed(caption, [column.title for column in columns], rows)


def side_by_side(figures: Any, heading: str, columns: Sequence[tuple[str, str]], unit: Unit, caption: str) -> str:
    """Return a table of lists of equal length, with a row for each index.

    Args:
        columns: title and path of each list.
    """
    lists = [(path, at(figures, path)) for _, path in columns]
    rows = []
    for index in range(len(lists[0][1])):
        cells = "".join(f"<td>{cell(values[index], f'{path}/{index}', unit)}</td>" for path, values in lists)
        rows.append(f'<tr><th scope="row">{index}</th>{cells}</tr>')
    return _framed(caption, [heading, *(title for title, _ in columns)], rows)


def cell(value: Any, path: str, unit: Unit | None) -> str:
    """Return a cell with a value and its path."""
    if value is None:
        return "–"
    if unit is None:
        return f'<data value="{escape(str(value))}" data-path="{path}">{escape(str(value))}</data>'
    return f'<data value="{value!r}" data-path="{path}" data-scale="{unit.scale!r}">{unit.text(value)}</data>'


def at(figures: Any, path: str) -> Any:
    """Return the value at a path of keys and indices."""
    for part in path.split("/"):
        figures = figures[int(part)] if isinstance(figures, list | tuple) else figures[part]
    return figures


def _framed(caption: str, titles: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    return (
        f'<p class="caption" aria-hidden="true">{escape(caption)}</p>'
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(caption)}"><table '
        f'aria-label="{escape(caption)}"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )

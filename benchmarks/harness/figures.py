"""Figures for people and for programs: tables, medians with quartiles, one JSON object."""

import json
import statistics
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .machine import provenance


@dataclass(frozen=True)
class Spread:
    """Quartiles of figures."""

    lower: float
    median: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.lower:.3f} to {self.upper:.3f})"


def spread(values: Sequence[float]) -> Spread:
    """The quartiles of figures, the extreme ones among them."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text in columns, the first one flush left."""
    columns = zip(header, *rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    for name, *figures in [header, *rows]:
        cells = [name.ljust(widths[0])]
        for figure, width in zip(figures, widths[1:], strict=True):
            cells.append(figure.rjust(width))
        print("  ".join(cells))


def options_parser(description: str | None, **numbers: tuple[int, str]) -> ArgumentParser:
    """The parser of a benchmark's options, those that take a number by name, with default and
    meaning.
    """
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    for name, (default, what) in numbers.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{what} (default: {default})"
        )
    return parser


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    table(list(rows[0]), [list(map(_shown, row.values())) for row in rows])


def _shown(figure: Any) -> str:
    return f"{figure:.3f}" if isinstance(figure, float) else str(figure)


def print_json(**figures: Any) -> None:
    """Print figures as one JSON object on one line, with the command, the machine and the commit
    they belong to.
    """
    print(json.dumps({**provenance(), "result": rounded(figures)}, ensure_ascii=False))


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Spread):
        return rounded(asdict(value))
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value

"""hf-distca plan: the planner on a user's own document lengths."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from hf_distca.cli.lengths_file import InputError, read_lengths
from hf_distca.plan import AttentionKind, Layout, Plan
from hf_distca.planner.balance import balance
from hf_distca.planner.cost import RowBytes
from hf_distca.planner.layout import fixed_layout, joint_layout, packed_layout
from hf_distca.planner.metrics import PlanMetrics, measure

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
REPORTED = (
    "max_over_mean",
    "tokens_max_over_mean",
    "bytes_total",
    "bytes_bottleneck",
    "tasks",
    "min_rows",
    "tasks_below_block",
)

DESCRIPTION = """\
Lay out the documents of one micro-batch on ranks, balance their core attention, and show what it costs.

FILE is JSON: a list of document lengths in tokens, or a list of such lists, one row per rank (rows may be
empty).

--layout joint  places the documents itself, tokens and attention together; rows are only a list of documents.
--layout fixed  keeps every row on its rank and moves attention only. With ranks = k x rows, each row spans
                k consecutive ranks and is cut where a rank's tokens are full. A plain list is packed in
                order, each rank filled before the next, documents cut where a rank is full.
"""


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text!r}")
    return number


def _tolerance(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number from 0 on (0.05 is 5 %), got {text!r}")
    return number


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand and its options."""
    parser = commands.add_parser(
        "plan",
        help="plan a micro-batch and show balance and bytes",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--lengths", required=True, metavar="FILE", help="JSON file with document lengths, see above")
    add("--ranks", required=True, type=_positive, metavar="N", help="number of ranks")
    add("--tokens-per-rank", required=True, type=_positive, metavar="T", help="most tokens a rank holds")
    add("--layout", choices=("joint", "fixed"), default="joint", help="who places tokens (default: joint)")
    add(
        "--tolerance",
        type=_tolerance,
        default=0.0,
        help="fraction a rank's attention may be above the mean; 0.01 at least (default: 0.0)",
    )
    add("--q-heads", type=_positive, default=32, help="query heads (default: 32)")
    add("--kv-heads", type=_positive, default=8, help="key-value heads (default: 8)")
    add("--head-dim", type=_positive, default=128, help="size of a head (default: 128)")
    add("--dtype", choices=tuple(BYTES), default="bfloat16", help="of activations (default: bfloat16)")
    add("--window", type=_positive, metavar="W", help="sliding window in tokens (default: full attention)")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("--dump", metavar="FILE", help="write documents, segments and tasks of the plan as JSON")


def run(options: argparse.Namespace) -> None:
    """Plan, print, and dump.

    Raises:
        InputError: the options or the files cannot be used.
    """
    lengths = read_lengths(options.lengths)
    try:
        kind = AttentionKind(options.window, options.q_heads, options.kv_heads, options.head_dim, options.head_dim)
        row_bytes = RowBytes.of_kind(kind, BYTES[options.dtype])
        began = time.perf_counter()
        layout = _layout(lengths, options)
        plan = balance(layout, window=options.window, tolerance=options.tolerance, row_bytes=row_bytes)
        plan_ms = (time.perf_counter() - began) * 1e3
    except ValueError as error:
        raise InputError(str(error)) from error
    metrics = measure(plan, row_bytes)
    if options.dump:
        _dump(plan, options.dump)
    if options.json:
        figures = {name: getattr(metrics, name) for name in REPORTED}
        print(json.dumps({**figures, "plan_ms": round(plan_ms, 3)}))
    else:
        print(_table(plan, metrics, plan_ms, options))


def _layout(lengths: list[int] | list[list[int]], options: argparse.Namespace) -> Layout:
    rows = [row for row in lengths if isinstance(row, list)]
    flat = [length for length in lengths if isinstance(length, int)]
    ranks, tokens = options.ranks, options.tokens_per_rank
    if len(rows) > ranks:
        raise InputError(f"{options.lengths} holds {len(rows)} rows, but --ranks is {ranks}; give a row per rank")
    if options.layout == "joint":
        documents = flat or [length for row in rows for length in row]
        return joint_layout(documents, ranks, tokens, window=options.window, tolerance=options.tolerance)
    return fixed_layout(rows, ranks, tokens_per_rank=tokens) if rows else packed_layout(flat, ranks, tokens)


def _dump(plan: Plan, path: str) -> None:
    segments, tasks = plan.layout.segments, plan.tasks
    content = {
        "documents": plan.layout.lengths.tolist(),
        "segments": [list(segment) for segment in segments.tolist()],
        "tasks": [list(task) for task in tasks.tolist()],
    }
    try:
        Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def _table(plan: Plan, metrics: PlanMetrics, plan_ms: float, options: argparse.Namespace) -> str:
    documents = len(plan.layout.lengths)
    cut = len(plan.layout.segments) - documents
    lines = [
        ("documents", f"{documents}, {int(plan.layout.lengths.sum())} tokens, {cut} cuts"),
        ("layout", f"{options.layout}, {options.ranks} ranks of at most {options.tokens_per_rank} tokens"),
        ("attention, max / mean", f"{metrics.max_over_mean:.4f}"),
        ("tokens, max / mean", f"{metrics.tokens_max_over_mean:.4f}"),
        ("bytes per layer, all ranks", f"{metrics.bytes_total / 1e6:.2f} MB"),
        ("bytes per layer, busiest rank", f"{metrics.bytes_bottleneck / 1e6:.2f} MB"),
        ("tasks", f"{metrics.tasks}, the smallest of {metrics.min_rows} rows"),
        ("tasks below 128 rows", f"{metrics.tasks_below_block}"),
        ("planned in", f"{plan_ms:.1f} ms"),
    ]
    return "\n".join(f"{name:<30} {value}" for name, value in lines)

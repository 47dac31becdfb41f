"""Steps that the reference system was measured at on GPUs, beside what is predicted from the
document lengths.

    PYTHONPATH=. python benchmarks/reference_steps.py benchmarks/data/measured_steps.json.gz

For each set two numbers are fitted to its baseline: seconds of a step besides core attention, for a
row of tokens, and seconds of a query-key pair. What balanced steps take is predicted from these
two, from the pairs that are left on the busiest rank, and from the bytes that balancing moves at
the speed of the network; nothing is fitted to balanced steps.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from harness import options_parser, print_json, table

from hf_distca.plan.cost import RowBytes, pairs
from hf_distca.plan.figures import bytes_moved, loads_of
from hf_distca.plan.nodes import NETWORK_BANDWIDTH
from hf_distca.planner.micro_batch import plan_placed
from hf_distca.planner.settings import PlanSettings

ROW = RowBytes()
"""Llama-3-8B in bfloat16."""
BALANCED = "d2"
"""Name of steps with core attention disaggregated."""
WHOLE = "wlbllm"
"""Name of steps with whole documents balanced over groups of ranks that share each document."""
EVEN_TOKENS = 64 * 1024
"""Length of a document whose core attention the reference counts as much as its other work."""


@dataclass(frozen=True)
class Run:
    """Steps of one strategy.

    Attributes:
        mode: "baseline", BALANCED or WHOLE.
        data: groups of ranks; each group trains on different data.
        context: ranks of a group, which share each document.
        context_named: whether the measurements name that number; 1 is taken where they do not.
        tensor: GPUs of a rank: each has a share of the heads.
        layers: of the model.
        row_tokens: tokens of a row.
        strided: whether rank i has rows i, i + data, ...; else consecutive ones.
        steps: of each step, the lengths of the documents of each row.
        seconds: what each took.
    """

    mode: str
    data: int
    context: int
    context_named: bool
    tensor: int
    layers: int
    row_tokens: int
    strided: bool
    steps: tuple[tuple[tuple[int, ...], ...], ...]
    seconds: np.ndarray

    @classmethod
    def of(cls, run: dict[str, Any]) -> "Run":
        return cls(
            mode=run["mode"],
            data=run["dp"],
            context=run.get("cp") or 1,
            context_named=run.get("cp") is not None,
            tensor=run["tp"],
            layers=run["layers"],
            row_tokens=run["tokens_per_row"],
            strided=run.get("pairing") == "i,i+dp",
            steps=tuple(tuple(map(tuple, sample["rows"])) for sample in run["samples"]),
            seconds=np.array([sample["ms"] for sample in run["samples"]]) / 1e3,
        )

    def rows_of_ranks(self, rows: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        """The rows of each rank, in the order in which it computes them: each is a micro-batch, or
        a nano-batch.
        """
        count = len(rows) // self.data
        if self.strided:
            return [list(rows[rank :: self.data]) for rank in range(self.data)]
        return [list(rows[rank * count : (rank + 1) * count]) for rank in range(self.data)]

    def rows_per_gpu(self, rows: Sequence[tuple[int, ...]]) -> float:
        """Rows that a GPU computes everything but core attention of."""
        return len(rows) / self.data / self.context

    def gathering(self, rows: Sequence[tuple[int, ...]]) -> float:
        """Seconds in which K and V of shared documents are gathered, forward and backward, and
        their gradients brought back."""
        tokens = self.rows_per_gpu(rows) * self.row_tokens * (self.context - 1)
        return 3 * self.layers * tokens * ROW.kv / self.tensor / (NETWORK_BANDWIDTH * 1e9)


@dataclass(frozen=True)
class Step:
    """Figures of a step, known before it is run.

    Attributes:
        rows: that a GPU computes everything but core attention of.
        pairs: query-key pairs of all layers of the rank that is done last.
        moving: seconds in which rows or K and V travel.
    """

    rows: float
    pairs: float
    moving: float


def described(run: Run) -> list[Step]:
    describe = {BALANCED: _balanced, WHOLE: _whole}.get(run.mode, _baseline)
    return [describe(run, rows) for rows in run.steps]


def _baseline(run: Run, rows: Sequence[tuple[int, ...]]) -> Step:
    """Rows stay where they are: the rank with the most pairs is the last."""
    load = max(_pairs(chain.from_iterable(of_rank)) for of_rank in run.rows_of_ranks(rows))
    return Step(run.rows_per_gpu(rows), run.layers * load / run.context, run.gathering(rows))


def _balanced(run: Run, rows: Sequence[tuple[int, ...]]) -> Step:
    """Each row of a rank is a nano-batch, balanced over all ranks by itself, and nothing is hidden.

    Forward: Q, K and V there and O back; backward: dO there and dQ, dK and dV back, the same bytes.
    """
    load, moved = 0.0, 0.0
    settings = PlanSettings(
        run.data, run.row_tokens, document_layout="fixed", balance_tolerance=0.0
    )
    for nano_batch in zip(*run.rows_of_ranks(rows), strict=True):
        plan = plan_placed(nano_batch, settings).nano_batches[0].plans[settings.dominant_kind]
        load += float(loads_of(plan).max())
        moved += float(bytes_moved(plan, ROW).max())
    # Ranks that share documents share what is moved too.
    gpus = run.tensor * run.context
    moving = 2 * run.layers * moved / gpus / (NETWORK_BANDWIDTH * 1e9)
    return Step(
        run.rows_per_gpu(rows), run.layers * load / run.context, moving + run.gathering(rows)
    )


def _whole(run: Run, rows: Sequence[tuple[int, ...]]) -> Step:
    """Whole documents, longest first, to the group of ranks with the least work, or the fewest
    tokens, that has room.

    The ranks of a group share each document evenly. The reference's `balance_data_for_wlbllm` has
    the same rule. It also gives the length at which core attention takes as long as all other work.
    """
    room = len(rows) * run.row_tokens // run.data
    packed: list[list[int]] = [[] for _ in range(run.data)]
    for length in sorted((length for row in rows for length in row), reverse=True):
        least = min(packed, key=_work)
        shortest = min(packed, key=sum)
        fits = [group for group in (least, shortest) if sum(group) + length <= room]
        (fits or [least])[0].append(length)
    last = max(packed, key=_pairs)
    tokens = sum(last) / run.context
    return Step(
        tokens / run.row_tokens,
        run.layers * _pairs(last) / run.context,
        3
        * run.layers
        * tokens
        * (run.context - 1)
        * ROW.kv
        / run.tensor
        / (NETWORK_BANDWIDTH * 1e9),
    )


def _work(lengths: Sequence[int]) -> float:
    return sum((length / EVEN_TOKENS) ** 2 + length / EVEN_TOKENS for length in lengths)


def _pairs(lengths: Iterator[int] | Sequence[int]) -> float:
    return float(sum(pairs(0, length) for length in lengths))


def predicted(fit: np.ndarray, steps: Sequence[Step]) -> np.ndarray:
    """[steps] seconds.

    Args:
        fit: seconds of a row besides core attention, seconds of a pair.
    """
    return np.array([fit[0] * step.rows + fit[1] * step.pairs + step.moving for step in steps])


def sharing(fit: np.ndarray, run: Run) -> Run:
    """Return a run of whole documents with the number of ranks that share a document.

    Where the measurements do not name it, the number whose predictions correlate best is taken.
    Only the ups and downs from step to step count then, not the level that is predicted.
    """
    if run.context_named:
        return run
    ranks = run.data * run.context
    counts = [count for count in range(1, ranks + 1) if ranks % count == 0]
    runs = [replace(run, data=ranks // count, context=count) for count in counts]
    return max(
        runs, key=lambda each: np.corrcoef(predicted(fit, described(each)), each.seconds)[0, 1]
    )


def figures_of(runs: Sequence[Run]) -> dict[str, Any]:
    baseline = [run for run in runs if run.mode == "baseline"]
    steps = [step for run in baseline for step in described(run)]
    measured = _seconds(baseline)
    columns = np.array([(step.rows, step.pairs) for step in steps])
    fit, *_ = np.linalg.lstsq(columns, measured - [step.moving for step in steps], rcond=None)
    missed = predicted(fit, steps) - measured
    found = {
        "baseline_r2": 1
        - float(np.square(missed).sum() / np.square(measured - measured.mean()).sum()),
        "ms_per_row": fit[0] * 1e3,
        "ms_per_billion_pairs": fit[1] * 1e12,
    }
    for name, mode in (("balanced", BALANCED), ("whole", WHOLE)):
        chosen = [run for run in runs if run.mode == mode]
        if mode == WHOLE:
            chosen = [sharing(fit, run) for run in chosen]
        if not chosen:
            continue
        steps = [step for run in chosen for step in described(run)]
        seen = _seconds(chosen)
        guess = predicted(fit, steps)
        error = np.abs(guess / seen - 1)
        found |= {
            f"{name}_steps": len(seen),
            f"{name}_error_mean": float(error.mean()),
            f"{name}_error_p90": float(np.quantile(error, 0.9)),
            f"{name}_bias": float((guess / seen - 1).mean()),
            f"{name}_moving_share": float(np.mean([step.moving for step in steps] / guess)),
        }
        if mode == WHOLE:
            found["whole_ranks_a_document"] = sorted({run.context for run in chosen})
            found["whole_ranks_a_document_named"] = all(run.context_named for run in chosen)
            found["whole_runs"] = [
                {
                    "ranks_a_document": run.context,
                    "mean_seconds": float(run.seconds.mean()),
                    "bias": float((predicted(fit, described(run)) / run.seconds - 1).mean()),
                }
                for run in chosen
            ]
    return found


def _seconds(runs: Sequence[Run]) -> np.ndarray:
    return np.concatenate([run.seconds for run in runs])


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("file", type=Path, help="measured steps as JSON, gzipped or not")
    path = parser.parse_args().file
    raw = path.read_bytes()
    sets = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    found = {}
    for name, runs in sets.items():
        if isinstance(runs, list):
            found[name] = figures_of(list(map(Run.of, runs)))
    columns = (
        "baseline_r2",
        "balanced_error_mean",
        "balanced_error_p90",
        "balanced_bias",
        "whole_error_mean",
    )
    rows = []
    for name, figures in found.items():
        cells = [f"{figures[column]:.4f}" if column in figures else "" for column in columns]
        rows.append((name, *cells))
    table(("set", *columns), rows)
    print_json(**found)


if __name__ == "__main__":
    main()

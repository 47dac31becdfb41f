"""hf-distca timeline: join the traces of ranks and draw a step."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_distca.cli import InputError
from hf_distca.cli.options import check_writable, write
from hf_distca.progress import terminal_status
from hf_distca.timeline.steps import RankStep, read_traces, shown, steps_of, svg_of

DESCRIPTION = """\
Join the traces of all ranks and show one step: the time that each rank spent in core attention, in
waits for rows, and in everything else, section by section. --svg draws when each rank did what.
Training with trace_steps writes the traces.

  hf-distca timeline out --joined trace.json     # for ui.perfetto.dev
"""
OTHER = """
Other time, by section of the step. batches: data are waited for and bound to plans. forward:
projections, MLPs, loss. backward: their gradients, layers again under gradient checkpointing, and
the part of the synchronisation of gradients that nothing hides. between: the next plans, and
clipping of gradients. optimizer: its step, and callbacks."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", help="trace files, or folders with trace_rank_*.json")
    add("--step", type=int, metavar="N", help="step to show (default: the last one)")
    add("--joined", metavar="FILE", help="write the joined trace, for ui.perfetto.dev")
    add("--svg", metavar="FILE", help="write the picture of the step")
    add("--json", action="store_true", help="print the totals as one JSON object")


def run(options: argparse.Namespace) -> None:
    """Join, draw and write; raise InputError for unusable traces, steps and files."""
    check_writable(options.joined, options.svg)
    joined = _read(options.traces)
    name, steps = _choose_step(joined, options.step)
    if options.joined:
        write(options.joined, json.dumps(joined))
    if options.svg:
        write(options.svg, svg_of(name, steps))
    clock_error_ms = joined["otherData"]["clock_error_us"] / 1e3
    if options.json:
        ranks = [_figures(step) for step in steps]
        print(json.dumps({"step": name, "clock_error_ms": clock_error_ms, "ranks": ranks}))
    else:
        _print_table(name, steps, clock_error_ms)


def _read(names: Sequence[str]) -> dict[str, Any]:
    """Join the traces of files, and of folders with the files that training writes."""
    paths: list[Path] = []
    for path in map(Path, names):
        files = sorted(path.glob("trace_rank_*.json")) if path.is_dir() else [path]
        if not files:
            raise InputError(
                f"{path} has no trace_rank_*.json, which training writes with trace_steps; set "
                "trace_steps, or name another folder"
            )
        paths += files
    try:
        with terminal_status("Reading traces"):
            return read_traces(paths)
    except ValueError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(
            f"{error.filename}: {error.strerror}; name the files that training wrote"
        ) from error


def _choose_step(joined: dict[str, Any], number: int | None) -> tuple[str, list[RankStep]]:
    """Return the name of a step, by default the last one, and the step of each rank."""
    steps_by_name = steps_of(joined)
    if not steps_by_name:
        raise InputError("the traces have no step in common; give the files of one training")
    name = list(steps_by_name)[-1] if number is None else f"step {number}"
    if name not in steps_by_name:
        raise InputError(f"the trace has no {name}; choose one of {', '.join(steps_by_name)}")
    return name, steps_by_name[name]


def _figures(step: RankStep) -> dict[str, Any]:
    """Return the milliseconds of a rank's step, by activity and by section."""
    figures: dict[str, Any] = {"rank": step.rank, "step_ms": (step.end - step.begin) / 1e6}
    for activity, time in step.totals().items():
        figures[f"{activity}_ms"] = time / 1e6
    figures["sections_ms"] = {section: time / 1e6 for section, time in step.sections.items()}
    figures["others_ms"] = {section: time / 1e6 for section, time in step.others.items()}
    return figures


def _print_table(name: str, steps: Sequence[RankStep], clock_error_ms: float) -> None:
    """Print a line of milliseconds for each rank that is shown.

    A line has activities, and other time by section.
    """
    rows, ranks = shown(steps)
    clocks = f", clocks within {clock_error_ms:.2g} ms" if len(steps) > 1 else ""
    duration_ms = (max(step.end for step in steps) - min(step.begin for step in steps)) / 1e6
    print(f"{name}: {duration_ms:.1f} ms, {ranks}{clocks}")
    activities = ("step", "attention", "waits", "other")
    sections = list(steps[0].others)
    equals = " =" if sections else ""
    activity_titles = "".join(f"{title:>12}" for title in activities)
    section_titles = "".join(f"{title:>12}" for title in sections)
    print(f"{'ms':9}{activity_titles}{equals}{section_titles}")
    for rank in map(_figures, rows):
        times = "".join(f"{rank[f'{activity}_ms']:12.1f}" for activity in activities)
        parts = "".join(f"{rank['others_ms'].get(section, 0):12.1f}" for section in sections)
        print(f"rank {rank['rank']:<4}{times}{equals}{parts}")
    if sections:
        print(OTHER)

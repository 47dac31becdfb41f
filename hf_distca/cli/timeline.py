"""hf-distca timeline: join the traces of ranks and draw a step."""

import argparse
import json
from pathlib import Path
from typing import Any

from hf_distca.cli.input_error import InputError
from hf_distca.cli.report_files import check_writable, write_report
from hf_distca.timeline.drawing import svg_of, text_of
from hf_distca.timeline.steps import RankStep, TraceError, read_traces, steps_of

DESCRIPTION = """\
Join the traces of all ranks and draw one step: what each rank did when, and the time that it spent in core attention,
in waits for rows, and in everything else. Training with trace_steps writes the traces.

  hf-distca timeline out --joined trace.json     # for ui.perfetto.dev
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", help="trace files, or folders with trace_rank_*.json")
    add("--step", type=int, metavar="N", help="step to draw (default: the last one)")
    add("--joined", metavar="FILE", help="write the joined trace, for ui.perfetto.dev")
    add("--svg", metavar="FILE", help="write the picture of the step")
    add("--json", action="store_true", help="print the totals as one JSON object instead of the drawing")


def run(options: argparse.Namespace) -> None:
    """Join, draw and write.

    Raises:
        InputError: a file is no trace, there is no such step, or something cannot be written.
    """
    check_writable(options.joined, options.svg)
    try:
        joined = read_traces(_files(options.traces))
        steps_by_name = steps_of(joined)
        if not steps_by_name:
            raise InputError("the traces share no step; give the files of one training")
        name = list(steps_by_name)[-1] if options.step is None else f"step {options.step}"
        if name not in steps_by_name:
            raise InputError(f"there is no {name} in the trace; it has {', '.join(steps_by_name)}")
        steps, clock_error = steps_by_name[name], joined["otherData"]["clock_error_us"] / 1e3
        if options.joined:
            write_report(options.joined, json.dumps(joined).encode())
        if options.svg:
            write_report(options.svg, svg_of(name, steps).encode())
    except TraceError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from error
    if options.json:
        told = {"step": name, "clock_error_ms": clock_error, "ranks": [_told(step) for step in steps]}
        print(json.dumps(told))
    else:
        print(text_of(name, steps, clock_error))


def _files(given: list[str]) -> list[Path]:
    """Return the given files and the trace files in given folders."""
    found = []
    for path in map(Path, given):
        inside = sorted(path.glob("trace_rank_*.json")) if path.is_dir() else [path]
        if not inside:
            raise InputError(f"{path} holds no trace_rank_*.json: training writes them with trace_steps")
        found += inside
    return found


def _told(step: RankStep) -> dict[str, Any]:
    """Return a rank's totals in milliseconds."""
    totals = {f"{doing}_ms": time / 1e6 for doing, time in step.totals().items()}
    sections = {name: time / 1e6 for name, time in step.sections.items()}
    return {"rank": step.rank, "step_ms": (step.end - step.begin) / 1e6, **totals, "sections_ms": sections}

"""hf-distca timeline: join the traces of ranks and draw a step."""

import argparse
import json
from pathlib import Path

from hf_distca.cli import InputError
from hf_distca.cli.options import check_writable, write
from hf_distca.timeline.steps import read_traces, steps_of, svg_of

DESCRIPTION = """\
Join the traces of all ranks and show one step: the time that each rank spent in core attention, in waits for rows, and
in everything else, section by section. --svg draws when each rank did what. Training with trace_steps
writes the traces.

  hf-distca timeline out --joined trace.json     # for ui.perfetto.dev
"""
OTHER = """
Other time, by section of the step. batches: data are waited for and bound to plans. forward: projections, MLPs, loss.
backward: their gradients, layers again under gradient checkpointing, and the part of the synchronisation of gradients
that nothing hides. between: the next plans, and clipping of gradients. optimizer: its step, and callbacks."""


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
    paths: list[Path] = []
    for path in map(Path, options.traces):
        found = sorted(path.glob("trace_rank_*.json")) if path.is_dir() else [path]
        if not found:
            raise InputError(
                f"{path} has no trace_rank_*.json, which training writes with trace_steps; set "
                "trace_steps, or name another folder"
            )
        paths += found
    try:
        joined = read_traces(paths)
    except ValueError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(
            f"{error.filename}: {error.strerror}; name the files that training wrote"
        ) from error
    steps_by_name = steps_of(joined)
    if not steps_by_name:
        raise InputError("the traces have no step in common; give the files of one training")
    name = list(steps_by_name)[-1] if options.step is None else f"step {options.step}"
    if name not in steps_by_name:
        raise InputError(f"the trace has no {name}; choose one of {', '.join(steps_by_name)}")
    steps, clock_error = steps_by_name[name], joined["otherData"]["clock_error_us"] / 1e3
    if options.joined:
        write(options.joined, json.dumps(joined))
    if options.svg:
        write(options.svg, svg_of(name, steps))
    ranks = [
        {
            "rank": step.rank,
            "step_ms": (step.end - step.begin) / 1e6,
            **{f"{activity}_ms": time / 1e6 for activity, time in step.totals().items()},
            "sections_ms": {section: time / 1e6 for section, time in step.sections.items()},
            "others_ms": {section: time / 1e6 for section, time in step.others.items()},
        }
        for step in steps
    ]
    if options.json:
        print(json.dumps({"step": name, "clock_error_ms": clock_error, "ranks": ranks}))
        return
    clocks = f", clocks within {clock_error:.2g} ms" if len(steps) > 1 else ""
    took = (max(step.end for step in steps) - min(step.begin for step in steps)) / 1e6
    print(f"{name}: {took:.1f} ms, {len(steps)} ranks{clocks}")
    columns = ("step", "attention", "waits", "other")
    sections = list(steps[0].others)
    equals = " =" if sections else ""
    names_of_columns = "".join(f"{name:>12}" for name in columns)
    names_of_sections = "".join(f"{name:>12}" for name in sections)
    print(f"{'ms':9}{names_of_columns}{equals}{names_of_sections}")
    for rank, step in zip(ranks, steps, strict=True):
        times = "".join(f"{rank[f'{column}_ms']:12.1f}" for column in columns)
        parts = "".join(f"{step.others.get(name, 0) / 1e6:12.1f}" for name in sections)
        print(f"rank {rank['rank']:<4}{times}{equals}{parts}")
    if sections:
        print(OTHER)

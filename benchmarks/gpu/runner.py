"""Runs parts one after another, each in a process of its own with a limit of time, and writes down
what each found.
"""

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import Findings
from benchmarks.harness import end_with_parent, table

PASSED, FAILED, TIMED_OUT, SKIPPED, NOT_RUN = "passed", "FAILED", "TIMED OUT", "skipped", "NOT RUN"
NOT_DONE = "NOT DONE"
"""Result of a part that runs; it stays if the whole run is killed."""
LOG_TAIL = 4000
"""Characters of a part's output that are kept in the results where something is wrong."""
SHOW_STACK = signal.SIGUSR1
"""At this a part prints where it is; it is ended then."""
DUMP_S = 0.5
CommandOf = Callable[[str, Path], list[str]]
"""For a part's name and a file, the command that runs it and leaves its findings in the file."""


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: as it is reported.
        check: does it, with a setting.
        limit_s: seconds after which it is ended; it begins only where so many are left.
        skipped: why it has nothing to do here; empty if it has. No process is started for it then.
        all_gpus: whether it sees all GPUs; else the first one alone.
    """

    name: str
    check: Callable[[Any], Findings]
    limit_s: float
    skipped: str = ""
    all_gpus: bool = False


def chosen(parts: Sequence[Part], words: Sequence[str]) -> list[Part]:
    """Parts whose names are, or else begin with, one of the words, in their own order; without
    words all.

    Raises:
        ValueError: a word fits no part.
    """
    names: set[str] = set()
    for word in words:
        same = [part.name for part in parts if part.name == word]
        named = same or [part.name for part in parts if part.name.startswith(word)]
        if not named:
            raise ValueError(
                f"no part is called {word!r}; there are: {', '.join(part.name for part in parts)}"
            )
        names.update(named)
    return [part for part in parts if not words or part.name in names]


def run_parts(
    parts: Sequence[Part],
    command_of: CommandOf,
    results: dict[str, Any],
    output: Path,
    logs: Path,
    seconds: float,
) -> bool:
    """Run parts; results are written before and after each, so that a run that is killed leaves
    them.

    Args:
        parts: the most important first. One whose limit is more than what is left is not run, later
            ones may be.
        results: what is known before; `parts` is added.

    Returns:
        Whether nothing was wrong.
    """
    end = time.monotonic() + seconds
    found: dict[str, Any] = {part.name: _result(NOT_RUN) for part in parts}
    results["parts"] = found
    logs.mkdir(parents=True, exist_ok=True)
    for part in parts:
        left = end - time.monotonic()
        if part.skipped:
            found[part.name] = _result(SKIPPED, skipped=part.skipped)
        elif part.limit_s <= left:
            found[part.name] = _result(NOT_DONE)
            _write(output, results)
            found[part.name] = run_part(part, command_of, logs)
        else:
            short = (
                f"it is given {part.limit_s:.0f} s, of {seconds:.0f} s {max(left, 0):.0f} are left"
            )
            found[part.name] = _result(NOT_RUN, wrong=[short])
        print(
            f"{part.name}: {found[part.name]['status']} in {found[part.name]['seconds']:.0f} s",
            flush=True,
        )
        _write(output, results)
    return all(part["status"] in (PASSED, SKIPPED) for part in found.values())


def run_part(part: Part, command_of: CommandOf, logs: Path) -> dict[str, Any]:
    """Run one part in a process that ends with this one; returns its result, with its output where
    that is wrong.
    """
    file_name = part.name.replace(" ", "_").replace(",", "")
    findings, log = logs / f"{file_name}.json", logs / f"{file_name}.log"
    findings.unlink(missing_ok=True)
    # Trainer would use all that it sees in one process.
    one_gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    begin = time.monotonic()
    with log.open("w") as out:
        # A session of its own: its ranks and servers are ended with it.
        process = subprocess.Popen(
            command_of(part.name, findings),
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **({} if part.all_gpus else one_gpu)},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            code: int | None = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(SHOW_STACK)
            time.sleep(DUMP_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - begin
    printed = log.read_text(errors="replace")[-LOG_TAIL:].strip()
    if code is None:
        return _result(
            TIMED_OUT, seconds, wrong=[f"not done in {part.limit_s:.0f} s"], printed=printed
        )
    if not findings.exists():
        return _result(
            FAILED, seconds, wrong=[f"ended with status {code}, without findings"], printed=printed
        )
    found = json.loads(findings.read_text())
    if found["wrong"]:
        return _result(FAILED, seconds, printed=printed, **found)
    return _result(SKIPPED if found["skipped"] else PASSED, seconds, **found)


def _result(
    status: str,
    seconds: float = 0.0,
    wrong: Sequence[str] = (),
    figures: dict[str, Any] | None = None,
    skipped: str = "",
    printed: str = "",
) -> dict[str, Any]:
    result = {
        "status": status,
        "seconds": round(seconds, 1),
        "wrong": list(wrong),
        "skipped": skipped,
    }
    return {**result, "figures": figures or {}, "printed": printed}


def _write(path: Path, results: dict[str, Any]) -> None:
    """Write results, never half of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(results, indent=2) + "\n")
    draft.replace(path)


def print_table(results: dict[str, Any]) -> None:
    """Print one line a part, then everything that is wrong, and the command for the parts that were
    not run.
    """
    parts = results["parts"]
    table(
        ["part", "result", "seconds", "wrong"],
        [
            [
                name,
                part["status"],
                f"{part['seconds']:.0f}",
                str(len(part["wrong"])) if part["wrong"] else "",
            ]
            for name, part in parts.items()
        ],
    )
    for name, part in parts.items():
        for sentence in part["wrong"]:
            print(f"{name}: {sentence}")
        if part["printed"]:
            print(part["printed"])
        if part["skipped"]:
            print(f"{name}: skipped: {part['skipped']}")
    if left := [name for name, part in parts.items() if part["status"] == NOT_RUN]:
        print(f'not run: make gpu GPU="{shlex.join(left)}"')

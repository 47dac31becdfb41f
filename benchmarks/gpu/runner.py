"""Runs parts one after another, each in a process of its own with a limit of time, and writes down what each found."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.findings import Findings

LOG_TAIL = 4000
"""Characters of a part's output that are kept in the results where something is wrong."""
TELL_WHERE = signal.SIGUSR1
"""At this a part prints where it is; it is ended then."""
DUMP_S = 0.5


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
    """The parts that words name or that begin with them, in their own order; without words all.

    Raises:
        ValueError: a word fits no part.
    """
    names: set[str] = set()
    for word in words:
        same = [part.name for part in parts if part.name == word]
        named = same or [part.name for part in parts if part.name.startswith(word)]
        if not named:
            raise ValueError(f"no part is called {word!r}; there are: {', '.join(part.name for part in parts)}")
        names.update(named)
    return [part for part in parts if not words or part.name in names]


def run_parts(
    parts: Sequence[Part],
    command_of: Callable[[str, Path], list[str]],
    results: dict[str, Any],
    output: Path,
    logs: Path,
    seconds: float,
) -> bool:
    """Run parts; results are written before and after each, so that a run that is killed leaves them.

    Args:
        parts: the most important first. One whose limit is more than what is left is not run, later ones may be.
        command_of: for a part's name and a file, the command that runs it and leaves its findings in the file.
        results: what is known before; `parts` is added.
        output: where results are written.
        logs: folder for what the parts print.
        seconds: for all parts together.

    Returns:
        Whether nothing was wrong.
    """
    end = time.monotonic() + seconds
    found: dict[str, Any] = {part.name: _result(report.NOT_RUN) for part in parts}
    results["parts"] = found
    logs.mkdir(parents=True, exist_ok=True)
    for part in parts:
        left = end - time.monotonic()
        if part.skipped:
            found[part.name] = _result(report.SKIPPED, skipped=part.skipped)
        elif part.limit_s <= left:
            found[part.name] = _result(report.NOT_DONE)
            report.write(output, results)
            found[part.name] = run_part(part.name, command_of, logs, part.limit_s, all_gpus=part.all_gpus)
        else:
            short = f"it is given {part.limit_s:.0f} s, of {seconds:.0f} s {max(left, 0):.0f} are left"
            found[part.name] = _result(report.NOT_RUN, wrong=[short])
        print(f"{part.name}: {found[part.name]['status']} in {found[part.name]['seconds']:.0f} s", flush=True)
        report.write(output, results)
    return all(part["status"] in report.GOOD for part in found.values())


def run_part(
    name: str, command_of: Callable[[str, Path], list[str]], logs: Path, limit_s: float, *, all_gpus: bool = False
) -> dict[str, Any]:
    """Run one part; everything that it has started ends with it, and with this process.

    Args:
        name: of the part.
        command_of: as in `run_parts`.
        logs: as in `run_parts`.
        limit_s: seconds after which it is ended.
        all_gpus: as in `Part`.

    Returns:
        Status, seconds, figures, what is wrong, why it was skipped, and where something is wrong what it printed last.
    """
    file_name = name.replace(" ", "_").replace(",", "")
    findings, log = logs / f"{file_name}.json", logs / f"{file_name}.log"
    findings.unlink(missing_ok=True)
    # Trainer would use all that it sees in one process.
    one_gpu = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    begin = time.monotonic()
    with log.open("w") as out:
        # A session of its own: its ranks and servers are ended with it.
        process = subprocess.Popen(
            command_of(name, findings),
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **({} if all_gpus else one_gpu)},
            start_new_session=True,
        )
        with _ended_with_this_process(process):
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
                process.send_signal(TELL_WHERE)
                time.sleep(DUMP_S)
            finally:
                _end_session(process)
    seconds = time.monotonic() - begin
    printed = log.read_text(errors="replace")[-LOG_TAIL:].strip()
    if code is None:
        return _result(report.TIMED_OUT, seconds, wrong=[f"not done in {limit_s:.0f} s"], printed=printed)
    if not findings.exists():
        return _result(report.FAILED, seconds, wrong=[f"ended with status {code}, without findings"], printed=printed)
    told = json.loads(findings.read_text())
    if told["wrong"]:
        return _result(report.FAILED, seconds, **told, printed=printed)
    return _result(report.SKIPPED if told["skipped"] else report.PASSED, seconds, **told)


def _result(
    status: str,
    seconds: float = 0.0,
    wrong: Sequence[str] = (),
    figures: dict[str, Any] | None = None,
    skipped: str = "",
    printed: str = "",
) -> dict[str, Any]:
    return {
        "status": status,
        "seconds": round(seconds, 1),
        "wrong": list(wrong),
        "skipped": skipped,
        "figures": figures or {},
        "printed": printed,
    }


@contextmanager
def _ended_with_this_process(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Let a process and all that it has started end where this process is killed: a GPU would stay busy."""
    # What it reads from is closed when this process ends, in whatever way.
    watch = ["sh", "-c", f"read _; kill -KILL -{process.pid}"]
    with subprocess.Popen(watch, stdin=subprocess.PIPE, start_new_session=True) as watching:
        try:
            yield
        finally:
            watching.kill()


def _end_session(process: "subprocess.Popen[bytes]") -> None:
    """End the process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

"""Parts that benchmarks share: figures, ranks that take rounds, and two checkouts in turns."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.harness import Ranks

ROOT = Path(__file__).parents[2]
SCRIPT = """
import hf_distca
from harness import over, report, rounds_parser, take_rounds

values = iter(hf_distca.VALUES)
options = rounds_parser(__doc__, rounds=3).parse_args()
measured = take_rounds(options, lambda: {"step, s": next(values), "half, s": 0.5})
report(measured, {"step / half": over("step, s", "half, s")})
"""


def count_up(step: int):
    taken = [0]

    def take() -> tuple[str, int]:
        taken[0] += step
        if taken[0] > 2 * step and os.environ["RANK"] == "1":
            raise ValueError("one is wrong")
        return os.environ["RANK"], taken[0]

    return take


@pytest.mark.launches
def test_ranks_keep_what_was_prepared_from_round_to_round():
    with Ranks(2, count_up, 3) as ranks:
        assert [ranks.take(), ranks.take()] == [[("0", 3), ("1", 3)], [("0", 6), ("1", 6)]]
        with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed.*one is wrong"):
            ranks.take()


def checkout(folder: Path, values: list[float], script: str = SCRIPT) -> Path:
    shutil.copytree(ROOT / "benchmarks" / "harness", folder / "benchmarks" / "harness")
    (folder / "benchmarks" / "bench.py").write_text(script)
    (folder / "hf_distca").mkdir()
    (folder / "hf_distca" / "__init__.py").write_text(f"VALUES = {values}\n")
    return folder


def run(folder: Path, package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "benchmarks" / "bench.py"), *words]
    environment = os.environ | {"PYTHONPATH": str(package)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.launches
def test_two_checkouts_take_rounds_in_turns(tmp_path):
    own_checkout = checkout(tmp_path / "ours", [1.0, 2.0, 6.0])
    theirs = checkout(tmp_path / "theirs", [2.0, 2.0, 2.0])
    done = run(own_checkout, own_checkout, "--against", str(theirs))
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed["command"] == f"python benchmarks/bench.py --against {theirs}"
    assert {"cpu", "commit", "packages"} <= printed["machine"].keys()
    result = printed["result"]
    against = printed["result"]["against"]
    assert result["figures"]["half, s"] == {"lower": 0.5, "median": 0.5, "upper": 0.5}
    assert [taken["step, s"] for taken in result["rounds"] + against["rounds"]] == [
        1.0,
        2.0,
        6.0,
        2.0,
        2.0,
        2.0,
    ]
    assert result["derived"]["step / half"] == {"lower": 3.0, "median": 4.0, "upper": 8.0}
    assert against["ours_over_theirs"]["step, s"] == {"lower": 0.75, "median": 1.0, "upper": 2.0}
    # The package of another checkout than the script's, on either side, would measure something
    # else.
    assert "set PYTHONPATH" in run(own_checkout, theirs, "--against", str(theirs)).stderr
    assert (
        "give another checkout's folder"
        in run(own_checkout, own_checkout, "--against", str(own_checkout)).stderr
    )


ENDLESS = """
import os, time
from pathlib import Path
from harness import Ranks, rounds_parser, take_rounds
import hf_distca

PIDS = Path({pids!r})

def prepare():
    (PIDS / f"rank {{os.getpid()}}").touch()
    return take

def take():
    (PIDS / "taking").touch()
    time.sleep(600)

if __name__ == "__main__":
    options = rounds_parser(__doc__, rounds=1).parse_args()
    (PIDS / f"script {{os.getpid()}}").touch()
    if options.follow:
        with Ranks(2, prepare) as ranks:
            take_rounds(options, ranks.take)
    take_rounds(options, dict)
"""


@pytest.mark.launches
def test_a_script_that_is_killed_leaves_no_process_behind(tmp_path):
    """In the middle of a round of another checkout's script, which is to end as well."""
    own_checkout, theirs = (
        checkout(tmp_path / name, [], ENDLESS.format(pids=str(tmp_path)))
        for name in ("ours", "theirs")
    )
    command = [
        sys.executable,
        str(own_checkout / "benchmarks" / "bench.py"),
        "--against",
        str(theirs),
    ]
    processes = []
    end = time.monotonic() + 120
    with subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(own_checkout)}, stderr=subprocess.DEVNULL
    ) as script:
        while len(processes) < 4 or not (tmp_path / "taking").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
            processes = [psutil.Process(int(path.name.split()[1])) for path in tmp_path.glob("* *")]
        script.kill()
    left = psutil.wait_procs(processes, timeout=5)[1]
    for process in left:
        process.kill()
    assert not left

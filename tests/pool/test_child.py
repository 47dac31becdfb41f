"""The process that a launcher watches survives the servers that it starts, and none of them survives it."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hf_distca.pool import child
from hf_distca.pool.child import STARTS, serve_from_child
from tests.pool.servers import wait_until

pytestmark = pytest.mark.timeout(60)  # a child that is never killed would be waited for


@pytest.fixture
def reported(monkeypatch, capfd):
    """Serves with short pauses; what a parent reports until it returns. This process keeps its own handlers."""
    for name, seconds in (("AGAIN_S", 0.01), ("END_S", 0.1), ("_POLL_S", 0.05)):
        monkeypatch.setattr(child, name, seconds)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def reported(command, has_ended=lambda: False):
        serve_from_child(command, "the token\n", has_ended)
        return [line for line in capfd.readouterr().err.splitlines() if "serves and may die" not in line]

    yield reported
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_server_that_dies_is_followed_by_another_and_one_that_cannot_serve_is_given_up(tmp_path, reported):
    starts = tmp_path / "starts"
    # The third leaves by itself.
    script = f'read -r token; echo "$token" >> {starts}; [ $(wc -l < {starts}) -lt 3 ] && kill -9 $$; exit 0'
    lines = reported(["sh", "-c", script])
    assert starts.read_text() == "the token\n" * 3
    said = r"process \d+ was killed by signal 9; training goes on, and another one starts in 0.01 s"
    assert [bool(re.search(said, line)) for line in lines] == [True, True]
    for command, most in ((["false"], STARTS), (["/no/such/program"], STARTS), (["sh", "-c", "exit 2"], 1)):
        *before, last = reported(command)
        assert len(before) == most - 1
        assert last.endswith("; training goes on without it")


@pytest.mark.parametrize("number", [None, signal.SIGSTOP])
def test_a_server_that_does_not_end_with_training_is_killed(number, capfd, reported):
    found = []

    def has_ended():
        found.extend(map(int, re.findall(r"process (\d+) serves", capfd.readouterr().err)))
        if number is not None and len(found) == 1:
            os.kill(found[0], number)
        return True

    try:
        assert reported(["sleep", "infinity"], has_ended) == []
        with pytest.raises(ProcessLookupError):
            os.kill(found[0], 0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(found[0], signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_its_parent(number):
    # The file alone: the package takes seconds to import.
    start = f"run_path({child.__file__!r})['serve_from_child'](['sleep', '100'], '', lambda: False)"
    program = [sys.executable, "-c", f"from runpy import run_path; {start}"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as parent:
        lines = iter(parent.stderr.readline, "")
        pid = next(int(found[1]) for line in lines if (found := re.search(r"process (\d+) serves", line)))
        parent.send_signal(number)
        assert parent.wait(20) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())

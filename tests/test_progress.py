"""Bars and lines of long work, which are for terminals alone."""

import gc
import sys
from io import StringIO

import pytest

from hf_distca.progress import importing, terminal_bar, terminal_status


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "shown"), [(StringIO(), False), (Terminal(), True)], ids=["file", "terminal"]
)
def test_a_bar_is_shown_on_a_terminal_and_nothing_elsewhere(monkeypatch, stream, shown):
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(terminal_bar([1, 2], "Counting")) == [1, 2]
    assert ("Counting" in stream.getvalue()) == shown
    assert bool(stream.getvalue()) == shown


@pytest.mark.parametrize(
    ("stream", "rank", "shown"),
    [(StringIO, "0", False), (Terminal, "0", True), (Terminal, "1", False)],
    ids=["file", "terminal", "terminal of another rank"],
)
def test_a_line_is_shown_on_a_terminal_while_a_block_runs(monkeypatch, stream, rank, shown):
    stderr = stream()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("RANK", rank)
    with terminal_status("Reading"):
        assert ("Reading ..." in stderr.getvalue()) == shown
        assert bool(stderr.getvalue()) == shown
    line = stderr.getvalue().split("\r")[-2:]  # blanks, and the cursor at their beginning
    assert "".join(line).strip() == ""


def test_no_garbage_is_collected_while_libraries_are_imported():
    with importing("torch"):
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with importing("torch"):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

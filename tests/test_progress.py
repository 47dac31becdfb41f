"""Bars of long work, which are for terminals alone."""

import sys
from io import StringIO

import pytest

from hf_distca.progress import terminal_bar


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

"""Bars of long work, which are for terminals alone."""

import sys
from io import StringIO

from hf_distca.progress import terminal_bar


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_on_a_terminal_and_nothing_elsewhere(monkeypatch):
    for stream, shown in ((StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        assert list(terminal_bar([1, 2], "Counting")) == [1, 2]
        assert ("Counting" in stream.getvalue(), bool(stream.getvalue())) == (shown, shown)

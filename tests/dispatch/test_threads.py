"""Waits of threads, processes and the store: they log that they last, and end at a limit with a
remedy.
"""

import threading
import time

import pytest

from hf_distca.dispatch import threads
from hf_distca.dispatch.threads import WaitError, join, wait_until


class Clock:
    """A clock that goes on by what is waited for, so that a wait of minutes takes no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.slices = []
        monkeypatch.setattr(threads.time, "monotonic", lambda: self.now)

    def never(self, within_s: float) -> bool:
        self.slices.append(within_s)
        self.now += within_s
        return False


def test_a_wait_ends_at_its_limit_and_says_so_once_a_minute(monkeypatch, caplog):
    clock = Clock(monkeypatch)
    with pytest.raises(WaitError) as raised:
        wait_until(clock.never, "rank 0, in a server", 150.0, "look at rank 0")
    assert (
        str(raised.value)
        == "waited 150 s for rank 0, in a server, and it did not come; look at rank 0"
    )
    assert clock.slices == [1.0] * 150  # short enough for signals
    assert [record.message for record in caplog.records] == [
        f"still waiting for rank 0, in a server ({seconds} s of at most 150 s); look at rank 0"
        for seconds in (60, 120)
    ]


def test_a_wait_of_less_than_a_slice_does_not_exceed_its_limit(monkeypatch):
    clock = Clock(monkeypatch)
    with pytest.raises(WaitError, match=r"waited 0 s for news"):
        wait_until(clock.never, "news", 0.25, "read")
    assert clock.slices == [0.25]


def test_a_wait_ends_when_it_is_done(caplog):
    asked = []
    wait_until(lambda within_s: asked.append(within_s) or len(asked) == 3, "news", 100.0, "read")
    assert asked == [1.0] * 3
    assert caplog.records == []


def test_a_thread_that_does_not_end_is_named():
    stays = threading.Event()
    thread = threading.Thread(target=stays.wait, args=(60,), name="receive 10.0.0.1:5", daemon=True)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(
        WaitError, match=r"the thread 'receive 10\.0\.0\.1:5' of this process to end.*py-spy dump"
    ):
        join(thread, 0.2)
    assert 0.2 <= time.monotonic() - begin < 30
    stays.set()
    join(thread, 60)
    assert not thread.is_alive()

"""Waits for other ranks: what a rank says while it waits and when a wait fails, and when its
process ends.
"""

import gc
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hf_distca.dispatch import waits as waits_module
from hf_distca.dispatch.waits import RankLost, Waits

LIMIT_S = 4.0
"""Signs of life come twenty times as often; silence is noticed in a quarter of it."""
TIMED_OUT = RuntimeError(
    "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation"
)
CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")


@contextmanager
def of_ranks(ranks: int, limit_s: float = LIMIT_S, store: Any = None) -> Iterator[list[Waits]]:
    """The waits of ranks that share a store, all in this process."""
    store = store or dist.HashStore()
    waits = [Waits(store, rank, ranks, limit_s) for rank in range(ranks)]
    yield waits
    for waits_of_rank in waits:
        waits_of_rank.close()


class Nowhere:
    """A store that keeps nothing."""

    def set(self, *_: Any) -> None: ...

    def check(self, _: list[str]) -> bool:
        return False

    def multi_get(self, _: list[str]) -> list[bytes]:
        return []


def silence(waits: Waits) -> Any:
    """Let a rank give no sign of life any more, as one that is stopped; return its store."""
    store, waits._watch.store = waits._watch.store, Nowhere()
    return store


def raise_after(wait_s: float, error: Exception) -> None:
    time.sleep(wait_s)
    raise error


def fail(waits: Waits, error: Exception, wait_s: float = 0.0) -> str:
    """What a rank says whose wait fails."""
    with pytest.raises(RankLost) as raised, waits.of("rows of other ranks"):
        raise_after(wait_s, error)
    assert raised.value.__cause__ is error
    return str(raised.value)


def at_place(waits: Waits, place: str, wait: str = "") -> threading.Event:
    """Be at a place, in a thread that takes the rank's part, until the event is set."""
    is_there, leaves = threading.Event(), threading.Event()

    def stay() -> None:
        with waits.watched(place), waits.of(wait) if wait else nullcontext():
            is_there.set()
            leaves.wait(60)

    threading.Thread(target=stay, daemon=True).start()
    is_there.wait()
    time.sleep(1.5 * waits._watch.sign_s)  # for a sign of life from there
    return leaves


def test_a_failed_wait_names_the_silent_rank_its_place_and_the_remedy():
    with of_ranks(3) as (mine, other, silent):
        leaves = at_place(silent, "the backward of step 3", "rows of other ranks")
        silence(silent)
        message = fail(mine, TIMED_OUT, wait_s=2.0)
        silent_s = r"rank 2 \(process \d+ on .+\) has given no sign of life for \d s"
        place = "in the backward of step 3, waiting for rows of other ranks"
        begin = r"rank 0 has waited for rows of other ranks for [2-5] s"
        assert re.match(
            rf"{begin}: {silent_s}, and was last seen {place}\. Look at that process", message
        )
        assert "rank 1" not in message
        assert message.endswith(
            f"ddp_timeout for collectives of DDP, FSDP and DeepSpeed. The error was: {TIMED_OUT}"
        )

        # In the loop a message names the place.
        def evaluate() -> None:
            other.at("the forward of step 3")
            with other.watched("an evaluation"):
                other.at("micro-batch 2 of an evaluation")
                with other.of("lengths of documents"), other.of("control messages"):
                    raise CLOSED

        def save() -> (
            None
        ):  # a collective of the training framework fails at a place that is no wait
            other.at("the saving of checkpoint-3")
            raise CLOSED

        for fails, what in (
            (evaluate, "waited for lengths of documents in micro-batch 2 of an evaluation"),
            (save, "been in the saving of checkpoint-3"),
        ):
            with pytest.raises(RankLost) as raised, other.watched():
                fails()
            assert re.match(rf"rank 1 has {what} for 0 s: rank 2 \(", str(raised.value))
            assert raised.value.__cause__ is CLOSED
        leaves.set()


def test_ranks_that_are_elsewhere_absent_or_ended_are_named_when_none_is_silent():
    with of_ranks(2) as (mine, other):
        leaves = at_place(other, "the loading of data for step 4")
        message = fail(mine, TIMED_OUT)
        place = "in the loading of data for step 4"
        assert re.search(
            rf": rank 1 \(process .*\) is alive and has been {place} for \d s\.", message
        )
        leaves.set()
        other.close()
        assert re.search(r": rank 1 \(process .*\) has ended\.", fail(mine, CLOSED))
    with of_ranks(2, 2.0) as (mine, other):
        leaves = at_place(other, "", "rows of other ranks")
        assert ": all ranks are alive and in the same place. Look at" in fail(mine, TIMED_OUT)
        leaves.set()
    mine = Waits(dist.HashStore(), 0, 6, 2.0)
    message = fail(mine, TIMED_OUT)
    mine.close()
    names = "; ".join(f"rank {rank} has not come so far" for rank in (1, 2, 3, 4))
    assert f": {names}; so it is with 1 more ranks. " in message


def test_silence_during_an_earlier_wait_is_forgotten(monkeypatch, caplog):
    monkeypatch.setattr(waits_module, "SIGN_S", 0.05)
    with of_ranks(2, 2.0) as (mine, other):
        leaves = at_place(mine, "the backward of step 3")
        assert mine._watch._seen == {}  # a short wait reads no signs: of many ranks they are many
        store = silence(other)
        time.sleep(1.5)
        leaves.set()
        assert "has given no sign of life" in caplog.text
        other._watch.store = store
        time.sleep(0.3)
        assert "is alive and has been outside of hf_distca" in fail(mine, TIMED_OUT)


def test_a_long_wait_is_logged_once_a_minute_by_the_first_rank_that_waits(monkeypatch, caplog):
    monkeypatch.setattr(waits_module, "REPORT_S", 2.0)
    monkeypatch.setattr(waits_module, "SIGN_S", 0.1)
    with of_ranks(3, 5.0) as (first, second, silent):
        time.sleep(0.5)  # for a first sign of life
        for step, seconds in (
            (3, 2.8),
            (4, 0.8),
        ):  # a wait that ended leaves nothing to the next one
            events = [at_place(waits, f"the backward of step {step}") for waits in (first, second)]
            silence(silent)
            time.sleep(seconds)
            for event in events:
                event.set()
            time.sleep(0.3)  # for both to leave the place
    lines = [record.message for record in caplog.records if "has been" in record.message]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert len(lines) == 1
    begin = "rank 0 has been in the backward of step 3 for 2 s"
    assert re.match(rf"{begin}: rank 2 \(process .*\) has given no sign of life", lines[0])


class StoppedStore:
    """A store whose process is stopped: a call never returns."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def clone(self) -> "StoppedStore":
        return self

    def set(self, *_: Any) -> None:
        self.goes_on.wait(60)

    check = get = compare_set = set


def test_a_stopped_store_holds_up_nobody_and_is_named(monkeypatch):
    monkeypatch.setattr(waits_module, "STORE_S", 0.5)
    store = StoppedStore()
    with of_ranks(2, 1.0, store) as (mine, _):
        begin, names = (
            time.monotonic(),
            r"the run's store, in the process of the launcher or of rank 0, has not answered",
        )
        with pytest.raises(RankLost, match=names), mine.watched():
            raise CLOSED
        own = ValueError("boom")
        with pytest.raises(ValueError, match="boom"), mine.watched():
            raise own
        assert time.monotonic() - begin < 30
        store.goes_on.set()


@pytest.fixture
def ended(monkeypatch) -> list[tuple[int, float]]:
    """Exit codes and times of processes that end; this process goes on."""
    noted: list[tuple[int, float]] = []
    monkeypatch.setattr(
        waits_module.os, "_exit", lambda code: noted.append((code, time.monotonic()))
    )
    return noted


@pytest.mark.parametrize("place_only", [True, False])
def test_a_process_ends_that_would_wait_for_ever(ended, caplog, place_only):
    with of_ranks(3, 1.0) as (mine, other, gone):
        gone.close()  # needs nobody, and nobody gives it up however long it is silent
        begin = time.monotonic()
        if place_only:
            leaves = at_place(mine, "the backward of step 3")
            time.sleep(3.5)
            assert ended == []  # while the other rank is alive
            silence(other)
        else:  # a named wait fails by itself at its limit
            leaves = at_place(mine, "the backward of step 3", "rows of other ranks")
        while not ended and time.monotonic() < begin + 30:
            time.sleep(0.05)
        leaves.set()
    assert ended[0][0] == 1
    assert ended[0][1] - begin > (4.5 if place_only else 2.0)
    last = next(record for record in caplog.records if record.levelno == logging.CRITICAL).message
    what = "been in" if place_only else "waited for rows of other ranks in"
    assert last.startswith(f"rank 0 has {what} the backward of step 3 for ")
    assert last.endswith(". This process ends")


def test_a_process_whose_store_is_stopped_ends(ended, caplog):
    store = StoppedStore()
    with of_ranks(2, 1.0, store) as (mine, _):
        leaves = at_place(mine, "the backward of step 3")
        begin = time.monotonic()
        while not ended and time.monotonic() < begin + 30:
            time.sleep(0.05)
        leaves.set()
        store.goes_on.set()
    assert ended[0][0] == 1
    assert "rank 0 has been in the backward of step 3 for 2 s: the run's store" in caplog.text


@pytest.mark.parametrize("wait", ["", "rows of other ranks"])
def test_a_process_that_was_suspended_goes_on(monkeypatch, ended, caplog, wait):
    suspended_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + suspended_s, sleep=time.sleep)
    monkeypatch.setattr(waits_module, "time", clock)
    with of_ranks(2, 5.0) as (mine, _):
        leaves = at_place(mine, "the backward of step 3", wait)
        suspended_s = 1000.0
        time.sleep(1.5)
        leaves.set()
    assert (ended, caplog.text) == ([], "")


@pytest.mark.launches
def test_a_process_whose_wait_failed_exits_soon(monkeypatch):
    registered = []
    monkeypatch.setattr(waits_module.atexit, "register", registered.append)
    with of_ranks(2, 1.0) as (mine, _):
        fail(mine, TIMED_OUT)
    assert registered == [waits_module._end_soon]
    # What runs at the exit hangs, as gloo may do that waits for collectives.
    script = (
        "import atexit, time; from hf_distca.dispatch import waits; waits.EXIT_S = 1; "
        "atexit.register(time.sleep, 60); atexit.register(waits._end_soon)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=100).returncode == -signal.SIGALRM


def wait_for_threads(number: int) -> None:
    until = time.monotonic() + 30
    while threading.active_count() != number:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_what_is_not_watched_stays_as_it_is_and_threads_end_with_the_waits():
    before = threading.active_count()
    alone = Waits()
    with pytest.raises(RuntimeError) as raised, alone.watched(), alone.of("rows"):
        raise CLOSED
    assert raised.value is CLOSED
    assert threading.active_count() == before
    store = dist.HashStore()
    waits = [Waits(store, 0, 2, 2.0)]
    boom = RuntimeError("DataLoader timed out after 10 seconds")
    with pytest.raises(RuntimeError) as raised, waits[0].watched("the loop"), waits[0].of("rows"):
        raise boom
    assert raised.value is boom
    assert threading.active_count() == before + 2
    waits.clear()
    gc.collect()
    wait_for_threads(before)
    assert store.get("sign of rank 0").endswith(b"true]")  # it has ended


def test_the_thread_of_signs_may_collect_the_waits():
    """Python collects garbage in any thread."""
    before = threading.active_count()
    waits = Waits(dist.HashStore(), 0, 2, 2.0)
    close, closed = waits.close, []

    class Collects:
        def set(self, *_: Any) -> None:
            close()
            closed.append(True)

    waits._watch.store = Collects()
    wait_for_threads(before)
    assert closed == [True, True]  # by the next sign, and by the last one

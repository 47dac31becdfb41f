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
from typing import Any

import pytest
import torch.distributed as dist

from hf_distca.dispatch import waits as waits_module
from hf_distca.dispatch.failures import Failures
from hf_distca.dispatch.signs import StoreLine
from hf_distca.dispatch.waits import RankLost, Waits

LIMIT_S = 8.0
"""Signs of life come twenty times as often; silence is noticed in a fifth of it."""
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


def silence(waits: Waits) -> None:
    """Let a rank give no sign of life any more, as one that is stopped."""
    waits._watch._stop.set()
    waits._watch._thread.join()


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
    time.sleep(LIMIT_S / 10)  # for a sign of life from there
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
        # Inside of a context of failures the outermost context says so, with the place.
        failures = Failures(other, wait_s=0.1)

        def evaluate() -> None:
            other.at("the forward of step 3")
            with failures.reported("an evaluation"):
                other.at("micro-batch 2 of an evaluation")
                with other.of("lengths of documents"):
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
            with pytest.raises(RankLost) as raised, failures.reported():
                fails()
            assert re.match(rf"rank 1 has {what} for 0 s: rank 2 \(", str(raised.value))
        leaves.set()


def test_ranks_that_are_elsewhere_absent_or_ended_are_named_when_none_is_silent():
    with of_ranks(2) as (mine, other):
        leaves = at_place(other, "the loading of data for step 4")
        message = fail(mine, TIMED_OUT, wait_s=1.0)
        place = "in the loading of data for step 4"
        assert re.search(
            rf": rank 1 \(process .*\) is alive and has been {place} for \d s\.", message
        )
        leaves.set()
        other.close()
        assert re.search(r": rank 1 \(process .*\) has ended\.", fail(mine, CLOSED))
        signs = mine._watch.signs
        for _ in range(
            4
        ):  # a rank that has ended needs nobody, and nobody gives it up however long it is silent
            time.sleep(signs.sign_s)
            signs.exchange(None, look=True)
        assert (signs.ended_ranks(), signs.silent_ranks(0.0)) == ([1], {})
    with of_ranks(2) as (mine, other):
        leaves = at_place(other, "", "rows of other ranks")
        assert ": all ranks are alive and in the same place. Look at" in fail(
            mine, TIMED_OUT, wait_s=1.0
        )
        leaves.set()
    with of_ranks(6) as (mine, *others):
        for absent in others:
            silence(absent)
            mine.line.ask(
                lambda store, rank=absent.rank: store.delete_key(f"sign of life of rank {rank}"), 5
            )
        message = fail(mine, TIMED_OUT)
        names = "; ".join(f"rank {rank} has not come so far" for rank in (1, 2, 3, 4))
        assert f": {names}; so it is with 1 more ranks. " in message


def test_a_long_wait_is_logged_once_a_minute_by_the_first_rank_that_waits(monkeypatch, caplog):
    monkeypatch.setattr(waits_module, "REPORT_S", 2.0)
    with of_ranks(3, 5.0) as (first, second, silent):
        time.sleep(1.0)  # for a first sign of life
        silence(silent)
        for step, seconds in (
            (3, 2.8),
            (4, 1.0),
        ):  # a wait that ended leaves nothing to the next one
            events = [at_place(waits, f"the backward of step {step}") for waits in (first, second)]
            time.sleep(seconds)
            for event in events:
                event.set()
            time.sleep(0.3)  # for both to leave the place
    lines = [record.message for record in caplog.records if "has been" in record.message]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert len(lines) == 3
    for line, step in zip(lines, (3, 3, 4), strict=True):
        begin = f"rank 0 has been in the backward of step {step} for [2-5] s"
        assert re.match(rf"{begin}: rank 2 \(process .*\) has given no sign of life", line)


class StoppedStore:
    """A store whose process is stopped after some calls: a call never returns."""

    def __init__(self, calls: int = 0) -> None:
        self.calls, self.goes_on = calls, threading.Event()

    def clone(self) -> "StoppedStore":
        return self

    def set(self, *_: Any) -> None:
        if self.calls <= 0:
            self.goes_on.wait(60)
        self.calls -= 1

    def check(self, *_: Any) -> bool:
        self.set()
        return False


def test_a_stopped_store_holds_up_nobody_and_is_named():
    store = StoppedStore()
    with of_ranks(2, 1.0, store) as (mine, _):
        begin, names = (
            time.monotonic(),
            r"the run's store, in the process of the launcher or of rank 0, has not answered",
        )
        with pytest.raises(RankLost, match=names), Failures(mine, wait_s=0.1).reported():
            raise CLOSED
        assert time.monotonic() - begin < 30
        store.goes_on.set()


@pytest.mark.parametrize("place_only", [True, False])
def test_a_process_ends_that_would_wait_for_ever(monkeypatch, caplog, place_only):
    ended = []
    monkeypatch.setattr(
        waits_module.os, "_exit", lambda code: ended.append((code, time.monotonic()))
    )
    with of_ranks(2, 2.0) as (mine, other):
        begin = time.monotonic()
        if place_only:
            leaves = at_place(mine, "the backward of step 3")
            time.sleep(2.5)
            assert ended == []  # while the other rank is alive
            silence(other)
        else:  # a named wait fails by itself at its limit
            leaves = at_place(mine, "the backward of step 3", "rows of other ranks")
        while not ended and time.monotonic() < begin + 30:
            time.sleep(0.05)
        leaves.set()
    assert ended[0][0] == 1
    assert ended[0][1] - begin > (4.0 if not place_only else 2.0)
    last = next(record for record in caplog.records if record.levelno == logging.CRITICAL).message
    what = "been in" if place_only else "waited for rows of other ranks in"
    assert last.startswith(f"rank 0 has {what} the backward of step 3 for ")
    assert last.endswith(". This process ends")


def test_a_rank_that_was_stopped_itself_forgets_when_others_were_seen(monkeypatch):
    with of_ranks(2, 2.0) as (mine, _):
        forgotten = threading.Event()
        monkeypatch.setattr(mine._watch.signs, "forget", forgotten.set)
        assert not forgotten.wait(1.0)
        exchange = mine._watch.signs.exchange
        monkeypatch.setattr(
            mine._watch.signs, "exchange", lambda *_, **__: time.sleep(mine._watch.signs.silent_s)
        )
        assert forgotten.wait(30)
        monkeypatch.setattr(mine._watch.signs, "exchange", exchange)


@pytest.mark.launches
def test_a_process_whose_wait_failed_exits_soon(monkeypatch):
    registered = []
    monkeypatch.setattr(waits_module.atexit, "register", registered.append)
    with of_ranks(2) as (mine, other):
        silence(other)
        fail(mine, TIMED_OUT)
    assert registered == [waits_module._end_soon]
    # What runs at the exit hangs, as gloo may do that waits for collectives.
    script = (
        "import atexit, time; from hf_distca.dispatch import waits; waits.EXIT_S = 1; "
        "atexit.register(time.sleep, 60); atexit.register(waits._end_soon)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=100).returncode == -signal.SIGALRM


def test_what_is_not_watched_stays_as_it_is_and_threads_end_with_the_waits():
    before = threading.active_count()
    alone = Waits(None, 0, 1, LIMIT_S)
    with pytest.raises(RuntimeError) as raised, alone.of("rows"):
        raise CLOSED
    assert raised.value is CLOSED
    assert threading.active_count() == before
    waits = [Waits(dist.HashStore(), 0, 2, 2.0)]
    boom = RuntimeError("DataLoader timed out after 10 seconds")
    with pytest.raises(RuntimeError) as raised, waits[0].watched("the loop"), waits[0].of("rows"):
        raise boom
    assert raised.value is boom
    assert threading.active_count() == before + 2
    waits.clear()
    gc.collect()
    assert threading.active_count() == before


def test_the_thread_of_the_store_may_collect_the_waits():
    """Python collects garbage in any thread."""
    line = StoreLine(dist.HashStore())
    line.post(lambda _store: line.close(60.0)).result(60.0)
    line.close(60.0)
    assert not line._thread.is_alive()

"""A rank that lost its partner says why the partner failed."""

import time

import pytest
import torch.distributed as dist

from hf_distca.dispatch.failures import Failures

CLOSED = "[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


class Unreachable(dist.Store):
    """A store whose host is gone."""

    def set(self, *args) -> None:
        raise dist.DistNetworkError("Broken pipe")

    def check(self, *args) -> bool:
        raise dist.DistNetworkError("Broken pipe")


def fail(failures: Failures, error: Exception) -> None:
    with failures.reported():
        raise error


def evaluate_twice_within(failures: Failures, error: Exception) -> None:
    with failures.reported():
        with failures.reported():
            pass
        fail(failures, error)


def left_behind(store: dist.Store, error: Exception) -> Failures:
    """Rank 0 of three, once rank 1 has failed with the error."""
    with pytest.raises(type(error)) as raised:
        fail(Failures(store, 1, 3), error)
    assert raised.value is error
    return Failures(store, 0, 3, wait_s=0.2)


@pytest.mark.parametrize(
    "lost", [RuntimeError(CLOSED), dist.DistBackendError("NCCL error"), dist.DistNetworkError("")]
)
def test_a_rank_that_lost_its_partner_says_why(lost):
    failures = left_behind(dist.HashStore(), KeyError("text"))
    with pytest.raises(RuntimeError, match=r"^rank 1 failed: KeyError: 'text'$") as raised:
        fail(failures, lost)
    assert raised.value.__cause__ is lost


@pytest.mark.parametrize("own", [ValueError(CLOSED), RuntimeError("shapes differ")])
def test_an_error_of_its_own_stays_and_waits_for_no_rank(own):
    left_behind(store := dist.HashStore(), ValueError("boom"))
    begin = time.monotonic()
    with pytest.raises(type(own)) as raised:
        fail(Failures(store, 0, 3, wait_s=600.0), own)
    assert raised.value is own
    assert time.monotonic() - begin < 300.0


@pytest.mark.parametrize("store", [dist.HashStore(), None], ids=["partner left no error", "one rank alone"])
def test_a_lost_connection_without_an_error_to_report(store):
    with pytest.raises(RuntimeError, match="Connection closed"):
        fail(Failures(store, 0, 2, wait_s=0.2), RuntimeError(CLOSED))


@pytest.mark.parametrize("error", [RuntimeError(CLOSED), ValueError("boom")])
def test_a_store_that_is_gone_hides_no_error(error):
    with pytest.raises(type(error)) as raised:
        fail(Failures(Unreachable(), 0, 2), error)
    assert raised.value is error


def test_what_failed_before_is_forgotten():
    store = dist.HashStore()
    failures = left_behind(store, ValueError("boom"))
    with failures.reported():
        pass
    with pytest.raises(RuntimeError, match="Connection closed"):
        fail(failures, RuntimeError(CLOSED))


def test_an_evaluation_within_a_training():
    store = dist.HashStore()
    failures = left_behind(store, ValueError("boom"))
    with pytest.raises(RuntimeError, match="rank 1 failed: ValueError: boom") as raised:
        evaluate_twice_within(failures, RuntimeError(CLOSED))
    assert str(raised.value.__cause__) == CLOSED
    # What rank 0 only reports is not reported again as an error of its own.
    with pytest.raises(RuntimeError, match=r"^rank 1 failed: ValueError: boom$"):
        fail(Failures(store, 2, 3, wait_s=0.2), RuntimeError(CLOSED))

"""A rank that lost its partner says why the partner failed."""

import time

import pytest
import torch.distributed as dist

from hf_distca.dispatch.failures import Failures

CLOSED = RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")


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


def stays(failures: Failures, error: Exception) -> bool:
    """Whether a rank raises its own error."""
    with pytest.raises(type(error)) as raised:
        fail(failures, error)
    return raised.value is error


def left_behind(store: dist.Store, error: Exception, wait_s: float = 0.2) -> Failures:
    """Rank 0 of three, once rank 1 has failed with the error."""
    assert stays(Failures(store, 1, 3), error)
    return Failures(store, 0, 3, wait_s)


@pytest.mark.parametrize("lost", [CLOSED, dist.DistBackendError("NCCL error"), dist.DistNetworkError("")])
def test_a_rank_that_lost_its_partner_says_why(lost):
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match=r"^rank 1 failed: KeyError: 'text'$") as raised:
        fail(left_behind(store, KeyError("text")), lost)
    assert raised.value.__cause__ is lost
    # What rank 0 only reports is not reported again as an error of its own.
    with pytest.raises(RuntimeError, match=r"^rank 1 failed: KeyError: 'text'$"):
        fail(Failures(store, 2, 3, wait_s=0.2), CLOSED)


@pytest.mark.parametrize("own", [ValueError(str(CLOSED)), RuntimeError("shapes differ")])
def test_an_error_of_its_own_stays_and_waits_for_no_rank(own):
    begin = time.monotonic()
    assert stays(left_behind(dist.HashStore(), ValueError("boom"), wait_s=600.0), own)
    assert time.monotonic() - begin < 300.0


@pytest.mark.parametrize("store", [dist.HashStore(), Unreachable(), None], ids=["no error left", "gone", "one rank"])
@pytest.mark.parametrize("error", [CLOSED, ValueError("boom")])
def test_an_error_stays_where_there_is_no_other(store, error):
    assert stays(Failures(store, 0, 2, wait_s=0.2), error)


def test_what_failed_before_is_forgotten_and_an_evaluation_belongs_to_its_training():
    failures = left_behind(dist.HashStore(), ValueError("boom"))
    with failures.reported():
        pass
    assert stays(failures, CLOSED)
    with pytest.raises(RuntimeError, match="rank 1 failed: ValueError: boom") as raised:
        evaluate_twice_within(left_behind(dist.HashStore(), ValueError("boom")), CLOSED)
    assert raised.value.__cause__ is CLOSED

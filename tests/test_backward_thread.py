"""The fixture that lets every backward run in a thread of its own: it does so here and on ranks."""

import threading

import pytest
import torch

pytestmark = pytest.mark.usefixtures("backward_thread")


def seen_by_a_backward() -> tuple[bool, float]:
    """Whether a backward ran in this thread, and the gradient."""
    threads = []
    x = torch.ones((), requires_grad=True)
    y = 3 * x
    y.register_hook(lambda _grad: threads.append(threading.get_ident()))
    y.backward()
    return threads == [threading.get_ident()], x.grad.item()


def test_another_thread_runs_it_here_and_on_ranks(rank_pools):
    assert [seen_by_a_backward(), *rank_pools[2].run(seen_by_a_backward)] == [(False, 3.0)] * 3
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()

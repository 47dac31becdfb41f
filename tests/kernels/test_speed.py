"""What is measured to compare the speeds of workers."""

import pytest
import torch

from hf_distca.kernels import speed
from hf_distca.kernels.speed import FILLING_WORK, USUAL_WORK, Work, measure_speed, work_for

CPU = torch.device("cpu")


class Paced:
    """A kernel that takes a second for so many multiplications of numbers, by a clock of its own."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(speed.time, "perf_counter", lambda: self.now)

    def forward(self, q, k, v, shapes, params):
        self.calls.append((tuple(q.shape), tuple(k.shape), shapes.q_lens, params.scale))
        self.now += sum(n * (n + 1) / 2 for n in shapes.q_lens) * q.shape[1] * q.shape[2] / 1e6
        return q, q[..., 0]

    def backward(self, do, q, k, v, o, lse, shapes, params):
        return q, k, v


@pytest.mark.parametrize("work", [Work(64, 8, 2, 64), Work(256, 16, 4, 128), Work(8, 1, 1, 4)])
def test_speeds_compare_whatever_was_computed(work, monkeypatch):
    assert measure_speed(Paced(monkeypatch), CPU, work=work) == pytest.approx(1e6 / 512)


def test_it_is_computed_what_was_asked(monkeypatch):
    kernel = Paced(monkeypatch)
    measure_speed(kernel, CPU, work=Work(64, 8, 2, 16))
    assert set(kernel.calls) == {((64, 8, 16), (64, 2, 16), (64,), 0.25)}


def test_a_gpu_is_filled():
    assert work_for(CPU) == USUAL_WORK
    assert work_for(torch.device("cuda:1")) == FILLING_WORK
    blocks = FILLING_WORK.tokens // 128 * FILLING_WORK.q_heads
    assert blocks > 10 * 132  # the multiprocessors of an H100

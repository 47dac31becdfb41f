"""What is measured to compare the speeds of workers."""

import pytest
import torch

from hf_distca.kernels import speed
from hf_distca.kernels.speed import FILLING_WORK, Work, measure_speed


class Paced:
    """A kernel that takes a second for so many multiplications of numbers, by a clock of its own."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(speed.time, "perf_counter", lambda: self.now)

    def forward(self, q, k, v, shapes, params):
        self.calls.append((tuple(q.shape), tuple(k.shape), shapes.q_lens, params.scale))
        seconds = sum(n * (n + 1) / 2 for n in shapes.q_lens) * q.shape[1] * q.shape[2] / 1e6
        self.now += 9 * seconds if len(self.calls) == 1 else seconds  # the first warms up
        return q, q[..., 0]

    def backward(self, do, q, k, v, o, lse, shapes, params):
        return q, k, v


@pytest.mark.parametrize("work", [Work(64, 8, 2, 64), Work(256, 16, 4, 16), Work(8, 1, 1, 4)])
def test_speeds_compare_whatever_was_computed(work, monkeypatch):
    monkeypatch.setattr(speed, "USUAL_WORK", work)
    kernel = Paced(monkeypatch)
    assert measure_speed(kernel, torch.device("cpu")) == pytest.approx(1e6 / 512)
    tokens, q_heads, kv_heads, dim = work
    assert set(kernel.calls) == {((tokens, q_heads, dim), (tokens, kv_heads, dim), (tokens,), dim**-0.5)}
    assert len(kernel.calls) >= 4


def test_a_gpu_is_filled():
    assert FILLING_WORK.tokens // 128 * FILLING_WORK.q_heads > 10 * 132  # the multiprocessors of an H100

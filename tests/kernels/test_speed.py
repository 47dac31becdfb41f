"""What is measured to compare the speeds of workers."""

import pytest
import torch

from hf_distca.kernels import speed


@pytest.mark.parametrize("work", [(64, 8, 2, 64), (256, 16, 4, 16), (8, 1, 1, 4)])
def test_speeds_compare_whatever_was_computed(work, monkeypatch):
    """By a clock of its own, the kernel takes a second for so many multiplications of numbers."""
    now, calls, (tokens, q_heads, kv_heads, dim) = 0.0, [], work

    class Paced:
        def forward(self, q, k, v, shapes, params):
            nonlocal now
            calls.append((tuple(q.shape), tuple(k.shape), shapes.q_lens, params.scale))
            seconds = sum(n * (n + 1) / 2 for n in shapes.q_lens) * q.shape[1] * q.shape[2] / 1e6
            now += 9 * seconds if len(calls) == 1 else seconds  # the first warms up
            return q, q[..., 0]

        def backward(self, do, q, k, v, o, lse, shapes, params):
            return q, k, v

    monkeypatch.setattr(speed.time, "perf_counter", lambda: now)
    monkeypatch.setattr(speed, "USUAL_WORK", work)
    assert speed.measure_speed(Paced(), torch.device("cpu")) == pytest.approx(1e6 / 512)
    assert set(calls) == {((tokens, q_heads, dim), (tokens, kv_heads, dim), (tokens,), dim**-0.5)}
    assert len(calls) >= 4

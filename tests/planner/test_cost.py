import numpy as np
import pytest

from hf_distca.plan import TASK, AttentionKind
from hf_distca.planner.cost import RowBytes, Workers, as_lengths, pairs, pairs_at, row_reaching
from hf_distca.planner.intervals import grain, merge_touching


def test_pairs_and_their_inverse():
    starts, stops, rows = np.array([0, 1, 5, 7]), np.array([0, 9, 8, 200]), np.array([0, 1, 3, 6, 1000])
    for window in (None, 1, 3, 100):
        expected = [sum(min(p + 1, window or p + 1) for p in range(*rows)) for rows in zip(starts, stops, strict=True)]
        assert pairs(starts, stops, window).tolist() == expected
        assert [pairs(int(a), int(b), window) for a, b in zip(starts, stops, strict=True)] == expected
        amounts = pairs(0, rows, window)
        np.testing.assert_allclose(row_reaching(amounts, window), rows, atol=1e-9)
        np.testing.assert_allclose([row_reaching(float(amount), window) for amount in amounts], rows, atol=1e-9)
        np.testing.assert_allclose(pairs_at(rows.astype(float), window), amounts)


def test_bytes_workers_and_cuts():
    assert RowBytes.of_kind(AttentionKind(), 2) == RowBytes()
    kind = AttentionKind(None, q_heads=16, kv_heads=8, dim_qk=192, dim_v=128)
    assert RowBytes.of_kind(kind, 4) == RowBytes(q=12288, kv=10240, o=8192)
    # The ideal time fills workers up to one level.
    assert Workers.uniform(4).ideal(100) == 25
    assert Workers((1.0, 1.0), (10.0, 0.0)).ideal(30) == 20
    assert Workers((1.0, 3.0), (0.0, 0.0)).ideal(100) == 25
    assert Workers((1.0, 1.0), (50.0, 0.0)).ideal(30) == 50  # a base load above the level
    # Rows that touch are one entry, if on the same worker.
    table = np.array([(0, 0, 2, 0), (0, 2, 5, 0), (0, 6, 7, 0), (1, 7, 8, 0), (1, 8, 9, 1)], TASK)
    assert merge_touching(table, "worker").tolist() == [(0, 0, 5, 0), (0, 6, 7, 0), (1, 7, 8, 0), (1, 8, 9, 1)]
    # A cut leaves the block as far as it must.
    assert [grain(128, 1, most) for most in (128, 127, 40, 0)] == [128, 64, 32, 1]
    assert grain(12, 1, 2) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttentionKind(q_heads=32, kv_heads=5), "kv_heads must divide q_heads, got q_heads=32 and kv_heads=5"),
        (lambda: AttentionKind(dim_v=0), "dim_v must be positive, got 0"),
        (lambda: Workers((1.0,), (0.0, 0.0)), "1 speeds and 2 base loads"),
        (lambda: Workers((), ()), "0 speeds"),
        (lambda: Workers((0.0,), (0.0,)), "speeds must be positive"),
        (lambda: Workers((float("nan"),), (0.0,)), "speeds must be positive"),
        (lambda: Workers((1.0,), (-1.0,)), "base loads must be finite and not negative"),
        (lambda: as_lengths([1, 0]), "document 1 has length 0"),
        (lambda: as_lengths([1.5]), "must be 64-bit integers"),
        (lambda: as_lengths([True]), "must be 64-bit integers"),
        (lambda: as_lengths([2**31]), "more than"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

import numpy as np
import pytest

from hf_distca.plan import AttentionKind
from hf_distca.planner.cost import RowBytes, Workers, as_lengths, pairs, pairs_at, row_reaching


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_pairs_of_arrays_are_those_of_numbers(window):
    starts, stops = np.array([0, 1, 5, 7]), np.array([0, 9, 8, 200])
    expected = [sum(min(p + 1, window or p + 1) for p in range(*rows)) for rows in zip(starts, stops, strict=True)]
    assert pairs(starts, stops, window).tolist() == expected
    assert [pairs(int(a), int(b), window) for a, b in zip(starts, stops, strict=True)] == expected


@pytest.mark.parametrize("window", [None, 1, 7])
def test_row_reaching_inverts_pairs(window):
    rows = np.array([0, 1, 6, 7, 8, 1000])
    amounts = pairs(0, rows, window)
    np.testing.assert_allclose(row_reaching(amounts, window), rows, atol=1e-9)
    np.testing.assert_allclose(pairs_at(rows.astype(float), window), amounts)


@pytest.mark.parametrize(
    ("kind", "bytes_per_value", "expected"),
    [
        (AttentionKind(), 2, RowBytes()),
        (AttentionKind(40, q_heads=14, kv_heads=2, dim_qk=64, dim_v=64), 4, RowBytes(q=3584, kv=1024, o=3584)),
        (AttentionKind(None, q_heads=16, kv_heads=16, dim_qk=192, dim_v=128), 2, RowBytes(6144, 10240, 4096)),
    ],
    ids=["llama-3-8b", "groups", "latent"],
)
def test_row_bytes_of_a_kind(kind, bytes_per_value, expected):
    assert RowBytes.of_kind(kind, bytes_per_value) == expected


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"q_heads": 32, "kv_heads": 5}, "kv_heads must divide q_heads, got q_heads=32 and kv_heads=5"),
        ({"dim_v": 0}, "dim_v must be positive, got 0"),
        ({"window": 0}, "window must be positive, got 0"),
    ],
)
def test_kinds_that_do_not_exist(sizes, message):
    with pytest.raises(ValueError, match=message):
        AttentionKind(**sizes)


def test_ideal_time_fills_workers_up_to_one_level():
    assert Workers.uniform(4).ideal(100) == 25
    assert Workers((1.0, 1.0), (10.0, 0.0)).ideal(30) == 20
    assert Workers((1.0, 3.0), (0.0, 0.0)).ideal(100) == 25
    assert Workers((1.0, 1.0), (50.0, 0.0)).ideal(30) == 50  # a base load above the level


@pytest.mark.parametrize(
    ("speed", "base", "message"),
    [
        ((1.0,), (0.0, 0.0), "1 speeds and 2 base loads"),
        ((), (), "0 speeds"),
        ((0.0,), (0.0,), "speeds must be positive"),
        ((1.0,), (-1.0,), "base loads must be finite and not negative"),
        ((float("nan"),), (0.0,), "speeds must be positive"),
    ],
)
def test_workers_refuse(speed, base, message):
    with pytest.raises(ValueError, match=message):
        Workers(speed, base)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([1, 0], "document 1 has length 0"), ([1.5], "must be 64-bit integers"), ([True], "must be 64-bit integers"),
     ([2**31], "more than")],
)  # fmt: skip
def test_lengths_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        as_lengths(lengths)

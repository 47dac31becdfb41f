"""Where a call is cut whose tasks differ in length, and what its parts are."""

from itertools import pairwise

import pytest

from hf_distca.kernels import TaskShapes
from hf_distca.kernels.split import MOST_RUNS, Grid, cuts, task_ranges

BY_Q = Grid(by_q=1, by_k=0)
SHORT = 100


@pytest.mark.parametrize(
    ("lens", "expected"),
    [
        ([], [0, 0]),
        ([32768], [0, 1]),
        ([SHORT] * 5000, [0, 5000]),
        ([32768] + [SHORT] * 500, [0, 1, 501]),
        ([SHORT] * 250 + [32768] + [SHORT] * 250, [0, 250, 251, 501]),
        # 255 empty blocks at 32 heads a short task: 15 of them cost 1.6 ms more in one call; a call costs 0.05.
        ([32768, SHORT, 32768, SHORT], [0, 1, 2, 3, 4]),
        # 1 empty block at 32 heads: 120 tasks make 3840 blocks, a call is worth 3846.
        ([256] + [SHORT] * 120, [0, 121]),
        ([256] + [SHORT] * 121, [0, 1, 122]),
        ([4096, 4000, 500, 400, 0, 0, 90], [0, 2, 7]),
    ],
)
def test_cuts(lens, expected):
    assert cuts(lens, lens, BY_Q, heads=32) == expected


def test_keys_count_where_they_make_blocks_and_few_heads_make_few():
    """A task of few rows may have many keys, as the end of a long document has."""
    q_lens, k_lens = [SHORT] * 101, [32768] + [SHORT] * 100
    assert cuts(q_lens, k_lens, BY_Q, heads=32) == [0, 101]
    assert cuts(q_lens, k_lens, Grid(by_q=2, by_k=1), heads=32) == [0, 1, 101]
    assert cuts(q_lens, k_lens, Grid(by_q=0, by_k=0), heads=32) == [0, 101]
    lens = [4096] + [SHORT] * 20
    assert [cuts(lens, lens, BY_Q, heads) for heads in (32, 4)] == [[0, 1, 21], [0, 21]]


def blocks(lens, borders):
    counts = [-(-length // 128) for length in lens]
    return sum(max(counts[i:j]) * (j - i) for i, j in pairwise(borders))


def test_many_runs_are_cut_as_well():
    """Neighbours of 16 and of 1 block by turns, more than are looked at one by one."""
    lens = [2048, SHORT] * (2 * MOST_RUNS)
    lens[333] = 65536
    borders = cuts(lens, lens, BY_Q, heads=32)
    assert (borders[0], borders[-1]) == (0, len(lens))
    assert borders == sorted(set(borders))
    assert blocks(lens, [0, len(lens)]) == 512 * 1024
    assert blocks(lens, borders) <= 16 * 1024 + 512 * 4


def test_the_parts_are_slices_with_lengths_of_their_own():
    lens = [32768] + [SHORT] * 40
    shapes = TaskShapes.build(lens, [length + 1 for length in lens], "cpu")
    (first, *of_first), (second, *of_second) = task_ranges(shapes, BY_Q, heads=32)
    assert of_first == [slice(0, 32768), slice(0, 32769)]
    assert of_second == [slice(32768, 36768), slice(32769, 36809)]
    assert (first.cu_q.tolist(), first.cu_k.tolist()) == ([0, 32768], [0, 32769])
    assert second.cu_q.tolist() == list(range(0, 4001, 100))
    assert second.cu_k.tolist() == list(range(0, 4041, 101))
    assert (first.max_q, first.max_k, second.max_q, second.max_k) == (32768, 32769, 100, 101)


def test_it_is_found_once():
    shapes = TaskShapes.build([3, 4], [3, 9], "cpu")
    assert task_ranges(shapes, BY_Q, heads=32) == ((shapes, slice(0, 7), slice(0, 12)),)  # not split: no other tensors
    assert task_ranges(shapes, BY_Q, heads=32) is task_ranges(shapes, Grid(by_q=1, by_k=0), heads=32)
    assert task_ranges(shapes, BY_Q, heads=32) is not task_ranges(shapes, BY_Q, heads=16)

"""Where a call is cut whose tasks differ in length, and what its parts are."""

from itertools import pairwise

import pytest

from hf_distca.kernels import TaskShapes
from hf_distca.kernels.split import ALL_EVEN, MOST_RUNS, OF_LONGEST, OF_LONGEST_Q, Grid, cuts, task_ranges

SHORT = 100
END_OF_A_LONG_DOCUMENT = [SHORT] * 101, [32768] + [SHORT] * 100
FEW_BLOCKS = ([4096] + [SHORT] * 20,) * 2


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
    assert cuts(lens, lens, OF_LONGEST_Q, heads=32) == expected


@pytest.mark.parametrize(
    ("lens", "grid", "heads", "expected"),
    [
        (END_OF_A_LONG_DOCUMENT, OF_LONGEST_Q, 32, [0, 101]),
        (END_OF_A_LONG_DOCUMENT, OF_LONGEST, 32, [0, 1, 101]),
        (END_OF_A_LONG_DOCUMENT, ALL_EVEN, 32, [0, 101]),
        (FEW_BLOCKS, OF_LONGEST_Q, 32, [0, 1, 21]),
        (FEW_BLOCKS, OF_LONGEST_Q, 4, [0, 21]),
    ],
)
def test_keys_count_where_they_make_blocks_and_few_heads_make_few(lens, grid, heads, expected):
    assert cuts(*lens, grid, heads) == expected


def test_many_runs_are_cut_as_well():
    """Neighbours of 16 and of 1 block by turns, more than are looked at one by one."""
    lens = [2048, SHORT] * (2 * MOST_RUNS)
    lens[333] = 65536
    borders = cuts(lens, lens, OF_LONGEST_Q, heads=32)
    assert (borders[0], borders[-1]) == (0, len(lens))
    assert borders == sorted(set(borders))
    counts = [-(-length // 128) for length in lens]
    assert sum(max(counts[i:j]) * (j - i) for i, j in pairwise(borders)) <= 16 * 1024 + 512 * 4


def test_the_parts_are_slices_with_lengths_of_their_own():
    lens = [32768] + [SHORT] * 40
    shapes = TaskShapes.build(lens, [length + 1 for length in lens], "cpu")
    (first, *of_first), (second, *of_second) = task_ranges(shapes, OF_LONGEST_Q, heads=32)
    assert of_first == [slice(0, 32768), slice(0, 32769)]
    assert of_second == [slice(32768, 36768), slice(32769, 36809)]
    assert (first.cu_q.tolist(), first.cu_k.tolist()) == ([0, 32768], [0, 32769])
    assert second.cu_q.tolist() == list(range(0, 4001, 100))
    assert second.cu_k.tolist() == list(range(0, 4041, 101))
    assert (first.max_q, first.max_k, second.max_q, second.max_k) == (32768, 32769, 100, 101)


def test_they_are_found_once():
    shapes = TaskShapes.build([3, 4], [3, 9], "cpu")
    found = task_ranges(shapes, OF_LONGEST_Q, heads=32)
    assert found == ((shapes, slice(0, 7), slice(0, 12)),)  # not split: no other tensors
    assert task_ranges(shapes, Grid(by_q=1, by_k=0), heads=32) is found
    assert task_ranges(shapes, OF_LONGEST_Q, heads=16) is not found

"""Where a call is cut whose tasks differ in length, and what its parts are."""

from itertools import pairwise

import pytest

from hf_distca.kernels import TaskShapes
from hf_distca.kernels.split_calls import (
    ALL_EVEN,
    MOST_RUNS,
    OF_LONGEST,
    OF_LONGEST_Q,
    Grid,
    cuts,
    task_ranges,
)

SHORT = 100


@pytest.mark.parametrize(
    ("lens", "expected"),
    [
        ([], [0, 0]),
        ([32768], [0, 1]),
        ([SHORT] * 5000, [0, 5000]),
        ([32768] + [SHORT] * 500, [0, 1, 501]),
        ([SHORT] * 250 + [32768] + [SHORT] * 250, [0, 250, 251, 501]),
        # 255 empty blocks at 32 heads a short task: four of them cost 0.08 ms more in one call; a
        # call costs 0.15.
        ([32768, SHORT] * 4, [0, 8]),
        ([32768] * 4 + [SHORT] * 8, [0, 4, 12]),
        # 1 empty block at 32 heads: 1875 tasks make 60,000 blocks, and a call is worth as many.
        ([256] + [SHORT] * 1875, [0, 1876]),
        ([256] + [SHORT] * 1876, [0, 1, 1877]),
        ([16384, 16000, 500, 400, *[0] * 13, 90], [0, 2, 18]),
    ],
)
def test_cuts(lens, expected):
    assert cuts(lens, lens, OF_LONGEST_Q, heads=32) == expected


def test_keys_count_where_they_make_blocks_and_few_heads_make_few():
    end_of_a_long_document = [SHORT] * 101, [32768] + [SHORT] * 100
    block_counts = [
        cuts(*end_of_a_long_document, grid, heads=32)
        for grid in (OF_LONGEST_Q, OF_LONGEST, ALL_EVEN)
    ]
    assert block_counts == [[0, 101], [0, 1, 101], [0, 101]]
    few_blocks = [4096] + [SHORT] * 80
    assert [cuts(few_blocks, few_blocks, OF_LONGEST_Q, heads) for heads in (32, 4)] == [
        [0, 1, 81],
        [0, 81],
    ]


def test_many_runs_are_cut_as_well():
    """Neighbours of 16 and of 1 block by turns, more than are looked at one by one."""
    lens = [2048, SHORT] * (2 * MOST_RUNS)
    lens[333] = 65536
    borders = cuts(lens, lens, OF_LONGEST_Q, heads=32)
    assert (borders[0], borders[-1]) == (0, len(lens))
    assert borders == sorted(set(borders))
    counts = [-(-length // 128) for length in lens]
    assert sum(max(counts[i:j]) * (j - i) for i, j in pairwise(borders)) <= 16 * 1024 + 512 * 4


@pytest.mark.parametrize(
    ("runs", "joined"), [(MOST_RUNS + 1, 2), (MOST_RUNS + 2, 2), (2 * MOST_RUNS + 1, 4)]
)
def test_no_task_is_lost_where_runs_that_are_joined_leave_one_over(runs, joined):
    """Two long tasks come first; cuts lie between runs that were joined, and the last one is the
    number of tasks.
    """
    lens = [65536, 65000, *([SHORT, 300] * runs)[: runs - 2]]
    assert cuts(lens, lens, OF_LONGEST_Q, heads=32) == [0, joined, runs]


def test_the_parts_are_slices_with_lengths_of_their_own_and_are_found_once():
    lens = [32768] + [SHORT] * 40
    shapes = TaskShapes.build(lens, [length + 1 for length in lens], "cpu")
    ranges = task_ranges(shapes, OF_LONGEST_Q, heads=32)
    (first, *of_first), (second, *of_second) = ranges
    assert of_first == [slice(0, 32768), slice(0, 32769)]
    assert of_second == [slice(32768, 36768), slice(32769, 36809)]
    assert (first.cu_q.tolist(), first.cu_k.tolist()) == ([0, 32768], [0, 32769])
    assert second.cu_q.tolist() == list(range(0, 4001, 100))
    assert second.cu_k.tolist() == list(range(0, 4041, 101))
    assert (first.max_q, first.max_k, second.max_q, second.max_k) == (32768, 32769, 100, 101)
    assert task_ranges(shapes, Grid(q_factor=1, k_factor=0), heads=32) is ranges
    assert (
        len(task_ranges(shapes, OF_LONGEST_Q, heads=1)) == 1
    )  # another kind of attention, with fewer empty blocks
    whole = task_ranges(shapes, ALL_EVEN, heads=32)
    assert whole == ((shapes, slice(0, 36768), slice(0, 36809)),)  # not split: no other tensors

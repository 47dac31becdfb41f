"""Split a kernel call whose tasks differ much in length into kernel calls on fewer tasks.

Some kernels launch a block of threads for every 128 rows of the *longest* task, for every task and
head. One task of 32768 rows with 500 short ones at 32 heads makes 4 million blocks, of which 24
thousand have rows. Tasks lie packed: any run of neighbours can be a kernel call of its own, on
slices, which copies no input.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .contract import TaskShapes

BLOCK = 128
"""Rows of a block, or keys; some kernels take 64 or 192 of them."""
EMPTY_BLOCK_NS = 2.5
"""Cost of a block without rows.

An H200 took 1.0 (FlashAttention-2, forward) to 2.9 (FlashAttention-3, backward).
"""
CALL_NS = 150_000.0
"""Cost of one more kernel call, at whose end multiprocessors idle.

An H200 took 100 to 210 µs with 32 heads.
"""
MOST_RUNS = 256
"""The time to find the best cuts grows with the square of the runs; more runs than that are joined
by pairs."""


class Grid(NamedTuple):
    """Blocks that a kernel launches for each task and head, by the length of the longest task.

    Attributes:
        q_factor: blocks for every 128 query rows of the longest task.
        k_factor: blocks for every 128 keys of the longest task.
    """

    q_factor: int
    k_factor: int


OF_LONGEST_Q = Grid(q_factor=1, k_factor=0)
OF_LONGEST = Grid(q_factor=2, k_factor=1)
ALL_EVEN = Grid(q_factor=0, k_factor=0)
"""Grid of blocks that fetch tasks, or are numbered through them: empty ones are few."""
TaskRange = tuple[TaskShapes, slice, slice]
"""Neighbouring tasks that make one kernel call: their lengths, packed query rows and packed
key/value rows."""


def task_ranges(shapes: TaskShapes, grid: Grid, heads: int) -> tuple[TaskRange, ...]:
    """Return the kernel calls that together compute all tasks in the least time.

    Each task has `heads` query heads.
    """

    def ranges() -> tuple[TaskRange, ...]:
        borders = cuts(shapes.q_lens, shapes.k_lens, grid, heads)
        if len(borders) == 2:  # without a border inside, the shapes themselves serve
            return ((shapes, slice(0, sum(shapes.q_lens)), slice(0, sum(shapes.k_lens))),)
        calls: list[TaskRange] = []
        q_stop = k_stop = 0
        for first_task, last_task in pairwise(borders):
            q_lens, k_lens = (
                shapes.q_lens[first_task:last_task],
                shapes.k_lens[first_task:last_task],
            )
            q, k = slice(q_stop, q_stop + sum(q_lens)), slice(k_stop, k_stop + sum(k_lens))
            cu_q, cu_k = (
                shapes.cu_q[first_task : last_task + 1] - q.start,
                shapes.cu_k[first_task : last_task + 1] - k.start,
            )
            calls.append((TaskShapes(q_lens, k_lens, cu_q, cu_k, max(q_lens), max(k_lens)), q, k))
            q_stop, k_stop = q.stop, k.stop
        return tuple(calls)

    return shapes.once(("ranges", grid, heads), ranges)


def cuts(q_lens: Sequence[int], k_lens: Sequence[int], grid: Grid, heads: int) -> list[int]:
    """Return the cuts of least cost.

    These are 0, the first task of each further kernel call, and the number of tasks.
    """
    tasks = len(q_lens)
    per_call = CALL_NS / (EMPTY_BLOCK_NS * heads)  # in blocks of one head
    q_blocks, k_blocks = (
        -(-np.asarray(lens, dtype=np.int64) // BLOCK) for lens in (q_lens, k_lens)
    )
    needed_blocks = grid.q_factor * q_blocks.sum() + grid.k_factor * k_blocks.sum()
    if (
        tasks < 2
        or (grid.q_factor * q_blocks.max() + grid.k_factor * k_blocks.max()) * tasks - needed_blocks
        <= per_call
    ):
        return [0, tasks]

    # 1. Neighbours alike are one run.
    differs = (np.diff(q_blocks) != 0) | (np.diff(k_blocks) != 0)
    borders = np.concatenate([[0], np.flatnonzero(differs) + 1, [tasks]])
    while len(borders) - 1 > MOST_RUNS:
        borders = np.concatenate([borders[:-1:2], borders[-1:]])
    longest_q, longest_k = (
        np.maximum.reduceat(blocks, borders[:-1]) for blocks in (q_blocks, k_blocks)
    )

    # 2. The least cost of the first runs, and where their last kernel call begins.
    runs = len(borders) - 1
    least_cost = np.zeros(runs + 1)
    begins = np.zeros(runs + 1, dtype=np.int64)
    for end in range(1, runs + 1):
        tallest_q, tallest_k = (
            np.maximum.accumulate(x[:end][::-1])[::-1] for x in (longest_q, longest_k)
        )
        blocks = (grid.q_factor * tallest_q + grid.k_factor * tallest_k) * (
            borders[end] - borders[:end]
        )
        cost = least_cost[:end] + blocks + per_call
        begins[end] = cost.argmin()
        least_cost[end] = cost[begins[end]]

    # 3. Back from the end.
    borders_of_calls = [tasks]
    end = runs
    while end:
        end = int(begins[end])
        borders_of_calls.append(int(borders[end]))
    return borders_of_calls[::-1]

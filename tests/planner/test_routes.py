import numpy as np

from hf_distca.planner.routes import TaskGroup


def group(q_lens, k_lens):
    return TaskGroup(
        np.array(q_lens, np.int64),
        np.array(k_lens, np.int64),
        np.arange(sum(q_lens), dtype=np.int64),
        np.arange(sum(k_lens), dtype=np.int64),
    )


def test_half_of_the_pairs():
    assert group([], []).half() == 0
    assert group([8], [8]).half() == 1
    assert group([4, 4, 4, 4], [4, 4, 4, 4]).half() == 2
    assert group([8, 2, 2], [8, 2, 2]).half() == 1
    assert group([2, 2, 8], [2, 2, 8]).half() == 2


def test_split_gives_every_task_its_rows():
    before, after = group([2, 1, 3], [2, 4, 3]).split(1)
    assert (before.q_lens.tolist(), before.k_lens.tolist()) == ([2], [2])
    assert (before.q_rows.tolist(), before.k_rows.tolist()) == ([0, 1], [0, 1])
    assert (after.q_lens.tolist(), after.k_lens.tolist()) == ([1, 3], [4, 3])
    assert (after.q_rows.tolist(), after.k_rows.tolist()) == ([2, 3, 4, 5], [2, 3, 4, 5, 6, 7, 8])

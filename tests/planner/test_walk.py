"""One layer walked with costs so simple that each second can be counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from hf_distca.plan import TASK, AttentionKind, Plan
from hf_distca.planner.cost import RowBytes
from hf_distca.planner.intervals import local_tasks
from hf_distca.planner.layout import fixed_layout
from hf_distca.planner.metrics import CountedPlan, RowsMoved, count_plan
from hf_distca.planner.seconds import KernelCost, LinkCost, Links, Tasks
from hf_distca.planner.walk import LayerClocks

NOWHERE = np.zeros((2, 2, 2), np.int64)


def tasks(*pairs: float) -> Tasks:
    amount = np.array(pairs)
    present = (amount > 0).astype(float)
    return Tasks(amount, amount, amount, present, 0 * amount, present)


def counted(local: tuple[float, float], remote_query: tuple[float, float] = (0, 0), rows: int = 0) -> CountedPlan:
    """Rank 0 sends so many rows of Q to rank 1."""
    queries = NOWHERE.copy()
    queries[0, 0, 0] = queries[0, 1, 1] = rows
    return CountedPlan(
        *(tasks(*local), tasks(0, 0), tasks(*remote_query)),
        *(RowsMoved(queries, NOWHERE), RowsMoved(NOWHERE, NOWHERE)),
        *(RowBytes(1, 1, 1), 1, 0, 2, False, False, np.zeros(2, np.int64)),
    )


def walk(nano_batches, direction="forward", before: float = 0.0, after: float = 0.0, bandwidth: float = np.inf):
    """A pair takes a second, in the backward two; a row that travels 1 / bandwidth."""
    kernel = KernelCost(0, 0, 0, 1.0 if direction == "forward" else 2.0)
    links = Links(LinkCost(0.0, bandwidth), LinkCost(0.0, bandwidth))
    parts = ([np.full(2, seconds)] * len(nano_batches) for seconds in (before, after))
    return LayerClocks(nano_batches, kernel, *parts, links, direction).walked()


def test_one_layer():
    # Without an exchange the slowest rank is the step.
    walked = walk([counted(local=(5, 7))], before=1, after=2)
    assert (walked.seconds, walked.attention.tolist(), walked.other.tolist()) == (10, [5, 7], [3, 3])
    assert walk([counted(local=(5, 7))], "backward", before=6, after=3).seconds == 14 + 9
    # Rank 1 computes two rows of rank 0, who waits for the results. In the middle of a model rank 1 begins the next
    # layer while rank 0 still waits.
    for bandwidth, seconds in (
        (np.inf, 6),  # 4 local and 2 remote-query
        (1.0, 4 + 2 + 2),  # rows are there before local tasks are done; results take two seconds more
        (0.25, 8 + 2 + 8),  # local tasks take half of the way there
    ):
        walked = walk([counted(local=(4, 4), remote_query=(0, 2), rows=2)], bandwidth=bandwidth)
        assert (walked.seconds, walked.attention.tolist()) == (seconds, [4, 6])
    # Keys come behind the queries: transfers of a link follow each other.
    plan = counted(local=(0, 0), remote_query=(0, 2), rows=2)
    plan = replace(plan, among_ranks=RowsMoved(plan.among_ranks.queries, plan.among_ranks.queries))
    assert walk([plan], bandwidth=1.0).seconds == 2 + 2 + 2 + 2
    # Two nano-batches hide each other's exchange.
    alone = walk([counted((8, 8), (0, 4), 4)], "forward", 1, 1, bandwidth=1.0)
    in_turns = walk([counted((4, 4), (0, 2), 2)] * 2, "forward", 0.5, 0.5, bandwidth=1.0)
    assert in_turns.seconds < alone.seconds
    assert in_turns.attention.tolist() == alone.attention.tolist()
    assert in_turns.waited.max() < alone.waited.max()


def test_ranks_that_share_no_documents_do_not_wait_for_each_other():
    """Ranks 0 and 1 reach the exchange after 2 seconds and compute for 9; ranks 2 and 3 after 7, for 1."""
    queries = np.zeros((2, 2, 4), np.int64)
    queries[0, 0, [0, 2]] = queries[0, 1, [1, 3]] = 1
    moved, nothing = RowsMoved(queries, queries * 0), RowsMoved(queries * 0, queries * 0)
    before, after = np.array([2.0, 2, 7, 7]), np.zeros(4)
    for connected, busy, seconds in (
        ((0, 0, 2, 2), 0.0, 2 + 9),
        ((0, 0, 0, 0), 0.0, 7 + 9),
        ((0, 0, 2, 2), 1e-9, 7 + 9),
    ):
        plan = CountedPlan(
            *(tasks(0, 0, 0, 0), tasks(0, 0, 0, 0), tasks(0, 9, 0, 1)),
            *(moved, nothing, RowBytes(1, 1, 1), 1, 0, 4, False, False, np.array(connected)),
        )
        links = Links(LinkCost(0.0, np.inf), LinkCost(0.0, np.inf), busy=busy)
        walked = LayerClocks([plan], KernelCost(0, 0, 0, 1.0), [before], [after], links, "forward").walked()
        assert (walked.seconds, *(walked.other - before)) == pytest.approx((seconds, *[2 * busy] * 4))


def test_what_is_counted_of_a_plan():
    # Ranks are connected by exchanges over other ranks.
    layout = fixed_layout([[30, 5], [5], [40], []], 8)  # over ranks 0 and 1, 2 and 3, 4 and 5
    plan = Plan(layout, local_tasks(layout.segments), 8)
    assert count_plan(plan, AttentionKind(), 2).connected.tolist() == [0, 0, 2, 2, 4, 4, 6, 7]
    plan.tasks["worker"][plan.tasks["worker"] == 2] = 1
    assert count_plan(plan, AttentionKind(), 2).connected.tolist() == [0, 0, 0, 0, 4, 4, 6, 7]
    # Stages are counted as if all were full: 16 rows go to rank 1.
    layout = fixed_layout([[31]], 2)
    plan = Plan(layout, local_tasks(layout.segments), 2)
    stages = {rows: count_plan(replace(plan, stage_rows=rows), AttentionKind(), 2).stages for rows in (7, 8, 16, None)}
    assert stages == {7: 3, 8: 2, 16: 1, None: 1}
    # Rank 0 holds 1005 rows, rank 1 the other 995 and the short document: rows of short tasks are counted.
    layout = fixed_layout([[2000, 10]], 2)
    plan = Plan(layout, local_tasks(layout.segments), 2)
    found = count_plan(plan, AttentionKind(), 2)
    assert found.local.diagonal.tolist() == [1005 * 512, 995 * 512 + 10 * 10]
    assert found.remote_kv.diagonal.tolist() == [0, 0]
    plan.tasks["worker"][plan.tasks["worker"] == 1] = 0
    assert count_plan(plan, AttentionKind(), 2).remote_query.diagonal.tolist() == [995 * 512 + 10 * 10, 0]


def test_a_cut_costs_a_task():
    """A document of 8 rows and one of 4 on two ranks, cut into tasks of rows [0, 4), [4, 6) and [6, 8)."""
    layout, kind = fixed_layout([[8], [4]]), AttentionKind()
    whole = Plan(layout, local_tasks(layout.segments), 2)
    cut = replace(whole, tasks=np.array([(0, 0, 4, 0), (0, 4, 6, 1), (0, 6, 8, 0), (1, 0, 4, 1)], TASK))
    counts = [count_plan(plan, kind, 2) for plan in (whole, cut)]
    for found, local, received in zip(counts, ([1, 1], [2, 1]), ([0, 0], [0, 1]), strict=True):
        assert (found.local.tasks.tolist(), found.remote_query.tasks.tolist()) == (local, received)
    assert [count.remote_kv.tasks.tolist() for count in counts] == [[0, 0]] * 2
    # A task with keys of its own rank and of others runs in two calls.
    layout = fixed_layout([[8]], 2)
    found = count_plan(Plan(layout, local_tasks(layout.segments), 2), kind, 2)
    assert (found.local.tasks.tolist(), found.remote_kv.tasks.tolist()) == ([1, 1], [0, 1])
    # A task takes ten seconds, nothing else takes time.
    links, nothing = Links(LinkCost(0.0, np.inf), LinkCost(0.0, np.inf)), [np.zeros(2)]
    kernel = KernelCost(0, 0, 0, 0, task=10.0)

    def attention(*plans, direction="forward"):
        return LayerClocks(plans, kernel, nothing * 2, nothing * 2, links, direction).walked().attention.tolist()

    assert [attention(count) for count in (*counts, found)] == [[10, 10], [20, 20], [10, 20]]
    assert attention(counts[1], direction="backward") == [20, 20]  # local tasks in two calls, half of them each
    assert attention(counts[1], counts[1]) == [40, 40]  # two nano-batches in turns compute their own tasks
    assert attention(replace(found, stages=3)) == [10, 40]  # each stage of keys runs the task again


def test_rows_cross_nodes_in_the_first_hop():
    """Local tasks of a lone nano-batch hide the first hop, and not the second."""
    keys = NOWHERE.copy()
    keys[1, 0, 0] = keys[1, 1, 1] = 3  # from rank 0 to another node
    plan = CountedPlan(
        *(tasks(10, 10), tasks(0, 2), tasks(0, 0)),
        *(RowsMoved(NOWHERE, keys), RowsMoved(NOWHERE, NOWHERE)),
        *(RowBytes(1, 1, 1), 1, 0, 2, True, False, np.zeros(2, np.int64)),
    )
    links, nothing = Links(LinkCost(0.0, np.inf), LinkCost(0.0, 1.0)), [np.zeros(2)]
    walked = LayerClocks([plan], KernelCost(0, 0, 0, 1.0), nothing, nothing, links, "forward").walked()
    assert (walked.seconds, walked.waited.tolist()) == (10 + 2, [0, 0])

"""One layer walked with costs so simple that each second can be counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from hf_distca.plan import TASK, AttentionKind, Plan
from hf_distca.plan.cost import RowBytes
from hf_distca.plan.figures import RowsMoved
from hf_distca.plan.intervals import local_tasks
from hf_distca.planner.layout import fixed_layout
from hf_distca.predict.counts import Connected, CountedPlan, count_plan
from hf_distca.predict.seconds import (
    KernelCost,
    KindCosts,
    LinkCost,
    Links,
    MixingCosts,
    StepCosts,
    Tasks,
)
from hf_distca.predict.walk import LayerClocks, document_seconds, predict_step

NOWHERE = np.zeros((2, 2, 2), np.int64)
TOGETHER = Connected(np.zeros(2, np.int64))
INSTANT = Links(LinkCost(0.0, np.inf), LinkCost(0.0, np.inf))
NO_SECONDS = np.zeros(2)


def tasks(*pairs: float) -> Tasks:
    amount = np.array(pairs)
    present = (amount > 0).astype(float)
    return Tasks(amount, amount, amount, present, 0 * amount, present)


def counted(
    local: tuple[float, float], remote_query: tuple[float, float] = (0, 0), rows: int = 0
) -> CountedPlan:
    """Rank 0 sends so many rows of Q to rank 1."""
    queries = NOWHERE.copy()
    queries[0, 0, 0] = queries[0, 1, 1] = rows
    return CountedPlan(
        *(tasks(*local), tasks(0, 0), tasks(*remote_query)),
        *(RowsMoved(queries, NOWHERE), RowsMoved(NOWHERE, NOWHERE)),
        *(RowBytes(1, 1, 1), 1, 0, 2, False, False, TOGETHER),
    )


def walk(
    nano_batches,
    direction="forward",
    before: float | tuple[float, float] = 0.0,
    after: float | tuple[float, float] = 0.0,
    bandwidth: float = np.inf,
    busy: float = 0.0,
    slowness: tuple[float, float] = (1.0, 1.0),
):
    """A pair takes a second, in the backward two; a row that travels 1 / bandwidth.

    Numbers may be by rank.
    """
    kernel = KernelCost(0, 0, 0, 1.0 if direction == "forward" else 2.0)
    links = Links(LinkCost(0.0, bandwidth), LinkCost(0.0, bandwidth), busy=busy)
    parts = ([np.zeros(2) + seconds] * len(nano_batches) for seconds in (before, after))
    return LayerClocks(nano_batches, kernel, *parts, links, direction, np.array(slowness)).walked()


def test_without_an_exchange_the_slowest_rank_is_the_step():
    walked = walk([counted(local=(5, 7))], before=1, after=2)
    assert walked.seconds == 10
    assert walked.attention.tolist() == [5, 7]
    assert walked.other.tolist() == [3, 3]
    assert walk([counted(local=(5, 7))], "backward", before=6, after=3).seconds == 14 + 9


@pytest.mark.parametrize(
    ("bandwidth", "seconds"),
    [
        (np.inf, 6),  # 4 local and 2 remote-query
        # Rows are there before local tasks are done; results take two seconds more.
        (1.0, 4 + 2 + 2),
        (0.25, 8 + 2 + 8),  # local tasks take half of the way there
    ],
)
def test_a_rank_waits_for_results_of_its_queries(bandwidth, seconds):
    """Rank 1 computes two rows of rank 0.

    In the middle of a model rank 1 begins the next layer while rank 0 still waits.
    """
    walked = walk([counted(local=(4, 4), remote_query=(0, 2), rows=2)], bandwidth=bandwidth)
    assert walked.seconds == seconds
    assert walked.attention.tolist() == [4, 6]


def test_transfers_of_a_link_follow_each_other():
    """Keys come behind the queries."""
    plan = counted(local=(0, 0), remote_query=(0, 2), rows=2)
    plan = replace(plan, among_ranks=RowsMoved(plan.among_ranks.queries, plan.among_ranks.queries))
    assert walk([plan], bandwidth=1.0).seconds == 2 + 2 + 2 + 2


def test_two_nano_batches_hide_the_exchanges_of_each_other():
    alone = walk([counted((8, 8), (0, 4), 4)], "forward", 1, 1, bandwidth=1.0)
    in_turns = walk([counted((4, 4), (0, 2), 2)] * 2, "forward", 0.5, 0.5, bandwidth=1.0)
    assert in_turns.seconds < alone.seconds
    assert in_turns.attention.tolist() == alone.attention.tolist()
    assert in_turns.waited.max() < alone.waited.max()


def test_a_rank_that_is_slow_computes_longer():
    walked = walk([counted(local=(5, 7))], slowness=(1.0, 2.0))
    assert (walked.seconds, walked.attention.tolist()) == (14, [5, 14])


def test_a_layer_begins_while_ranks_still_wait_in_the_one_before():
    """Rank 0 has 60 seconds after core attention and rank 1 has 30, in which rank 0's next rows
    have not come.
    """
    walked = walk([counted(local=(0, 0), remote_query=(0, 10), rows=1)], after=(60.0, 30.0))
    assert (walked.seconds, walked.waited.tolist()) == (70, [10, 30])


def test_the_second_of_two_layers_counts_where_mixing_layers_come_before():
    """They may exchange rows where core attention moves nothing."""

    class Mixing:
        computed, waited, seconds = np.zeros(2), np.zeros(2), [4.0, 1.0]

        def walk(self, clock):
            return clock + self.seconds.pop(0)

    kernel, parts = KernelCost(0, 0, 0, 1.0), [[NO_SECONDS]] * 2
    clocks = LayerClocks(
        [counted(local=(5, 7))], kernel, *parts, INSTANT, "forward", mixing=Mixing()
    )
    assert clocks.walked().seconds == 1 + 7


def test_the_second_nano_batch_begins_the_backward():
    """Its local tasks, of 6 seconds, hide the 6 seconds for which 2 rows of do, o and q travel to
    rank 1.
    """
    walked = walk([counted((4, 4), (0, 2), 2), counted((3, 3))], "backward", bandwidth=1.0)
    # Rank 0 reaches the next layer 4 seconds before rank 1, which has no wait.
    assert (walked.seconds, walked.waited.tolist()) == (6 + 4 + 8, [4, 0])


def test_an_exchange_takes_time_of_a_rank_that_computes_meanwhile():
    """2 rows travel for 8 seconds and take 1 second of a rank.

    It computes during half of the way.
    """
    walked = walk([counted((4, 4), (0, 2), 2)], bandwidth=0.25, busy=0.5)
    # Results travel while nobody computes: from 10 to 18; rank 0 waits for them from 8 on.
    assert (walked.seconds, walked.waited.tolist()) == (18, [3.5 + 10, 3.5 + 8])
    assert walked.other.tolist() == [2, 2]


def test_a_server_begins_when_the_rows_of_all_ranks_are_there():
    queries = np.zeros((2, 2, 3), np.int64)
    queries[1, 0, :2], queries[1, 1, 2] = 1, 2  # each rank sends a row, the server receives two
    moved, nothing = RowsMoved(queries, queries * 0), RowsMoved(queries * 0, queries * 0)
    plan = CountedPlan(
        *(tasks(0, 0, 0), tasks(0, 0, 0), tasks(0, 0, 4)),
        *(nothing, moved, RowBytes(1, 1, 1), 1, 0, 2, False, False, TOGETHER),
    )
    assert walk([plan], before=(0.0, 5.0)).seconds == 5 + 4
    # The link of the server takes both rows, one after the other, from when the first rank sends.
    assert walk([plan], before=(1.0, 1.5), bandwidth=1.0).seconds == 1 + 2 + 4 + 2


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(KernelCost(0, 0, key=1.0, pair=0), id="keys"),
        pytest.param(KernelCost(0, 0, 0, pair=1.0), id="pairs"),
        pytest.param(KernelCost(0, 0, 0, 0, diagonal=1.0), id="diagonal"),
    ],
)
def test_each_of_two_stages_has_half_of_the_tasks(kernel):
    """Of remote-KV tasks of 8 pairs, 8 keys and 8 diagonal rows."""
    layout = fixed_layout([[8]], 2)
    plan = count_plan(Plan(layout, local_tasks(layout.segments), 2), AttentionKind(), 2)
    plan = replace(plan, remote_kv=Tasks(*np.full((6, 2), 8.0)))

    def attention(stages):
        staged = replace(plan, stages=stages)
        clocks = LayerClocks([staged], kernel, [NO_SECONDS], [NO_SECONDS], INSTANT, "forward")
        return clocks.walked().attention.tolist()

    assert attention(stages=1) == attention(stages=2)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("others", [[], [counted((4, 4))]], ids=["alone", "two nano-batches"])
def test_no_rank_waits_for_stages_of_a_rank_with_more_local_tasks(others, direction):
    """Rank 0 has 24 local pairs and one pair in each of 8 stages; rank 1 has 8 and three.

    If ranks computed local pairs first, rank 0 would send the third stage after 25 seconds, and
    rank 1 would need that stage after 14.
    """
    keys = NOWHERE.copy()
    keys[0] = 8
    moved = RowsMoved(NOWHERE, keys)
    plan = replace(counted((24, 8)), remote_kv=tasks(8, 24), among_ranks=moved, stages=8)
    walked = walk([plan, *others], direction)
    pair_s = {"forward": 1, "backward": 2}[direction]
    assert walked.seconds == pytest.approx(pair_s * (32 + 4 * len(others)))
    assert walked.waited.tolist() == pytest.approx([0, 0])
    windowed = walk([replace(plan, windowed=True), *others], direction)
    assert windowed.waited.max() > 5


def test_a_step_of_layers_that_mix_rows():
    """A rank with 10 tokens, two layers with attention and six that mix rows; the backward takes
    three times as long.

    A layer with attention takes 10 · (1 + 2) + 8 seconds in the forward, a mixing one 10 · (1 + 2 +
    4) + 8.
    """
    kernel, links = KernelCost(0, 0, 0, 0), Links(LinkCost(0.0, np.inf), LinkCost(0.0, np.inf))
    mixing = MixingCosts(
        layers=6,
        before_mixing=1.0,
        mix=2.0,
        continued=0.0,
        after_mixing=4.0,
        run=0.0,
        halo=0.0,
        state=0.0,
    )
    kind, layout = AttentionKind(), fixed_layout([[10]], 1)
    costs = StepCosts(
        *((KindCosts(kind, 2, kernel, kernel),), 1.0, 2.0, 3.0, 5.0, links),
        launches=8.0,
        mixing=mixing,
    )
    plan = count_plan(Plan(layout, local_tasks(layout.segments), 1), kind, 2)
    walked = predict_step([{kind: plan}], [layout], costs, [0])
    of_mixing = 6 * (10 * 7 + 8) * (1 + 3)
    assert walked.mixing.tolist() == [of_mixing]
    assert walked.other.tolist() == [of_mixing + 2 * (10 * 3 + 8) * (1 + 3) + 5 * 10]
    assert walked.seconds == walked.other[0]
    # A kernel call takes 1 second for 10 rows in the forward, and 100 in a backward that is left
    # out.
    calls = KindCosts(kind, 2, KernelCost(0, 0.1, 0, 0), KernelCost(0, 10.0, 0, 0))
    forward = predict_step(
        [{kind: plan}], [layout], replace(costs, kinds=(calls,)).forward_only(), [0]
    )
    assert forward.attention.tolist() == pytest.approx([2 * 1.0])
    assert forward.other.tolist() == pytest.approx(
        [6 * (10 * 7 + 8) + 2 * (10 * 3 + 8) + 5 * 10 / 3]
    )
    assert forward.seconds == pytest.approx(float(forward.attention[0] + forward.other[0]))
    assert document_seconds(
        np.array([10]), replace(costs, kinds=(calls,)).forward_only()
    ).tolist() == pytest.approx(
        [2 * 1.0 + 10 * replace(costs, kinds=(calls,)).forward_only().token]
    )


@pytest.mark.parametrize(
    ("connected", "busy", "seconds"),
    [
        pytest.param((0, 0, 2, 2), 0.0, 2 + 9, id="apart"),
        pytest.param((0, 0, 0, 0), 0.0, 7 + 9, id="connected"),
        pytest.param((0, 0, 2, 2), 1e-9, 7 + 9, id="apart-with-empty-messages"),
    ],
)
def test_ranks_that_share_no_documents_do_not_wait_for_each_other(connected, busy, seconds):
    """Ranks 0 and 1 reach the exchange after 2 seconds and compute for 9; ranks 2 and 3 after 7,
    for 1.
    """
    queries = np.zeros((2, 2, 4), np.int64)
    queries[0, 0, [0, 2]] = queries[0, 1, [1, 3]] = 1
    among_ranks = RowsMoved(queries, queries * 0)
    with_remote = RowsMoved(queries * 0, queries * 0)
    plan = CountedPlan(
        *(tasks(0, 0, 0, 0), tasks(0, 0, 0, 0), tasks(0, 9, 0, 1)),
        *(among_ranks, with_remote, RowBytes(1, 1, 1), 1, 0, 4, False, False),
        Connected(np.array(connected)),
    )
    before = np.array([2.0, 2, 7, 7])
    walked = LayerClocks(
        [plan],
        KernelCost(0, 0, 0, 1.0),
        [before],
        [np.zeros(4)],
        replace(INSTANT, busy=busy),
        "forward",
    ).walked()
    assert walked.seconds == pytest.approx(seconds)
    assert (walked.other - before).tolist() == pytest.approx([2 * busy] * 4)


def local_plan(rank_lengths, ranks):
    layout = fixed_layout(rank_lengths, ranks)
    return Plan(layout, local_tasks(layout.segments), ranks)


def test_ranks_are_connected_by_exchanges_over_other_ranks():
    plan = local_plan([[30, 5], [5], [40], []], 8)  # over ranks 0 and 1, 2 and 3, 4 and 5
    assert count_plan(plan, AttentionKind(), 2).connected.lowest.tolist() == [
        0,
        0,
        2,
        2,
        4,
        4,
        6,
        7,
    ]
    plan.tasks["worker"][plan.tasks["worker"] == 2] = 1
    assert count_plan(plan, AttentionKind(), 2).connected.lowest.tolist() == [
        0,
        0,
        0,
        0,
        4,
        4,
        6,
        7,
    ]


@pytest.mark.parametrize(("stage_rows", "stages"), [(7, 3), (8, 2), (16, 1), (None, 1)])
def test_stages_are_counted_as_if_all_were_full(stage_rows, stages):
    """16 rows go to rank 1."""
    plan = replace(local_plan([[31]], 2), stage_rows=stage_rows)
    assert count_plan(plan, AttentionKind(), 2).stages == stages


def test_rows_of_short_tasks_are_counted():
    """Rank 0 holds 1005 rows, rank 1 the other 995 and the short document."""
    plan = local_plan([[2000, 10]], 2)
    counts = count_plan(plan, AttentionKind(), 2)
    assert counts.local.diagonal.tolist() == [1005 * 512, 995 * 512 + 10 * 10]
    assert counts.remote_kv.diagonal.tolist() == [0, 0]
    plan.tasks["worker"][plan.tasks["worker"] == 1] = 0
    counts = count_plan(plan, AttentionKind(), 2)
    assert counts.remote_query.diagonal.tolist() == [995 * 512 + 10 * 10, 0]


def whole_documents():
    """A document of 8 rows and one of 4, each on a rank."""
    return count_plan(local_plan([[8], [4]], 2), AttentionKind(), 2)


def cut_into_tasks():
    """The same documents; rank 1 computes rows 4 to 6 of the longer one."""
    tasks = [(0, 0, 4, 0), (0, 4, 6, 1), (0, 6, 8, 0), (1, 0, 4, 1)]
    plan = replace(local_plan([[8], [4]], 2), tasks=np.array(tasks, TASK))
    return count_plan(plan, AttentionKind(), 2)


def document_on_two_ranks():
    """A document of 8 rows on two ranks, each of which computes its own rows."""
    return count_plan(local_plan([[8]], 2), AttentionKind(), 2)


@pytest.mark.parametrize(
    ("counts", "local", "remote_kv", "remote_query"),
    [
        (whole_documents(), [1, 1], [0, 0], [0, 0]),
        (cut_into_tasks(), [2, 1], [0, 0], [0, 1]),
        # A task with keys of its own rank and of others runs in two calls.
        (document_on_two_ranks(), [1, 1], [0, 1], [0, 0]),
    ],
    ids=["whole", "cut-into-tasks", "on-two-ranks"],
)
def test_counted_tasks(counts, local, remote_kv, remote_query):
    assert counts.local.tasks.tolist() == local
    assert counts.remote_kv.tasks.tolist() == remote_kv
    assert counts.remote_query.tasks.tolist() == remote_query


@pytest.mark.parametrize(
    ("nano_batches", "direction", "seconds"),
    [
        pytest.param([whole_documents()], "forward", [10, 10], id="whole"),
        pytest.param([cut_into_tasks()], "forward", [20, 20], id="cut-into-tasks"),
        pytest.param([document_on_two_ranks()], "forward", [10, 20], id="on-two-ranks"),
        # Local tasks in two calls, half of them each.
        pytest.param([cut_into_tasks()], "backward", [20, 20], id="backward"),
        pytest.param([cut_into_tasks()] * 2, "forward", [40, 40], id="two-nano-batches"),
        # Each stage of keys runs the task again.
        pytest.param(
            [replace(document_on_two_ranks(), stages=3)], "forward", [10, 40], id="three-stages"
        ),
    ],
)
def test_each_task_of_a_kernel_call_costs(nano_batches, direction, seconds):
    """A task takes ten seconds, nothing else takes time."""
    kernel = KernelCost(0, 0, 0, 0, task=10.0)
    no_seconds = [NO_SECONDS] * len(nano_batches)
    clocks = LayerClocks(nano_batches, kernel, no_seconds, no_seconds, INSTANT, direction)
    assert clocks.walked().attention.tolist() == seconds


def test_rows_cross_nodes_in_the_first_hop():
    """Local tasks of a lone nano-batch hide the first hop, and not the second."""
    keys = NOWHERE.copy()
    keys[1, 0, 0] = keys[1, 1, 1] = 3  # from rank 0 to another node
    plan = CountedPlan(
        *(tasks(10, 10), tasks(0, 2), tasks(0, 0)),
        *(RowsMoved(NOWHERE, keys), RowsMoved(NOWHERE, NOWHERE)),
        *(RowBytes(1, 1, 1), 1, 0, 2, True, False, TOGETHER),
    )
    links, nothing = Links(LinkCost(0.0, np.inf), LinkCost(0.0, 1.0)), [np.zeros(2)]
    walked = LayerClocks(
        [plan], KernelCost(0, 0, 0, 1.0), nothing, nothing, links, "forward"
    ).walked()
    assert (walked.seconds, walked.waited.tolist()) == (10 + 2, [0, 0])


def test_a_forward_alone_waits_for_no_gradients():
    """Rank 1 attends to 16 rows of rank 0, over a link that takes 1 second; nothing else takes
    time.

    K and V travel in both passes, and their gradients return in the backward.
    """
    kind, nothing, link = AttentionKind(), KernelCost(0, 0, 0, 0), LinkCost(1.0, np.inf)
    costs = StepCosts(
        (KindCosts(kind, 1, nothing, nothing),), 0.0, 0.0, 0.0, 0.0, Links(link, link)
    )
    layout = fixed_layout([[31]], 2)
    counted = count_plan(Plan(layout, local_tasks(layout.segments), 2), kind, 2)
    both, forward = (
        predict_step([{kind: counted}], [layout], step_costs, [0, 0])
        for step_costs in (costs, costs.forward_only())
    )
    assert (both.seconds, forward.seconds) == (3.0, 1.0)


@pytest.mark.parametrize(
    ("before", "after", "seconds"), [(0.0, 1.0, 24 + 24 + 24 + 8 + 8), (1.0, 0.0, 24 + 24 + 8 + 48)]
)
def test_a_backward_begins_with_what_follows_core_attention_in_the_forward(before, after, seconds):
    """Each nano-batch has 24 tokens on a rank, of which rank 1 computes 8: their do, o and q travel
    for 24 seconds, and dq for 8.

    The backward of what follows core attention hides the rows of the other nano-batch. If nothing
    follows, all 48 tokens come once the first dq is there.
    """
    kind, nothing, link = AttentionKind(), KernelCost(0, 0, 0, 0), LinkCost(0.0, 1.0)
    costs = StepCosts(
        *((KindCosts(kind, 1, nothing, nothing),), before, after, 1.0, 0.0, Links(link, link)),
        directions=("backward",),
    )
    nano_batches, layouts = [{kind: counted((0, 0), rows=8)}] * 2, [fixed_layout([[48]], 2)] * 2
    assert predict_step(nano_batches, layouts, costs, [0, 0]).seconds == seconds

"""Where columns lie in an exchange's buffers, and that ranks get what was sent to them."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.dispatch.bound import BoundRoutes
from hf_distca.dispatch.exchange import LAYOUTS_KEPT, Exchange, Route, rounded_up
from hf_distca.dispatch.groups import Groups
from hf_distca.dispatch.rows import IndexBuffer
from hf_distca.plan import SEGMENT, TASK, Layout, Plan
from hf_distca.planner.routes import make_routes

CPU = torch.device("cpu")
VECTOR_LOAD = 16
"""Bytes that FlashAttention loads at once, from addresses that must be a multiple of it."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_columns_and_rows_begin_where_kernels_can_load_them(dtype):
    exchange, route = Exchange(Groups(CPU, 30)), Route([3], [3], crossing=False)
    for heads in range(1, 65):
        for head_dim in (8, 64):
            o_QHE, lse_QH = torch.ones(3, heads, head_dim, dtype=dtype), torch.ones(3, heads)
            columns = [o_QHE, lse_QH, 2 * o_QHE, 3 * lse_QH]
            arrived = exchange.buffer("slot", route, columns).send(columns).wait()
            for column, sent in zip(arrived, columns, strict=True):
                assert torch.equal(column, sent)
                assert column.data_ptr() % VECTOR_LOAD == column.stride(0) * column.itemsize % VECTOR_LOAD == 0


NODES = (0, 1, 1)
HOPS = [  # of each rank: rows sent and received, and forwarded inside its node. Rank 2 has nothing to forward
    Route([0, 2, 1], [0, 0, 0], True, forwarded=Route([0], [0], False)),
    Route([0, 0, 0], [2, 0, 0], True, forwarded=Route([0, 1], [0, 0], True)),
    Route([0, 0, 0], [1, 0, 0], True, forwarded=Route([0, 0], [1, 0], True)),
]
COLUMNS = [torch.empty(0, 3), torch.empty(0, dtype=torch.float64)]


def _in_hops() -> list[object]:
    """Rows 1, 2 and 3 of rank 0 go to ranks 1, 1 and 2, and row 2 on to rank 2; there they are doubled and go back."""
    rank = dist.get_rank()
    groups = Groups(CPU, 30)
    groups.connect_nodes(NODES)
    exchange = Exchange(groups)
    buffer = exchange.buffer("slot", HOPS[rank], COLUMNS)
    wide = torch.tensor([[1.0] * 3, [2.0] * 3, [3.0] * 3] if rank == 0 else []).view(-1, 3)
    buffer.send([wide, wide[:, 0].double()]).wait()
    going_on = torch.tensor([1] if rank == 1 else [], dtype=torch.int64)
    assert buffer.forward(going_on).under_way == (groups.node is not None)
    came = buffer.wait()
    found = [came[0].tolist()]
    assert came[1].tolist() == came[0][:, 0].tolist()

    assert exchange.buffer("slot", HOPS[rank], COLUMNS) is buffer
    assert came is buffer.received  # rows go back from where they came
    for column in buffer.received:
        column.mul_(2)
    returned = buffer.return_forwarded().wait()
    assert returned is buffer.forwarded
    found.append(returned[1].tolist())
    for column, added in zip(buffer.received, returned, strict=True):
        column[going_on] += added  # as a gateway adds gradients up before they go home
    home = buffer.return_received().wait()
    assert home[1].tolist() == home[0][:, 0].tolist()
    assert exchange.size() == 3 * 4096  # the least of each: sent, received, forwarded
    return [groups.node is not None, *found, home[1].tolist()]


def test_rows_that_are_forwarded_and_return(rank_pools):
    assert rank_pools[3].run(_in_hops) == [
        [False, [], [], [2.0, 4.0 + 4.0, 6.0]],  # a node of one rank
        [True, [[1.0] * 3, [2.0] * 3], [4.0], []],
        [True, [[3.0] * 3, [2.0] * 3], [], []],
    ]


def test_a_stage_in_which_nothing_crosses_beside_others_that_are_forwarded():
    # Row 2 of the first document is read by both ranks of node 1. In the second one rank 0 gathers its own rows, since
    # those that a window reaches lie apart, and has more of them than come in one stage.
    lying_apart = [(1, start, start + 2, 0, 4 + (start ^ 2)) for start in range(0, 12, 2)]
    segments = sorted([(0, 0, 4, 0, 0), *lying_apart], key=lambda segment: segment[4])
    tasks = [(0, 0, 2, 0), (1, 0, 12, 0), (0, 2, 3, 1), (0, 3, 4, 2)]
    layout = Layout(np.array([4, 12]), np.array(segments, SEGMENT), 3)
    plan = Plan(layout, np.array(tasks, TASK), 3, window=2, stage_rows=4, nodes=NODES)
    for rank in range(3):
        stages = make_routes(plan, rank).stages
        assert {(stage.keys.crossing, stage.forwarded.crossing) for stage in stages} == {(True, True), (False, False)}
        exchange, bound = Exchange(Groups(CPU, 30)), BoundRoutes(plan, rank, "alone", IndexBuffer(CPU))
        for route in bound.keys:
            # The first hop is an exchange in every stage, as all stages have the same memory.
            assert route.crossing
            buffer = exchange.buffer("slot", route, COLUMNS)
            assert len(buffer.sent[0]) == sum(route.sent)
            assert len(buffer.received[0]) >= sum(route.received)


def test_few_sizes_of_a_role_are_kept_and_its_memory_grows_rarely():
    exchange = Exchange(Groups(CPU, 30))

    def opened(rows):
        return exchange.buffer("slot", Route([rows], [rows], crossing=False), [torch.empty(0, 4)])

    newest = [opened(rows) for rows in range(20, 0, -1)][-LAYOUTS_KEPT:]
    assert all(opened(rows) is kept for rows, kept in zip(range(LAYOUTS_KEPT, 0, -1), newest, strict=True))
    opened(20)
    assert opened(LAYOUTS_KEPT) is not newest[0]  # the oldest one gave way
    assert len({opened(rows).sent[0].data_ptr() for rows in range(6250, 7812, 62)}) <= 3
    assert exchange.size() <= 2 * rounded_up(125_000)
    last = opened(7000)
    opened(100_000)
    assert opened(7000) is not last  # more memory: what is laid out in the old one is let go


MESSAGES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.sampled_from((8, 16, 33))), max_size=12)


@given(messages=MESSAGES)
def test_buffers_of_a_role_are_used_again_and_those_of_others_left_alone(messages):
    exchange = Exchange(Groups(CPU, timeout_s=60.0))
    latest: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    sizes: dict[str, int] = {}
    for index, (role, rows, width) in enumerate(messages):
        column = torch.full((rows, width), float(index))
        buffer = exchange.buffer(role, Route([rows], [rows], crossing=False), [column])
        (received,) = buffer.send([column]).wait()
        grew = rows * width > sizes.get(role, -1)
        if not grew and role in latest and len(received) and len(latest[role][0]):
            assert received.untyped_storage().data_ptr() == latest[role][0].untyped_storage().data_ptr()
        sizes[role] = max(sizes.get(role, 0), rows * width)
        latest[role] = received, column
        for got, sent in latest.values():  # what came last in each role is still there
            assert torch.equal(got, sent)

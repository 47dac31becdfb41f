"""Where columns lie in an exchange's buffers, and that ranks get what was sent to them."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.dispatch.exchange import Exchange, Traffic
from hf_distca.dispatch.groups import Groups

CPU = torch.device("cpu")
VECTOR_LOAD = 16
"""Bytes that FlashAttention loads at once, from addresses that must be a multiple of it."""


def _misplaced() -> list[str]:
    """Columns of what layers exchange that a kernel could not load from."""
    exchange = Exchange(Groups(torch.device("cpu"), 30))
    rank = dist.get_rank()
    traffic = Traffic([1, 2], [1, 2], crossing=True) if rank == 0 else Traffic([2, 1], [2, 1], crossing=True)
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for heads in range(1, 65):
            for head_dim in (8, 64):
                o_QHE, lse_QH = torch.ones(3, heads, head_dim, dtype=dtype), torch.ones(3, heads)
                columns = [o_QHE, lse_QH, 2 * o_QHE, 3 * lse_QH]
                received = exchange.start(columns, traffic, "role").wait()
                for number, (column, sent) in enumerate(zip(received, columns, strict=True)):
                    assert torch.equal(column, sent)
                    if column.data_ptr() % VECTOR_LOAD or column.stride(0) * column.itemsize % VECTOR_LOAD:
                        found.append(f"column {number} of {heads} heads of {head_dim} in {dtype}")
    return found


def test_columns_and_rows_begin_where_kernels_can_load_them(rank_pools):
    assert rank_pools[2].run(_misplaced) == [[], []]


@pytest.mark.parametrize("crossing", [True, False])
def test_rows_back(crossing):
    traffic = Traffic([1, 2], [3, 4], crossing)
    assert traffic.reversed() == Traffic([3, 4], [1, 2], crossing, back=True)
    assert traffic.reversed().reversed() == traffic


def _there_and_back() -> tuple[bool, bool, bool]:
    """Whether rows that go back lie where they came from, and what came was right."""
    exchange = Exchange(Groups(CPU, 30))
    rank = dist.get_rank()
    traffic = Traffic([1, 2], [1, 2], crossing=True) if rank == 0 else Traffic([2, 1], [2, 1], crossing=True)
    there = exchange.open([((4,), torch.float32)], traffic, "role", CPU)
    (sent,) = there.columns
    sent.copy_(torch.arange(12.0).view(3, 4))
    (received,) = there.send().wait()
    back = exchange.open([((4,), torch.float32)], traffic.reversed(), "role", CPU)
    sent_at, received_at = back.columns[0].data_ptr(), received.data_ptr()
    back.columns[0].copy_(2 * received)
    (returned,) = back.send().wait()
    expected = 2 * torch.arange(12.0).view(3, 4)
    return sent_at == received_at, returned.data_ptr() == sent.data_ptr(), torch.equal(returned, expected)


def test_rows_go_back_in_the_memory_in_which_they_came(rank_pools):
    assert rank_pools[2].run(_there_and_back) == [(True, True, True)] * 2


def test_buffers_are_laid_out_once_for_all_kinds_of_layers():
    device = torch.device("cpu")
    exchange = Exchange(Groups(device, timeout_s=60.0))
    # Two kinds of layers, forward and backward: other columns, other numbers of rows.
    sizes = [
        ([((2, 8), torch.float32)] * columns, Traffic([rows], [rows], crossing=False))
        for rows, columns in ((40, 3), (30, 1), (20, 3), (10, 1))
    ]

    def layer():
        return [exchange.open(columns, traffic, "queries", device).columns[0] for columns, traffic in sizes]

    first = layer()
    assert all(again is before for again, before in zip(layer(), first, strict=True))


MESSAGES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.sampled_from((8, 16, 33))), max_size=12)


@given(messages=MESSAGES)
def test_buffers_of_a_role_are_used_again_and_those_of_others_left_alone(messages):
    exchange = Exchange(Groups(CPU, timeout_s=60.0))
    latest: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    sizes: dict[str, int] = {}
    for index, (role, rows, width) in enumerate(messages):
        column = torch.full((rows, width), float(index))
        (received,) = exchange.start([column], Traffic([rows], [rows], crossing=False), role).wait()
        grew = rows * width > sizes.get(role, -1)
        if not grew and role in latest and len(received) and len(latest[role][0]):
            assert received.untyped_storage().data_ptr() == latest[role][0].untyped_storage().data_ptr()
        sizes[role] = max(sizes.get(role, 0), rows * width)
        latest[role] = received, column
        for got, sent in latest.values():  # what came last in each role is still there
            assert torch.equal(got, sent)

"""Index tensors of rows; gather, scatter and sums by them; the memory in which rows travel."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.dispatch import rows as rows_module
from hf_distca.dispatch.bound import BoundRoutes, GradientSum
from hf_distca.dispatch.exchange import LAYOUTS_KEPT, Exchange, Route, rounded_up
from hf_distca.dispatch.executor import _Gradients, _Outputs
from hf_distca.dispatch.process_groups import Groups
from hf_distca.dispatch.rows import (
    IndexBuffer,
    RowSum,
    addend_table,
    copy_rows,
    merge_rows,
    put,
    row_index,
    take,
)
from hf_distca.kernels.contract import MAX_SOURCES, SOURCE_BITS
from hf_distca.plan import SEGMENT, TASK, Layout, Plan
from hf_distca.plan.routes import make_routes
from hf_distca.plan.schedule import KernelCall, Transfer
from hf_distca.planner.layout import fixed_layout
from tests.counting import META, Counting

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [[], [2, 3], [5, 6, 0, 3]], ids=["none", "slice", "scattered"])
def test_rows_by_index(rows):
    buffer = IndexBuffer(CPU)
    index = row_index(np.array(rows, np.int64), buffer)
    buffer.send()
    assert isinstance(index, slice) == (rows != [5, 6, 0, 3])
    x = torch.arange(8.0).view(8, 1).expand(8, 3)
    taken = take(x, index)
    assert taken[:, 0].tolist() == rows
    written = torch.zeros(8, 3)
    put(written, index, taken + 1)
    assert written[:, 1].tolist() == [row + 1 if row in rows else 0 for row in range(8)]
    copied = torch.zeros(len(rows), 3)
    copy_rows(copied, x, index)
    assert copied[:, 2].tolist() == rows
    o, lse = torch.ones(8, 1, 2), torch.zeros(8, 1)
    merge_rows(o, lse, index, taken[:, :2].unsqueeze(1), torch.zeros(len(rows), 1))
    assert o[:, 0, 1].tolist() == [(1 + row) / 2 if row in rows else 1 for row in range(8)]
    assert lse.flatten().tolist() == pytest.approx(
        [math.log(2) if row in rows else 0 for row in range(8)]
    )


def test_numbers_come_back_aligned():
    buffer = IndexBuffer(CPU)
    numbers = [
        np.array([3, 1, 2]),
        np.array([0, 5], np.int32),
        np.arange(0),
        np.arange(4)[::2],
        np.arange(3)[::-1],
    ]
    placed = [buffer.place(array) for array in numbers]
    buffer.send()
    assert [x.tolist() for x in placed] == [[3, 1, 2], [0, 5], [], [0, 2], [2, 1, 0]]
    assert [x.dtype for x in placed] == [torch.int64, torch.int32, *[torch.int64] * 3]
    assert [x.storage_offset() * x.itemsize for x in placed] == [0, 32, 48, 48, 64]
    assert len({x.untyped_storage().data_ptr() for x in placed}) == 1
    buffer.place(np.array([7]))  # what is placed after sending lies elsewhere
    assert placed[0].tolist() == [3, 1, 2]
    assert IndexBuffer(META).in_one_go is True
    assert IndexBuffer(CPU).in_one_go is False


@pytest.mark.parametrize(("chunk", "copies"), [(64, 1), (63, 2), (1, 4)])
def test_one_copy_where_there_is_room(monkeypatch, chunk, copies):
    monkeypatch.setattr(rows_module, "CHUNK_BYTES", chunk)
    buffer = IndexBuffer(META)
    with Counting() as mode:
        assert [buffer.place(np.arange(2)).shape for _ in range(4)] == [(2,)] * 4
        buffer.send()
        buffer.send()
    assert [call.name for call in mode.calls if call.what == "copy"] == ["copy_"] * copies


def row_sum(sources, rows, **options):
    by_name = {str(number): np.array(source, np.int64) for number, source in enumerate(sources)}
    buffer = IndexBuffer(CPU)
    total = RowSum(by_name, rows, buffer, **options)
    buffer.send()
    return total


def column(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).view(-1, 1)


def test_a_first_source_with_every_row_in_order_is_added_to():
    rows = column(1, 2, 3)
    total = row_sum([[0, 1, 2], [1], []], 3).add_up([rows, column(10), column()])
    assert total.flatten().tolist() == [1, 12, 3]
    assert total is rows


@pytest.mark.parametrize(
    ("targets", "expected"),
    [([0, 2, 1], [1, 13, 2]), ([0, 1], [1, 12, 0]), ([0, 0, 2], [3, 10, 3])],
    ids=["another order", "rows missing", "a row twice"],
)
def test_any_other_first_source_stays(targets, expected):
    rows = column(*range(1, len(targets) + 1))
    before = rows.tolist()
    total = row_sum([targets, [1], []], 3).add_up([rows, column(10), column()])
    assert total.flatten().tolist() == expected
    assert rows.tolist() == before


def test_a_sum_is_written_where_it_is_wanted():
    message = torch.full((2, 5), 7.0)
    first = column(1, 2)
    row_sum([[0, 1], [1]], 2, in_place=False).add_up([first, column(10)], out=message[:, 2:3])
    assert message.tolist() == [[7, 7, 1, 7, 7], [7, 7, 12, 7, 7]]
    assert first.flatten().tolist() == [1, 2]


SOURCES = st.lists(st.lists(st.integers(0, 11), max_size=30), min_size=1, max_size=MAX_SOURCES)


@given(SOURCES, st.booleans())
def test_sum_is_that_of_all_addends(sources, whole_first):
    sources = ([list(range(12)), *sources])[:MAX_SOURCES] if whole_first else sources
    expected, rows = torch.zeros(12, 2), []
    for number, targets in enumerate(sources):
        rows.append(torch.arange(len(targets) * 2.0).view(-1, 2) + 100 * number)
        for target, row in zip(targets, rows[-1].clone(), strict=True):
            expected[target] += row
    assert row_sum(sources, 12).add_up(rows).tolist() == expected.tolist()


def test_sums_of_three_in_bfloat16_are_kept_in_float32_and_of_many_sources_refused():
    values = [
        column(value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)
    ]  # in bfloat16, 256 + 1 is 256
    empty = torch.empty(0, 1, dtype=torch.bfloat16)
    assert row_sum([[], [0], [0], [0]], 1).add_up([empty, *values]).item() == 258.0
    assert row_sum([[0], [0], [0]], 1).add_up(values).item() == 258.0  # onto the first
    with pytest.raises(ValueError, match="at most 6 sources, got 7"):
        row_sum([[0]] * (MAX_SOURCES + 1), 1)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        pytest.param([[0, 1], [0], [0]], [258.0, 256.0], id="onto-the-first-stage"),
        pytest.param([[0], [0], [0]], [258.0, 0.0], id="onto-zeros"),
    ],
)
def test_gradients_of_several_stages_in_bfloat16_are_added_up_in_float32(stages, expected):
    """In bfloat16, 256 + 1 is 256."""
    buffer = IndexBuffer(CPU)
    early = {("ranks", stage): np.array(targets) for stage, targets in enumerate(stages)}
    routes = SimpleNamespace(gradients={("dq", "local"): GradientSum(2, early, {}, buffer)})
    buffer.send()
    zeros = torch.zeros(2, 1, 1, dtype=torch.bfloat16)
    gradients = _Gradients(routes, dict.fromkeys(("q", "k", "v"), zeros))
    for stage, (value, targets) in enumerate(zip((256.0, 1.0, 1.0), stages, strict=True)):
        rows = torch.full((len(targets), 1, 1), value, dtype=torch.bfloat16)
        gradients.add_from_ranks(stage, {"dq": rows})
    assert gradients.add_up("dq", "local").flatten().tolist() == expected


def test_results_of_several_stages_in_bfloat16_are_merged_in_float32():
    """The mean of 1, 1 + 2⁻⁷ and 1 + 2⁻⁷ is nearer to 1 + 2⁻⁷. In bfloat16, that of the first two
    is 1, and then that of all three.
    """
    routes = SimpleNamespace(merges=True, rows={"local": 1}, begins_with_no_keys={"local"})
    row = torch.zeros(1, 1, 1, dtype=torch.bfloat16)
    outputs = _Outputs(routes, {"q": row, "v": row})
    call = KernelCall("remote-KV", "local", "received", first=False)
    tasks = SimpleNamespace(q_rows=slice(0, 1))
    for value in (1.0, 1 + 2.0**-7, 1 + 2.0**-7):
        outputs.add(call, tasks, (row + value, torch.zeros(1, 1)))
    o, lse = outputs.at("local")
    assert o.flatten().tolist() == [1 + 2.0**-7]
    assert o.dtype == torch.bfloat16
    assert lse.flatten().tolist() == pytest.approx([math.log(3)])


def addends_of_two_sources(onto):
    """Source 0 adds its rows to rows 2, 0 and 2 of the sum, and source 1 to rows 0 and 2.

    Return the written rows, the first addend of each, and the (source, row) of each addend.
    """
    targets = [np.array(source, np.int64) for source in ([2, 0, 2], [0, 2])]
    buffer = IndexBuffer(CPU)
    rows, ends, addends = addend_table(targets, 3, onto, buffer)
    buffer.send()
    sources_and_rows = [
        (addend & (1 << SOURCE_BITS) - 1, addend >> SOURCE_BITS) for addend in addends.tolist()
    ]
    return rows, ends.tolist(), sources_and_rows


def test_addends_of_a_row_come_source_by_source_and_in_order():
    rows, ends, addends = addends_of_two_sources(onto=False)
    assert rows is None
    assert ends == [0, 2, 2, 5]
    assert addends == [(0, 1), (1, 0), (0, 0), (0, 2), (1, 1)]


def test_a_first_source_that_is_added_to_has_no_addends():
    rows, ends, addends = addends_of_two_sources(onto=True)
    assert rows.tolist() == [0, 2]
    assert ends == [0, 1, 2]
    assert addends == [(1, 0), (1, 1)]


def test_few_sizes_of_a_slot_are_kept_and_its_memory_grows_rarely():
    exchange = Exchange(Groups(CPU, 30))

    def opened(rows, slot="slot"):
        return exchange.buffer(slot, Route([rows], [rows], crossing=False), [torch.empty(0, 4)])

    newest = [opened(rows) for rows in range(20, 0, -1)][-LAYOUTS_KEPT:]
    assert all(
        opened(rows) is kept for rows, kept in zip(range(LAYOUTS_KEPT, 0, -1), newest, strict=True)
    )
    opened(20)
    assert opened(LAYOUTS_KEPT) is not newest[0]  # the oldest one gave way
    assert len({opened(rows).sent[0].data_ptr() for rows in range(6250, 7812, 62)}) <= 3
    assert opened(7000).sent[0].untyped_storage().nbytes() <= rounded_up(125_000)
    last = opened(7000)
    assert opened(7000, "other").sent[0].data_ptr() != last.sent[0].data_ptr()
    opened(100_000)
    assert opened(7000) is not last  # more memory: what is laid out in the old one is let go


def test_a_stage_in_which_nothing_crosses_beside_others_that_are_forwarded():
    # Row 2 of the first document is read by both ranks of node 1. In the second one rank 0 gathers
    # its own rows, since those that a window reaches lie apart, and has more of them than come in
    # one stage.
    lying_apart = [(1, start, start + 2, 0, 4 + (start ^ 2)) for start in range(0, 12, 2)]
    segments = sorted([(0, 0, 4, 0, 0), *lying_apart], key=lambda segment: segment[4])
    tasks = [(0, 0, 2, 0), (1, 0, 12, 0), (0, 2, 3, 1), (0, 3, 4, 2)]
    layout = Layout(np.array([4, 12]), np.array(segments, SEGMENT), 3)
    plan = Plan(layout, np.array(tasks, TASK), 3, window=2, stage_rows=4, nodes=(0, 1, 1))
    for rank in range(3):
        stages = make_routes(plan, rank).stages
        assert {(stage.keys.crossing, stage.forwarded.crossing) for stage in stages} == {
            (True, True),
            (False, False),
        }
        exchange = Exchange(Groups(CPU, 30))
        for route in BoundRoutes(plan, rank, "alone", IndexBuffer(CPU)).keys:
            # The first hop is an exchange in every stage, as all stages have the same memory.
            assert route.crossing
            buffer = exchange.buffer(
                "slot", route, [torch.empty(0, 3), torch.empty(0, dtype=torch.float64)]
            )
            assert len(buffer.sent[0]) == sum(route.sent)
            assert len(buffer.received[0]) >= sum(route.received)


@pytest.mark.parametrize(
    ("rank", "direct", "forwarded"), [(0, 0, 0), (1, 2, 0), (2, 2, 2), (3, 4, 2)]
)
def test_gradients_of_received_keys_have_a_row_for_each_row_of_both_hops(rank, direct, forwarded):
    # Each rank has two rows of a document and reads all rows before them. Both ranks of node 1 read
    # the four rows of node 0: two rows cross to each, which forwards them to the other.
    tasks = np.array([(0, 2 * rank, 2 * rank + 2, rank) for rank in range(4)], TASK)
    plan = Plan(fixed_layout([[8]], 4), tasks, 4, nodes=(0, 0, 1, 1))
    routes = BoundRoutes(plan, rank, "alone", IndexBuffer(CPU))
    (route,) = routes.keys
    assert sum(route.received) == direct
    assert sum(route.forwarded.received) == forwarded
    assert routes.gradients["dk", 0].rows == direct + forwarded
    assert routes.gradients["dv", 0].rows == direct + forwarded


def test_rows_of_a_transfer_there_and_back():
    # Rank 0 computes rows 8 to 12 of rank 1; rank 1 computes the others of its rows, and reads all
    # of rank 0.
    tasks = np.array([(0, 0, 8, 0), (0, 8, 12, 0), (0, 12, 16, 1)], TASK)
    plan = Plan(fixed_layout([[16]], 2), tasks, 2)
    # By rank: sent and received rows of each rank; a task's own K/V rows beside others are gathered
    # with them.
    expected = {
        "queries": (((0, 0), (0, 4)), ((4, 0), (0, 0))),
        "keys": (((8, 8), (8, 4)), ((4, 0), (8, 0))),
    }
    for rank in (0, 1):
        # The ranks are the seventh and the eighth of all.
        routes = BoundRoutes(plan, rank, "alone", IndexBuffer(CPU), first_rank=6)
        for rows, of_ranks in expected.items():
            assert routes.rows_of(Transfer(rows, ())) == (*of_ranks[rank], 6)
            assert routes.rows_of(Transfer(rows, (), back=True)) == (*of_ranks[rank][::-1], 6)

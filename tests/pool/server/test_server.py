import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_distca.kernels import get_kernel
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.planner.routes import make_routes
from hf_distca.pool.directory import Directory
from hf_distca.pool.messages import End, plan_tables
from hf_distca.pool.server import AttentionServer
from hf_distca.pool.server.calls import IN_FLIGHT, KEPT
from hf_distca.pool.token import make_token
from hf_distca.pool.wire import LinkLost
from tests.pool.server.fake_ranks import FULL, SLIM, Data, FakeRank, make_call, make_nano_batch, run_calls, unchecked
from tests.pool.servers import wait_until

CPU = torch.device("cpu")
LENGTHS = [300, 37, 1, 255]


@pytest.fixture
def token():
    return make_token()


@pytest.fixture
def server(token):
    server = AttentionServer(token, CPU, get_kernel("cpu", CPU), plan_wait_s=60.0)
    yield server
    server.close()


@pytest.fixture
def ranks(server, token):
    """Two ranks; the server is worker 2 of 3."""
    ranks = [FakeRank(server.port, token, rank, 2, 2) for rank in range(2)]
    yield ranks
    for rank in ranks:
        rank.link.close()


@pytest.fixture
def nano_batches():
    return [make_nano_batch(LENGTHS, 2, 1, seed) for seed in (1, 2)]


def both(plan):
    """Whether both ranks have rows for the server."""
    routes = make_routes(plan, 2)
    return ((routes.queries.recv_counts + routes.stages[0].keys.recv_counts)[:2] > 0).all()


def test_results_are_those_of_the_reference(server, ranks, nano_batches):
    assert all(both(plan) for nano in nano_batches for plan in nano.plans.values())
    ranks[0].send_plan(5, nano_batches)
    number = run_calls(ranks, 5, nano_batches)
    reply = ranks[0].replies[-1]
    assert 0 < reply.seconds < server.busy_s
    assert reply.pairs > 0
    ranks[0].send_plan(6, nano_batches[:1])
    run_calls(ranks, 6, nano_batches[:1], number, softcap=2.0)


class WithoutSoftcap(CpuKernel):
    def check(self, need, device):
        if need.params.softcap is not None:
            raise ValueError("no softcap")


def test_another_kernel_is_chosen_for_what_the_first_cannot_do(token, nano_batches):
    asked = []

    def choose(need):
        asked.append(need)
        return CpuKernel()

    server = AttentionServer(token, CPU, WithoutSoftcap(), choose=choose)
    ranks = [FakeRank(server.port, token, rank, 2, 2) for rank in range(2)]
    ranks[0].send_plan(0, nano_batches[:1])
    number = run_calls(ranks, 0, nano_batches[:1])
    assert not asked
    run_calls(ranks, 0, nano_batches[:1], number, softcap=2.0)
    assert {(need.dtype, need.params.softcap) for need in asked} == {(torch.float32, 2.0)}
    for rank in ranks:
        rank.link.close()
    server.close()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-9), ("bfloat16", 5e-2), ("float16", 1e-2), ("float32", 2e-4)]
)
def test_every_dtype_travels(token, dtype, tolerance, nano_batches):
    server = AttentionServer(token, CPU, get_kernel("reference", CPU))
    ranks = [FakeRank(server.port, token, rank, 2, 2) for rank in range(2)]
    ranks[0].send_plan(0, nano_batches[:1])
    run_calls(ranks, 0, nano_batches[:1], dtype=dtype, tolerance=tolerance)
    for rank in ranks:
        rank.link.close()
    server.close()


def test_pairs_are_those_of_the_tasks(ranks, nano_batches):
    ranks[0].send_plan(0, nano_batches[:1])
    run_calls(ranks, 0, nano_batches[:1])
    by_hand = []
    for kind, plan in nano_batches[0].plans.items():
        mine = [task for task in plan.tasks.tolist() if task[3] == 2]
        by_hand.append(
            sum(min(row + 1, kind.window or row + 1) for _, start, stop, _ in mine for row in range(start, stop))
        )
    assert [reply.pairs for reply in ranks[0].replies] == [pairs for pairs in by_hand for _ in range(2)]


def test_many_random_plans(ranks):
    number = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        nano_batches = [
            make_nano_batch(
                rng.integers(1, 90, rng.integers(1, 6)), 2, 2, seed, kinds=(SLIM, replace(SLIM, window=40))
            )
        ]
        ranks[0].send_plan(seed, nano_batches)
        number = run_calls(ranks, seed, nano_batches, number)


def test_a_call_may_overtake_its_plan(server, ranks, nano_batches, monkeypatch):
    asked, get = threading.Event(), server._calls.plan
    monkeypatch.setattr(server._calls, "plan", lambda *args: asked.set() or get(*args))
    plan = nano_batches[0].plans[FULL]
    call = make_call(0, 0, 0, FULL, "forward")
    data = Data(plan, call, 2)
    second = ranks[1].start(call, plan, data)
    assert asked.wait(30)
    ranks[0].send_plan(0, nano_batches)
    first = ranks[0].start(call, plan, data)
    ranks[1].finish(second, 2e-4)
    ranks[0].finish(first, 2e-4)


def test_more_calls_than_are_taken_at_once_in_any_order_of_ranks(server, ranks, nano_batches, monkeypatch):
    asked, taken, begin = [], [], server._calls.begin

    def noted_begin(link, *args):
        asked.append(link)
        assembly = begin(link, *args)
        taken.append(link.in_flight)
        return assembly

    monkeypatch.setattr(server._calls, "begin", noted_begin)
    plan = nano_batches[0].plans[FULL]
    ranks[0].send_plan(0, nano_batches)
    calls = [make_call(0, number, 0, FULL, "forward") for number in range(3 * IN_FLIGHT)]
    data = Data(plan, calls[0], 2)
    waiting = [ranks[0].start(call, plan, data) for call in calls]
    wait_until(lambda: len(asked) > IN_FLIGHT)  # the other has sent nothing: none of these can be answered
    started = [ranks[1].start(call, plan, data) for call in calls]
    for rank, all_started in zip(ranks, (waiting, started), strict=True):
        for each in all_started:
            rank.finish(each, 2e-4)
    assert len(taken) == 6 * IN_FLIGHT
    assert max(taken) == IN_FLIGHT


@pytest.mark.parametrize("fields", [{"scale": 0.5}, {"softcap": 3.0}, {"plan_id": 1}, {"nano_batch": 1}])
def test_another_call_under_the_same_id_is_refused(server, ranks, nano_batches, fields):
    plan = nano_batches[0].plans[FULL]
    for number in range(2):
        ranks[0].send_plan(number, [nano_batches[0]] * 2)
    call = make_call(0, 3, 0, FULL, "forward")
    started = ranks[0].start(call, plan, Data(plan, call, 2))
    wait_until(lambda: server._calls._open)
    other = ranks[1].start(replace(call, **fields), plan, Data(plan, call, 2))
    with pytest.raises(LinkLost, match="call 3 differs from the call of other ranks"):
        ranks[1].finish(other, 0)
    with pytest.raises(LinkLost, match="rank 1 left in the middle of call 3"):
        ranks[0].finish(started, 0)


def test_a_call_made_twice_is_refused(ranks, nano_batches):
    plan = nano_batches[0].plans[FULL]
    ranks[0].send_plan(0, nano_batches)
    call = make_call(0, 3, 0, FULL, "forward")
    started = [ranks[0].start(call, plan, Data(plan, call, 2)) for _ in range(2)]
    for each in started:
        with pytest.raises(LinkLost, match="call 3 differs from the call of other ranks, or was made twice"):
            ranks[0].finish(each, 0)


def test_old_plans_are_forgotten(ranks, nano_batches):
    for number in range(KEPT + 1):
        ranks[0].send_plan(number, nano_batches)
    run_calls(ranks, KEPT, nano_batches)
    run_calls(ranks, 1, nano_batches, 100)
    with pytest.raises(LinkLost, match=f"plan 0 is no longer kept; the latest is {KEPT}"):
        run_calls(ranks[1:], 0, nano_batches, 200)


def test_a_plan_that_never_comes_is_said(token, nano_batches):
    server = AttentionServer(token, CPU, get_kernel("cpu", CPU), plan_wait_s=0.1)
    rank = FakeRank(server.port, token, 1, 2, 2)
    with pytest.raises(LinkLost, match=r"plan 7 did not arrive within 0\.1 s"):
        run_calls([rank], 7, nano_batches)
    rank.link.close()
    server.close()


def test_a_call_without_all_its_ranks_is_refused(server, ranks, nano_batches):
    ranks[0].send_plan(0, nano_batches)
    ranks[1].link.close()
    wait_until(lambda: server._calls.ranks == 1)
    with pytest.raises(LinkLost, match="rank 1, which is not connected"):
        run_calls(ranks[:1], 0, nano_batches)


def test_a_rank_that_leaves_in_a_call_is_told_to_the_others_who_may_connect_again(server, token, ranks, nano_batches):
    plan = nano_batches[0].plans[FULL]
    call = make_call(0, 0, 0, FULL, "forward")
    ranks[0].send_plan(0, nano_batches)
    started = ranks[0].start(call, plan, Data(plan, call, 2))
    wait_until(lambda: server._calls._open)
    ranks[1].link.close()
    with pytest.raises(LinkLost, match="rank 1 left in the middle of call 0"):
        ranks[0].finish(started, 0)
    again = [FakeRank(server.port, token, rank, 2, 2) for rank in (1, 0)][::-1]
    again[0].send_plan(0, nano_batches)
    run_calls(again, 0, nano_batches, 1)
    for rank in again:
        rank.link.close()


def test_a_rank_that_connects_again_replaces_its_older_connection(server, token, ranks, nano_batches):
    again = FakeRank(server.port, token, 1, 2, 2)
    ranks[0].send_plan(0, nano_batches)
    run_calls([ranks[0], again], 0, nano_batches)
    with pytest.raises(LinkLost, match="connected again"):
        run_calls(ranks[1:], 0, nano_batches, 50)
    again.link.close()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"plan_id": "0"}, "'0' is not of type <class 'int'>"),
        ({"nano_batch": 2}, "no tasks of nano-batch 2"),
        ({"window": 41}, "no tasks of nano-batch 0, a window of 41"),
        ({"direction": "sideways"}, "'sideways' is no"),
        ({"direction": "backward"}, "bytes, expected"),
        ({"scale": None}, "None is not of type <class 'float'>"),
        ({"q_heads": 5}, "kv_heads must divide"),
        ({"dim_qk": 2**40}, "no tasks of nano-batch 0"),
        ({"dtype": "int8"}, "'int8' is no"),
        ({"dtype": ["float32"]}, "is no"),
        ({"dtype": "float64"}, "bytes, expected"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_and_others_are_served(server, token, fields, said):
    # Everything is on one rank, so that the other may leave.
    nano_batches = [make_nano_batch([64], 1, 1, 0)]
    good = FakeRank(server.port, token, 0, 1, 1)
    good.send_plan(0, nano_batches)
    run_calls([good], 0, nano_batches)
    plan = nano_batches[0].plans[FULL]
    call = make_call(0, 10, 0, FULL, "forward")
    bad = FakeRank(server.port, token, 1, 2, 1)
    started = good.start(call, plan, Data(plan, call, 1))
    with pytest.raises(LinkLost, match=f"{said}|has no tasks of"):
        bad.link.call(replace(call, **fields), [torch.zeros(10)], []).wait(30)
    good.finish(started, 2e-4)
    with pytest.raises(LinkLost, match=said):
        good.link.call(replace(call, **{"call_id": 11} | fields), [torch.zeros(100)], []).wait(30)
    bad.link.close()
    good.link.close()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"workers": 2}, "worker 2 is no server"),
        ({"worker": 1}, "worker 1 is no server"),
        ({"ranks": 2**60, "worker": 2**60, "workers": 2**61}, "is no server"),
        ({"tables": ((1, 2),)}, "each nano-batch has documents"),
        ({"tables": ((2**40,) * 5,)}, "tables of .* bytes are more than"),
        ({"tables": ((1,) * 5,)}, "sent an unexpected PlanTables with"),
        ({"kinds": ((None, 4),) * 3}, "cannot use this PlanTables"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(ranks, nano_batches, fields, said):
    message, tables = plan_tables(0, 2, nano_batches)
    ranks[0].link.send(unchecked(message, fields), tables)
    with pytest.raises(LinkLost, match=said):
        ranks[0].link.call(make_call(0, 0, 0, FULL, "forward"), [], []).wait(30)


def test_tables_that_are_no_plan_end_the_connection_alone(server, token, ranks, nano_batches):
    message, tables = plan_tables(0, 2, nano_batches)
    tables = [table.copy() for table in tables]
    tables[1].view(np.int64)[0] = 4  # a document that does not exist
    ranks[0].link.send(message, tables)
    with pytest.raises(LinkLost, match="the server cannot use this PlanTables"):
        ranks[0].link.call(make_call(0, 0, 0, FULL, "forward"), [], []).wait(30)
    again = FakeRank(server.port, token, 0, 2, 2)
    again.send_plan(0, nano_batches)
    run_calls([again, ranks[1]], 0, nano_batches)
    again.link.close()


def test_only_rank_0_sends_plans(ranks, nano_batches):
    ranks[1].send_plan(0, nano_batches)
    with pytest.raises(LinkLost, match="rank 1 sent an unexpected PlanTables"):
        ranks[1].link.call(make_call(0, 0, 0, FULL, "forward"), [], []).wait(30)
    ranks[0].link.send(End())
    with pytest.raises(LinkLost, match="rank 0 sent an unexpected End"):
        ranks[0].link.call(make_call(0, 0, 0, FULL, "forward"), [], []).wait(30)


def test_a_rank_without_rows_for_the_server_makes_no_call(server, token):
    nano_batches = [make_nano_batch([33, 33], 2, 1, 3)]
    plan = nano_batches[0].plans[FULL]
    plan.tasks["worker"] = np.where(plan.tasks["document"] == 0, 2, 1)  # the second rank keeps its document
    assert set(plan.layout.of_rank(1)["document"].tolist()) == {1}
    ranks = [FakeRank(server.port, token, rank, 2, 2) for rank in range(2)]
    ranks[0].send_plan(0, nano_batches)
    with pytest.raises(LinkLost, match=r"no tasks of nano-batch 0, .*, for rank 1"):
        ranks[1].link.call(make_call(0, 0, 0, FULL, "forward"), [], []).wait(30)
    for rank in ranks:
        rank.link.close()


def test_a_kernel_that_fails_is_told_and_the_server_goes_on(token, nano_batches):
    class Failing:
        name = "failing"
        fails = True

        def __init__(self):
            self.kernel = get_kernel("cpu", CPU)
            self.check, self.backward = self.kernel.check, self.kernel.backward

        def forward(self, *args):
            if self.fails:
                raise RuntimeError("out of memory")
            return self.kernel.forward(*args)

    kernel = Failing()
    server = AttentionServer(token, CPU, kernel)
    for again in range(2):
        ranks = [FakeRank(server.port, token, rank, 2, 2) for rank in range(2)]
        ranks[0].send_plan(0, nano_batches)
        if not again:
            with pytest.raises(LinkLost, match="call 0 failed: out of memory"):
                run_calls(ranks, 0, nano_batches)
            kernel.fails = False
        else:
            run_calls(ranks, 0, nano_batches, 1)
        for rank in ranks:
            rank.link.close()
    server.close()


def test_the_server_says_what_it_is_doing_and_ends_with_training(server, token, ranks, nano_batches, monkeypatch):
    monkeypatch.setattr("hf_distca.pool.server.server.STATUS_S", 0.1)
    monkeypatch.setattr("hf_distca.pool.directory.ALIVE_S", 0.1)
    directory = Directory("127.0.0.1", 0, token)
    lines = []
    running = threading.Thread(target=server.run, args=("127.0.0.1", directory.port, 30, lines.append))
    running.start()
    wait_until(directory.members)
    (member,) = directory.members()
    assert (member.host, member.port, member.device) == ("127.0.0.1", server.port, "cpu")
    assert member.pairs_per_second > 1e5
    ranks[0].send_plan(0, nano_batches)
    run_calls(ranks, 0, nano_batches)
    wait_until(lambda: any("2 ranks" in line and "tasks/s; busy" in line for line in lines))
    directory.drop(member.id)  # it comes back under another number
    wait_until(directory.members)
    assert directory.members()[0].id != member.id
    directory.end()
    running.join(30)
    assert not running.is_alive()
    assert lines[-1] == "training has ended"
    directory.close()

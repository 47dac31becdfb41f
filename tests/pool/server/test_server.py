import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_distca.kernels import get_kernel
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.planner.routes import make_routes
from hf_distca.pool import server as servers
from hf_distca.pool.directory import Directory
from hf_distca.pool.messages import End, plan_tables
from hf_distca.pool.server import KEPT, AttentionServer
from hf_distca.pool.wire import LinkLost
from tests.pool.server.fake_ranks import FULL, SLIM, Data, FakeRank, make_call, make_nano_batch, run_calls
from tests.pool.servers import TOKEN, wait_until

CPU = torch.device("cpu")
LENGTHS = [300, 37, 1, 255]
CALL = make_call(0, 3, 0, FULL, "forward")


@pytest.fixture
def make_server():
    """Makes servers; closed after the test, as the ranks of `connect` are."""
    made = []

    def make(kernel="cpu", **options):
        kernel = get_kernel(kernel, CPU) if isinstance(kernel, str) else kernel
        made.append(AttentionServer(TOKEN, CPU, kernel, **options))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def connect(make_server):
    """Connects a rank to a server, by default one of two to the server that is worker 2 of 3."""
    made = []

    def connect(server, rank, ranks=2):
        made.append(FakeRank(server.port, TOKEN, rank, ranks, ranks))
        return made[-1]

    yield connect
    for rank in made:
        rank.link.close()


@pytest.fixture
def server(make_server):
    return make_server()


@pytest.fixture
def ranks(server, connect):
    return [connect(server, rank) for rank in range(2)]


@pytest.fixture(scope="module")
def nano_batches():
    return [make_nano_batch(LENGTHS, 2, 1, seed) for seed in (1, 2)]


@pytest.fixture
def plan(nano_batches):
    return nano_batches[0].plans[FULL]


def refused(rank, error, call=None):
    """A rank's call, by default one that no plan knows, comes back with an error."""
    call = call or make_call(0, 0, 0, FULL, "forward")
    with pytest.raises(LinkLost, match=error):
        rank.link.wait(rank.link.call(call, [torch.zeros(10)], {}), 30)


def test_results_and_pairs_are_those_of_the_reference(server, ranks, nano_batches):
    for nano in nano_batches:
        for plan in nano.plans.values():
            routes = make_routes(plan, 2)
            assert ((routes.queries.recv_counts + routes.stages[0].keys.recv_counts)[:2] > 0).all()
    ranks[0].send_plan(5, nano_batches)
    number = run_calls(ranks, 5, nano_batches)
    assert 0 < ranks[0].replies[-1].seconds < server.busy_s
    by_hand = [
        sum(min(row + 1, kind.window or row + 1) for row in range(start, stop))
        for nano in nano_batches
        for kind, plan in nano.plans.items()
        for _, start, stop, _ in [task for task in plan.tasks.tolist() if task[3] == 2]
    ]
    assert sum(reply.pairs for reply in ranks[0].replies) == 2 * sum(by_hand)
    ranks[0].send_plan(6, nano_batches[:1])
    run_calls(ranks, 6, nano_batches[:1], number, softcap=2.0)


class WithoutSoftcap(CpuKernel):
    def check(self, need, device):
        if need.params.softcap is not None:
            raise ValueError("no softcap")


def test_another_kernel_is_chosen_for_what_the_first_cannot_do(make_server, connect, nano_batches):
    asked = []
    server = make_server(WithoutSoftcap(), choose=lambda need: asked.append(need) or CpuKernel())
    ranks = [connect(server, rank) for rank in range(2)]
    ranks[0].send_plan(0, nano_batches[:1])
    number = run_calls(ranks, 0, nano_batches[:1])
    assert not asked
    run_calls(ranks, 0, nano_batches[:1], number, softcap=2.0)
    assert {(need.dtype, need.params.softcap) for need in asked} == {(torch.float32, 2.0)}


def test_every_dtype_travels(make_server, connect):
    server, nano_batches, number = make_server("reference"), [make_nano_batch([90, 37], 2, 1, 1, (SLIM,))], 0
    ranks = [connect(server, rank) for rank in range(2)]
    ranks[0].send_plan(0, nano_batches)
    for dtype, tolerance in (("float64", 1e-9), ("bfloat16", 5e-2), ("float16", 1e-2)):
        number = run_calls(ranks, 0, nano_batches, number, dtype=dtype, tolerance=tolerance)


def test_many_random_plans(ranks):
    number = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        lengths, kinds = rng.integers(1, 90, rng.integers(1, 6)), (SLIM, replace(SLIM, window=40))
        nano_batches = [make_nano_batch(lengths, 2, 2, seed, kinds)]
        ranks[0].send_plan(seed, nano_batches)
        number = run_calls(ranks, seed, nano_batches, number)


def test_a_call_may_overtake_its_plan(server, ranks, nano_batches, plan, monkeypatch):
    asked, begin = threading.Event(), server._calls.begin
    monkeypatch.setattr(server._calls, "begin", lambda *args: asked.set() or begin(*args))
    data = Data(plan, CALL, 2)
    second = ranks[1].start(CALL, plan, data)
    assert asked.wait(30)
    ranks[0].send_plan(0, nano_batches)
    first = ranks[0].start(CALL, plan, data)
    ranks[1].finish(second)
    ranks[0].finish(first)


@pytest.mark.parametrize("fields", [{"scale": 0.5}, {"nano_batch": 1}])
def test_another_call_under_the_same_id_is_refused(server, ranks, nano_batches, plan, fields):
    ranks[0].send_plan(0, [nano_batches[0]] * 2)
    data = Data(plan, CALL, 2)
    started = ranks[0].start(CALL, plan, data)
    wait_until(lambda: server._calls._open)
    with pytest.raises(LinkLost, match="call 3 differs from the call of other ranks"):
        ranks[1].finish(ranks[1].start(replace(CALL, **fields), plan, data))
    with pytest.raises(LinkLost, match="rank 1 left in the middle of call 3"):
        ranks[0].finish(started)


def test_a_call_made_twice_is_refused(ranks, nano_batches, plan):
    ranks[0].send_plan(0, nano_batches)
    data = Data(plan, CALL, 2)
    _, second = (ranks[0].start(CALL, plan, data) for _ in range(2))
    with pytest.raises(LinkLost, match="call 3 differs from the call of other ranks, or was made twice"):
        ranks[0].finish(second)


def test_plans_are_forgotten_and_waited_for_in_vain(make_server, connect, ranks, nano_batches, monkeypatch):
    for number in range(KEPT + 1):
        ranks[0].send_plan(number, nano_batches)
    run_calls(ranks, KEPT, nano_batches[:1])
    run_calls(ranks, 1, nano_batches[:1], 100)
    refused(ranks[1], f"plan 0 is no longer kept; the latest is {KEPT}")
    monkeypatch.setattr(servers, "PLAN_WAIT_S", 0.1)
    refused(connect(make_server(), 1), r"plan 0 did not arrive within 0\.1 s")


def test_a_rank_that_leaves_in_a_call_is_told_to_the_others_who_may_connect_again(
    server, connect, ranks, nano_batches, plan
):
    ranks[0].send_plan(0, nano_batches)
    started = ranks[0].start(CALL, plan, Data(plan, CALL, 2))
    wait_until(lambda: server._calls._open)
    ranks[1].link.close()
    with pytest.raises(LinkLost, match="rank 1 left in the middle of call 3"):
        ranks[0].finish(started)
    again = connect(server, 0)
    again.send_plan(0, nano_batches)
    refused(again, "rank 1, which is not connected")
    again = [connect(server, rank) for rank in (1, 0)][::-1]
    again[0].send_plan(0, nano_batches)
    number = run_calls(again, 0, nano_batches[:1], 4)
    replacing = connect(server, 1)
    run_calls([again[0], replacing], 0, nano_batches[:1], number)
    with pytest.raises(LinkLost, match="connected again"):
        run_calls(again[1:], 0, nano_batches, 50)


@pytest.mark.parametrize(
    ("fields", "kind", "error"),
    [
        ({"nano_batch": 2}, {}, "no tasks of nano-batch 2"),
        ({}, {"window": 41}, "no tasks of nano-batch 0, a window of 41"),
        ({"direction": "backward"}, {}, "bytes, expected"),
        ({"dtype": "int8"}, {}, "'int8' is no"),
        ({"softcap": -1.0}, {}, "cannot use this Call: softcap must be positive"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_and_others_are_served(server, connect, fields, kind, error):
    # Everything is on one rank, so that the other may leave.
    nano_batches = [make_nano_batch([64], 1, 1, 0)]
    good, bad = connect(server, 0, ranks=1), connect(server, 1)
    good.send_plan(0, nano_batches)
    plan = nano_batches[0].plans[FULL]
    started = good.start(CALL, plan, Data(plan, CALL, 1))
    wrong = replace(CALL, call_id=11, **fields, kind=replace(FULL, **kind))
    refused(bad, f"{error}|has no tasks of", wrong)
    good.finish(started)
    refused(good, error, wrong)


def test_a_plan_that_does_not_fit_ends_the_connection_alone(server, connect, ranks, nano_batches):
    message, tables = plan_tables(0, 2, nano_batches)
    short = replace(message, tables=((1,) * 5,))
    wrong = [np.full_like(table, 255) for table in tables]
    for sent, error in (
        ((replace(message, worker=1), tables), "worker 1 is no server"),
        ((short, tables), "sent an unexpected PlanTables with"),
        ((message, wrong), "cannot use this PlanTables: "),
        ((End(),), "rank 0 sent an unexpected End"),
    ):
        rank = connect(server, 0)
        rank.link.send(*sent)
        refused(rank, error)
    again = connect(server, 0)
    again.send_plan(0, nano_batches)
    run_calls([again, ranks[1]], 0, nano_batches)
    ranks[1].send_plan(1, nano_batches)
    refused(ranks[1], "rank 1 sent an unexpected PlanTables")


def test_a_rank_without_rows_for_the_server_makes_no_call(ranks):
    nano_batches = [make_nano_batch([33, 33], 2, 1, 3)]
    plan = nano_batches[0].plans[FULL]
    plan.tasks["worker"] = np.where(plan.tasks["document"] == 0, 2, 1)  # the second rank keeps its document
    assert set(plan.layout.of_rank(1)["document"].tolist()) == {1}
    ranks[0].send_plan(0, nano_batches)
    refused(ranks[1], r"no tasks of nano-batch 0, .*, for rank 1")


class Failing(CpuKernel):
    fails = True

    def forward(self, *args):
        if self.fails:
            raise RuntimeError("out of memory")
        return super().forward(*args)


def test_a_kernel_that_fails_is_told_and_the_server_goes_on(make_server, connect, nano_batches):
    kernel = Failing()
    server = make_server(kernel)
    ranks = [connect(server, rank) for rank in range(2)]
    ranks[0].send_plan(0, nano_batches)
    with pytest.raises(LinkLost, match="call 0 failed: out of memory"):
        run_calls(ranks, 0, nano_batches)
    kernel.fails = False
    ranks = [connect(server, rank) for rank in range(2)]
    ranks[0].send_plan(0, nano_batches)
    run_calls(ranks, 0, nano_batches, 1)


def test_the_server_says_what_it_is_doing_and_ends_with_training(server, ranks, nano_batches, monkeypatch):
    monkeypatch.setattr("hf_distca.pool.server.STATUS_S", 0.1)
    monkeypatch.setattr("hf_distca.pool.directory.ALIVE_S", 0.1)
    directory = Directory("127.0.0.1", 0, TOKEN)
    lines = []
    running = threading.Thread(target=server.run, args=("127.0.0.1", directory.port, 30, lines.append))
    running.start()
    wait_until(directory.members)
    member = directory.members()[0]
    assert (member.host, member.port, member.device) == ("127.0.0.1", server.port, "cpu")
    assert member.pairs_per_second > 1e5
    ranks[0].send_plan(0, nano_batches)
    run_calls(ranks, 0, nano_batches)
    wait_until(lambda: any("2 ranks" in line and "tasks/s; busy" in line for line in lines))
    directory.drop(0)  # it comes back under another number
    wait_until(directory.members)
    assert list(directory.members()) == [1]
    directory.end()
    running.join(30)
    assert not running.is_alive()
    assert lines[-1] == "training has ended"
    directory.close()

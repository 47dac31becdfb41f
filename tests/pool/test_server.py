import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_distca.kernels.cpu import CpuKernel
from hf_distca.pool import server as servers
from hf_distca.pool.directory import Directory
from hf_distca.pool.messages import Alive, End, plan_tables
from hf_distca.pool.server import KEPT, AttentionServer
from hf_distca.pool.wire import LinkLost
from tests.pool.ends import CPU, FULL, SLIM, TOKEN, FakeRank, data_of, make_call, make_nano_batch, run_calls
from tests.pool.servers import wait_until

CALL = make_call(3)


@pytest.fixture
def make_server():
    """Makes servers; closed after the test, as the ranks of `connect` are."""
    made = []

    def make(kernel=None, **options):
        made.append(AttentionServer(TOKEN, CPU, kernel or CpuKernel(), **options))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def connect(make_server):
    """Connects ranks to a server, by default two to the server that is worker 2 of 3."""
    made = []

    def connect(server, *ranks, worker=2):
        made.extend(FakeRank(server.port, rank, worker) for rank in ranks or (0, 1))
        return made[-len(ranks or (0, 1)) :]

    yield connect
    for rank in made:
        rank.link.close()


@pytest.fixture
def server(make_server):
    return make_server()


@pytest.fixture
def ranks(server, connect):
    return connect(server)


@pytest.fixture(scope="module")
def nano_batches():
    return [make_nano_batch([300, 37, 1, 255], 2, seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def data(nano_batches):
    return data_of(nano_batches[0].plans[FULL], CALL)


def refused(rank, error, call=None):
    """A rank's call, by default one that no plan knows, comes back with an error."""
    call = call or make_call()
    with pytest.raises(LinkLost, match=error):
        rank.link.wait(rank.link.call(call, [torch.zeros(10)], {}), 30)


class WithoutSoftcap(CpuKernel):
    def check(self, need, device):
        if need.params.softcap is not None:
            raise ValueError("no softcap")


def test_results_and_pairs_are_those_of_the_reference(make_server, connect, nano_batches):
    asked = []
    server = make_server(WithoutSoftcap(), choose=lambda need: asked.append(need) or CpuKernel())
    ranks = connect(server)
    ranks[0].send_plan(5, nano_batches)
    number = run_calls(ranks, 5, nano_batches)
    assert 0 < ranks[0].replies[-1].seconds < server.busy_s
    by_hand = [
        sum(min(row + 1, kind.window or row + 1) for row in range(start, stop))
        for nano in nano_batches
        for kind, plan in nano.plans.items()
        for _, start, stop, _ in plan.tasks.tolist()
    ]
    assert sum(reply.pairs for reply in ranks[0].replies) == 2 * sum(by_hand)
    assert not asked
    ranks[0].send_plan(6, nano_batches[:1])
    number = run_calls(ranks, 6, nano_batches[:1], number, softcap=2.0)
    assert {(need.dtype, need.params.softcap) for need in asked} == {(torch.float32, 2.0)}
    for dtype, tolerance in (("float64", 1e-9), ("bfloat16", 5e-2), ("float16", 1e-2)):
        number = run_calls(ranks, 6, nano_batches[:1], number, dtype=dtype, tolerance=tolerance)
        precise = {spec.name: spec.dtype for spec in make_call(dtype=dtype).reply()}["lse"]
        assert precise == ("float64" if dtype == "float64" else "float32")  # never a half precision
    for seed in range(8):
        rng = np.random.default_rng(seed)
        lengths, kinds = rng.integers(1, 90, rng.integers(1, 6)), (SLIM, replace(SLIM, window=40))
        some = [make_nano_batch(lengths, 2, seed, kinds)]
        ranks[0].send_plan(7 + seed, some)
        number = run_calls(ranks, 7 + seed, some, number)


def test_a_call_may_overtake_its_plan_which_is_forgotten_or_waited_for_in_vain(
    make_server, server, connect, ranks, nano_batches, data, monkeypatch
):
    asked, begin = threading.Event(), server._begin
    monkeypatch.setattr(server, "_begin", lambda *args: asked.set() or begin(*args))
    second = ranks[1].start(CALL, data)
    assert asked.wait(30)
    ranks[0].send_plan(0, nano_batches)
    first = ranks[0].start(CALL, data)
    ranks[1].finish(second)
    ranks[0].finish(first)
    for number in range(1, KEPT + 1):
        ranks[0].send_plan(number, nano_batches)
    run_calls(ranks, KEPT, nano_batches[:1], 10)
    run_calls(ranks, 1, nano_batches[:1], 100)
    refused(ranks[1], f"plan 0 is no longer kept; the latest is {KEPT}")
    monkeypatch.setattr(servers, "PLAN_WAIT_S", 0.1)
    refused(*connect(make_server(), 1), r"plan 0 did not arrive within 0\.1 s")


@pytest.mark.parametrize("fields", [{"scale": 0.5}, {"nano_batch": 1}, None])
def test_another_call_under_the_same_id_or_the_same_call_twice_is_refused(server, ranks, nano_batches, data, fields):
    ranks[0].send_plan(0, [nano_batches[0]] * 2)
    started = ranks[0].start(CALL, data)
    wait_until(lambda: server._open)
    again = replace(CALL, **(fields or {}))
    with pytest.raises(LinkLost, match="call 3 differs from the call of other ranks, or was made twice"):
        ranks[bool(fields)].finish(ranks[bool(fields)].start(again, data))
    if fields:
        with pytest.raises(LinkLost, match="rank 1 left in the middle of call 3"):
            ranks[0].finish(started)


def test_a_rank_that_leaves_in_a_call_is_told_to_the_others_who_may_connect_again(
    server, connect, ranks, nano_batches, data
):
    ranks[0].send_plan(0, nano_batches)
    started = ranks[0].start(CALL, data)
    wait_until(lambda: server._open)
    ranks[1].link.close()
    with pytest.raises(LinkLost, match="rank 1 left in the middle of call 3"):
        ranks[0].finish(started)
    (again,) = connect(server, 0)
    again.send_plan(0, nano_batches)
    refused(again, "rank 1, which is not connected")
    again = connect(server, 1, 0)[::-1]
    again[0].send_plan(0, nano_batches)
    number = run_calls(again, 0, nano_batches[:1], 4)
    run_calls([again[0], *connect(server, 1)], 0, nano_batches[:1], number)
    with pytest.raises(LinkLost, match="connected again"):
        run_calls(again[1:], 0, nano_batches, 50)


def test_a_call_that_does_not_fit_is_refused_and_others_are_served(server, connect):
    # Everything is on one rank, so that the other may leave.
    nano_batches = [make_nano_batch([64], 1, 0)]
    plan = nano_batches[0].plans[FULL]
    data = data_of(plan, CALL)
    for fields, error in (
        ({"nano_batch": 2}, "no tasks of nano-batch 2"),
        ({"kind": replace(FULL, window=41)}, "no tasks of nano-batch 0, a window of 41"),
        ({"direction": "backward"}, "bytes, expected"),
        ({"dtype": "int8"}, "'int8' is no"),
        ({"softcap": -1.0}, "cannot use this Call: softcap must be positive"),
    ):
        good, bad = connect(server, 0, 1, worker=1)
        good.send_plan(0, nano_batches)
        started = good.start(CALL, data)
        wrong = replace(CALL, call_id=11, **fields)
        refused(bad, f"{error}|no tasks of nano-batch 0, .*, for rank 1", wrong)  # a rank without rows makes no call
        good.finish(started)
        refused(good, error, wrong)


def test_a_plan_that_does_not_fit_ends_the_connection_alone(server, connect, ranks, nano_batches):
    message, tables = plan_tables(0, 2, nano_batches)
    for sent, error in (
        ((replace(message, worker=1), tables), "worker 1 is no server"),
        ((replace(message, tables=((1,) * 5,)), tables), "sent an unexpected PlanTables with"),
        ((message, [np.full_like(table, 255) for table in tables]), "cannot use this PlanTables: "),
        ((End(),), "rank 0 sent an unexpected End"),
    ):
        (rank,) = connect(server, 0)
        rank.link.send(*sent)
        refused(rank, error)
    (again,) = connect(server, 0)
    again.send_plan(0, nano_batches)
    run_calls([again, ranks[1]], 0, nano_batches)
    ranks[1].send_plan(1, nano_batches)
    refused(ranks[1], "rank 1 sent an unexpected PlanTables")


class Failing(CpuKernel):
    fails = True

    def forward(self, *args):
        if self.fails:
            raise RuntimeError("out of memory")
        return super().forward(*args)


def test_a_kernel_that_fails_is_told_and_the_server_goes_on_says_so_and_ends_with_training(
    make_server, connect, nano_batches, monkeypatch
):
    monkeypatch.setattr(servers, "STATUS_S", 0.1)
    monkeypatch.setattr(servers, "ALIVE_S", 0.1)
    monkeypatch.setattr(servers, "measure_speed", lambda *_: 5e6)
    alive, lines, kernel = [], [], Failing()
    monkeypatch.setattr(servers, "Alive", lambda: alive.append(1) or Alive())
    server, directory = make_server(kernel), Directory("127.0.0.1", 0, TOKEN)
    running = threading.Thread(target=server.run, args=("127.0.0.1", directory.port, 30, lines.append))
    running.start()
    wait_until(directory.members)
    member = directory.members()[0]
    assert (member.host, member.port, member.device) == ("127.0.0.1", server.port, "cpu")
    assert member.pairs_per_second == 5e6
    for _ in range(2):
        ranks = connect(server)
        ranks[0].send_plan(0, nano_batches)
        if kernel.fails:
            with pytest.raises(LinkLost, match="call 0 failed: out of memory"):
                run_calls(ranks, 0, nano_batches)
        kernel.fails = False
    run_calls(ranks, 0, nano_batches, 1)
    wait_until(lambda: any("2 ranks" in line and "tasks/s; busy" in line for line in lines))
    wait_until(lambda: len(alive) > 1)
    directory.drop(0)  # it comes back under another number
    wait_until(directory.members)
    assert list(directory.members()) == [1]
    directory.end()
    running.join(30)
    assert not running.is_alive()
    assert lines[-1] == "training has ended"
    directory.close()

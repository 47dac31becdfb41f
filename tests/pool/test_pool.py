"""One rank's pool, with servers behind links that do what the test says. A rank computes 50 pairs/s, a server 100."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hf_distca.dispatch.groups import Groups
from hf_distca.dispatch.recorder import Recorder, Span, Work
from hf_distca.dispatch.remote import ServerRows
from hf_distca.dispatch.rows import IndexBuffer
from hf_distca.kernels import AttentionParams
from hf_distca.plan import AttentionKind
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.routes import make_routes
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.messages import RankHello, Reply, ServerHello
from hf_distca.pool.rank.pool import Pool
from hf_distca.pool.transport import Memory
from hf_distca.pool.wire import LinkLost, MismatchError

CPU = torch.device("cpu")
KIND = AttentionKind(None, q_heads=2, kv_heads=1, dim_qk=8, dim_v=8)
WORK = Work(3, 0, "forward")
SETTINGS = PlanSettings(ranks=1, tokens_per_rank=64, kinds=(KIND,), balance_block_size=8, ping_pong=False)
INFOS = {7 + i: ServerHello("127.0.0.1", 4000 + i, "cpu", 100.0) for i in range(3)}


class FakeLink:
    """A link to a server that computes for 1.75 s of 3 s; port 4000 is on the rank's host, 1 and 2 are not reached."""

    def __init__(self, host, port, *rest):
        self.made_with = (host, port, *rest)
        if port in (1, 2):
            raise (LinkLost if port == 1 else MismatchError)("nobody answers")
        self.calls, self.sent, self.lost, self.closed = [], [], "", False
        self.within_host, self.carried_by = port == 4000, "TCP (TCP was asked for)"

    def send(self, message, payload):
        self.sent.append(message)

    def call(self, call, rows, results, ready):
        self.calls.append(call)
        return SimpleNamespace(results=results, departed=10.0, arrived=13.0)

    def wait(self, answer, timeout_s):
        if self.lost:
            raise LinkLost(self.lost)
        return Reply(call_id=0, seconds=1.75, pairs=40)

    def close(self):
        self.closed, self.lost = True, self.lost or "closed by this rank"


class FakeDirectory:
    """A directory whose members a test sets by id; notes who is dropped, with the refusal, and its own end."""

    def __init__(self):
        self.ids, self.changed, self.dropped, self.ends = (), {}, [], []

    def members(self):
        return {server: self.changed.get(server, INFOS[server]) for server in self.ids}

    def drop(self, member, refusal=""):
        self.dropped.append((member, refusal))

    def end(self):
        self.ends.append("told")

    def close(self):
        self.ends.append("closed")


@pytest.fixture
def directory():
    return FakeDirectory()


@pytest.fixture
def make_pool(monkeypatch, directory):
    """Makes a rank's pool; `groups` stands for the other ranks."""
    monkeypatch.setattr("hf_distca.pool.rank.pool.ServerLink", FakeLink)
    monkeypatch.setattr("hf_distca.pool.rank.pool.measure_speed", lambda *_: 50.0)

    def make(groups=None, **options):
        dispatcher = SimpleNamespace(groups=groups or Groups(CPU, 60), recorder=Recorder(CPU), kernel=None, device=CPU)
        return Pool(dispatcher, b"token", directory, Memory(CPU), **options)

    return make


@pytest.fixture
def pool(make_pool, directory):
    """One rank's, with server 7."""
    pool = make_pool()
    directory.ids = [7]
    pool.refresh()
    return pool


def other_rank(changed, **methods):
    """Groups of two ranks, the other of which computes as fast and says of servers what `changed` makes of it."""

    def all_gather(value):
        return [value, changed(value) if isinstance(value, tuple) else value]

    return SimpleNamespace(rank=0, ranks=2, all_gather=all_gather, **methods)


class Asking:
    """A plan of 64 rows that the pool has bound, and one attention after another of it."""

    def __init__(self, pool):
        self.plan, self.at_servers = pool.bind(plan_micro_batch([64], SETTINGS), SETTINGS)
        routes = make_routes(self.plan.nano_batches[0].plans[KIND], 0)
        self.rows = ServerRows(0, routes, 1, IndexBuffer(CPU))
        assert self.rows.q_count > 0

    def __call__(self):
        rows = {"q": torch.zeros(64, 2, 8), "k": torch.zeros(64, 1, 8), "v": torch.zeros(64, 1, 8)}
        return self.at_servers.start(WORK, [self.rows], KIND, AttentionParams(scale=0.5), rows)


def test_results_come_by_name_and_what_they_took_is_recorded(pool):
    asking, recording = Asking(pool), pool.recorder.listen()
    first, second = asking(), asking()
    assert recording.take() == []
    results, lost = second.collect()
    assert lost == frozenset()
    expected = {"o": (asking.rows.q_count, 2, 8), "lse": (asking.rows.q_count, 2)}
    assert {name: rows_N.shape for name, rows_N in results[0].items()} == expected
    assert recording.take() == [Span("call", "7", WORK, 10.0, 13.0), Span("server", "7", WORK, 11.25, 13.0, pairs=40)]
    assert [call.call_id for call in pool.link(7).calls] == [0, 1]
    pool.link(7).lost = "it is gone"
    assert first.collect() == ({}, {0})
    assert pool.servers == ()
    assert recording.take() == []


def test_members_of_the_directory_take_part_until_they_leave_it_or_training_ends(pool, directory):
    left = pool.link(7)
    directory.ids, directory.changed = [8, 9], {9: replace(INFOS[9], port=1)}
    pool.refresh()
    assert pool.servers == (8,)
    assert left.closed
    assert sorted(directory.dropped) == [(7, ""), (9, "")]  # who left is dropped once more, which does nothing
    assert pool.workers(1).speed == (1.0, 2.0)
    later = pool.link(8)
    pool.close()
    assert (pool.servers, later.closed, directory.ends) == ((), True, ["told", "closed"])


@pytest.mark.parametrize(("port", "refusal"), [(1, ""), (2, "nobody answers")])
def test_a_server_that_a_rank_does_not_reach_takes_no_part(make_pool, directory, caplog, port, refusal):
    def changed(value):  # the other rank does not reach server 8
        return ({8: ("nobody answers", port == 2)}, set()) if len(value) == 2 else value

    pool = make_pool(other_rank(changed, any_of=lambda flags: flags))
    directory.ids, directory.changed = [7, 8, 9], {9: replace(INFOS[9], port=port)}
    pool.refresh()
    assert pool.servers == (7,)
    assert directory.dropped == [(8, refusal), (9, refusal)]  # refused where another try would end alike
    assert [line for line in caplog.messages if "takes part" not in line] == [
        f"attention server {name} cannot take part: nobody answers"
        for name in ("8 (127.0.0.1:4001, cpu)", f"9 (127.0.0.1:{port}, cpu)")
    ]


def test_a_server_that_another_rank_has_lost_is_lost_here_too(make_pool, directory, caplog):
    asked, lost = [], set()

    def changed(value):
        return ({}, set()) if len(value) == 2 else ({}, set(lost), value[2])

    pool = make_pool(other_rank(changed, any_of=lambda flags: asked.append(flags) or [False, True]))
    directory.ids = [7, 8, 9]
    pool.refresh()
    link = pool.link(8)
    assert pool.without_lost([7, 8]) == {8}
    assert pool.without_lost([8]) == {8}  # nobody is asked of a server that is gone
    assert asked == [[False, False]]
    assert link.closed
    directory.ids = [7, 9]
    pool.link(7).lost = "it is gone"
    lost.add(9)
    pool.refresh()
    assert pool.servers == ()
    between = "between steps; no call was running"
    assert [line for line in caplog.messages if "lost" in line] == [
        "lost attention server 8 (127.0.0.1:4001, cpu) (another rank lost it): its tasks of this micro-batch are "
        "computed by the ranks; 2 servers left",
        f"lost attention server 7 (127.0.0.1:4000, cpu) (it is gone): {between}; 1 servers left",
        f"lost attention server 9 (127.0.0.1:4002, cpu) (another rank lost it): {between}; no server left, so ranks "
        "compute all tasks",
    ]


def test_what_a_link_is_made_with(make_pool, directory):
    for timeout_s, connect_s in ((60.0, 10.0), (4.0, 4.0)):
        pool = make_pool(timeout_s=timeout_s)
        directory.ids = [7]
        pool.refresh()
        hello = RankHello(0, 1, why_tcp="TCP was asked for")
        assert pool.link(7).made_with == ("127.0.0.1", 4000, b"token", hello, connect_s, timeout_s, pool.memory)


@pytest.mark.parametrize(
    ("ranks_per_node", "nodes"),
    [
        # Server 7 is on the host of this rank, 0, server 8 on that of rank 2, server 9 on one of its own.
        ((2, 1), (0, 0, 1, 0, 1, 2)),
        (1, None),
    ],
)
def test_servers_are_on_the_node_of_ranks_of_their_host(make_pool, directory, ranks_per_node, nodes):
    def gathered(value):
        reached = isinstance(value, tuple) and len(value) == 2
        return [value, ({}, set()), ({}, {7, 8})] if reached else [value] * 3

    pool = make_pool(SimpleNamespace(rank=0, ranks=3, all_gather=gathered))
    directory.ids = [7, 8, 9]
    pool.refresh()
    settings = replace(SETTINGS, ranks=3, ranks_per_node=ranks_per_node)
    plan, _ = pool.bind(plan_micro_batch([64], settings), settings)
    assert plan.nano_batches[0].plans[KIND].nodes == nodes


def test_what_was_seen_is_learned_once(pool):
    pool.recorder.add(Span("server", "7", WORK, 0.0, 1.0, pairs=600))  # six times a rank's 100 pairs/s
    for _ in range(2):
        pool.refresh()
        assert pool.workers(1).speed == (1.0, 4.0)


def test_waiting_for_servers_ends_on_every_rank_when_one_says_so(make_pool, caplog):
    # By this rank's clock there is an hour left, by the other's none.
    told = []
    pool = make_pool(other_rank(lambda value: value, any_of=lambda flags: told.append(flags) or [True]))
    pool.wait_for(3, 3600)
    assert told == [[False]]
    assert "0 of 3 attention servers joined within 3600 s" in caplog.text

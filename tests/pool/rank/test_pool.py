"""One rank's pool, with servers behind links that do what the test says. A rank computes 50 pairs/s, a server 100."""

import logging
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
from hf_distca.pool.memory import HostMemory
from hf_distca.pool.messages import RankHello
from hf_distca.pool.rank.members import Members, News
from hf_distca.pool.rank.pool import Pool
from tests.pool.rank.fake_links import FakeDirectory, FakeLink, server_info

CPU = torch.device("cpu")
KIND = AttentionKind(None, q_heads=2, kv_heads=1, dim_qk=8, dim_v=8)
WORK = Work(3, 0, "forward")
SETTINGS = PlanSettings(ranks=1, tokens_per_rank=64, kinds=(KIND,), balance_block_size=8, ping_pong=False)


@pytest.fixture
def directory():
    return FakeDirectory()


@pytest.fixture
def recorder():
    return Recorder(CPU)


@pytest.fixture
def pool(monkeypatch, directory, recorder):
    """One rank's, with server 7."""
    monkeypatch.setattr("hf_distca.pool.rank.members.ServerLink", FakeLink)
    groups = Groups(CPU, 60)
    pool = Pool(groups, Members(groups, HostMemory(CPU), b"", directory, 60.0), recorder, 50.0)
    directory.infos = (server_info(7, 4000),)
    pool.refresh()
    return pool


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


def test_a_plan_is_sent_to_the_servers_that_are_there(pool, directory):
    directory.infos = (server_info(7, 4000), server_info(9, 4001))
    pool.refresh()
    plan, at_servers = pool.bind(plan_micro_batch([64], SETTINGS), SETTINGS)
    assert plan.nano_batches[0].plans[KIND].workers == 3
    assert at_servers is not None
    for server, worker in ((7, 1), (9, 2)):
        (message,) = pool.members.link(server).sent
        assert (message.plan_id, message.worker) == (0, worker)
    directory.infos = ()
    pool.refresh()
    plan = plan_micro_batch([64], SETTINGS)
    assert pool.bind(plan, SETTINGS) == (plan, None)


def test_results_come_by_name_for_the_rows_that_were_sent(pool):
    asking = Asking(pool)
    results, lost = asking().collect()
    assert lost == frozenset()
    assert {name: rows_N.shape for name, rows_N in results[0].items()} == {
        "o": (asking.rows.q_count, 2, 8),
        "lse": (asking.rows.q_count, 2),
    }


def test_a_call_and_the_servers_part_of_it_are_recorded_when_results_are_collected(pool, recorder):
    asking, recording = Asking(pool), recorder.listen()
    first, second = asking(), asking()
    assert recording.take() == []
    second.collect()
    assert recording.take() == [Span("call", "7", WORK, 10.0, 13.0), Span("server", "7", WORK, 11.25, 13.0, pairs=40)]
    first.collect()
    assert len(recording.take()) == 2
    assert [call.call_id for call in pool.members.link(7).calls] == [0, 1]


def test_a_call_that_is_lost_tells_nothing_of_its_server(pool, recorder):
    recording, call = recorder.listen(), Asking(pool)()
    pool.members.link(7).lost = "it is gone"
    assert call.collect() == ({}, {0})
    assert pool.servers == ()
    assert recording.take() == []


def test_members_of_the_directory_take_part_until_they_leave_it(pool, directory):
    left = pool.members.link(7)
    directory.infos = (server_info(8, 4001), server_info(9, 1))
    pool.refresh()
    assert pool.servers == (8,)
    assert left.closed
    assert sorted(directory.dropped) == [7, 9]  # who left is dropped once more, which does nothing
    assert pool.workers(1).speed == (1.0, 2.0)
    later = pool.members.link(8)
    directory.infos = ()
    pool.refresh()
    assert pool.servers == ()
    assert later.closed


@pytest.mark.parametrize(("final", "refusal"), [(False, ""), (True, "nobody answers")])
def test_a_server_that_another_rank_does_not_reach_takes_no_part(directory, monkeypatch, final, refusal):
    made = []
    monkeypatch.setattr(
        "hf_distca.pool.rank.members.ServerLink", lambda *args: made.append(FakeLink(*args)) or made[-1]
    )
    told = iter([({}, set()), ({8: ("nobody answers", final)}, set())])
    groups = SimpleNamespace(rank=0, ranks=2, all_gather=lambda value: [value, next(told)])
    members = Members(groups, HostMemory(CPU), b"", directory, 60.0)
    seven, eight = server_info(7, 4000), server_info(8, 4001)
    assert members.update([News((seven,), ()), News((), ())]) == [seven]
    assert members.update([News((seven, eight), ()), News((), ())]) == []
    assert members.ids == (7,)
    assert [link.closed for link in made] == [False, True]
    assert (directory.dropped, directory.refusals) == ([8], [refusal])  # it is told what will not change


def test_a_server_that_another_rank_has_lost_is_lost_here_too(directory, monkeypatch, caplog):
    monkeypatch.setattr("hf_distca.pool.rank.members.ServerLink", FakeLink)
    asked = []
    groups = SimpleNamespace(
        rank=0,
        ranks=2,
        all_gather=lambda value: [value, ({}, set())],
        any_of=lambda flags: asked.append(flags) or [False, True],
    )
    members = Members(groups, HostMemory(CPU), b"", directory, 60.0)
    seven, eight, nine = (server_info(7 + i, 4000 + i) for i in range(3))
    members.update([News((seven, eight, nine), ()), News((), ())])
    link = members.link(8)
    assert members.without_lost([7, 8]) == {8}
    assert members.without_lost([8]) == {8}  # nobody is asked of a server that is gone
    assert asked == [[False, False]]
    assert link.closed
    assert members.update([News((seven, nine), (7,)), News((), (9,))]) == []
    assert members.ids == ()
    lost, ranks_go_on = (
        "(another rank lost it): between steps; no call was running",
        "no server left, so ranks compute all tasks",
    )
    assert caplog.messages == [
        "lost attention server 8 (127.0.0.1:4001, cpu) (another rank lost it): its tasks of this micro-batch are "
        "computed by the ranks; 2 servers left",
        f"lost attention server 7 (127.0.0.1:4000, cpu) {lost}; 1 servers left",
        f"lost attention server 9 (127.0.0.1:4002, cpu) {lost}; {ranks_go_on}",
    ]


@pytest.mark.parametrize(("timeout_s", "connect_s"), [(60.0, 10.0), (4.0, 4.0)])
def test_what_a_link_is_made_with(directory, monkeypatch, timeout_s, connect_s):
    made = []
    monkeypatch.setattr("hf_distca.pool.rank.members.ServerLink", lambda *args: made.append(args) or FakeLink(*args))
    groups, memory = SimpleNamespace(rank=0, ranks=2, all_gather=lambda value: [value] * 2), HostMemory(CPU)
    members = Members(groups, memory, b"token", directory, timeout_s)
    members.update([News((server_info(7, 4000),), ()), News((), ())])
    assert made == [("127.0.0.1", 4000, b"token", RankHello(0, 2), connect_s, timeout_s, memory)]


def test_all_links_and_the_directory_end_with_the_training(pool, directory):
    link = pool.members.link(7)
    pool.members.close()
    assert link.closed
    assert pool.servers == ()
    assert directory.ends == ["told", "closed"]


@pytest.mark.parametrize(("rank", "told"), [(0, ["hello"]), (1, [])])
def test_rank_0_tells_for_all(rank, told, caplog):
    groups = SimpleNamespace(rank=rank, ranks=2)
    Members(groups, HostMemory(CPU), b"", None, 60.0).tell("hello", logging.WARNING)
    assert caplog.messages == told


@pytest.mark.parametrize(
    ("ranks_per_node", "nodes"),
    [
        # Server 7 is on the host of this rank, 0, server 8 on that of rank 2, server 9 on one of its own.
        ((2, 1), (0, 0, 1, 0, 1, 2)),
        (1, None),
    ],
)
def test_servers_are_on_the_node_of_ranks_of_their_host(directory, monkeypatch, ranks_per_node, nodes):
    monkeypatch.setattr("hf_distca.pool.rank.members.ServerLink", FakeLink)

    def gathered(value):
        reached = isinstance(value, tuple) and isinstance(value[0], dict)
        return [value, ({}, set()), ({}, {7, 8})] if reached else [value] * 3

    groups = SimpleNamespace(rank=0, ranks=3, all_gather=gathered)
    pool = Pool(groups, Members(groups, HostMemory(CPU), b"", directory, 60.0), Recorder(CPU), 50.0)
    directory.infos = tuple(server_info(7 + i, 4000 + i) for i in range(3))
    pool.refresh()
    assert [pool.members.rank_beside(server) for server in pool.servers] == [0, 2, None]
    settings = replace(SETTINGS, ranks=3, ranks_per_node=ranks_per_node)
    plan, _ = pool.bind(plan_micro_batch([64], settings), settings)
    assert plan.nano_batches[0].plans[KIND].nodes == nodes


def test_what_was_seen_is_learned_once(pool, recorder):
    recorder.add(Span("server", "7", WORK, 0.0, 1.0, pairs=600))  # six times a rank's 100 pairs/s
    pool.refresh()
    assert pool.workers(1).speed == (1.0, 4.0)
    pool.refresh()
    assert pool.workers(1).speed == (1.0, 4.0)


def test_waiting_for_servers_ends_on_every_rank_when_one_says_so():
    # By this rank's clock there is an hour left, by the other's none.
    told = []
    groups = SimpleNamespace(
        rank=1, all_gather=lambda value: [value], any_of=lambda flags: told.append(flags) or [True]
    )
    members = Members(groups, HostMemory(CPU), b"", None, 60.0)
    Pool(groups, members, Recorder(CPU), 50.0).wait_for(3, 3600)
    assert told == [[False]]

"""A rank's link to a server whose end the test has, and its pool, with links that do what the test
says.

A rank computes 50 pairs/s, a server 100.
"""

import contextlib
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch

from hf_distca.dispatch.process_groups import Groups
from hf_distca.dispatch.recorder import Recorder, Span, Work
from hf_distca.dispatch.remote import RemoteRows
from hf_distca.dispatch.rows import IndexBuffer
from hf_distca.kernels import AttentionParams
from hf_distca.plan.routes import make_routes
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.messages import End, RankHello, RankWelcome, Reply, ServerHello
from hf_distca.pool.rank.link import ServerLink
from hf_distca.pool.rank.pool import FIGURES, Pool
from hf_distca.pool.transport import Memory
from hf_distca.pool.wire import LinkLost, MismatchError
from tests.pool.ends import CPU, SLIM, TOKEN, channels, make_call, message, wait_until

pytestmark = pytest.mark.timeout(100)  # whoever waits for ever has failed


@pytest.fixture
def ends(monkeypatch):
    """A rank's link, and the server's channel."""
    with channels() as (near, far):
        connected = near, RankWelcome("TCP", "no RDMA")
        monkeypatch.setattr("hf_distca.pool.rank.link.connect", lambda *_: connected)
        link = ServerLink(*near._sock.getpeername(), TOKEN, RankHello(1), 60, 60, Memory(CPU))
        yield link, far
        link.close()


def rows(data):
    """Rows of one byte each."""
    return torch.tensor(list(data), dtype=torch.uint8)


def buffer(size=8):
    return torch.full((size,), 255, dtype=torch.uint8)


def start(link, number, *results, sends=b"12345678", ready=lambda: None):
    """A call by this number."""
    sent = sends if isinstance(sends, torch.Tensor) else rows(sends)
    return link.call(make_call(number), [sent], dict(enumerate(results)), ready)


def reply(number):
    return Reply(number, seconds=0.5, pairs=10)


def taken(far):
    """The next message at the server, with its payload."""
    received, size = far.receive(60)
    payload = bytearray(size)
    far.receive_payload([payload], 60)
    return received, bytes(payload)


def test_calls_leave_when_they_are_ready_and_replies_may_come_in_another_order(ends):
    link, far = ends
    payload = buffer(2)
    received = buffer(1)
    rest = buffer(1)
    asked = threading.Event()
    written = threading.Event()
    link.send(End(), [b"xyz"])
    first = start(
        link, 0, received, rest, sends=payload, ready=lambda: asked.set() or written.wait(60)
    )
    others = [buffer(2) for _ in range(2)]
    answers = [start(link, n, others[n - 1], sends=[n, n]) for n in (1, 2)]
    assert asked.wait(60)
    payload[:] = rows(b"ok")
    begin = time.perf_counter()
    written.set()
    sent = [taken(far) for _ in range(4)]
    assert sent == [
        (End(), b"xyz"),
        (make_call(0), b"ok"),
        (make_call(1), b"\1\1"),
        (make_call(2), b"\2\2"),
    ]
    for asked_for, data in reversed(sent[1:]):
        far.send(reply(asked_for.call_id), [data])
    assert [link.wait(item, 60) for item in (first, *answers)] == [reply(0), reply(1), reply(2)]
    assert bytes([*received, *rest]) == b"ok"
    assert [item.tolist() for item in others] == [[1, 1], [2, 2]]
    assert begin <= first.departed <= first.arrived
    assert link.within_host is True
    assert link.carried_by == "TCP (no RDMA)"
    pending = start(link, 3, buffer())
    for _ in range(2):
        link.close()
    with pytest.raises(LinkLost, match="closed by this rank"):
        link.wait(pending, 60)


def test_a_caller_never_waits_for_a_slow_server(ends):
    # Would a call wait until the server has taken its rows, the second one would wait until the
    # test's end.
    link = ends[0]
    large = torch.zeros(20_000_000, dtype=torch.uint8)
    answers = [start(link, number, buffer(), sends=large) for number in range(3)]
    with pytest.raises(LinkLost, match=r"no reply within 0\.3 s"):
        link.wait(answers[0], 0.3)
    with pytest.raises(LinkLost, match=r"no reply within 0\.3 s"):
        link.wait(answers[2], 60)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (message(reply(1), b"12345678")[:-4], "closed"),
        (b"", "no reply within 0.5 s"),
        (message(reply(1), b"123456789"), "9 bytes, expected 8"),
        (message(reply(1), payload_bytes=2**63), "expected 8"),
        (message(reply(0), b"again!!!"), "received a Reply that answers no call"),
        (message(make_call(1), b"12345678"), "received a Call that answers no call"),
        (b"\0" * 100, "does not follow the protocol"),
        (None, "no such plan"),
    ],
)
def test_a_failed_link_says_why_and_stays_failed(ends, sent, error):
    (link, far) = ends
    answered = buffer()
    other = buffer()
    done = start(link, 0, answered)
    far.send(reply(0), [taken(far)[1]])
    link.wait(done, 60)
    first = start(link, 1, buffer())
    second = start(link, 2, other)
    for _ in range(2):
        taken(far)  # else sending may fail first, and say so
    if sent is None:
        far.refuse(error)
    else:
        far._sock.sendall(sent)
    if error == "closed":
        far.shut_down()
    with pytest.raises(LinkLost, match=error):
        link.wait(first, 0.5 if error == "no reply within 0.5 s" else 60)
    with pytest.raises(LinkLost, match=error):
        link.wait(second, 60)
    with pytest.raises(LinkLost, match=error):
        start(link, 3)
    with pytest.raises(LinkLost, match=error):
        link.send(End())
    assert error in link.lost
    assert bytes(answered) == b"12345678"
    assert (other == 255).all()
    assert not any(thread.name.endswith(link.name) for thread in threading.enumerate())


def test_buffers_are_left_alone_after_a_loss(ends):
    (link, far) = ends
    first = buffer(4)
    rest = buffer(4)
    written = threading.Event()
    receive = link._transport.receive

    def receive_slowly(*args):
        try:
            receive(*args)
        finally:
            time.sleep(0.2)
            written.set()

    link._transport.receive = receive_slowly
    pending = start(link, 0, first, rest)
    far._sock.sendall(message(reply(0), b"12345678")[:-4])
    wait_until(lambda: first[-1] != 255)
    with pytest.raises(LinkLost, match=r"no reply within 0\.1 s"):
        link.wait(pending, 0.1)
    assert written.is_set()  # nobody writes any more
    with contextlib.suppress(OSError):
        far._sock.sendall(b"5678")
    assert bytes(first) == b"1234"
    assert (rest == 255).all()


WORK = Work(3, 0, "forward")
SETTINGS = PlanSettings(
    ranks=1, rows_per_rank=64, kinds=(SLIM,), balance_block_size=8, ping_pong=False
)


def listed(*servers):
    """Members of the directory by id, which is also their port."""
    return {server: ServerHello("127.0.0.1", server, "cpu", 100.0) for server in servers}


class FakeLink:
    """A link to a server that computes for 1.75 s of 3 s; 7 is on the rank's host, 1 and 2 are not
    reached.
    """

    def __init__(self, host, port, *rest):
        self.made_with = (host, port, *rest)
        if port in (1, 2):
            raise (LinkLost if port == 1 else MismatchError)("nobody answers")
        self.calls = []
        self.lost = ""
        self.send = Mock()
        self.name = f"{host}:{port}"
        self.within_host = port == 7
        self.carried_by = "TCP (TCP was asked for)"

    def call(self, call, rows, results, ready):
        self.calls.append(call.call_id)
        return SimpleNamespace(results=results, departed=10.0, arrived=13.0)

    def wait(self, answer, timeout_s):
        if self.lost:
            raise LinkLost(self.lost)
        return Reply(call_id=0, seconds=1.75, pairs=40)

    def close(self):
        self.lost = self.lost or "closed by this rank"


@pytest.fixture
def directory():
    return Mock()


@pytest.fixture
def make_pool(monkeypatch, directory):
    """Makes a rank's pool with servers; `groups` stands for the other ranks."""
    monkeypatch.setattr("hf_distca.pool.rank.pool.ServerLink", FakeLink)
    monkeypatch.setattr("hf_distca.pool.rank.pool.measure_speed", lambda *_: 50.0)

    def make(*servers, groups=None, **options):
        dispatcher = SimpleNamespace(
            groups=groups or Groups(CPU, 60), recorder=Recorder(CPU), kernel=None, device=CPU
        )
        pool = Pool(dispatcher, b"token", directory, Memory(CPU), **options)
        directory.members.return_value = listed(*servers)
        pool.refresh()
        return pool

    return make


def other_rank(changed, **methods):
    """Groups of two ranks, the other of which computes as fast and says of servers what `changed`
    makes of it.
    """

    def all_gather(value):
        return [value, changed(value) if isinstance(value, tuple) else value]

    return SimpleNamespace(rank=0, ranks=2, all_gather=all_gather, **methods)


def test_results_come_by_name_and_what_they_took_is_recorded(make_pool):
    pool = make_pool(7)
    assert (pool.present, pool.figures()) == (1, {"attention_servers": 1})
    assert pool.figures().keys() == FIGURES.keys()
    plan, at_servers = pool.bind(plan_micro_batch([64], SETTINGS), SETTINGS)
    server_rows = RemoteRows(
        0, make_routes(plan.nano_batches[0].plans[SLIM], 0), 1, IndexBuffer(CPU)
    )
    assert server_rows.q_count > 0
    rows = {"q": torch.zeros(64, 2, 8), "k": torch.zeros(64, 1, 8), "v": torch.zeros(64, 1, 8)}
    recording = pool.recorder.listen()
    link = pool.links[7]
    first, second = (
        at_servers.start(WORK, [server_rows], SLIM, AttentionParams(scale=0.5), rows)
        for _ in range(2)
    )
    assert recording.take() == []
    results, lost = second.collect()
    assert lost == frozenset()
    shapes = {name: x_N.shape for name, x_N in results[0].items()}
    assert shapes == {"o": (server_rows.q_count, 2, 8), "lse": (server_rows.q_count, 2)}
    assert recording.take() == [
        Span("call", "7", WORK, 10.0, 13.0),
        Span("remote", "7", WORK, 11.25, 13.0, pairs=40),
    ]
    assert link.calls == [0, 1]
    link.lost = "it is gone"
    assert first.collect() == ({}, {0})
    assert pool.servers == ()
    assert recording.take() == []


@pytest.mark.parametrize(("timeout_s", "connect_s"), [(60.0, 10.0), (4.0, 4.0)])
def test_members_of_the_directory_take_part_until_they_leave_it_or_training_ends(
    make_pool, directory, timeout_s, connect_s
):
    pool = make_pool(7, timeout_s=timeout_s)
    left = pool.links[7]
    hello = RankHello(0, why_tcp="TCP was asked for")
    assert left.made_with == ("127.0.0.1", 7, b"token", hello, connect_s, timeout_s, pool.memory)
    directory.members.return_value = listed(8, 1)
    pool.refresh()
    assert pool.servers == (8,)
    assert left.lost == "closed by this rank"
    # Who left is dropped once more, which does nothing.
    assert directory.drop.call_args_list == [call(7), call(1, "")]
    assert pool.speeds.workers(1, pool.servers, False).speed == (1.0, 2.0)
    later = pool.links[8]
    pool.recorder.add(
        Span("remote", "8", WORK, 0.0, 1.0, pairs=600)
    )  # six times a rank's 100 pairs/s
    for _ in range(2):  # learned once
        pool.refresh()
        assert pool.speeds.workers(1, pool.servers, False).speed == (1.0, 4.0)
    pool.close()
    assert pool.servers == ()
    assert later.lost == "closed by this rank"
    assert directory.method_calls[-2:] == [call.end(), call.close()]


@pytest.mark.parametrize(("unreached", "refusal"), [(1, ""), (2, "nobody answers")])
def test_a_server_that_a_rank_does_not_reach_takes_no_part(
    make_pool, directory, caplog, unreached, refusal
):
    def changed(value):  # the other rank does not reach server 8
        return ({8: ("nobody answers", unreached == 2)}, set()) if len(value) == 2 else value

    pool = make_pool(7, 8, unreached, groups=other_rank(changed, any_of=lambda flags: flags))
    assert pool.servers == (7,)
    others = sorted((8, unreached))
    # Refused where another try would end alike.
    assert directory.drop.call_args_list == [call(server, refusal) for server in others]
    why = "cannot take part: nobody answers"
    assert [line for line in caplog.messages if "takes part" not in line] == [
        f"attention server {server} (127.0.0.1:{server}, cpu) {why}" for server in others
    ]


def test_a_server_that_another_rank_has_lost_is_lost_here_too(make_pool, directory, caplog):
    asked = []
    lost = set()

    def changed(value):
        return ({}, set()) if len(value) == 2 else ({}, set(lost), value[2])

    groups = other_rank(changed, any_of=lambda flags: asked.append(flags) or [False, True])
    pool = make_pool(7, 8, 9, groups=groups)
    link = pool.links[8]
    assert pool.without_lost([7, 8]) == {8}
    assert pool.without_lost([8]) == {8}  # nobody is asked of a server that is gone
    assert asked == [[False, False]]
    assert link.lost == "closed by this rank"
    directory.members.return_value = listed(7, 9)
    pool.links[7].lost = "it is gone"
    lost.add(9)
    pool.refresh()
    assert pool.servers == ()
    between = "between steps; no call was running"
    assert [line for line in caplog.messages if "lost" in line] == [
        (
            "lost attention server 8 at 127.0.0.1:8 (another rank lost it): its tasks of this "
            "micro-batch are computed by the ranks; 2 servers left"
        ),
        f"lost attention server 7 at 127.0.0.1:7 (it is gone): {between}; 1 server left",
        (
            f"lost attention server 9 at 127.0.0.1:9 (another rank lost it): {between}; no server "
            "left, so ranks compute all tasks"
        ),
    ]


# Server 7 is on the host of this rank, 0, server 8 on that of rank 2, server 9 on one of its own.
@pytest.mark.parametrize(("ranks_per_node", "nodes"), [((2, 1), (0, 0, 1, 0, 1, 2)), (1, None)])
def test_servers_are_on_the_node_of_ranks_of_their_host(make_pool, ranks_per_node, nodes):
    def gathered(value):
        reached = isinstance(value, tuple) and len(value) == 2
        return [value, ({}, set()), ({}, {7, 8})] if reached else [value] * 3

    pool = make_pool(7, 8, 9, groups=SimpleNamespace(rank=0, ranks=3, all_gather=gathered))
    settings = replace(SETTINGS, ranks=3, ranks_per_node=ranks_per_node)
    plan, _ = pool.bind(plan_micro_batch([64], settings), settings)
    assert plan.nano_batches[0].plans[SLIM].nodes == nodes


@pytest.mark.parametrize("ping_pong", [False, True])
def test_speeds_are_asked_for_with_turns_where_there_are_two_nano_batches(
    make_pool, monkeypatch, ping_pong
):
    pool = make_pool(7)
    workers = Mock(side_effect=pool.speeds.workers)
    monkeypatch.setattr(pool.speeds, "workers", workers)
    settings = replace(SETTINGS, ping_pong=ping_pong)
    pool.bind(plan_micro_batch([32, 32], settings), settings)
    workers.assert_called_once()
    assert workers.call_args.kwargs["takes_turns"] is ping_pong


def test_waiting_for_servers_ends_on_every_rank_when_one_says_so(make_pool, caplog):
    # By this rank's clock there is an hour left, by the other's none.
    told = []
    pool = make_pool(
        groups=other_rank(lambda value: value, any_of=lambda flags: told.append(flags) or [True])
    )
    pool.wait_for(3, 3600)
    assert told == [[False]]
    assert "0 of 3 attention servers joined within 3600 s" in caplog.text

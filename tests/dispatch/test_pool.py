"""Trainers with dedicated attention servers against one process with "sdpa" on the same global batch."""

import pytest
import torch
import torch.distributed as dist

from hf_distca.call_codec import Call
from hf_distca.dispatch.bound import BoundRoutes
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.groups import Groups
from hf_distca.dispatch.index_buffer import IndexBuffer
from hf_distca.dispatch.pool import Pool, PooledPlan
from hf_distca.dispatch.speeds import Observed, Served, TimedKernel
from hf_distca.kernels import get_kernel
from hf_distca.kernels.contract import AttentionParams
from hf_distca.patches.layers import plan_layers
from hf_distca.planner.cost import Workers
from hf_distca.planner.micro_batch import PlanSettings, plan_micro_batch
from hf_distca.wire.directory import Directory, ServerInfo
from hf_distca.wire.errors import LinkLost
from tests.dispatch.test_equality import planned_step
from tests.models import random_documents, reference_step, relative_error, small_kinds, small_model
from tests.ranks import free_port
from tests.server.fake_trainers import FULL, make_nano_batch
from tests.servers import TOKEN, Fault, ServerProcess

LENGTHS = [120, 7, 1, 33, 64, 90]
PAIRS = sum(length * (length + 1) // 2 for length in LENGTHS)
ATTENTIONS = 4
"""Of a step: two layers, forward and backward."""


def pooled_steps(
    port: int,
    servers: int,
    steps: int,
    options: dict,
) -> tuple[list[tuple[float, dict[str, torch.Tensor], Observed]], list[int]]:
    """Planned steps with a pool on every rank: loss, gradients and what it saw of each, and the servers in each."""
    windows = options.get("windows", (None,))
    settings = PlanSettings(
        ranks=dist.get_world_size(),
        tokens_per_rank=4096,
        kinds=small_kinds(*windows),
        balance_block_size=8,
        ping_pong=options.get("ping_pong", False),
    )
    dispatcher = Dispatcher(settings, torch.device("cpu"), keep_received=options.get("keep_received", False))
    directory = Directory("127.0.0.1", port, TOKEN, silence_s=30) if dist.get_rank() == 0 else None
    pool = dispatcher.use_pool(
        TOKEN,
        directory,
        ranks_serve=options.get("ranks_serve", True),
        timeout_s=options.get("timeout_s", 20),
    )
    pool.wait_for(servers, 40)
    if dist.get_rank() == 0 and "trigger" in options:
        options["trigger"].touch()
    model = small_model(options.get("model_type", "llama"), **options.get("config", {}))
    if settings.ping_pong:
        plan_layers(model)
    results, members = [], []
    for step in range(steps):
        # Measured speeds and ways may leave a server without tasks.
        if step == options.get("measured", 0):
            pool.workers = lambda nano_batches: Workers.uniform(settings.ranks + len(pool.servers))
        pool.refresh()
        members.append(len(pool.servers))
        if dist.get_rank() == 1 and step == 0 and options.get("cut") == "in a call":
            for link in pool._links.values():
                link.call = cut_in_a_call(link)
        model.zero_grad()
        loss = planned_step(model, plan_micro_batch(LENGTHS, settings), dispatcher, random_documents(LENGTHS))
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append((loss, grads, pool.stopwatch.read()))
        if dist.get_rank() == 1 and step == 0 and options.get("cut") == "between steps":
            for link in pool._links.values():
                link.fail("cut")
    members.append(len(pool.servers))
    pool.close()
    return results, members


def cut_in_a_call(link):
    """A `link.call` whose reply comes, so that the server misses nobody, and is lost on this rank alone."""
    call = link.call

    def cut(*args):
        reply = call(*args)
        wait = reply.wait

        def wait_and_lose(timeout_s):
            wait(timeout_s)
            link.fail("cut")
            raise LinkLost(link.lost)

        reply.wait = wait_and_lose
        return reply

    return cut


@pytest.fixture
def start_servers():
    """Starts servers that join a port; ends what is left of them."""
    started = []

    def start(port: int, *faults: Fault | None) -> list[ServerProcess]:
        started.extend(ServerProcess(port, fault) for fault in faults)
        return started

    yield start
    for server in started:
        server.close()


def assert_equal_to_single_process(rank_pools, ranks, port, servers, steps, **options):
    config, model_type = options.get("config", {}), options.get("model_type", "llama")
    implementation = "sdpa" if model_type != "gemma2" else "eager"
    loss, grads = reference_step(small_model(model_type, implementation, **config), random_documents(LENGTHS))
    results = rank_pools[ranks].run(pooled_steps, port, servers, steps, options)
    for per_step, members in results:
        assert len(per_step) == steps
        assert members == results[0][1]
        for got_loss, got, _ in per_step:
            assert got_loss == pytest.approx(loss, rel=1e-6)
            assert got.keys() == grads.keys()
            for name in grads:
                assert relative_error(got[name], grads[name]) < 1e-5, name
    return results


@pytest.mark.parametrize("ping_pong", [False, True], ids=["one", "ping-pong"])
@pytest.mark.parametrize("ranks_serve", [True, False], ids=["serving", "not-serving"])
@pytest.mark.parametrize("servers", [1, 2])
def test_two_trainers(rank_pools, start_servers, servers, ranks_serve, ping_pong):
    port = free_port()
    started = start_servers(port, *[None] * servers)
    options = {"ranks_serve": ranks_serve, "ping_pong": ping_pong, "measured": 1}
    results = assert_equal_to_single_process(rank_pools, 2, port, servers, 2, **options)
    assert results[0][1] == [servers] * 3
    seen = [per_step[1][2] for per_step, _ in results]
    assert all(rank.calls == ATTENTIONS * (1 + ping_pong) for rank in seen)
    assert all((rank.pairs > 0) == (rank.seconds > 0) == ranks_serve for rank in seen)
    if not ping_pong:  # else one rank may know of a server's first nano-batch, and another of the second
        assert sum(rank.pairs for rank in seen) + served_pairs(seen) == ATTENTIONS * PAIRS
    assert [server.exit_code(10) for server in started] == [0] * servers  # they were told that training ended


def served_pairs(seen: list[Observed]) -> int:
    """Of all servers; a rank knows of a server's calls if it has rows for them."""
    servers = {server for rank in seen for server in rank.servers}
    return sum(max(rank.servers[server].pairs for rank in seen if server in rank.servers) for server in servers)


@pytest.mark.parametrize("cut", ["in a call", "between steps"])
def test_a_server_that_one_trainer_loses_is_lost_to_all(rank_pools, start_servers, cut):
    port = free_port()
    start_servers(port, None)
    steps = 1 if cut == "in a call" else 2
    results = assert_equal_to_single_process(rank_pools, 2, port, 1, steps, cut=cut)
    assert results[0][1] == [1, 0] if cut == "in a call" else [1, 0, 0]
    seen = [per_step[0][2] for per_step, _ in results]
    if cut == "in a call":
        # Only rank 0 got the result, which does not count: trainers compute the server's tasks in this and all calls.
        assert [len(rank.servers) for rank in seen] == [1, 0]
        assert seen[0].servers[0].pairs > 0
        assert sum(rank.pairs for rank in seen) == ATTENTIONS * PAIRS


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "mistral", "config": {"sliding_window": 24}, "windows": (24,)},
        {
            "model_type": "gemma2",
            "config": {"sliding_window": 24, "query_pre_attn_scalar": 8},
            "windows": (24, None),
            "ping_pong": True,
        },
        {"keep_received": True},
    ],
    ids=["mistral", "gemma2", "keep-received"],
)
def test_other_layers(rank_pools, start_servers, options):
    port = free_port()
    start_servers(port, None)
    assert_equal_to_single_process(rank_pools, 2, port, 1, 1, **options)


@pytest.mark.parametrize("ping_pong", [False, True], ids=["one", "ping-pong"])
def test_one_trainer(rank_pools, start_servers, ping_pong):
    port = free_port()
    start_servers(port, None)
    assert_equal_to_single_process(rank_pools, 1, port, 1, 1, ping_pong=ping_pong)


@pytest.mark.parametrize("ping_pong", [False, True], ids=["one", "ping-pong"])
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("kind", ["killed", "hung"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_server_lost_in_a_call(rank_pools, start_servers, tmp_path, direction, kind, servers, ping_pong):
    port, trigger = free_port(), tmp_path / "trigger"
    start_servers(port, Fault(kind, direction, trigger, calls=1), *[None] * (servers - 1))
    # A server that is killed is noticed at once: its timeout is longer than the ranks have time.
    options = {"timeout_s": 2 if kind == "hung" else 600, "ping_pong": ping_pong, "trigger": trigger}
    members = assert_equal_to_single_process(rank_pools, 2, port, servers, 3, **options)[0][1]
    assert members[0] == servers
    assert members[-1] == servers - 1


class FakeReply:
    """What comes back after 3 s."""

    departed, arrived = 10.0, 13.0

    def __init__(self, link):
        self._link = link

    def wait(self, timeout_s):
        if self._link.lost:
            raise LinkLost(self._link.lost)
        return {"seconds": 1.75, "pairs": 40}


class FakeLink:
    """A link to a server that computes for 1.75 s.

    Attributes:
        headers: of the calls.
        lost: as of a ServerLink.
        closed: whether it is closed.
    """

    def __init__(self):
        self.headers, self.lost, self.closed = [], "", False

    def call(self, header, buffers, reply_buffers, ready):
        self.headers.append(header)
        return FakeReply(self)

    def close(self):
        self.closed = True


@pytest.fixture
def pool(monkeypatch):
    """One trainer's, with server 7 behind a FakeLink."""
    monkeypatch.setattr("hf_distca.dispatch.pool.measure_speed", lambda kernel, device: 50.0)
    kernel = TimedKernel(get_kernel("cpu", torch.device("cpu")), torch.device("cpu"))
    pool = Pool(Groups(torch.device("cpu"), 60), kernel, TOKEN, None)
    pool._links[7], pool._infos[7] = FakeLink(), ServerInfo(7, "127.0.0.1", 4000, "cpu", 100.0)
    return pool


@pytest.fixture
def routes():
    """Of one trainer and one server."""
    routes = BoundRoutes(
        make_nano_batch([64], 1, 1, 0, kinds=(FULL,)).plans[FULL], 0, False, IndexBuffer(torch.device("cpu"))
    )
    assert routes.pairs > 0
    return routes


def start(pool, routes):
    """Start one attention of one layer."""
    tensors = {"q": torch.zeros(64, 2, 8), "k": torch.zeros(64, 1, 8), "v": torch.zeros(64, 1, 8)}
    return PooledPlan(pool, 5, (7,)).start("forward", 0, routes, AttentionParams(scale=0.5), tensors)


def test_a_way_is_what_a_call_took_besides_the_kernel_while_no_other_was_under_way(pool, routes):
    first = start(pool, routes)
    second = start(pool, routes)
    assert pool.stopwatch.under_way == 2
    for call in (first, second):
        results, lost = call.collect()
        assert (len(results), lost) == (1, frozenset())
    assert pool.stopwatch.under_way == 0
    start(pool, routes).collect()
    assert pool.stopwatch.observed == Observed(
        calls=3, pairs=3 * routes.pairs, servers={7: Served(pairs=120, seconds=5.25, alone=2, way_s=2.5)}
    )
    assert [Call.read(header).number for header in pool._links[7].headers] == [0, 1, 2]


def test_a_call_that_is_lost_is_not_under_way_any_more_and_tells_nothing_of_its_server(pool, routes):
    call = start(pool, routes)
    pool._links[7].lost = "it is gone"
    assert call.collect() == ([], {0})
    assert pool.servers == ()
    assert pool.stopwatch.under_way == 0
    assert pool.stopwatch.observed == Observed(calls=1, pairs=routes.pairs)


class FakeDirectory:
    """A directory whose members a test sets; notes who is dropped."""

    def __init__(self):
        self.infos, self.dropped = (), []

    def members(self):
        return self.infos

    def drop(self, member):
        self.dropped.append(member)


@pytest.fixture
def links(monkeypatch):
    """The links that a pool makes, by port; nobody answers at port 1."""
    made = {}

    class Connected(FakeLink):
        def __init__(self, host, port, *args):
            if port == 1:
                raise LinkLost("nobody answers")
            super().__init__()
            made[port] = self

    monkeypatch.setattr("hf_distca.dispatch.pool.ServerLink", Connected)
    return made


def info(number, port):
    return ServerInfo(number, "127.0.0.1", port, "cpu", 100.0)


def test_members_of_the_directory_take_part_until_they_leave_it(pool, links):
    pool._directory = directory = FakeDirectory()
    left = pool._links[7]
    directory.infos = (info(8, 4001), info(9, 1))
    pool.refresh()
    assert pool.servers == (8,)
    assert left.closed
    assert sorted(directory.dropped) == [7, 9]  # who left is dropped once more, which does nothing
    assert pool.workers(1).speed == (1.0, 2.0)
    directory.infos = ()
    pool.refresh()
    assert pool.servers == ()
    assert links[4001].closed


def test_a_server_that_another_trainer_does_not_reach_takes_no_part(pool, links, monkeypatch):
    pool._directory = directory = FakeDirectory()
    directory.infos = (info(7, 4000), info(8, 4001))
    others = iter([((), [], Observed()), {8: "nobody answers"}])
    monkeypatch.setattr(pool.groups, "all_gather", lambda value: [value, next(others)])
    pool.refresh()
    assert pool.servers == (7,)
    assert links[4001].closed
    assert directory.dropped == [8]


def test_what_was_seen_is_learned_once(pool):
    pool._directory = directory = FakeDirectory()
    directory.infos = (info(7, 4000),)
    pool._speeds.joined(7, 50.0)
    pool.stopwatch.served(7, 300, 1.0, None)  # three times a trainer's 100 pairs/s
    pool.refresh()
    assert pool.workers(1).speed == (1.0, 2.0)
    assert pool.stopwatch.read() == Observed()
    pool.refresh()
    assert pool.workers(1).speed == (1.0, 2.0)


def test_waiting_for_servers_ends_on_every_trainer_when_one_says_so(pool, monkeypatch):
    # By this trainer's clock there is an hour left, by the other's none.
    told = []
    monkeypatch.setattr(pool.groups, "any_of", lambda flags: told.append(flags) or [True])
    monkeypatch.setattr(pool, "refresh", lambda: None)
    pool.wait_for(3, 3600)
    assert told == [[False]]

"""Trainers with dedicated attention servers against one process with "sdpa" on the same global batch."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.patches.layers import plan_layers
from hf_distca.planner.cost import Workers
from hf_distca.planner.metrics import loads_of
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.servers import local_tasks
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.directory import Directory
from hf_distca.pool.rank.pool import use_servers
from hf_distca.pool.rank.speeds import OBSERVED, Observed, observe
from hf_distca.pool.wire import LinkLost
from tests.dispatch.test_equality import planned_step
from tests.models_and_batches import (
    SMALL_LLAMA4,
    random_documents,
    reference_step,
    relative_error,
    small_kinds,
    small_model,
)
from tests.pool.servers import TOKEN, Fault, ServerProcess, alike
from tests.pool.transport.ends import TRANSPORTS, memory_of
from tests.ranks import free_port

pytestmark = pytest.mark.usefixtures("backward_thread")

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
        kinds=small_kinds(*windows, chunk=options.get("config", {}).get("attention_chunk_size")),
        document_layout=options.get("document_layout", "joint"),
        balance_block_size=8,
        ping_pong=options.get("ping_pong", False),
        exchange_buffer_bytes=512,  # of 8 rows: what ranks exchange travels in stages
    )
    dispatcher = Dispatcher(settings, torch.device("cpu"), keep_received=options.get("keep_received", False))
    directory = Directory("127.0.0.1", port, TOKEN, silence_s=30) if dist.get_rank() == 0 else None
    with patch("hf_distca.pool.rank.pool.measure_speed", alike):
        pool = use_servers(
            dispatcher,
            TOKEN,
            directory,
            memory_of(options["transport"], "rank"),
            ranks_serve=options.get("ranks_serve", True),
            timeout_s=options.get("timeout_s", 20),
        )
    pool.wait_for(servers, 40)
    if dist.get_rank() == 0 and "trigger" in options:
        options["trigger"].touch()
    model = small_model(options.get("model_type", "llama"), **options.get("config", {}))
    if settings.ping_pong:
        plan_layers(model)
    results, members, stages, repairs = [], [], [], []
    bind = dispatcher.bind

    def watched(plan):
        bound = bind(plan)
        stages.append(bound.stages)
        if bound.runtime.remote is not None:
            bound.runtime.remote.repair = watched_repair(bound.runtime.remote.repair, repairs)
        return bound

    dispatcher.bind = watched
    recording = dispatcher.recorder.listen(*OBSERVED)
    for step in range(steps):
        # Measured speeds and ways may leave a server without tasks.
        if step == options.get("measured", 0):
            pool.workers = lambda nano_batches: Workers.uniform(settings.ranks + len(pool.servers))
        pool.refresh()
        members.append(len(pool.servers))
        if dist.get_rank() == 1 and step == 0 and options.get("cut") == "in a call":
            for server in pool.servers:
                cut_in_a_call(pool.members.link(server))
        model.zero_grad()
        loss = planned_step(model, plan_micro_batch(LENGTHS, settings), dispatcher, random_documents(LENGTHS))
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append((loss, grads, observe(recording.take())))
        if dist.get_rank() == 1 and step == 0 and options.get("cut") == "between steps":
            for server in pool.servers:
                pool.members.link(server).fail("cut")
    members.append(len(pool.servers))
    pool.close()
    assert max(stages) > 1 or settings.ranks == 1 or not options.get("ranks_serve", True)
    assert not options.get("spread") or any(spread < home for home, spread in repairs)
    return results, members


def watched_repair(repair, repairs):
    """A plan's `repair` that notes the pairs of the busiest rank: if each row were computed where it is held, and as
    they are."""

    def watched(plan, kind, lost):
        repaired = repair(plan, kind, lost)
        home = local_tasks(plan, [plan.layout.ranks + server for server in lost])
        repairs.append((loads_of(home).max(), loads_of(repaired).max()))
        return repaired

    return watched


def cut_in_a_call(link):
    """Lose a link in a call whose reply comes, so that the server misses nobody: this rank alone loses it."""
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

    link.call = cut


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    """What carries rows."""
    return request.param


@pytest.fixture
def start_servers(transport):
    """Starts servers that join a port; ends what is left of them."""
    started = []

    def start(port: int, *faults: Fault | None) -> list[ServerProcess]:
        started.extend(ServerProcess(port, fault, transport=transport) for fault in faults)
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
def test_two_ranks(rank_pools, start_servers, transport, servers, ranks_serve, ping_pong):
    port = free_port()
    started = start_servers(port, *[None] * servers)
    options = {"ranks_serve": ranks_serve, "ping_pong": ping_pong, "measured": 1, "transport": transport}
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
def test_a_server_that_one_trainer_loses_is_lost_to_all(rank_pools, start_servers, transport, cut):
    port = free_port()
    start_servers(port, None)
    steps = 1 if cut == "in a call" else 2
    results = assert_equal_to_single_process(rank_pools, 2, port, 1, steps, cut=cut, transport=transport)
    assert results[0][1] == [1, 0] if cut == "in a call" else [1, 0, 0]
    seen = [per_step[0][2] for per_step, _ in results]
    if cut == "in a call":
        # Only rank 0 got the result, which does not count: ranks compute the server's tasks in this and all calls.
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
        {"model_type": "llama4_text", "config": SMALL_LLAMA4},
        {"keep_received": True},
    ],
    ids=["mistral", "gemma2", "llama4", "keep-received"],
)
def test_other_layers(rank_pools, start_servers, transport, options):
    port = free_port()
    start_servers(port, None)
    assert_equal_to_single_process(rank_pools, 2, port, 1, 1, transport=transport, **options)


@pytest.mark.parametrize("ping_pong", [False, True], ids=["one", "ping-pong"])
def test_one_trainer(rank_pools, start_servers, transport, ping_pong):
    port = free_port()
    start_servers(port, None)
    assert_equal_to_single_process(rank_pools, 1, port, 1, 1, ping_pong=ping_pong, transport=transport)


@pytest.mark.parametrize(
    ("kind", "servers", "ping_pong"),  # hung without ping-pong: in test_faults
    [("killed", 1, False), ("killed", 1, True), ("killed", 2, False), ("killed", 2, True), ("hung", 2, True)],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_server_lost_in_a_call(rank_pools, start_servers, transport, tmp_path, direction, kind, servers, ping_pong):
    port, trigger = free_port(), tmp_path / "trigger"
    start_servers(port, Fault(kind, direction, trigger, calls=1), *[None] * (servers - 1))
    # A server that is killed is noticed at once: its timeout is longer than the ranks have time.
    timeout_s = 1 if kind == "hung" else 600
    options = {"timeout_s": timeout_s, "ping_pong": ping_pong, "trigger": trigger, "transport": transport}
    # Packed in order, rank 0 holds most of the attention, and of what is lost: it is not to compute that alone.
    options |= {"document_layout": "fixed", "spread": True}
    members = assert_equal_to_single_process(rank_pools, 2, port, servers, 3, **options)[0][1]
    assert members[0] == servers
    assert members[-1] == servers - 1

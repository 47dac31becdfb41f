"""Trainers with dedicated attention servers against one process with "sdpa" on the same global batch."""

import time

import pytest
import torch
import torch.distributed as dist

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.patches.layers import plan_layers
from hf_distca.planner.micro_batch import PlanSettings, plan_micro_batch
from hf_distca.wire.directory import Directory
from tests.dispatch.test_equality import planned_step
from tests.models import random_documents, reference_step, relative_error, small_model
from tests.ranks import free_port
from tests.servers import TOKEN, Fault, ServerProcess

LENGTHS = [120, 7, 1, 33, 64, 90]


def pooled_steps(
    port: int,
    servers: int,
    steps: int,
    options: dict,
) -> tuple[list[tuple[float, dict[str, torch.Tensor]]], list[int]]:
    """Planned steps with a pool on every rank: loss and gradients of each, and the servers after each."""
    windows = options.get("windows", (None,))
    settings = PlanSettings(
        ranks=dist.get_world_size(),
        tokens_per_rank=4096,
        windows=windows,
        block_size=8,
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
    for _ in range(steps):
        pool.refresh()
        members.append(len(pool.servers))
        model.zero_grad()
        loss = planned_step(model, plan_micro_batch(LENGTHS, settings), dispatcher, random_documents(LENGTHS))
        results.append((loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    members.append(len(pool.servers))
    pool.close()
    return results, members


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
        for got_loss, got in per_step:
            assert got_loss == pytest.approx(loss, rel=1e-6)
            assert got.keys() == grads.keys()
            for name in grads:
                assert relative_error(got[name], grads[name]) < 1e-5, name
    return results[0][1]


@pytest.mark.parametrize("ping_pong", [False, True], ids=["one", "ping-pong"])
@pytest.mark.parametrize("ranks_serve", [True, False], ids=["serving", "not-serving"])
@pytest.mark.parametrize("servers", [1, 2])
def test_two_trainers(rank_pools, start_servers, servers, ranks_serve, ping_pong):
    port = free_port()
    started = start_servers(port, *[None] * servers)
    options = {"ranks_serve": ranks_serve, "ping_pong": ping_pong}
    members = assert_equal_to_single_process(rank_pools, 2, port, servers, 2, **options)
    assert members == [servers] * 3
    assert [server.exit_code(10) for server in started] == [0] * servers  # they were told that training ended


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
    options = {"timeout_s": 2 if kind == "hung" else 20, "ping_pong": ping_pong, "trigger": trigger}
    begin = time.monotonic()
    members = assert_equal_to_single_process(rank_pools, 2, port, servers, 3, **options)
    assert members[0] == servers
    assert members[-1] == servers - 1
    assert time.monotonic() - begin < 60

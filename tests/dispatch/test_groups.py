"""Over which backend rows travel, that ranks are connected before the first layer, and which ranks share a node."""

import logging
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hf_distca.dispatch import backends
from hf_distca.dispatch import groups as groups_module
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.groups import Groups, mesh_ranks, raised_together, ranks_per_node
from hf_distca.planner.settings import PlanSettings
from tests.models_and_batches import small_kinds
from tests.ranks import RankPool

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
KINDS = small_kinds()


def test_the_exchange_takes_the_default_groups_backend(monkeypatch):
    for default, on_cpu, on_cuda in (
        ("gloo", "gloo", "gloo"),
        ("cpu:gloo,cuda:nccl", "gloo", "nccl"),
        ("cuda:nccl", "gloo", "nccl"),
        ("cpu:gloo", "gloo", "gloo"),
    ):
        monkeypatch.setattr(dist, "get_backend_config", lambda default=default: default)
        assert [backends.exchange_backend(device) for device in (CPU, CUDA)] == [on_cpu, on_cuda]


@pytest.mark.parametrize("fields", [("cga_cluster_size", "max_ctas", "min_ctas"), ("blocking",)], ids=["new", "old"])
def test_nccl_leaves_attention_its_sms(monkeypatch, fields):
    """As far as a build of torch has the options."""

    def options(is_high_priority_stream):
        return SimpleNamespace(urgent=is_high_priority_stream, config=SimpleNamespace(**dict.fromkeys(fields, -1)))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    made = backends.exchange_options("nccl")
    assert made.urgent is True
    wanted = {"cga_cluster_size": 0, "max_ctas": backends.EXCHANGE_CTAS}
    assert vars(made.config) == {name: wanted.get(name, -1) for name in fields}
    assert backends.exchange_options("gloo") is None


@pytest.mark.skipif(not dist.is_nccl_available(), reason="a build of torch without NCCL")
def test_the_options_are_those_of_torch():
    made = backends.exchange_options("nccl")
    assert made.is_high_priority_stream is True
    assert (made.config.max_ctas, made.config.cga_cluster_size) == (backends.EXCHANGE_CTAS, 0)


def test_ranks_that_share_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device}"))
    found = [backends.indexed(torch.device(name)) for name in ("cuda", "cuda:1", "cpu")]
    assert found == [torch.device("cuda", 3), CUDA, CPU]
    assert (backends.device_uuid(CUDA), backends.device_uuid(CPU)) == ("GPU-cuda:1", None)
    backends.check_devices("nccl", ["a", "b", "c"])
    backends.check_devices("gloo", shared := ["a", "b", "a", "b"])
    with pytest.raises(ValueError, match=r"share one: ranks \[0, 2\] on a; ranks \[1, 3\] on b\. Start one.*use gloo"):
        backends.check_devices("nccl", shared)


def test_what_to_set_where_gloo_does_not_connect(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node3")
    monkeypatch.setattr(socket, "gethostbyname", {"node3": "127.0.1.1"}.__getitem__)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    error = RuntimeError("connect: timed out")
    assert "(not set on this host)" in str(backends.unreachable(2, error))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    message = str(backends.unreachable(2, error))
    assert message.startswith("rank 2 cannot reach the other ranks over gloo")
    assert all(part in message for part in (str(error), "(eth7 on this host)", "('node3' here to 127.0.1.1)"))


def _groups_of_dispatcher(ranks_per_node: int | tuple[int, ...] = 1) -> tuple[list[Any], list[int], str]:
    """What a new dispatcher does before any layer; the number of groups before, with and after it; its error then."""
    found: list[Any] = []
    new_group, all_to_all, groups = dist.new_group, dist.all_to_all_single, dist.distributed_c10d._world.pg_map

    def recorded_group(ranks: list[int] | None = None, **options: Any) -> Any:
        found.append((options["group_desc"], options["backend"], ranks))
        return new_group(ranks, **options)

    def recorded_exchange(output: Any, input: Any, received: Any, sent: Any, group: Any) -> Any:
        found.append((group.group_desc, received, sent))
        return all_to_all(output, input, received, sent, group=group)

    count = [len(groups)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", recorded_group)
        patch.setattr(dist, "all_to_all_single", recorded_exchange)
        patch.setattr(backends, "device_uuid", lambda device: f"GPU-{dist.get_rank()}")
        patch.setattr(backends, "check_devices", lambda *args: found.append(args))
        dispatcher = Dispatcher(PlanSettings(dist.get_world_size(), 64, KINDS, ranks_per_node=ranks_per_node), CPU)
    count.append(len(groups))
    dispatcher.close()
    dispatcher.close()
    count.append(len(groups))
    with pytest.raises(RuntimeError) as error:
        dispatcher.plan_lengths([[3]])
    return found, count, str(error.value)


CLOSED = "the process groups of this dispatcher are closed; make a new trainer or dispatcher to continue"


def connected(size: int) -> list[Any]:
    """What becomes of groups in any case: control messages, whether devices will do, and rows between all."""
    everyone = list(range(size))
    devices = ("gloo", [f"GPU-{rank}" for rank in everyone])
    exchange = [("distca exchange", "gloo", everyone), ("distca exchange", [1] * size, [1] * size)]
    return [("distca control", "gloo", everyone), devices, *exchange]


def test_ranks_are_connected_once_before_the_first_layer(rank_pools):
    assert rank_pools[1].run(_groups_of_dispatcher) == [([], [1, 1, 1], CLOSED)]
    assert rank_pools[2].run(_groups_of_dispatcher) == [(connected(2), [1, 3, 1], CLOSED)] * 2
    # A single node is not connected apart; of several, every rank makes the groups of all.
    assert rank_pools[3].run(_groups_of_dispatcher, 3) == [(connected(3), [1, 3, 1], CLOSED)] * 3
    nodes = [("distca world", "gloo", None), ("distca node", "gloo", [0]), ("distca node", "gloo", [1, 2])]
    assert rank_pools[3].run(_groups_of_dispatcher, (1, 2)) == [
        ([*connected(3), *nodes], [1, 3, 1], CLOSED),
        *[([*connected(3), *nodes, ("distca node", [1] * 2, [1] * 2)], [1, 4, 1], CLOSED)] * 2,
    ]


def _start(last: str) -> str:
    """What rank 0 says whose partner comes as far as to make a group, or not at all."""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as raised:
            Groups(CPU, 1.0)
        return str(raised.value)
    with pytest.MonkeyPatch.context() as patch:
        if last == "control":
            patch.setattr(backends, "exchange_backend", lambda device: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                Groups(CPU, 1.0)
    return ""


@pytest.mark.parametrize(("last", "told"), [("nothing", "reach the other ranks"), ("control", "exchange rows")])
def test_a_rank_whose_partner_is_not_there(last, told):
    pool = RankPool(2)
    try:
        assert f"rank 0 cannot {told} over gloo" in pool.run(_start, last)[0]
    finally:
        pool.close()


def _two_by_two() -> dict[str, Any]:
    """Two groups of two ranks, each of which dispatches by itself beside the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = Groups(CPU, 60.0, mesh["dp"])
    rank = dist.get_rank()
    replica, shard = divmod(rank, 2)
    with pytest.raises(ValueError, match=r"^rank 1: ImportError: no kernel named 1$"), raised_together(60.0):
        _import_kernel(rank)
    # The same error on all ranks stays as it is; one rank's error names the rank.
    wrong = [["wrong", "wrong"], ["wrong", None]][shard]
    error = wrong[replica] and ValueError(wrong[replica])
    with pytest.raises(ValueError, match=[r"^wrong$", r"^rank 0: ValueError: wrong$"][shard]):
        groups.raise_together(error)
    with pytest.raises(ValueError, match="has the dimensions"):
        mesh_ranks(mesh)
    documents = [[[40, 3], [20]], [[9, 30], [25, 25]]][replica][shard]
    # Different plans side by side, one of them with rows that travel.
    dispatcher = Dispatcher(PlanSettings(2, 64, KINDS, balance_block_size=8), CPU, mesh["dp"].get_group())
    (plan,) = dispatcher.plan_lengths([documents])
    before = len(dist.distributed_c10d._world.pg_map)
    Groups(CPU, 60.0, mesh["dp"]).close()
    return {
        "left": len(dist.distributed_c10d._world.pg_map) - before,
        "place": (groups.rank, groups.ranks, groups.all_gather(rank)),
        "lengths": sorted(int(length) for nano in plan.nano_batches for length in nano.layout.lengths),
        "received": _exchanged(dispatcher.groups.exchange),
        "any": dispatcher.groups.any_of([rank == 3, rank == 0]),
        "nodes": [
            _of_node(mesh["dp"], of_both[shard]) for of_both in (((0, 0), None), ((0, 0), (0, 1)), (None, None))
        ],
        "world": groups.all_gather(rank, in_world=True),
        "met": _met(groups),
        "failed": _failed(groups),
    }


def _import_kernel(rank: int) -> None:
    if rank == 1:
        raise ImportError(f"no kernel named {rank}")


def _exchanged(group: dist.ProcessGroup) -> list[int]:
    rank, received = dist.get_rank(), torch.full((2,), -1)
    dist.all_to_all_single(received, torch.tensor([10 * rank, 10 * rank + 1]), group=group)
    return received.tolist()


def _of_node(mesh: Any, nodes: tuple[int, ...] | None) -> list[int] | None:
    """What comes from the ranks of this rank's node, where ranks of the mesh are on these nodes."""
    groups = Groups(CPU, 60.0, mesh)
    groups.connect_nodes(nodes)
    return None if groups.node is None else _exchanged(groups.node)


def _met(groups: Groups) -> int:
    """How many processes of the world have come where the last one is late, once this one may go on."""
    store = dist.distributed_c10d._get_default_store()
    time.sleep(0.3 * (dist.get_rank() == 3))
    store.add("come", 1)
    groups.meet()
    return store.add("come", 0)


def _failed(groups: Groups) -> str:
    """What a rank says where rank 0 fails and takes the others with it, whichever mesh they are in."""
    error = KeyError("text") if dist.get_rank() == 0 else RuntimeError("Connection closed by peer")
    with pytest.raises((KeyError, RuntimeError)) as raised, groups.failures.reported():
        raise error
    return str(raised.value)


def test_groups_of_a_mesh_dispatch_by_themselves(rank_pools, monkeypatch):
    results = rank_pools[4].run(_two_by_two)
    assert [result["place"] for result in results] == [(0, 2, [0, 2]), (0, 2, [1, 3]), (1, 2, [0, 2]), (1, 2, [1, 3])]
    assert [result["lengths"] for result in results] == [[3, 9, 30, 40], [20, 25, 25]] * 2
    assert [result["received"] for result in results] == [[0, 20], [10, 30], [1, 21], [11, 31]]
    assert [result["any"] for result in results] == [[False, True], [True, False]] * 2
    # Ranks 0 and 2 share a node twice; 1 and 3 have no nodes, then one each.
    assert [result["nodes"] for result in results] == [
        [[0, 20], [0, 20], None],
        [None] * 3,
        [[1, 21], [1, 21], None],
        [None] * 3,
    ]
    assert [(result["world"], result["met"], result["left"]) for result in results] == [([0, 1, 2, 3], 4, 0)] * 4
    assert [result["failed"] for result in results] == ["'text'", *["rank 0 failed: KeyError: 'text'"] * 3]
    # A group may list its ranks in an order of its own.
    monkeypatch.setattr(groups_module, "in_world", lambda: True)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [3, 1])
    assert mesh_ranks(SimpleNamespace()) == [1, 3]


def _found(hosts: str, local_ranks: list[int | None], mesh_shape: tuple[int, int] | None) -> tuple[Any, list[str]]:
    """What a rank finds, and what it logs, where each rank has this host and this LOCAL_RANK."""
    rank, messages, handler = dist.get_rank(), [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups_module.logger, "handlers", [handler])
        patch.setattr(groups_module.logger, "level", logging.INFO)
        groups_module.logger.manager._clear_cache()
        patch.setattr(socket, "gethostname", lambda: hosts[rank])
        if local_ranks[rank] is None:
            patch.delenv("LOCAL_RANK")
        else:
            patch.setenv("LOCAL_RANK", str(local_ranks[rank]))
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))["dp"] if mesh_shape else None
        return ranks_per_node(mesh, 60.0), messages


@pytest.mark.parametrize(
    ("hosts", "local_ranks", "shape", "found", "logged"),
    [
        ("aaaa", [0, 1, 2, 3], None, [4] * 4, ["4"]),
        ("abbc", [0, 0, 1, 0], None, [(1, 2, 1)] * 4, ["1, 2, 1"]),
        ("aaaa", [0, 1, 0, 1], None, [2] * 4, ["2, 2"]),  # two launchers on one host, each with a share of its GPUs
        ("aabb", [0, 1, None, None], None, [(2, 1, 1)] * 4, ["2, 1, 1"]),
        # With tensor parallelism of two, ranks 0 and 2 train together, and so do 1 and 3.
        ("aabb", [0, 1, 0, 1], (2, 2), [1] * 4, ["1, 1"] * 2),
        ("aaab", [0, 1, 2, 0], (2, 2), [2, 1, 2, 1], ["2", "1, 1"]),
        # By local ranks alone, rank 2 would be on the node of rank 1.
        ("abaa", [0, 0, 1, 2], None, [(1, 1, 2)] * 4, ["1, 1, 2"]),
    ],
)
def test_nodes_of_a_launch(rank_pools, hosts, local_ranks, shape, found, logged):
    results = rank_pools[4].run(_found, hosts, local_ranks, shape)
    assert [sizes for sizes, _ in results] == found
    if hosts == "abaa":
        assert results[0][1].pop(0).startswith("ranks that share a host are not numbered one after another")
    told = [[f"ranks on each node, as launched: {sizes}"] for sizes in logged]
    assert [messages for _, messages in results] == told + [[]] * (4 - len(told))


def test_without_a_world_all_links_are_alike():
    assert ranks_per_node(None, 60.0) == 1

"""Groups of ranks: their backend, their connections, the nodes that ranks share, and errors that
all ranks raise.
"""

import re
import socket
import time
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hf_distca.checks.argument_rules import DISPATCHED
from hf_distca.checks.refusal import RefusedError, check
from hf_distca.config import DistCAConfig
from hf_distca.dispatch import process_groups as groups_module
from hf_distca.dispatch import world as world_module
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.process_groups import Groups, OfPod
from hf_distca.dispatch.waits import OtherRankError, RankLost, Waits
from hf_distca.dispatch.world import World, mesh_ranks
from hf_distca.planner.pods import pods_around
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.trainer.resuming import FullDiskError
from tests.models_and_batches import dispatcher_of_all_ranks, small_kinds, small_run
from tests.ranks import RankPool

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("default", "backend_on_cuda"),
    [
        ("gloo", "gloo"),
        ("cpu:gloo", "gloo"),
        ("cuda:nccl", "nccl"),
        ("cpu:gloo,cuda:nccl", "nccl"),
    ],
)
def test_the_exchange_takes_the_default_groups_backend(monkeypatch, default, backend_on_cuda):
    monkeypatch.setattr(dist, "get_backend_config", lambda: default)
    assert groups_module.exchange_backend(CPU) == "gloo"
    assert groups_module.exchange_backend(CUDA) == backend_on_cuda


EXCHANGE_OPTIONS = {"cga_cluster_size": 0, "max_ctas": groups_module.EXCHANGE_CTAS}


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a build of torch with NCCL")
def test_nccl_leaves_attention_its_sms():
    options = groups_module.exchange_options("nccl")
    assert options.is_high_priority_stream is True
    set_options = {name: getattr(options.config, name) for name in EXCHANGE_OPTIONS}
    assert set_options == EXCHANGE_OPTIONS


@pytest.mark.parametrize(
    "fields", [("cga_cluster_size", "max_ctas", "min_ctas"), ("blocking",)], ids=["new", "old"]
)
def test_options_that_a_build_of_torch_lacks_are_left_out(monkeypatch, fields):
    config = SimpleNamespace(**dict.fromkeys(fields, -1))
    stand_in = SimpleNamespace(Options=partial(SimpleNamespace, config=config))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", stand_in, raising=False)
    assert groups_module.exchange_options("nccl").is_high_priority_stream is True
    assert vars(config) == {name: EXCHANGE_OPTIONS.get(name, -1) for name in fields}


def test_gloo_has_no_options():
    assert groups_module.exchange_options("gloo") is None


def test_ranks_that_share_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device}")
    )
    devices = [groups_module.indexed(torch.device(name)) for name in ("cuda", "cuda:1", "cpu")]
    assert devices == [torch.device("cuda", 3), CUDA, CPU]
    assert (groups_module.device_uuid(CUDA), groups_module.device_uuid(CPU)) == ("GPU-cuda:1", None)
    groups_module.check_devices("nccl", ["a", "b", "c"])
    groups_module.check_devices("gloo", shared := ["a", "b", "a", "b"])
    with pytest.raises(
        ValueError,
        match=r"share a GPU: ranks \[0, 2\] on a; ranks \[1, 3\] on b, but.*; start one.*use gloo",
    ):
        groups_module.check_devices("nccl", shared)


def test_what_to_set_where_gloo_does_not_connect(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node3")
    monkeypatch.setattr(socket, "gethostbyname", {"node3": "127.0.1.1"}.__getitem__)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    error = RuntimeError("connect: timed out")
    assert "(not set on this host)" in str(world_module.unreachable(2, error))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    message = str(world_module.unreachable(2, error))
    assert message.startswith("rank 2 cannot reach the other ranks over gloo")
    assert str(error) in message
    assert "(eth7 on this host)" in message
    assert "('node3' here to 127.0.1.1)" in message


def _groups_of_dispatcher(
    ranks_per_node: int | tuple[int, ...],
) -> tuple[list[Any], list[int], str]:
    """What a new dispatcher does before any layer; the number of groups before, with and after it;
    its error then.
    """
    groups_of_rank: list[Any] = []
    new_group, all_to_all, groups = (
        dist.new_group,
        dist.all_to_all_single,
        dist.distributed_c10d._world.pg_map,
    )

    def recorded_group(ranks: list[int] | None = None, **options: Any) -> Any:
        groups_of_rank.append((options["group_desc"], options["backend"], ranks))
        return new_group(ranks, **options)

    def recorded_exchange(output: Any, input: Any, received: Any, sent: Any, group: Any) -> Any:
        groups_of_rank.append((group.group_desc, received, sent))
        return all_to_all(output, input, received, sent, group=group)

    count = [len(groups)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", recorded_group)
        patch.setattr(dist, "all_to_all_single", recorded_exchange)
        patch.setattr(groups_module, "device_uuid", lambda device: f"GPU-{dist.get_rank()}")
        patch.setattr(groups_module, "check_devices", lambda *args: groups_of_rank.append(args))
        dispatcher = dispatcher_of_all_ranks(ranks_per_node=ranks_per_node)
    count.append(len(groups))
    dispatcher.close()
    dispatcher.close()
    count.append(len(groups))
    with pytest.raises(RuntimeError) as error:
        dispatcher.plan_lengths([[3]])
    return groups_of_rank, count, str(error.value)


def test_ranks_are_connected_once_before_the_first_layer(rank_pools):
    closed = (
        "the process groups of this dispatcher are closed; make a new trainer or dispatcher to "
        "continue"
    )
    everyone = [0, 1, 2]
    # Control messages, whether devices will do, and rows between all.
    connected = [
        ("distca control", "gloo", everyone),
        ("gloo", [f"GPU-{rank}" for rank in everyone]),
        ("distca exchange", "gloo", everyone),
        ("distca exchange", [1] * 3, [1] * 3),
    ]
    assert rank_pools[1].run(_groups_of_dispatcher, 1) == [([], [1, 1, 1], closed)]
    # A single node is not connected apart; of several, every rank makes the groups of all.
    assert rank_pools[3].run(_groups_of_dispatcher, 3) == [(connected, [1, 3, 1], closed)] * 3
    nodes = [
        ("distca node", "gloo", [0]),
        ("distca node", "gloo", [1, 2]),
    ]
    assert rank_pools[3].run(_groups_of_dispatcher, (1, 2)) == [
        ([*connected, *nodes], [1, 3, 1], closed),
        *[([*connected, *nodes, ("distca node", [1] * 2, [1] * 2)], [1, 4, 1], closed)] * 2,
    ]


def _start(comes: bool) -> str:
    """What rank 0 says whose partner comes as far as to make a group, or not at all."""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as raised:
            Groups(CPU, 3.0)
        return str(raised.value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups_module, "exchange_backend", lambda device: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            _ = Groups(CPU, 3.0) if comes else 1 / 0
    return ""


@pytest.mark.parametrize(
    ("comes", "told"), [(False, "reach the other ranks"), (True, "exchange rows")]
)
@pytest.mark.launches
def test_a_rank_whose_partner_is_not_there(comes, told):
    with closing(RankPool(2)) as pool:
        assert f"rank 0 cannot {told} over gloo" in pool.run(_start, comes)[0]


def _check_pods(rank: int) -> None:
    """Connect pods of three blocks: one, one and two ranks. The last one has no other beside it.

    Messages of all ranks take two steps: within blocks, and between their first ranks.
    """
    of_pods, first = Groups(CPU, 60.0), rank // 2 * 2
    of_blocks = PlanSettings(4, 64, ranks_per_node=(1, 1, 2), pod_ranks=1)
    of_pods.connect_pods(pods_around(of_blocks, rank))
    assert sorted(of_pods.pods) == ([1, 2, 4] if rank < 2 else [2, 4])
    assert _exchanged(of_pods.pods[2]) == [10 * first + rank % 2, 10 * (first + 1) + rank % 2]
    # 1. Values and answers of all ranks, in the order of ranks.
    assert of_pods.all_gather(rank * 10, in_world=True) == [0, 10, 20, 30]
    assert of_pods.any_of([rank == 3, False]) == [True, False]
    # 2. Values of a block, and a summary of each block.
    block = of_pods.block
    assert block == (range(rank, rank + 1) if rank < 2 else range(2, 4))
    gathered = of_pods.all_gather_in_pod(block, lambda: rank, sum, contents="ranks")
    assert gathered == OfPod([*block], sum(block), [0, 1, 5])
    together = of_pods.all_gather_in_pod(range(4), lambda: rank, sum, contents="ranks")
    assert together == OfPod([0, 1, 2, 3], 6, [6])
    # 3. An error of one rank, or of the summary of one block, is raised on all ranks.
    for make, summarize in (
        (partial(_raise_on_rank_1, rank, ValueError("no")), len),
        (lambda: rank, lambda ranks: _raise_on_rank_1(ranks[0], ValueError("no"))),
    ):
        with pytest.raises(ValueError, match=r"^rank 1: ValueError: no$"):
            of_pods.all_gather_in_pod(block, make, summarize, contents="ranks")
    of_pods.close()


def _check_streams(rank: int) -> None:
    """Two pods plan documents that lie on their ranks; the second one has one micro-batch more."""
    of_plans = PlanSettings(
        4, 64, small_kinds(), ranks_per_node=2, pod_ranks=2, balance_block_size=8
    )
    run = small_run(of_plans, kernel="auto").with_profile(DeviceProfile.load("h100"))
    dispatcher = Dispatcher(run.plans, CPU)
    own = [[[30, 4]], [[9]], [[40, 3], [5]], [[8], [20, 2]]][rank]
    plans = dispatcher.plan_lengths(own)
    assert [plan.ranks for plan in plans] == [range(2) if rank < 2 else range(2, 4)] * 2
    held = [
        [stop - start for _, start, stop in dispatcher.bind(plan).plan.held_by(rank)]
        for plan in plans
    ]
    assert held == ([*own, [1]] if rank < 2 else own)
    assert [plan.document_tokens for plan in plans] == [94, 27]
    assert [plan.fillers for plan in plans] == ([0, 2] if rank < 2 else [0, 0])
    dispatcher.close()


def _two_by_two() -> None:
    """Two groups of two ranks, each of which dispatches by itself beside the other."""
    mesh, rank = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), dist.get_rank()
    groups, (replica, shard) = Groups(CPU, 60.0, mesh["dp"]), divmod(rank, 2)
    assert (groups.rank, groups.ranks, groups.all_gather(rank)) == (replica, 2, [shard, 2 + shard])
    assert groups.all_gather(rank, in_world=True) == [0, 1, 2, 3]
    assert groups.any_of([rank == 3, rank == 0]) == [shard == 1, shard == 0]
    with pytest.raises(ValueError, match=r"mesh has the dimensions \('dp', 'tp'\).*mesh\['dp'\]"):
        check(DISPATCHED, {"config": DistCAConfig(tokens_per_rank=8), "mesh": mesh})
    for lost in (ImportError("no kernel"), OSError("no disk")):
        with (
            pytest.raises(ValueError, match=f"^rank 1: {type(lost).__name__}: {lost}$"),
            World(60.0).raised_together(),
        ):
            _raise_on_rank_1(rank, lost)
    # The same error on all ranks stays as it is; one rank's error names the rank.
    wrong = [["wrong", "wrong"], ["wrong", None]][shard][replica]
    with pytest.raises(ValueError, match=[r"^wrong$", r"^rank 0: ValueError: wrong$"][shard]):
        groups.raise_together(wrong and ValueError(wrong))
    # A refusal stays a refusal on ranks that did not see it; a crash of any rank is none.
    for kinds, expected in (
        ((RefusedError, None), RefusedError),
        ((RefusedError, OSError), ValueError),
    ):
        kind = kinds[replica]
        with pytest.raises(ValueError, match=r"^rank 0: wrong") as caught:
            groups.raise_together(kind and kind("wrong"))
        assert type(caught.value) is expected
    # Different plans side by side, one of them with rows that travel.
    settings = PlanSettings(2, 64, small_kinds(), balance_block_size=8)
    dispatcher = Dispatcher(settings, CPU, mesh["dp"].get_group())
    (plan,) = dispatcher.plan_lengths([[[[40, 3], [20]], [[9, 30], [25, 25]]][replica][shard]])
    lengths = sorted(int(length) for nano in plan.nano_batches for length in nano.layout.lengths)
    assert lengths == [[3, 9, 30, 40], [20, 25, 25]][shard]
    received = [10 * shard + replica, 10 * (2 + shard) + replica]
    assert _exchanged(dispatcher.groups.exchange) == received
    before = len(dist.distributed_c10d._world.pg_map)
    Groups(CPU, 60.0, mesh["dp"]).close()
    assert len(dist.distributed_c10d._world.pg_map) == before
    _check_pods(rank)
    _check_streams(rank)
    assert len(dist.distributed_c10d._world.pg_map) == before
    for of_both in (
        ((0, 0), None),
        ((0, 0), (0, 1)),
        (None, None),
    ):  # nodes of the ranks of each mesh
        of_nodes, nodes = Groups(CPU, 60.0, mesh["dp"]), of_both[shard]
        of_nodes.connect_nodes(nodes)
        assert (None if of_nodes.node is None else _exchanged(of_nodes.node)) == (
            received if nodes == (0, 0) else None
        )
    # How many processes of the world have come where the last one is late, once this one may go on.
    store = dist.distributed_c10d._get_default_store()
    time.sleep(0.3 * (rank == 3))
    store.add("come", 1)
    groups.meet()
    assert store.add("come", 0) == 4
    # Rank 0 fails and takes the others with it, whichever mesh they are in.
    error = raised(groups.waits, KeyError("text") if rank == 0 else LOST)
    assert str(error) == ("'text'" if rank == 0 else "rank 0 failed: KeyError: 'text'")


def _raise_on_rank_1(rank: int, error: Exception) -> None:
    if rank == 1:
        raise error


def _exchanged(group: dist.ProcessGroup) -> list[int]:
    rank, received = dist.get_rank(), torch.full((2,), -1)
    dist.all_to_all_single(received, torch.tensor([10 * rank, 10 * rank + 1]), group=group)
    return received.tolist()


def test_groups_of_a_mesh_dispatch_by_themselves(rank_pools, monkeypatch):
    rank_pools[4].run(_two_by_two)
    assert World(60.0).ranks_per_node() == 1  # without a world
    # A group may list its ranks in an order of its own.
    monkeypatch.setattr(world_module, "in_world", lambda: True)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [3, 1])
    assert mesh_ranks(SimpleNamespace()) == [1, 3]


def _found(
    hosts: str, local_ranks: list[int | None], mesh_shape: tuple[int, int] | None
) -> tuple[Any, list[str]]:
    """What a rank finds, and what it logs, where each rank has this host and this LOCAL_RANK."""
    rank, messages = dist.get_rank(), []
    with pytest.MonkeyPatch.context() as patch:
        for level in ("info", "warning"):
            patch.setattr(
                world_module.logger, level, lambda text, *args: messages.append(text % args)
            )
        patch.setattr(socket, "gethostname", lambda: hosts[rank])
        patch.delenv("LOCAL_RANK")
        if local_ranks[rank] is not None:
            patch.setenv("LOCAL_RANK", str(local_ranks[rank]))
        mesh = (
            init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))["dp"]
            if mesh_shape
            else None
        )
        return World(60.0).ranks_per_node(mesh), messages


@pytest.mark.parametrize(
    ("hosts", "local_ranks", "shape", "expected", "logged"),
    [
        ("aaaa", [0, 1, 2, 3], None, [4] * 4, ["4"]),
        ("abbc", [0, 0, 1, 0], None, [(1, 2, 1)] * 4, ["1, 2, 1"]),
        (
            "aaaa",
            [0, 1, 0, 1],
            None,
            [2] * 4,
            ["2, 2"],
        ),  # two launchers on one host, each with a share of its GPUs
        ("aabb", [0, 1, None, None], None, [(2, 1, 1)] * 4, ["2, 1, 1"]),
        # With tensor parallelism of two, ranks 0 and 2 train together, and so do 1 and 3.
        ("aabb", [0, 1, 0, 1], (2, 2), [1] * 4, ["1, 1"] * 2),
        ("aaab", [0, 1, 2, 0], (2, 2), [2, 1, 2, 1], ["2", "1, 1"]),
        # By local ranks alone, rank 2 would be on the node of rank 1.
        ("abaa", [0, 0, 1, 2], None, [(1, 1, 2)] * 4, ["1, 1, 2"]),
    ],
)
def test_nodes_of_a_launch(rank_pools, hosts, local_ranks, shape, expected, logged):
    sizes, messages = zip(*rank_pools[4].run(_found, hosts, local_ranks, shape), strict=True)
    assert [*sizes] == expected
    if hosts == "abaa":
        assert (
            messages[0]
            .pop(0)
            .startswith("ranks that share a host are not numbered one after another")
        )
    told = [[f"ranks on each node, as launched: {sizes}"] for sizes in logged]
    assert [*messages] == told + [[]] * (4 - len(told))


# A rank that lost its partner says why the partner failed.

LOST = RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
BOOM = ValueError("boom")
REFUSED = RefusedError("x is set")


def waits_of(rank: int, ranks: int, store: dist.Store | None) -> Waits:
    return Waits(store, rank, ranks, 1.0)


def raised(waits: Waits, error: Exception, evaluates: bool = False) -> Exception:
    """What is raised where the error is, here or in a second evaluation: itself, or one that has it
    as its cause.
    """
    try:
        with waits.watched():
            if evaluates:
                with waits.watched():
                    pass
                with waits.watched():
                    raise error
            raise error
    except Exception as error:
        return error


def left_behind(error: Exception) -> tuple[Waits, dist.Store]:
    """Rank 0 of three, once rank 1 has failed with the error, and their store."""
    store = dist.HashStore()
    assert raised(waits_of(1, 3, store), error) is error
    return waits_of(0, 3, store), store


@pytest.mark.parametrize(
    "lost",
    [
        LOST,
        RuntimeError("Application timeout caused pair closure"),
        dist.DistBackendError("NCCL error"),
        dist.DistNetworkError(""),
    ],
    ids=["lost", "pair", "NCCL", "network"],
)
def test_a_rank_that_lost_its_partner_says_why(lost):
    waits, store = left_behind(KeyError("text"))
    error = raised(waits, lost)
    assert type(error) is OtherRankError
    assert str(error) == "rank 1 failed: KeyError: 'text'"
    # Where this rank lost the other says no more.
    assert error.__suppress_context__
    assert error.__cause__ is None
    # What rank 0 only reports is not reported again as an error of its own.
    assert str(raised(waits_of(2, 3, store), LOST)) == "rank 1 failed: KeyError: 'text'"


@pytest.mark.parametrize("error", [ValueError(str(LOST)), RuntimeError("shapes differ")])
def test_an_error_of_its_own_stays(error):
    waits, _ = left_behind(BOOM)
    assert raised(waits, error) is error


def store_that_is_gone():
    error = dist.DistNetworkError("Broken pipe")
    store = Mock(**{"set.side_effect": error, "check.side_effect": error})
    store.clone.return_value = store
    return store


@pytest.mark.parametrize(
    ("make_store", "message"),
    [
        (dist.HashStore, "rank 1 has not come"),
        (store_that_is_gone, "store.* has not answered"),
    ],
    ids=["no error left", "store gone"],
)
def test_a_loss_without_another_error(make_store, message):
    assert raised(waits_of(0, 2, make_store()), BOOM) is BOOM
    error = raised(waits_of(0, 2, make_store()), LOST)
    assert type(error) is RankLost
    assert error.__cause__ is LOST
    assert re.search(message, str(error))


def test_errors_of_a_single_rank_stay():
    assert raised(waits_of(0, 2, None), BOOM) is BOOM
    assert raised(waits_of(0, 2, None), LOST) is LOST


def test_what_failed_before_is_forgotten_and_an_evaluation_belongs_to_its_training():
    waits, _ = left_behind(BOOM)
    with waits.watched():
        pass
    assert type(raised(waits, LOST)) is RankLost
    waits, _ = left_behind(BOOM)
    error = raised(waits, LOST, evaluates=True)
    assert str(error) == "rank 1 failed: ValueError: boom"


def test_an_error_that_several_ranks_have_is_reported_by_the_first():
    full = FullDiskError("disk full: out is incomplete")
    waits, store = left_behind(full)
    for error in (raised(waits, full), raised(waits_of(2, 3, store), full)):
        assert type(error) is OtherRankError
        assert str(error) == "rank 1 failed: disk full: out is incomplete"
    # What all ranks raise stays the error of each.
    waits, _ = left_behind(REFUSED)
    assert raised(waits, REFUSED) is REFUSED


def _given_by_rank_0(fails: int) -> list[str]:
    """What every rank gets from rank 0, whose call fails `fails` times first; and sums of ranks."""
    groups = Groups(torch.device("cpu"), 60.0)
    left = [fails]

    def make() -> str:
        assert groups.rank == 0
        left[0] -= 1
        if left[0] >= 0:
            raise RefusedError("no rollout is left")
        return "a rollout"

    got = []
    for _ in range(2):
        try:
            got.append(groups.broadcast_checked(make, contents="rollouts"))
        except RefusedError as error:
            got.append(str(error))
    own = torch.tensor([1.0, groups.rank])
    assert groups.summed(own, "sums").tolist() == [3.0, 3.0]
    assert own.tolist() == [1.0, groups.rank]
    groups.close()
    return got


def test_every_rank_gets_what_rank_0_makes_or_its_error(rank_pools):
    expected = ["no rollout is left", "a rollout"]
    assert rank_pools[3].run(_given_by_rank_0, 1) == [expected] * 3

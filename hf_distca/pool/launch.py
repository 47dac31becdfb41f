"""Dedicated attention servers of a training run.

They are the last processes of its launch (`split_launch`, `serve_if_server`), or processes that
start by themselves and join. `open_pool` lets either take part in a rank's plans.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch.cuda import device_count, is_available

from hf_distca.checks.refusal import RefusedError
from hf_distca.checks.server_rules import ServerPool
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.threads import in_thread, wait_until
from hf_distca.pool.child import serve_from_child
from hf_distca.pool.directory import Directory
from hf_distca.pool.nixl import address_towards
from hf_distca.pool.rank.pool import Pool
from hf_distca.pool.token import make_token, parse_address, read_token, write_token
from hf_distca.pool.transport import Choice, Memory, make_memory
from hf_distca.server_settings import AttentionServers

logger = logging.getLogger(__name__)

TOKEN_FILE = "attention_server_token"
START_S = 300.0
"""Most seconds from the start of one process of a launch to that of another."""
TRAINER_S = 24 * 3600.0
"""Most seconds in which ranks load their model and read their data."""
STORE_S = 5.0
"""Most seconds for an answer of the launch's store."""
POLL_S = 0.1
"""Seconds between two looks into the launch's store."""

_PROCESS_GROUP_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Environment variables by which a process joins the launch's process group: a server must not."""


@dataclass(frozen=True)
class Launch:
    """How this process takes part in a launch whose last processes are servers."""

    # The launcher's store, where rank 0 leaves the address and the token for servers.
    store: dist.Store | None
    # Device of this process if it is a server; None: it is a rank.
    serves_on: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the connection, for a Trainer that saves its arguments."""
        return {"store": None, "serves_on": self.serves_on}


def split_launch(servers: int, *, cpu: bool) -> Launch:
    """Make the last processes of this launch attention servers, and the others ranks.

    Call it before anything looks at the world: ranks are then a world without servers. ValueError
    on every process, where the launch has too few processes, or a server's host no GPU for it.
    """
    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = world - servers
    if ranks < 1:
        raise ServerPool.NO_RANKS.error(servers=servers, processes=world, least=servers + 1)
    if dist.is_initialized() or PartialState._shared_state:
        raise ServerPool.STARTED.error()
    store = _connect_to_store(rank)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = f"cuda:{local_rank}" if is_available() and not cpu else "cpu"

    # 1. Every process learns why some server cannot work, so that all of them raise.
    if rank >= ranks:
        store.set(f"error of {rank}", _missing_gpu(rank, local_rank, device))
    for server in range(ranks, world):
        name = f"the attention server in process {server} of this launch to start"
        remedy = "look at the output of that process; `WORLD_SIZE` processes must be launched"
        error = _wait_for_value(store, f"error of {server}", name, START_S, remedy)
        if error:
            raise RefusedError(error)

    # 2. A server forgets the process group.
    if rank >= ranks:
        for name in _PROCESS_GROUP_VARIABLES:
            os.environ.pop(name, None)
        return Launch(store, device)

    # 3. A rank sees a world of ranks alone.
    os.environ["WORLD_SIZE"] = str(ranks)
    if "LOCAL_WORLD_SIZE" in os.environ:
        first_rank_of_host = rank - local_rank
        local_world = int(os.environ["LOCAL_WORLD_SIZE"])
        os.environ["LOCAL_WORLD_SIZE"] = str(min(local_world, ranks - first_rank_of_host))
    return Launch(store)


def _connect_to_store(rank: int) -> dist.Store:
    """Connect to the store of the launch, which rank 0 serves where the launcher does not."""
    launcher_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: dist.Store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=not launcher_has_store and rank == 0,
        wait_for_workers=False,
        multi_tenant=not launcher_has_store,
    )
    # The launcher's store outlives a restart of all processes, and keeps what they left there.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"hf_distca/attention_servers/{restarts}", store)


def _missing_gpu(rank: int, local_rank: int, device: str) -> str:
    """Return why the host has no GPU for the attention server `rank`, or "" where it has one."""
    if device == "cpu":
        return ""
    gpus = device_count()
    if local_rank < gpus:
        return ""
    return str(ServerPool.NO_GPU.error(rank=rank, device=device, gpus=gpus))


def serve_if_server(launch: Launch | None, timeout_s: float, kernel: str) -> None:
    """Serve until training ends, and then exit, if this process is a server of its launch.

    A server raises SystemExit at the end. In a rank the function returns at once.

    Args:
        timeout_s: how long the server waits for the ranks once it knows their address.
        kernel: name of the kernel with which the server computes, the same as on ranks.
    """
    if launch is None or launch.serves_on is None:
        return
    store = launch.store
    assert store is not None  # only a saved launch has none

    # 1. Wait for what rank 0 leaves in the store. If ranks fail, the launcher ends this process.
    name = "rank 0 to make its trainer, in an attention server of the launch"
    remedy = (
        "ranks first load their model and read their data; look at the output of rank 0 if that is "
        "done"
    )
    address, token, transport = (
        _wait_for_value(store, key, name, TRAINER_S, remedy)
        for key in ("address", "token", "transport")
    )

    # 2. Serve as `hf-distca serve` does. The token travels by standard input.
    options = {
        "--join": address,
        "--token-file": "-",
        "--device": launch.serves_on,
        "--wait": f"{timeout_s:g}",
        "--transport": transport,
        "--attention-kernel": kernel,
        "--parent": str(os.getpid()),
    }
    command = [sys.executable, "-m", "hf_distca.cli.main", "serve"]
    for option, value in options.items():
        command += [option, value]

    ended_is_there = _asking_for(store, "ended")

    def has_ended() -> bool:
        try:
            return ended_is_there()
        except TimeoutError:  # the process that has the store is stopped
            return False
        except dist.DistError:  # the process that has the store is gone, and rank 0 with it
            return True

    serve_from_child(command, token + "\n", has_ended)
    raise SystemExit(0)


def _asking_for(store: dist.Store, key: str) -> Callable[[], bool]:
    """Return a function that asks the launch's store whether it has a key.

    A call to a store blocks for ever while the store's process is stopped. The function raises
    TimeoutError then, and the next call waits for the same answer.
    """
    asked: Future[bool] | None = None

    def is_there() -> bool:
        nonlocal asked
        asked = asked or in_thread(lambda: store.check([key]))
        answer = asked.result(STORE_S)
        asked = None
        return answer

    return is_there


def _wait_for_value(store: dist.Store, key: str, name: str, limit_s: float, remedy: str) -> str:
    """Return a value of the launch's store as soon as it is there.

    WaitError: it is not there within `limit_s`.

    Args:
        name: whom this process waits for.
        remedy: what to do if the value does not come.
    """
    value_is_there = _asking_for(store, key)

    def is_there(within_s: float) -> bool:
        try:
            if value_is_there():
                return True
        except TimeoutError:
            logger.warning(
                "the launch's store does not answer; its process, the launcher or rank 0, is "
                "stopped or hung"
            )
        time.sleep(min(POLL_S, within_s))
        return False

    wait_until(is_there, name, limit_s, remedy)
    return in_thread(lambda: store.get(key)).result(STORE_S).decode()


def open_pool(
    dispatcher: Dispatcher, servers: AttentionServers, launch: Launch | None, folder: Path
) -> Pool:
    """Let attention servers take part in a dispatcher's plans.

    With a launch its own servers take part, and this function waits for them. Without one, servers
    join from outside at any time.

    A collective. ValueError on every rank: the address, the token or the transport cannot be used.

    Args:
        launch: None where servers come from outside.
        folder: of the run, for the token of servers from outside where settings name no file.
    """
    groups = dispatcher.groups
    store = None if launch is None else launch.store
    transport = Choice(servers.transport)
    token_file = Path(servers.token_file or folder / TOKEN_FILE)
    directory: Directory | None = None
    memory: Memory | None = None
    token = b""
    error: Exception | None = None

    # 1. Rank 0 opens the directory.
    if groups.rank == 0:
        try:
            setting = "attention_servers member address"
            host, port = parse_address(servers.address, setting=setting)
            token = make_token() if launch is not None else _token_of_file(token_file)
            # Servers of the launch learn the end of training from the store.
            report_end = (lambda: None) if store is None else partial(store.set, "ended", "")
            directory = Directory(host, port, token, ended=report_end)
        except (OSError, ValueError) as caught:
            error = caught

    # 2. All ranks learn the directory's address and the token, and make memory for rows.
    place = (token, directory.host, directory.port) if directory is not None else None
    place = groups.all_gather(place)[0]
    if place is not None:
        token, host, port = place
        try:
            # NIXL may have to open a port: on the interface by which this rank reaches rank 0.
            interface = address_towards(host, port) if transport is Choice.NIXL else ""
            memory = make_memory(transport, dispatcher.device, interface)
        except (OSError, ValueError) as caught:
            error = caught

    # 3. An error of one rank is raised on all of them.
    try:
        groups.raise_together(error)
    except ValueError:
        if directory is not None:
            directory.close()
        raise
    assert memory is not None

    # 4. Servers learn where to join; the pool takes part in plans.
    if directory is not None:
        _announce(directory, token, transport, store, token_file)
    pool = Pool(
        dispatcher,
        token,
        directory,
        memory,
        ranks_serve=servers.ranks_serve,
        timeout_s=servers.timeout,
    )
    dispatcher.remote = pool
    if launch is not None:
        pool.wait_for(servers.in_launch, servers.timeout)
    return pool


def _token_of_file(path: Path) -> bytes:
    """Return the token in a file, which gets a new token if there is no such file."""
    if not path.exists():
        write_token(path, make_token())
    return read_token(path)


def _announce(
    directory: Directory,
    token: bytes,
    transport: Choice,
    store: dist.Store | None,
    token_file: Path,
) -> None:
    """Tell servers of the launch by its store, or the user by the log, how servers join."""
    if store is None:
        logger.warning(
            "attention servers join with: hf-distca serve --join %s:%d --token-file %s",
            directory.host,
            directory.port,
            token_file,
        )
        return
    store.set("transport", transport)
    store.set("token", token.hex())
    store.set("address", f"{directory.host}:{directory.port}")


def on_cpu(use_cpu: bool) -> bool:
    """Return whether a run keeps to the CPU, by its arguments or by how it was launched."""
    return (
        use_cpu
        or parse_flag_from_env("ACCELERATE_USE_CPU")
        or os.environ.get("ACCELERATE_TORCH_DEVICE") == "cpu"
    )

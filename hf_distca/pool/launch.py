"""Dedicated attention servers of a training run: the last processes of its launch, or processes that join."""

import logging
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch.cuda import device_count, is_available

from hf_distca.config import DistCAConfig
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.signs import StoreLine
from hf_distca.pool.child import serve_from_child
from hf_distca.pool.directory import Directory
from hf_distca.pool.nixl import address_towards
from hf_distca.pool.rank.pool import Pool
from hf_distca.pool.token import make_token, parse_address, read_token, write_token
from hf_distca.pool.transport import Choice, make_memory
from hf_distca.refusal import RefusedError
from hf_distca.waiting import wait_until

logger = logging.getLogger(__name__)

TOKEN_FILE = "attention_server_token"
START_S = 300.0
"""Most seconds from the start of one process of a launch to that of another."""
TRAINER_S = 24 * 3600.0
"""Most seconds in which ranks load their model and read their data."""
STORE_S = 5.0
"""Most seconds for an answer of the launch's store."""
POLL_S = 0.1

_OF_THE_WORLD = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables by which a process takes part in the launch's process group; a server must not take
part."""


@dataclass(frozen=True)
class Launch:
    """How this process takes part in a launch whose last processes are servers."""

    store: (
        dist.Store | None
    )  # the launcher's, where rank 0 leaves the address and the token for servers
    serves_on: str | None = None  # device of this process if it is a server; None: it is a rank

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the connection: Trainer saves its arguments, and with them this."""
        return {"store": None, "serves_on": self.serves_on}


def split_launch(servers: int, *, cpu: bool) -> Launch:
    """Decide which processes of this launch are ranks and which, the last ones, are attention servers.

    Call it before anything looks at the world: ranks are then a world without servers. ValueError
    on every process, where the launch has too few processes, or a server's host no GPU for it.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    ranks = world - servers
    if ranks < 1:
        raise RefusedError(
            f"attention_servers={servers} of {world} processes leaves no rank to train; start more "
            f"processes: accelerate launch --num_processes {servers + 1} or above"
        )
    if dist.is_initialized() or PartialState._shared_state:
        raise RefusedError(
            "torch.distributed or accelerate has started already, but attention_servers divides "
            "the processes before that; make DistCATrainingArguments first in the script"
        )
    own_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store: dist.Store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=own_store and rank == 0,
        wait_for_workers=False,
        multi_tenant=own_store,
    )
    # The launcher's store outlives a restart of all processes, and with it what they left there.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"hf_distca/attention_servers/{restarts}", store)
    missing, local_rank = "", int(os.environ.get("LOCAL_RANK", "0"))
    device = f"cuda:{local_rank}" if is_available() and not cpu else "cpu"
    if device != "cpu" and local_rank >= (count := device_count()):
        missing = (
            f"the attention server of rank {rank} would compute on {device}, but its host has "
            f"{count} GPUs, and a server that shares a GPU with a rank adds nothing. Start no "
            "more processes on a host than it has GPUs, servers included; or start servers on "
            "other hosts with attention_servers='external' and hf-distca serve"
        )
    if rank >= ranks:
        store.set(f"error of {rank}", missing)
    line = StoreLine(store)
    for server in range(ranks, world):
        name = f"the attention server in process {server} of this launch to start"
        remedy = "look at the output of that process; `WORLD_SIZE` processes must be launched"
        if error := _value(line, f"error of {server}", name, START_S, remedy):
            raise RefusedError(error)
    line.close(STORE_S)
    if rank >= ranks:
        for name in _OF_THE_WORLD:
            os.environ.pop(name, None)
        return Launch(store, device)
    os.environ["WORLD_SIZE"] = str(ranks)
    if "LOCAL_WORLD_SIZE" in os.environ:
        on_this_host = ranks - (rank - local_rank)  # ranks after the first one of this host
        os.environ["LOCAL_WORLD_SIZE"] = str(min(int(os.environ["LOCAL_WORLD_SIZE"]), on_this_host))
    return Launch(store)


def serve_if_server(launch: Launch | None, timeout_s: float, kernel: str) -> None:
    """Serve until training ends, then raise SystemExit, if this process is a server of its launch.

    Else return.

    Args:
        timeout_s: how long the server waits for the ranks once it knows their address.
        kernel: name of the kernel with which the server computes, the same as on ranks.
    """
    if launch is None or launch.serves_on is None:
        return
    store = launch.store
    assert store is not None  # only a saved launch has none
    # If the ranks fail instead, the launcher ends this process.
    line, name = (
        StoreLine(store),
        "rank 0 to make its trainer, in an attention server of the launch",
    )
    remedy = (
        "ranks first load their model and read their data; look at the output of rank 0 if that is "
        "done"
    )
    address, token, transport = (
        _value(line, key, name, TRAINER_S, remedy) for key in ("address", "token", "transport")
    )
    command = [
        sys.executable,
        "-m",
        "hf_distca.cli.main",
        "serve",
        "--join",
        address,
        "--token-file",
        "-",
    ]
    command += ["--device", launch.serves_on, "--wait", f"{timeout_s:g}", "--transport", transport]
    command += ["--attention-kernel", kernel, "--parent", str(os.getpid())]

    def has_ended() -> bool:
        try:
            return line.ask(lambda own: own.check(["ended"]), STORE_S)
        except TimeoutError:  # the process that has the store is stopped
            return False
        except dist.DistError:  # the process that has the store is gone, and rank 0 with it
            return True

    serve_from_child(command, token + "\n", has_ended)
    raise SystemExit(0)


def _value(line: StoreLine, key: str, name: str, limit_s: float, remedy: str) -> str:
    """Return a value of the launch's store as soon as it is there; WaitError at the limit.

    Args:
        name: whom this process waits for.
        remedy: what to do if the value does not come.
    """

    def is_there(within_s: float) -> bool:
        try:
            if line.ask(lambda store: store.check([key]), STORE_S):
                return True
        except TimeoutError:
            logger.warning(
                "the launch's store does not answer; its process, the launcher or rank 0, is "
                "stopped or hung"
            )
        time.sleep(min(POLL_S, within_s))
        return False

    wait_until(is_there, name, limit_s, remedy)
    return line.ask(lambda store: store.get(key), STORE_S).decode()


def open_pool(
    dispatcher: Dispatcher, config: DistCAConfig, launch: Launch | None, token_file: str
) -> Pool:
    """Let servers take part in a dispatcher's plans: those of this launch, which are waited for, or any from outside.

    A collective. ValueError on every rank: the address, the token or the transport cannot be used.

    Args:
        launch: None where servers come from outside.
        token_file: for servers from outside: file with the run's token, made if there is none.
    """
    groups, store = dispatcher.groups, None if launch is None else launch.store
    choice, timeout_s = Choice(config.attention_server_transport), config.attention_server_timeout
    directory, memory, error = None, None, None
    place: tuple[bytes, str, int] | None = None
    if groups.rank == 0:
        try:
            host, port = parse_address(
                config.attention_server_address, setting="attention_server_address"
            )
            token = make_token()
            if launch is None:
                path = Path(token_file)
                if not path.exists():
                    write_token(path, token)
                token = read_token(path)
            ended = (lambda: None) if store is None else partial(store.set, "ended", "")
            directory = Directory(host, port, token, ended=ended)
            place = token, directory.host, directory.port
        except (OSError, ValueError) as caught:
            error = caught
    place = groups.all_gather(place)[0]
    if place is not None:
        token, host, port = place
        try:
            # Of use to NIXL where it must open a port: on the interface by which this rank reaches
            # the directory.
            towards = address_towards(host, port) if choice is Choice.NIXL else ""
            memory = make_memory(choice, dispatcher.device, towards)
        except (OSError, ValueError) as caught:
            error = caught
    try:
        groups.raise_together(error)
    except ValueError:
        if directory is not None:
            directory.close()
        raise
    assert memory is not None
    if store is not None and directory is not None:
        for name, value in (
            ("transport", choice),
            ("token", token.hex()),
            ("address", f"{host}:{port}"),
        ):
            store.set(name, value)
    elif directory is not None:
        logger.warning(
            "attention servers join with: hf-distca serve --join %s:%d --token-file %s",
            host,
            port,
            token_file,
        )
    pool = Pool(
        dispatcher, token, directory, memory, ranks_serve=config.ranks_serve, timeout_s=timeout_s
    )
    dispatcher.remote = pool
    if launch is not None:
        pool.wait_for(int(config.attention_servers), timeout_s)
    return pool


def on_cpu(use_cpu: bool) -> bool:
    """Return whether a run keeps to the CPU, by its arguments or by how it was launched."""
    return (
        use_cpu
        or parse_flag_from_env("ACCELERATE_USE_CPU")
        or os.environ.get("ACCELERATE_TORCH_DEVICE") == "cpu"
    )

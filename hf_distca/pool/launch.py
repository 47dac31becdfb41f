"""Dedicated attention servers of a training run: the last processes of its own launch, or a pool started apart."""

import logging
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch.cuda import device_count, is_available

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.pool.child import ChildServer
from hf_distca.pool.directory import Directory
from hf_distca.pool.memory import Choice, Memory, make_memory
from hf_distca.pool.nixl import address_towards
from hf_distca.pool.rank.pool import Pool, use_servers
from hf_distca.pool.token import make_token, parse_address, read_token, write_token

logger = logging.getLogger(__name__)

TOKEN_FILE = "attention_server_token"

_OF_THE_WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which a process takes part in the launch's process group; a server must not."""


@dataclass(frozen=True)
class Launch:
    """How this process takes part in a launch whose last processes are servers.

    Attributes:
        servers: how many.
        store: the launcher's, where rank 0 leaves the address and the token for them.
        serves_on: device of this process if it is a server; None: it is a rank.
    """

    servers: int
    store: dist.Store | None
    serves_on: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the connection: Trainer saves its arguments, and with them this."""
        return {"servers": self.servers, "store": None, "serves_on": self.serves_on}


def split_launch(servers: int, *, cpu: bool) -> Launch:
    """Decide which processes of this launch are ranks and which, the last ones, are attention servers.

    Call it before anything looks at the world. Ranks are a world of their own from then on: accelerate, DDP, FSDP2 and
    DeepSpeed see them alone. A server belongs to no world; `serve_if_server` is what makes it serve.

    Args:
        servers: how many processes become servers.
        cpu: servers compute on the CPU even where there is a GPU.

    Raises:
        ValueError: on every process, where the launch has too few processes, or a server's host no GPU for it.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    ranks = world - servers
    if ranks < 1:
        raise ValueError(
            f"attention_servers={servers} of {world} processes leaves no rank to train; start more processes: "
            f"accelerate launch --num_processes {servers + 1} or above"
        )
    if dist.is_initialized() or PartialState._shared_state:
        raise ValueError(
            "torch.distributed or accelerate has started already, but attention_servers divides the processes before "
            "that; make DistCATrainingArguments first in the script"
        )
    own_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.PrefixStore(
        # The launcher's store outlives a restart of all processes, and with it what they left there.
        f"hf_distca/attention_servers/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=own_store and rank == 0,
            wait_for_workers=False,
            multi_tenant=own_store,
        ),
    )
    device = _server_device(cpu=cpu)
    if rank >= ranks:
        store.set(f"wrong with {rank}", _without_device(rank, device))
    wrong = [store.get(f"wrong with {server}").decode() for server in range(ranks, world)]
    if any(wrong):
        raise ValueError(next(filter(None, wrong)))
    if rank >= ranks:
        for name in _OF_THE_WORLD:
            os.environ.pop(name, None)
        return Launch(servers, store, device)
    os.environ["WORLD_SIZE"] = str(ranks)
    if "LOCAL_WORLD_SIZE" in os.environ:
        first = rank - int(os.environ["LOCAL_RANK"])  # of this host
        os.environ["LOCAL_WORLD_SIZE"] = str(min(int(os.environ["LOCAL_WORLD_SIZE"]), ranks - first))
    return Launch(servers, store)


def _server_device(*, cpu: bool) -> str:
    """Return the device of a server of this launch: the GPU of its local rank, or the CPU."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if is_available() and not cpu else "cpu"


def _without_device(rank: int, device: str) -> str:
    """Return an error message if the device of a server does not exist, else an empty string."""
    if device == "cpu" or int(device.removeprefix("cuda:")) < (count := device_count()):
        return ""
    return (
        f"the attention server of rank {rank} would compute on {device}, but its host has {count} GPUs, and a server "
        "that shares a GPU with a rank adds nothing. Start no more processes on a host than it has GPUs, servers "
        "included; or start servers on other hosts with attention_servers='external' and hf-distca serve"
    )


def serve_if_server(launch: Launch | None, timeout_s: float) -> None:
    """Serve until training ends, then raise SystemExit, if this process is a server of its launch; else return.

    `timeout_s` is how long the server waits for the ranks once it knows their address.
    """
    if launch is None or launch.serves_on is None:
        return
    assert launch.store is not None  # only what was saved has none
    _serve(launch.store, timeout_s, launch.serves_on)
    raise SystemExit(0)


def _serve(store: dist.Store, timeout_s: float, device: str) -> None:
    """Run a server until training ends, in a child: a lost server must not hurt the run."""
    # Ranks load their model first; if they fail instead, the launcher ends this process.
    store.set_timeout(timedelta(days=1))
    address, token, transport = (store.get(name).decode() for name in ("address", "token", "transport"))
    command = [sys.executable, "-m", "hf_distca.cli.main", "serve", "--join", address, "--token-file", "-"]
    command += ["--device", device, "--wait", f"{timeout_s:g}", "--transport", transport]
    ChildServer(command, token + "\n", partial(_has_ended, store)).run()


def _has_ended(store: dist.Store) -> bool:
    """Whether ranks have left word that training is over."""
    try:
        return store.check(["ended"])
    except dist.DistError:  # the process that has the store is gone, and rank 0 with it
        return True


def open_pool(
    dispatcher: Dispatcher,
    launch: Launch | None,
    *,
    address: str,
    token_file: str,
    ranks_serve: bool,
    timeout_s: float,
    transport: str,
) -> Pool:
    """Take servers in: those of this launch, for which it waits, or any that join from outside. A collective.

    Args:
        dispatcher: whose plans they are to work on.
        launch: of this run; None where servers come from outside.
        address: HOST:PORT on which rank 0 takes servers in; port 0 for any that is free.
        token_file: for servers from outside: file with the run's token, made if there is none.
        ranks_serve: whether ranks compute core attention too.
        timeout_s: a server that does not answer for so long is lost.
        transport: what carries rows: auto, tcp or nixl.

    Raises:
        ValueError: on every rank, where the address, the token or the transport cannot be used.
    """
    groups = dispatcher.groups
    token, directory, error = b"", None, None
    place: tuple[str, int] = ("", 0)
    if groups.rank == 0:
        try:
            host, port = parse_address(address, setting="attention_server_address")
            token = make_token() if launch is not None else _file_token(Path(token_file))
            ended = partial(launch.store.set, "ended", "") if launch is not None and launch.store is not None else None
            directory = Directory(host, port, token, ended=ended)
            place = directory.host, directory.port
        except (OSError, ValueError) as caught:
            error = caught
    groups.raise_together(error)
    (token, place), *_ = groups.all_gather((token, place))
    memory: Memory | None = None
    try:
        choice = Choice(transport)
        # Of use to NIXL where it must open a port: on the interface by which this rank reaches the directory.
        address = address_towards(*place) if choice is Choice.NIXL else ""
        memory = make_memory(choice, dispatcher.device, address)
    except (OSError, ValueError) as caught:
        error = caught
    try:
        groups.raise_together(error)
    except ValueError:
        if directory is not None:
            directory.close()
        raise
    assert memory is not None
    if directory is not None:
        reached = f"{directory.host}:{directory.port}"
        if launch is not None and launch.store is not None:
            launch.store.set("transport", transport)
            launch.store.set("token", token.hex())
            launch.store.set("address", reached)
        else:
            logger.warning(
                "attention servers join with: hf-distca serve --join %s --token-file %s", reached, token_file
            )
    pool = use_servers(dispatcher, token, directory, memory, ranks_serve=ranks_serve, timeout_s=timeout_s)
    if launch is not None:
        pool.wait_for(launch.servers, timeout_s)
    return pool


def _file_token(path: Path) -> bytes:
    """Read the token from the file, or write a new one if there is no file."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_token(path, make_token())
    return read_token(path)


def on_cpu(use_cpu: bool) -> bool:
    """Whether a run keeps to the CPU, by its arguments or by how it was launched."""
    return use_cpu or parse_flag_from_env("ACCELERATE_USE_CPU") or os.environ.get("ACCELERATE_TORCH_DEVICE") == "cpu"

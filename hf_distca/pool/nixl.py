"""This process's NIXL agent: registered memory, and one-sided transfers with peers.

NIXL's own functions pickle descriptors. Here addresses and sizes travel as numbers, and metadata
travels in NIXL's binary form.

Ports that are open to strangers. Where a host has RDMA devices, UCX uses no TCP, and nothing
listens. Elsewhere UCX listens on a TCP port of one interface without authentication: a peer that
reaches the port can write to any address of this process. Such an agent is made only where NIXL was
asked for by name.
"""

import base64
import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from hf_distca.checks.refusal import PackageError
from hf_distca.checks.server_rules import ServerPool
from hf_distca.pool.messages import NixlPeer
from hf_distca.pool.wire import LinkLost

CHUNK_BYTES = 32 << 20
"""Most bytes of one transfer. More bytes take several transfers in turn, each with a time-out."""
WAKE_US = 100_000
"""After so many microseconds without an event UCX's thread looks for itself."""

_MODULES = ("nixl_cu12", "nixl_cu13")
_RDMA_DEVICES = Path("/sys/class/infiniband")
_FIRST_POLL_S = 0.0001
_LAST_POLL_S = 0.002
"""Shortest and longest pause between two looks at a transfer; the pause doubles from look to look.
"""

Operation = Literal["READ", "WRITE"]
Piece = tuple[int, int]
"""Address and number of bytes."""


class Space(NamedTuple):
    """A kind of memory, as NIXL names it: DRAM of a host, or VRAM of a GPU by its number."""

    kind: Literal["DRAM", "VRAM"]
    device: int


HOST = Space("DRAM", 0)


def is_installed() -> bool:
    """Return whether this Python has NIXL."""
    return any(find_spec(name) for name in _MODULES)


def installed_package() -> str:
    """Return the name of NIXL's package; raise PackageError if this Python has none."""
    package = next(filter(find_spec, _MODULES), None)
    if package is None:
        raise PackageError(
            "NIXL is not installed; install nixl-cu12 or nixl-cu13, for the CUDA version of PyTorch"
        )
    return package


def has_rdma() -> bool:
    """Return whether this host has RDMA devices."""
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())


def address_towards(host: str, port: int) -> str:
    """Return this host's address on the route to another one; nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, port or 1))
        return str(sock.getsockname()[0])


class NixlAgent:
    """NIXL in this process, under a unique name. Several threads may call its methods.

    `listens_on` is the name of the interface on which UCX listens: the one with this address, or ""
    where the host has RDMA devices.
    """

    def __init__(self, address: str) -> None:
        package = installed_package()
        api = import_module(f"{package}._api")
        bindings = import_module(f"{package}._bindings")
        if "NIXL_LOG_LEVEL" not in os.environ:  # NIXL's own; else it prints a line for every agent
            logging.getLogger("nixl").setLevel(logging.WARNING)
        self.listens_on = "" if has_rdma() else _interface_with(address)
        self.name = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._ends: Counter[str] = Counter()  # of links, by the name of the peer
        errors = [
            value
            for value in vars(bindings).values()
            if isinstance(value, type) and issubclass(value, Exception)
        ]
        # The others are raised for numbers that are no addresses, and for text that is no base64.
        self._errors: tuple[type[Exception], ...] = (*errors, RuntimeError, TypeError, ValueError)
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self._agent = api.nixl_agent(self.name, api.nixl_agent_config(backends=[], sync_mode=sync))
        # The thread of an agent with default settings polls without a pause, and takes a core from
        # the computation. `nixl_agent_config` cannot set the pause.
        settings = bindings.nixlAgentConfig()
        settings.useProgThread = True
        settings.syncMode = sync.value
        settings.pthrDelay = WAKE_US
        self._agent.agent = bindings.nixlAgent(self.name, settings)
        config = f"NET_DEVICES={self.listens_on}" if self.listens_on else "TLS=^tcp"
        with self._failures(f"could not start UCX with {config}"):
            self._agent.create_backend("UCX", {"engine_config": config})

    def register(self, memory: Piece, space: Space) -> str:
        """Register memory; return the metadata of all memory registered so far, in base64."""
        with self._failures(f"could not register {memory[1]} bytes of {space.kind}"):
            self._agent.register_memory([(*memory, space.device, "")], space.kind)
        return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def meet(self, peer: str, metadata: str) -> None:
        """Add a peer's memory, or count one more use of the peer.

        The peer stays known until `forget` has been called once for each call of `meet`.
        """
        with self._lock:
            self.learn(peer, metadata)
            self._ends[peer] += 1

    def learn(self, peer: str, metadata: str) -> None:
        """Add memory that a peer has registered since `meet`."""
        with self._failures("could not use the peer's metadata"):
            name = self._agent.add_remote_agent(base64.b64decode(metadata, validate=True))
        if isinstance(name, bytes):
            name = name.decode()
        if name != peer:
            raise LinkLost("the metadata and the peer have different names")

    def forget(self, peer: str) -> None:
        """End one use of a peer; the last one removes the peer's memory.

        A lost peer that is not forgotten cannot be met again.
        """
        with self._lock:
            self._ends[peer] -= 1
            if self._ends[peer] <= 0:
                del self._ends[peer]
                with contextlib.suppress(*self._errors):
                    self._agent.remove_remote_agent(peer)

    def transfer(
        self,
        operation: Operation,
        local: Sequence[Piece],
        space: Space,
        remote: Sequence[Piece],
        peer: NixlPeer,
        timeout_s: float,
        peer_is_gone: Callable[[], bool],
    ) -> None:
        """Read from a peer's memory into pieces of this process, or write there.

        NIXL refuses unregistered memory.

        Args:
            peer_is_gone: says whether the peer has left.

        Raises:
            LinkLost: the peer has left, or a chunk took `timeout_s`. Nobody may use the memory at
                both ends again: rows may still arrive.
        """
        for local_chunk, remote_chunk in zip(_chunks(local), _chunks(remote), strict=True):
            handle: Any = None
            try:
                with self._failures(f"{operation.lower()} failed"):
                    local_memory = self._agent.get_xfer_descs(
                        [(*local_chunk, space.device)], space.kind
                    )
                    remote_memory = self._agent.get_xfer_descs(
                        [(*remote_chunk, peer.device)], peer.memory
                    )
                    handle = self._agent.initialize_xfer(
                        operation, local_memory, remote_memory, peer.name
                    )
                    self._run(handle, timeout_s, peer_is_gone)
            finally:
                if handle is not None:
                    # NIXL refuses to release a transfer that is still under way.
                    with contextlib.suppress(*self._errors):
                        self._agent.release_xfer_handle(handle)

    def _run(self, handle: Any, timeout_s: float, peer_is_gone: Callable[[], bool]) -> None:
        """Start a transfer and wait for its end."""
        state = self._agent.transfer(handle)
        begin = time.monotonic()
        pause_s = _FIRST_POLL_S
        while state == "PROC":  # in progress
            if time.monotonic() - begin > timeout_s:
                raise LinkLost(f"no rows moved for {timeout_s:g} s")
            if peer_is_gone():
                raise LinkLost("the peer left")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise LinkLost(f"NIXL: a transfer ended as {state}")

    @contextlib.contextmanager
    def _failures(self, action: str) -> Iterator[None]:
        """Turn NIXL's errors into LinkLost."""
        try:
            yield
        except self._errors as error:
            raise LinkLost(f"NIXL {action}: {error}") from error


def _interface_with(address: str) -> str:
    """Return the name of this host's network interface that has an address."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    raise ServerPool.NO_INTERFACE.error(address=address)


def _chunks(pieces: Sequence[Piece]) -> list[Piece]:
    """Divide pieces into chunks of at most `CHUNK_BYTES`."""
    return [
        (address + start, min(CHUNK_BYTES, size - start))
        for address, size in pieces
        for start in range(0, size, CHUNK_BYTES)
    ]

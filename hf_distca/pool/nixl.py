"""This process's NIXL agent: registered memory, and one-sided transfers to and from the memory of peers.

NIXL's helpers for descriptors pickle; here addresses and sizes are numbers and metadata is NIXL's
own binary form.

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

from hf_distca.pool.messages import NixlPeer
from hf_distca.pool.wire import LinkLost
from hf_distca.refusal import PackageError, RefusedError

CHUNK_BYTES = 32 << 20
"""Most bytes of one transfer: longer ones are made one after another, each with its own time-out.
"""
WAKE_US = 100_000
"""After so many microseconds without an event UCX's thread looks for itself."""

_MODULES = ("nixl_cu12", "nixl_cu13")
_RDMA_DEVICES = Path("/sys/class/infiniband")
_POLL_S = (0.0001, 0.002)

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

    Without RDMA devices UCX listens on the interface of this address; `listens_on` is the
    interface's name.
    """

    def __init__(self, address: str) -> None:
        package = next(filter(find_spec, _MODULES), None)
        if package is None:
            raise PackageError(
                "NIXL is not installed; install nixl-cu12 or nixl-cu13, for the CUDA version of "
                "PyTorch"
            )
        api, bindings = import_module(f"{package}._api"), import_module(f"{package}._bindings")
        if "NIXL_LOG_LEVEL" not in os.environ:  # NIXL's own; else it prints a line for every agent
            logging.getLogger("nixl").setLevel(logging.WARNING)
        self.listens_on = ""
        if not has_rdma():
            found = psutil.net_if_addrs().items()
            self.listens_on = next(
                (name for name, each in found if address in {one.address for one in each}), ""
            )
            if not self.listens_on:
                raise RefusedError(
                    f"no network interface of this host has the address {address}, to which NIXL "
                    "binds its port; use an address of an interface of this host"
                )
        self.name = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._ends: Counter[str] = Counter()  # of each peer
        errors = [
            one
            for one in vars(bindings).values()
            if isinstance(one, type) and issubclass(one, Exception)
        ]
        # The further ones are for numbers that are no addresses, and for what is no base64.
        self._errors: tuple[type[Exception], ...] = (*errors, RuntimeError, TypeError, ValueError)
        sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self._agent = api.nixl_agent(self.name, api.nixl_agent_config(backends=[], sync_mode=sync))
        # An agent's default thread asks for news without a pause, and takes a core from whoever
        # computes.
        settings = bindings.nixlAgentConfig()
        settings.useProgThread, settings.syncMode, settings.pthrDelay = True, sync.value, WAKE_US
        self._agent.agent = bindings.nixlAgent(self.name, settings)
        config = f"NET_DEVICES={self.listens_on}" if self.listens_on else "TLS=^tcp"
        with self._failures(f"could not start UCX with {config}"):
            self._agent.create_backend("UCX", {"engine_config": config})

    def register(self, memory: Piece, space: Space) -> str:
        """Register memory, and return what a peer needs to reach all memory registered so far, in base64."""
        with self._failures(f"could not register {memory[1]} bytes of {space.kind}"):
            self._agent.register_memory([(*memory, space.device, "")], space.kind)
        return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def meet(self, peer: str, metadata: str) -> None:
        """Get to know a peer until it is forgotten as often as it was met."""
        with self._lock:
            self.learn(peer, metadata)
            self._ends[peer] += 1

    def learn(self, peer: str, metadata: str) -> None:
        """Get to know memory that a peer has registered since it was met."""
        with self._failures("could not use the peer's metadata"):
            found = self._agent.add_remote_agent(base64.b64decode(metadata, validate=True))
        if (found.decode() if isinstance(found, bytes) else found) != peer:
            raise LinkLost("the metadata and the peer have different names")

    def forget(self, peer: str) -> None:
        """Make no more transfers with a peer that was met.

        Without this a lost peer cannot be met again.
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
        gone: Callable[[], bool],
    ) -> None:
        """Read from a peer's memory into pieces of this process, or write there.

        NIXL refuses unregistered memory.

        LinkLost: the peer is `gone`, or a chunk took `timeout_s`. Nobody may use the memory at both
        ends again: rows may still arrive.
        """
        for own, other in zip(_chunks(local), _chunks(remote), strict=True):
            handle: Any = None
            try:
                with self._failures(f"{operation.lower()} failed"):
                    here = self._agent.get_xfer_descs([(*own, space.device)], space.kind)
                    there = self._agent.get_xfer_descs([(*other, peer.device)], peer.memory)
                    handle = self._agent.initialize_xfer(operation, here, there, peer.name)
                    state = self._agent.transfer(handle)
                    begin = time.monotonic()
                    pause, longest = _POLL_S
                    while state == "PROC":
                        if time.monotonic() - begin > timeout_s:
                            raise LinkLost(f"no rows moved for {timeout_s:g} s")
                        if gone():
                            raise LinkLost("the peer left")
                        time.sleep(pause)
                        pause = min(2 * pause, longest)
                        state = self._agent.check_xfer_state(handle)
                    if state != "DONE":
                        raise LinkLost(f"NIXL: a transfer ended as {state}")
            finally:
                if handle is not None:
                    with contextlib.suppress(
                        *self._errors
                    ):  # NIXL keeps a transfer that is still under way
                        self._agent.release_xfer_handle(handle)

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise LinkLost(f"NIXL {what}: {error}") from error


def _chunks(pieces: Sequence[Piece]) -> list[Piece]:
    return [
        (address + start, min(CHUNK_BYTES, size - start))
        for address, size in pieces
        for start in range(0, size, CHUNK_BYTES)
    ]

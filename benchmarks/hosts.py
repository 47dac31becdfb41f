"""Two ranks of one machine as two hosts: network namespaces joined by a link of limited rate. Needs root."""

import ctypes
import os
import subprocess

import torch.distributed as dist

ADDRESSES = ("10.213.77.1", "10.213.77.2")
NETWORK_NAMESPACE = 0x40000000
"""CLONE_NEWNET of setns(2), which Python has from 3.12 on."""


class Hosts:
    """Two network namespaces and the pair of devices that joins them; a context manager.

    Attributes:
        names: of the namespaces, others in every process, so that two checkouts can be measured in turns.
    """

    def __init__(self) -> None:
        self.names = tuple(f"distca{os.getpid()}{side}" for side in "ab")
        self._devices = tuple(f"dv{os.getpid()}{side}" for side in "ab")

    def __enter__(self) -> "Hosts":
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self._devices[0], "type", "veth", "peer", "name", self._devices[1])
        for name, address, device in zip(self.names, ADDRESSES, self._devices, strict=True):
            ip("link", "set", device, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)

    def move_in(self, rank: int) -> None:
        """Make this process one on the host of a rank: it and what it starts see nothing but the link."""
        with open(f"/run/netns/{self.names[rank]}") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), NETWORK_NAMESPACE) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.names[rank]}")
        os.environ.update(MASTER_ADDR=ADDRESSES[0], GLOO_SOCKET_IFNAME=self._devices[rank])

    def limit(self, rank: int, rate_mbit: float | None) -> None:
        """Limit what the host of this rank sends; None: no limit. A collective."""
        device = self._devices[rank]
        subprocess.run(["tc", "qdisc", "del", "dev", device, "root"], check=False, stderr=subprocess.DEVNULL)
        if rate_mbit is not None:
            shape = ["tbf", "rate", f"{rate_mbit:.0f}mbit", "burst", "256kb", "latency", "400ms"]
            subprocess.run(["tc", "qdisc", "add", "dev", device, "root", *shape], check=True)
        dist.barrier()


def ip(*words: str) -> None:
    """Run the ip command."""
    subprocess.run(["ip", *words], check=True)

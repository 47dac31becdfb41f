"""Ranks of one machine as two hosts: network namespaces joined by a link of limited rate.

Needs root.

Ranks of one host reach each other by the namespace's loopback device, which nothing limits, also
where gloo is bound to the device of the link: what is sent to an address of the namespace itself
never gets to that device.
"""

import ctypes
import os
import subprocess
from pathlib import Path

import torch.distributed as dist

ADDRESSES = ("10.213.77.1", "10.213.77.2")
NETWORK_NAMESPACE = 0x40000000
"""CLONE_NEWNET of setns(2), which Python has from 3.12 on."""


class Hosts:
    """Two network namespaces and the pair of devices that joins them; a context manager.

    Names are others in every process, so that two checkouts can be measured in turns.
    """

    def __init__(self, ranks_per_host: int = 1) -> None:
        self.names = tuple(f"distca{os.getpid()}{side}" for side in "ab")
        self.devices = tuple(f"dv{os.getpid()}{side}" for side in "ab")
        self._ranks_per_host = ranks_per_host

    def __enter__(self) -> "Hosts":
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.devices[0], "type", "veth", "peer", "name", self.devices[1])
        for name, address, device in zip(self.names, ADDRESSES, self.devices, strict=True):
            ip("link", "set", device, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)

    def host_of(self, rank: int) -> int:
        return rank // self._ranks_per_host

    def move_in(self, rank: int) -> None:
        """Make this process one on the host of a rank: it and what it starts see nothing but it and
        the link.
        """
        host = self.host_of(rank)
        with open(f"/run/netns/{self.names[host]}") as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), NETWORK_NAMESPACE) != 0:
                raise OSError(
                    ctypes.get_errno(), f"cannot enter the network namespace {self.names[host]}"
                )
        os.environ.update(MASTER_ADDR=ADDRESSES[0], GLOO_SOCKET_IFNAME=self.devices[host])

    def limit(self, rank: int, rate_mbit: float | None) -> None:
        """Limit the Mbit/s that the ranks of a host send together; None: no limit. A collective."""
        if rank % self._ranks_per_host == 0:
            device = self.devices[self.host_of(rank)]
            subprocess.run(
                ["tc", "qdisc", "del", "dev", device, "root"],
                check=False,
                stderr=subprocess.DEVNULL,
            )
            if rate_mbit is not None:
                shape = [
                    "tbf",
                    "rate",
                    f"{rate_mbit:.0f}mbit",
                    "burst",
                    "256kb",
                    "latency",
                    "400ms",
                ]
                subprocess.run(["tc", "qdisc", "add", "dev", device, "root", *shape], check=True)
        dist.barrier()

    def sent(self, rank: int) -> int:
        """Bytes that the host of this rank has sent over the link so far; its process is on that
        host.
        """
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            device, _, counters = line.partition(":")
            if device.strip() == self.devices[self.host_of(rank)]:
                return int(counters.split()[8])  # after eight numbers of what was received
        raise RuntimeError(f"rank {rank} is on no host: call move_in first")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)

"""Which address gloo, which carries words between ranks, gives to other hosts."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address

from hf_distca.cli.findings.finding import Finding

INTERFACE = "GLOO_SOCKET_IFNAME"
HOW = f"set {INTERFACE} on every host to an interface that the others reach, such as eth0 (ip -brief address)"


def network_findings(*, several_hosts: bool) -> list[Finding]:
    """The interface that gloo was told, or else the address that this host's name resolves to."""
    host, address = socket.gethostname(), None
    with suppress(OSError):
        address = socket.gethostbyname(host)
    interfaces = [name for _, name in socket.if_nameindex()]
    return [gloo_finding(os.environ.get(INTERFACE), interfaces, host, address, several_hosts=several_hosts)]


def gloo_finding(
    named: str | None, interfaces: Sequence[str], host: str, address: str | None, *, several_hosts: bool
) -> Finding:
    """What gloo goes by.

    Args:
        named: GLOO_SOCKET_IFNAME; None where it is not set.
        interfaces: of this host.
        host: its name.
        address: that the name resolves to; None if to none.
        several_hosts: whether processes were launched on others too.
    """
    if named is not None:
        missing = [name for name in named.split(",") if name not in interfaces]
        if missing:
            found = f"{named}, but this host has no interface {', '.join(missing)}, only {', '.join(interfaces)}"
            return Finding(INTERFACE, found, HOW, needed=True)
        return Finding(INTERFACE, named)
    if address is None:
        found = f"not set, and this host's name {host!r} resolves to no address"
    elif ip_address(address).is_loopback:
        found = f"not set, and this host's name {host!r} resolves to {address}, which no other host reaches"
    else:
        return Finding(INTERFACE, f"not set; this host's name {host!r} resolves to {address}")
    if several_hosts:
        return Finding(INTERFACE, found, HOW, needed=True)
    return Finding(INTERFACE, f"{found}; that is enough on one host")

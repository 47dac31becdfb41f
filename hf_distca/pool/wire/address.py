"""Addresses as users write them."""


def parse_address(text: str, least_port: int = 0) -> tuple[str, int]:
    """Host and port of HOST:PORT; an IPv6 host may stand in brackets.

    Raises:
        ValueError: it is something else.
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not least_port <= int(port) <= 65535:
        raise ValueError(f"must be HOST:PORT with a port from {least_port} to 65535, got {text!r}")
    return host, int(port)

"""The run's token, a secret that ranks and servers of a run share, and addresses of users."""

import os
import secrets
import stat
import string
from pathlib import Path
from tempfile import NamedTemporaryFile

from hf_distca.checks.server_rules import ServerPool

TOKEN_BYTES = 32
"""Bytes of a token: as many as the digest of the HMAC-SHA256 that proves it."""


def parse_token(text: str) -> bytes:
    """Return the token of 64 hexadecimal digits.

    ValueError: the text is no token. The error does not show the text, which may be a secret.
    """
    digits = text.strip()
    if len(digits) == 2 * TOKEN_BYTES and set(digits) <= set(string.hexdigits):
        return bytes.fromhex(digits)
    raise ServerPool.NOT_A_TOKEN.error(digits=2 * TOKEN_BYTES, characters=len(digits))


def make_token() -> bytes:
    """Return a new random token."""
    return secrets.token_bytes(TOKEN_BYTES)


def write_token(path: Path, token: bytes) -> None:
    """Write a token to a file that only its owner can read, replacing a file of that name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A new file is written and renamed: an old file might be open elsewhere, or readable by others.
    with NamedTemporaryFile("w", dir=path.parent, delete=False) as new_file:
        try:
            new_file.write(token.hex() + "\n")
            new_file.flush()
            os.replace(new_file.name, path)
        except OSError:
            os.unlink(new_file.name)
            raise


def read_token(path: str | Path) -> bytes:
    """Read a token from a file that only its owner can read, or raise ValueError."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ServerPool.READABLE_TOKEN.error(path=path, mode=f"{mode:04o}")
            # More than the digits of a token and their line end; a large file is not read wholly.
            return parse_token(file.read(4 * TOKEN_BYTES))
    except OSError as error:
        raise ServerPool.NO_TOKEN_FILE.error(path=path, why=error.strerror) from error


def parse_address(text: str, least_port: int = 0, setting: str = "the address") -> tuple[str, int]:
    """Return host and port of HOST:PORT or [HOST]:PORT."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not least_port <= int(port) <= 65535:
        raise ServerPool.ADDRESS.error(setting=setting, given=text, least=least_port)
    return host, int(port)

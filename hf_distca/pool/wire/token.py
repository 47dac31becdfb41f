"""The run's token: a secret that ranks and servers of one run share."""

import os
import secrets
import stat
from pathlib import Path

TOKEN_BYTES = 32


class TokenError(ValueError):
    """A token cannot be used; the message says what was found and how to fix it."""


def make_token() -> bytes:
    """A new random token of TOKEN_BYTES bytes."""
    return secrets.token_bytes(TOKEN_BYTES)


def parse_token(text: str) -> bytes:
    """The token from its text form, 64 hexadecimal digits; spaces around it do not count.

    Raises:
        TokenError: the text is something else. The message does not show it.
    """
    digits = text.strip()
    try:
        token = bytes.fromhex(digits)
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES or len(digits) != 2 * TOKEN_BYTES:
        raise TokenError(
            f"a token is {2 * TOKEN_BYTES} hexadecimal digits, got {len(digits)} characters that are not that; "
            "use the token that the training run wrote"
        )
    return token


def write_token(path: str | Path, token: bytes) -> None:
    """Write a token to a file that only its owner can read, replacing a file of that name.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    # A new file, renamed: an old one might be open elsewhere, or be readable by others.
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(token.hex() + "\n")
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_token(path: str | Path) -> bytes:
    """Read a token from a file that only its owner can read.

    Raises:
        TokenError: there is no such file, others may read it, or it holds no token.
    """
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise TokenError(
                    f"{path} can be read or written by others (mode {mode:04o}); "
                    "make it yours alone with chmod 600, or make a new token"
                )
            return parse_token(file.read(4 * TOKEN_BYTES))
    except OSError as error:
        raise TokenError(f"cannot read the token file {path}: {error.strerror}") from error

"""HELLO, WELCOME and REFUSED: how a connection begins, between a rank and a server or a server and the directory."""

from dataclasses import asdict, dataclass
from typing import Any

from hf_distca.pool.messages.fields import Fields

RANKS = 2**16
"""Ranks of a run, at most."""


@dataclass(frozen=True)
class RankHello:
    """A rank's first message to a server.

    Attributes:
        rank: which one it is.
        ranks: how many there are.
    """

    rank: int
    ranks: int

    def header(self) -> dict[str, Any]:
        """As a message's header."""
        return asdict(self)

    @classmethod
    def read(cls, header: dict[str, Any]) -> "RankHello":
        """From a message's header.

        Raises:
            ProtocolError: it is not sane.
        """
        fields = Fields("a rank's hello", header)
        ranks = fields.whole("ranks", 1, RANKS)
        return cls(rank=fields.whole("rank", 0, ranks - 1), ranks=ranks)


@dataclass(frozen=True)
class ServerHello:
    """A server's first message to the directory.

    Attributes:
        host: where it listens for ranks; empty: at the address from which it comes.
        port: its TCP port.
        device: what it computes on, for messages and logs.
        pairs_per_second: its speed, measured when it started (see `hf_distca.kernels.speed`).
    """

    host: str
    port: int
    device: str
    pairs_per_second: float

    def header(self) -> dict[str, Any]:
        """As a message's header."""
        return asdict(self)

    @classmethod
    def read(cls, header: dict[str, Any]) -> "ServerHello":
        """From a message's header.

        Raises:
            ProtocolError: it is not sane.
        """
        fields = Fields("a server's hello", header)
        return cls(
            host=fields.text("host", 255),
            port=fields.whole("port", 1, 65535),
            device=fields.text("device", 63),
            pairs_per_second=fields.real("pairs_per_second", positive=True),
        )


@dataclass(frozen=True)
class DirectoryWelcome:
    """The directory's answer to a server's hello.

    Attributes:
        server: id of its membership.
    """

    server: int

    def header(self) -> dict[str, Any]:
        """As a message's header."""
        return asdict(self)

    @classmethod
    def read(cls, header: dict[str, Any]) -> "DirectoryWelcome":
        """From a message's header.

        Raises:
            ProtocolError: it is not sane.
        """
        return cls(server=Fields("a welcome", header).whole("server"))


@dataclass(frozen=True)
class Refusal:
    """What whoever ends a connection says before.

    Attributes:
        reason: for people.
    """

    reason: str

    def header(self) -> dict[str, Any]:
        """As a message's header; a long reason is cut."""
        return {"reason": self.reason[:1000]}

    @classmethod
    def read(cls, header: dict[str, Any]) -> "Refusal":
        """From a message's header.

        Raises:
            ProtocolError: it is not sane.
        """
        return cls(reason=Fields("a refusal", header).text("reason", 1000))

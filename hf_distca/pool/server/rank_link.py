"""The server's end of the connection to one trainer."""

from collections.abc import Callable, Sequence
from typing import Any

from hf_distca.pool.messages.kinds import Kind
from hf_distca.pool.wire import Channel, Outbox, Peer, ProtocolError
from hf_distca.pool.wire.channel import Buffer

_FLUSH_S = 1.0


class RankLink:
    """One trainer that is connected.

    Args:
        peer: the trainer, after its hello {"rank", "ranks"}.

    Attributes:
        rank: which trainer it is.
        name: for messages.
        channel: where its messages come from.
        in_flight: calls of it that have begun and whose replies are not sent; guarded by `Calls`.
        gone: nothing that comes from it counts any more.

    Raises:
        ProtocolError: the hello is not sane.
    """

    def __init__(self, peer: Peer) -> None:
        rank, ranks = (peer.hello.header.get(name) for name in ("rank", "ranks"))
        if type(rank) is not int or type(ranks) is not int or not 0 <= rank < ranks <= 2**16:
            raise ProtocolError(
                f"a trainer must give its rank and the number of ranks, got {rank!r} and {ranks!r}"[:200]
            )
        self.rank = rank
        self.name = f"trainer {rank} ({peer.name})"
        self.channel: Channel = peer.channel
        self.in_flight = 0
        self.gone = False
        self._outbox = Outbox(peer.channel, f"send {peer.name}")

    def welcome(self) -> None:
        """Tell the trainer that it is connected."""
        self._outbox.put(Kind.WELCOME, {})

    def reply(
        self, header: dict[str, Any], buffers: Sequence[Buffer], sequence: int, sent: Callable[[], None]
    ) -> None:
        """Queue a reply; `sent` is called when it has left, or never will."""
        self._outbox.put(Kind.REPLY, header, buffers, sequence, sent=sent)

    def refuse(self, reason: str) -> None:
        """Tell the trainer why, then end the connection; its own thread notices."""
        self.gone = True
        self._outbox.put(Kind.REFUSED, {"reason": reason}, sent=self.channel.shut_down)

    def is_gone(self) -> bool:
        """Whether the trainer has left or was refused, asked where nothing is received from it."""
        return self.gone or self.channel.hung_up()

    def finish(self) -> None:
        """Send what is queued, within reason, and end the connection."""
        self.gone = True
        self._outbox.finish(_FLUSH_S)

"""The server's end of the connection to one rank."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from hf_distca.pool.messages.call import Reply
from hf_distca.pool.messages.hello import RankHello, Refusal
from hf_distca.pool.messages.kinds import Kind
from hf_distca.pool.transport.contract import Memory, Transport
from hf_distca.pool.transport.negotiation import accept
from hf_distca.pool.wire import Channel, Outbox, Peer

_FLUSH_S = 1.0


class RankLink:
    """One rank that is connected.

    Args:
        peer: the rank, after its hello.
        rows_s: rows on their way here or back may stand still for so long.
        memory: where the rows of all calls lie.

    Attributes:
        rank: which one it is.
        name: for messages.
        channel: where its messages come from.
        transport: what carries its rows.
        rows_s: as above.
        in_flight: calls of it that have begun and whose replies are not sent; guarded by `Calls`.
        gone: nothing that comes from it counts any more.

    Raises:
        ProtocolError: the hello is not sane.
    """

    def __init__(self, peer: Peer, rows_s: float, memory: Memory) -> None:
        self.rank = RankHello.read(peer.hello.header).rank
        self.name = f"rank {self.rank} ({peer.name})"
        self.channel: Channel = peer.channel
        self.transport: Transport
        self.transport, self._accepted = accept(peer.channel, memory, peer.hello.header)
        self.rows_s = rows_s
        self.in_flight = 0
        self.gone = False
        self._outbox = Outbox(peer.channel, f"send {peer.name}")

    def welcome(self) -> None:
        """Tell the rank that it is connected."""
        self._outbox.put(partial(self.channel.send, Kind.WELCOME, self._accepted))

    def reply(self, reply: Reply, rows: Sequence[Tensor], sequence: int, sent: Callable[[], None]) -> None:
        """Queue a reply; `sent` is called when it has left, or never will."""
        send = partial(self.transport.send, Kind.REPLY, reply.header(), rows, sequence, self.rows_s)
        self._outbox.put(send, sent=sent)

    def refuse(self, reason: str) -> None:
        """Tell the rank why, then end the connection; its own thread notices."""
        self.gone = True
        refusal = partial(self.channel.send, Kind.REFUSED, Refusal(reason).header())
        self._outbox.put(refusal, sent=self.channel.shut_down)

    def is_gone(self) -> bool:
        """Whether the rank has left or was refused, asked where nothing is received from it."""
        return self.gone or self.channel.hung_up()

    def finish(self) -> None:
        """Send what is queued, within reason, and end the connection."""
        self.gone = True
        self._outbox.finish(_FLUSH_S)
        self.transport.close()

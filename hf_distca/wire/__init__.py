"""Authenticated messages over TCP between trainers and dedicated attention servers.

A leaf: the standard library only. What travels is a fixed binary head, a small JSON object and raw bytes, never
pickled objects. A peer proves that it knows the run's token before anything else is read from it. Nothing is
encrypted: the token keeps strangers out of a network whose wires are trusted.
"""

from .directory import Directory, Membership, ServerInfo, State
from .errors import AuthenticationError, LinkLost, PeerLeft, ProtocolError
from .framing import Channel, Frame, Kind
from .link import PendingReply, ServerLink
from .listener import Listener, Peer
from .outbox import Outbox
from .token import TokenError, make_token, parse_token, read_token, write_token

__all__ = [
    "AuthenticationError",
    "Channel",
    "Directory",
    "Frame",
    "Kind",
    "LinkLost",
    "Listener",
    "Membership",
    "Outbox",
    "Peer",
    "PeerLeft",
    "PendingReply",
    "ProtocolError",
    "ServerInfo",
    "ServerLink",
    "State",
    "TokenError",
    "make_token",
    "parse_token",
    "read_token",
    "write_token",
]

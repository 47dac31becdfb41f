"""Authenticated messages over TCP.

A leaf: the standard library only. What travels is a fixed binary head, a small JSON object and raw bytes, never
pickled objects; what the messages are is for those to say who send them. A peer proves that it knows the run's token
before anything else is read from it. Nothing is encrypted: the token keeps strangers out of a network whose wires are
trusted.
"""

from .channel import Buffer, Channel, Frame
from .errors import AuthenticationError, LinkLost, MismatchError, PeerLeft, ProtocolError
from .listener import Listener, Peer
from .outbox import Outbox
from .token import TokenError, make_token, parse_token, read_token, write_token

__all__ = [
    "AuthenticationError",
    "Buffer",
    "Channel",
    "Frame",
    "LinkLost",
    "Listener",
    "MismatchError",
    "Outbox",
    "Peer",
    "PeerLeft",
    "ProtocolError",
    "TokenError",
    "make_token",
    "parse_token",
    "read_token",
    "write_token",
]

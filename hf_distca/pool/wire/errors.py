"""What can go wrong with a connection."""


class LinkLost(ConnectionError):  # noqa: N818 - says what happened
    """A connection is gone, and with it all that was on its way; the message says why."""


class PeerLeft(LinkLost):
    """The peer closed the connection between two messages."""


class ProtocolError(LinkLost):
    """The peer sent something that it must not send; the connection is closed."""


class MismatchError(ProtocolError):
    """Both peers are as they should be and cannot work together; another try would end alike."""


class AuthenticationError(LinkLost):
    """The peer does not know the run's token, or is not what it was taken for."""

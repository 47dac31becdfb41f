"""What messages between ranks, servers and the directory are."""

from enum import IntEnum

from hf_distca.pool.wire.channel import HELLO, REFUSED, WELCOME

DIRECTORY_SERVICE, SERVER_SERVICE = "directory", "attention server"
"""What listens at the other end of a connection."""


class Kind(IntEnum):
    """What a message is; the first three are those of every connection."""

    HELLO = HELLO  # from the side that connected: who it is
    WELCOME = WELCOME  # to it: it may go on
    REFUSED = REFUSED  # {"reason"}: the connection is about to be closed
    PLAN = 4  # from rank 0 to a server
    CALL = 6  # from a rank to a server
    REPLY = 7  # from the server, with the sequence of the call
    ALIVE = 8  # from a server to the directory: nothing new
    END = 9  # from the directory: training is over

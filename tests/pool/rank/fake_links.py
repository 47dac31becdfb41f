"""Links to servers and a directory that do what a test says."""

from hf_distca.pool.directory import ServerInfo
from hf_distca.pool.messages import Reply
from hf_distca.pool.wire import LinkLost


def server_info(server, port):
    """Of a server that computes 100 pairs/s."""
    return ServerInfo(server, "127.0.0.1", port, "cpu", 100.0)


class FakeReply:
    """What comes back after 3 s."""

    departed, arrived = 10.0, 13.0

    def __init__(self, link):
        self._link = link

    def wait(self, timeout_s):
        if self._link.lost:
            raise LinkLost(self._link.lost)
        return Reply(call_id=0, seconds=1.75, pairs=40)


class FakeLink:
    """A link to a server that computes for 1.75 s; nobody answers at port 1, and port 4000 is on the rank's host.

    Attributes:
        calls: so far.
        sent: other messages.
        lost, within_host: as of a ServerLink.
        closed: whether it is closed.
    """

    def __init__(self, host, port, token, hello, connect_s, rows_s, memory):
        if port == 1:
            raise LinkLost("nobody answers")
        self.calls, self.sent, self.lost, self.closed = [], [], "", False
        self.within_host, self.carried_by = port == 4000, "TCP (TCP was asked for)"

    def send(self, message, payload):
        self.sent.append(message)

    def call(self, call, rows, results, ready):
        self.calls.append(call)
        return FakeReply(self)

    def close(self):
        self.closed, self.lost = True, self.lost or "closed by this rank"


class FakeDirectory:
    """A directory whose members a test sets; notes who is dropped, what they are told, and its own end."""

    def __init__(self):
        self.infos, self.dropped, self.refusals, self.ends = (), [], [], []

    def members(self):
        return self.infos

    def drop(self, member, refusal=""):
        self.dropped.append(member)
        self.refusals.append(refusal)

    def end(self):
        self.ends.append("told")

    def close(self):
        self.ends.append("closed")

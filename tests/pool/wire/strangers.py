"""Random inputs for a port that must not be impressed by them."""

import json
import random
import socket
import struct
from collections import deque

from hf_distca.pool.wire import LinkLost, make_token
from hf_distca.pool.wire.handshake import MAGIC, VERSION, connect, connecting_side

HEAD = struct.Struct("!4sB3xIQQ")


def message(kind, header, payload=b"", payload_bytes=None):
    """A message's bytes, which may say another size of its payload."""
    text = json.dumps(header).encode()
    return HEAD.pack(b"CAD1", kind, len(text), 0, payload_bytes or len(payload)) + text + payload


class Strangers:
    """Makes random inputs, one a call: without the token, with it and nonsense, and some that stay for a while.

    Args:
        port: of the listener.
        token: the run's token, which half of them know.
        service: what listens.
        hello: a sane first message; never one of a true peer, which the listener would take it for.
        valid: messages that are changed and cut off.
        seed: of everything.
    """

    def __init__(self, port, token, service, hello, valid, seed):
        self.port, self.token, self.service = port, token, service
        self.hello, self.valid = hello, valid
        self.random = random.Random(seed)
        self.open = deque()
        self.kinds = [
            self.garbage,
            self.part_of_a_handshake,
            self.another_token,
            self.garbage_after_the_handshake,
            self.part_of_a_message,
            self.changed_message,
            self.oversized,
            self.silence,
        ]

    def __call__(self):
        """One input."""
        try:
            sock = self.random.choice(self.kinds)()
        except (LinkLost, OSError):  # the listener was quicker
            return
        self.open.append(sock)
        while len(self.open) > self.random.randint(0, 30):
            self.open.popleft().close()

    def close(self):
        """End what is still open."""
        while self.open:
            self.open.popleft().close()

    def raw(self, data):
        sock = socket.create_connection(("127.0.0.1", self.port), 5)
        sock.sendall(data)
        return sock

    def authenticated(self, data):
        sock = connect("127.0.0.1", self.port, self.token, self.service, 5)
        sock.settimeout(5)
        sock.sendall(data)
        return sock

    def garbage(self):
        return self.raw(self.random.randbytes(self.random.choice([1, 10, 100, 5000])))

    def part_of_a_handshake(self):
        hello = struct.pack("!4sH32s", MAGIC, VERSION, self.random.randbytes(32)) + self.random.randbytes(40)
        return self.raw(hello[: self.random.randint(0, len(hello))])

    def another_token(self):
        steps = connecting_side(make_token(), self.service)
        sock = self.raw(next(steps)[0])
        sock.sendall(self.random.randbytes(32))
        return sock

    def garbage_after_the_handshake(self):
        start = self.random.choice([b"", self.hello])
        return self.authenticated(start + self.random.randbytes(self.random.choice([1, 28, 3000])))

    def part_of_a_message(self):
        whole = self.hello + self.random.choice(self.valid)
        return self.authenticated(whole[: self.random.randint(0, len(whole) - 1)])

    def changed_message(self):
        whole = bytearray(self.random.choice(self.valid))
        for _ in range(self.random.randint(0, 4)):
            whole[self.random.randrange(len(whole))] = self.random.randrange(256)
        # Never a changed hello, which might become that of a true peer.
        return self.authenticated(self.hello + whole)

    def oversized(self):
        kind, size = self.random.randint(1, 9), 2 ** self.random.randint(16, 63)
        head = HEAD.pack(b"CAD1", kind, min(size, 2**32 - 1), 0, size)
        return self.authenticated(self.random.choice([b"", self.hello]) + head + bytes(1000))

    def silence(self):
        return self.random.choice([self.raw, self.authenticated])(b"")

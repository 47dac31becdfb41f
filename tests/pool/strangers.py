"""Random inputs for a port that must not be impressed by them."""

import json
import random
import socket
import struct
from collections import deque

from hf_distca.pool.messages import encode
from hf_distca.pool.token import make_token
from hf_distca.pool.wire import VERSION, LinkLost, connect


def framed(text):
    """A message's bytes as they travel."""
    return struct.pack("!I", len(text)) + text


def message(message, payload=b"", payload_bytes=None):
    """The bytes of a message, which may name another size of its payload."""
    return framed(encode(message, len(payload) if payload_bytes is None else payload_bytes)) + payload


class Strangers:
    """Makes random inputs, one a call: without the token, with it and nonsense, and some that stay for a while.

    Args:
        hello: bytes of a sane first message; never one of a true peer, which the listener would take it for.
        valid: messages that are changed and cut off.
    """

    def __init__(self, port, token, service, hello, valid, seed):
        self.port, self.token, self.service = port, token, service
        self.hello, self.valid = hello, valid
        self.random = random.Random(seed)
        self.open = deque()
        self.kinds = [
            lambda: self.raw(self.random.randbytes(self.random.choice([1, 10, 100, 5000]))),
            self.part_of_a_handshake,
            lambda: connect("127.0.0.1", self.port, make_token(), self.service, 5),
            self.garbage_after_the_handshake,
            self.part_of_a_message,
            self.changed_message,
            self.changed_fields,
            self.oversized,
            lambda: self.random.choice([self.raw, self.authenticated])(b""),
        ]

    def __call__(self):
        """One input."""
        try:
            end = self.random.choice(self.kinds)()
        except (LinkLost, OSError):  # the listener was quicker
            return
        self.open.append(end)
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
        channel = connect("127.0.0.1", self.port, self.token, self.service, 5)
        channel._sock.sendall(data)
        return channel

    def part_of_a_handshake(self):
        greeting = b"hf_distca %d " % VERSION
        whole = framed(greeting + self.random.randbytes(32)) + framed(self.random.randbytes(32))
        return self.raw(whole[: self.random.randint(0, len(whole))])

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

    def changed_fields(self):
        whole = self.random.choice(self.valid)
        (size,) = struct.unpack("!I", whole[:4])
        name, fields, payload = json.loads(whole[4 : 4 + size])
        value = self.random.choice([None, True, 0, -1, 2**62, 10**400, 0.5, "x" * 3000, [], [[1]], {"x": 1}])
        field = self.random.choice([*fields, "x"])
        changed = json.dumps([name, {**fields, field: value}, self.random.choice([payload, value])]).encode()
        return self.authenticated(self.hello + framed(changed) + whole[4 + size :])

    def oversized(self):
        start = self.random.choice([b"", self.hello])
        return self.authenticated(start + struct.pack("!I", 2 ** self.random.randint(17, 32) - 1) + bytes(1000))

"""Thousands of things that a server must not be impressed by, while it serves."""

import contextlib
import json
import random
import socket
import threading
import time
from collections import deque
from dataclasses import replace

import pytest

from hf_distca.pool.directory import Directory
from hf_distca.pool.messages import Alive, End, Places, Reply, plan_tables
from hf_distca.pool.token import make_token
from hf_distca.pool.transport import Choice, rank_hello
from hf_distca.pool.wire import SERVER, VERSION, Channel, LinkLost
from tests.pool.ends import (
    SLIM,
    FakeRank,
    framed,
    make_call,
    make_nano_batch,
    memory_of,
    message,
    needs_nixl,
    run_calls,
)
from tests.pool.servers import ServeCommand


class Strangers:
    """Makes random inputs, one a call: without the token, with it and nonsense, and some that stay for a while.

    Those that know the token claim to be rank 7, which the plan does not know.
    """

    def __init__(self, port, token, nano_batches, memory):
        self.port, self.token = port, token
        self.random, self.open = random.Random(0), deque()
        plan, tables = plan_tables(0, 2, nano_batches)
        call = make_call(5, kind=SLIM)
        self.sane = replace(rank_hello(7, memory), required=False)
        self.hello = message(self.sane)
        self.valid = [
            self.hello,
            message(plan, b"".join(table.tobytes() for table in tables)),
            message(Alive()),
            message(call, bytes(1000)),
            message(call, payload_bytes=2**50),
            message(Reply(5, 0.0, 0), bytes(8)),
            message(End()),
        ]
        self.kinds = [
            lambda: self.raw(self.bytes(1, 10, 100, 5000)),
            self.part_of_a_handshake,
            lambda: self.authenticated(b"", make_token()),
            lambda: self.random.choice([self.raw, self.authenticated])(b""),
            lambda: self.authenticated(self.start() + self.bytes(1, 28, 3000)),
            lambda: self.authenticated(self.start() + self.oversized() + bytes(1000)),
            self.changed_message,
            self.changed_fields,
        ]
        if self.sane.nixl:
            self.valid.append(message(replace(call, places=Places(((4096, 1000),), (), ""))))
            self.kinds.append(self.changed_agent)

    def __call__(self):
        """One input."""
        with contextlib.suppress(LinkLost, OSError):  # the listener was quicker
            self.open.append(self.random.choice(self.kinds)())
            self.leave(self.random.randint(0, 30))

    def leave(self, remaining=0):
        """End what is still open but so many."""
        while len(self.open) > remaining:
            self.open.popleft().close()

    def bytes(self, *sizes):
        return self.random.randbytes(self.random.choice(sizes))

    def start(self):
        """Nothing, or a sane first message: never a changed one, which might become that of a true peer."""
        return self.random.choice([b"", self.hello])

    def oversized(self):
        return (2 ** self.random.randint(17, 32) - 1).to_bytes(4, "big")

    def raw(self, data):
        sock = socket.create_connection(("127.0.0.1", self.port), 5)
        sock.sendall(data)
        return sock

    def authenticated(self, data, token=None):
        channel = Channel(self.raw(b""))
        channel.prove(token or self.token, SERVER, 5, connects=True)
        channel._sock.sendall(data)
        return channel

    def part_of_a_handshake(self):
        whole = framed(b"hf_distca %d " % VERSION + self.bytes(32)) + framed(self.bytes(32))
        return self.raw(whole[: self.random.randint(0, len(whole))])

    def changed_message(self):
        """A part of a message, or a message with some other bytes."""
        whole = bytearray(self.random.choice(self.valid))
        for _ in range(self.random.randint(0, 4)):
            whole[self.random.randrange(len(whole))] = self.random.randrange(256)
        length = self.random.choice([len(whole), self.random.randint(0, len(whole) - 1)])
        return self.authenticated(self.hello + whole[:length])

    def changed_fields(self):
        whole = self.random.choice(self.valid)
        end = 4 + int.from_bytes(whole[:4], "big")
        name, fields, payload = json.loads(whole[4:end])
        value = self.random.choice([None, True, 0, -1, 2**62, 10**400, 0.5, "x" * 3000, [], [[1]], {"x": 1}])
        field = self.random.choice([*fields, "x"])
        changed = json.dumps([name, {**fields, field: value}, self.random.choice([payload, value])]).encode()
        return self.authenticated(self.hello + framed(changed) + whole[end:])

    def changed_agent(self):
        """An agent of which something is said that is not so."""
        field = self.random.choice(["name", "metadata", "probe", "device"])
        number = self.random.choice([0, -1, 2**62])
        value = number if field in ("probe", "device") else self.bytes(0, 1, 10, 1000).hex()
        return self.authenticated(message(replace(self.sane, nixl=replace(self.sane.nixl, **{field: value}))))


@pytest.mark.parametrize(
    ("transport", "warm_up", "inputs_after"),
    [(Choice.TCP, 1000, 4000), pytest.param(Choice.NIXL, 400, 1200, marks=needs_nixl)],
)
def test_random_inputs(tmp_path, transport, warm_up, inputs_after):
    token = make_token()
    directory = Directory("127.0.0.1", 0, token)
    server = ServeCommand(directory.port, token, tmp_path / "output", "--transport", transport)
    try:
        server.wait_for("joined")
        port = directory.members()[0].port
        nano_batches = [make_nano_batch([120, 37, 1, 90], 2, 1, (SLIM,))]
        ranks = [FakeRank(port, rank, 2, token, transport) for rank in range(2)]
        ranks[0].send_plan(0, nano_batches)
        served, failures, over = [0], [], threading.Event()

        def train():
            try:
                while not over.is_set():
                    served[0] = run_calls(ranks, 0, nano_batches, served[0])
                    time.sleep(0.05)
            except BaseException as error:
                failures.append(error)

        training = threading.Thread(target=train)
        training.start()
        strangers = Strangers(port, token, nano_batches, memory_of(transport, "stranger"))
        for _ in range(warm_up):
            strangers()
        before, served_before, inputs = server.memory(), served[0], 0
        while training.is_alive() and (inputs < inputs_after or served[0] <= served_before + 20):
            strangers()
            inputs += 1
        grown = server.memory() - before
        over.set()
        training.join()
        assert not failures
        run_calls(ranks, 0, nano_batches, served[0])
        strangers.leave()
        for rank in ranks:
            rank.link.close()
        directory.end()
        assert server.process.wait(60) == 0
    finally:
        server.close()
        directory.close()
    said = server.output.read_text()
    assert "refused" in said
    assert "refusals so far" in said
    assert "Traceback" not in said
    assert len(said) < 100_000
    assert grown < 20e6

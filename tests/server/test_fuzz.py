"""Ten thousand things that a server must not be impressed by, while it serves."""

import json
import random
import socket
import struct
import threading
import time
from collections import deque

import pytest

from hf_distca.plan_codec import encode_plan
from hf_distca.wire import Directory, LinkLost, make_token
from hf_distca.wire.handshake import MAGIC, VERSION, connect, connecting_side
from hf_distca.wire.link import SERVICE
from tests.server.fake_trainers import FakeTrainer, make_call, make_nano_batch, run_calls
from tests.server.processes import ServerProcess

INPUTS = 10_000
WARM_UP = 1_500
HEAD = struct.Struct("!4sB3xIQQ")


def message(kind, header, payload=b"", sequence=0, payload_bytes=None):
    text = json.dumps(header).encode()
    return HEAD.pack(b"CAD1", kind, len(text), sequence, payload_bytes or len(payload)) + text + payload


class Strangers:
    """Makes random inputs. Those after a handshake claim to be trainer 7 of 8, which the plan does not know."""

    def __init__(self, port, token, nano_batches, seed):
        self.port = port
        self.token = token
        self.random = random.Random(seed)
        header, tables = encode_plan(0, 2, nano_batches)
        call = make_call(0, 5, 0, None, "forward").header()
        self.hello = message(1, {"rank": 7, "ranks": 8})
        self.valid = [
            self.hello,
            message(4, header, b"".join(table.tobytes() for table in tables)),
            message(5, {"plan": 0}),
            message(6, call, bytes(1000)),
            message(6, call, payload_bytes=2**50),
            message(7, {}, bytes(8)),
            message(9, {}),
        ]
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
        except (LinkLost, OSError):  # the server was quicker
            return
        self.open.append(sock)  # some stay for a while
        while len(self.open) > self.random.randint(0, 30):
            self.open.popleft().close()

    def raw(self, data):
        sock = socket.create_connection(("127.0.0.1", self.port), 5)
        sock.sendall(data)
        return sock

    def authenticated(self, data):
        sock = connect("127.0.0.1", self.port, self.token, SERVICE, 5)
        sock.settimeout(5)
        sock.sendall(data)
        return sock

    def garbage(self):
        return self.raw(self.random.randbytes(self.random.choice([1, 10, 100, 5000])))

    def part_of_a_handshake(self):
        hello = struct.pack("!4sH32s", MAGIC, VERSION, self.random.randbytes(32)) + self.random.randbytes(40)
        return self.raw(hello[: self.random.randint(0, len(hello))])

    def another_token(self):
        steps = connecting_side(make_token(), SERVICE)
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
        # Never a hello, which might become that of one of the true trainers.
        return self.authenticated(self.hello + whole)

    def oversized(self):
        kind, size = self.random.randint(1, 9), 2 ** self.random.randint(16, 63)
        head = HEAD.pack(b"CAD1", kind, min(size, 2**32 - 1), 0, size)
        return self.authenticated(self.random.choice([b"", self.hello]) + head + bytes(1000))

    def silence(self):
        return self.random.choice([self.raw, self.authenticated])(b"")


@pytest.mark.timeout(150)
def test_ten_thousand_random_inputs(tmp_path):
    token = make_token()
    directory = Directory("127.0.0.1", 0, token)
    server = ServerProcess(directory, token, tmp_path)
    try:
        port = server.joined().port
        nano_batches = [make_nano_batch([120, 37, 1, 90], 2, 1, 1)]
        trainers = [FakeTrainer(port, token, rank, 2, 2) for rank in range(2)]
        trainers[0].send_plan(0, nano_batches)
        served, failures, over = [0], [], threading.Event()

        def train():
            try:
                while not over.is_set():
                    served[0] = run_calls(trainers, 0, nano_batches, served[0], heads=(2, 1), dims=(8, 8))
                    time.sleep(0.05)
            except BaseException as error:
                failures.append(error)

        training = threading.Thread(target=train)
        training.start()
        strangers = Strangers(port, token, nano_batches, seed=0)
        for _ in range(WARM_UP):
            strangers()
        before, served_before, begin = server.memory(), served[0], time.monotonic()
        for _ in range(INPUTS - WARM_UP):
            strangers()
        seconds = time.monotonic() - begin
        grown, served_after = server.memory() - before, served[0]
        over.set()
        training.join(30)
        assert not failures
        assert served_after > served_before + 20
        run_calls(trainers, 0, nano_batches, served[0])
        for sock in strangers.open:
            sock.close()
        for trainer in trainers:
            trainer.link.close()
        directory.end()
        assert server.process.wait(20) == 0
    finally:
        server.close()
        directory.close()
    said = server.text()
    print(f"{INPUTS - WARM_UP} inputs in {seconds:.1f} s, memory grew by {grown / 1e6:.1f} MB, {served_after} calls")
    assert "refused" in said
    assert "more refusals like these" in said
    assert "Traceback" not in said
    assert len(said) < 100_000
    assert grown < 20e6
    assert seconds < 60

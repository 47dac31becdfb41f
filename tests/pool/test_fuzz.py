"""Thousands of things that a server must not be impressed by, while it serves."""

import contextlib
import json
import signal
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial
from random import Random
from socket import create_connection

import pytest

from hf_distca.pool.directory import Directory
from hf_distca.pool.messages import Alive, End, Places, Reply, plan_tables
from hf_distca.pool.token import make_token, write_token
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


def strangers(random, port, token, nano_batches, memory):
    """Random inputs, as functions that send them and return a connection: without the token, or with it nonsense.

    Those that know the token claim to be rank 7, which the plan does not know.
    """
    sane = replace(rank_hello(7, memory), required=False)
    (plan, tables), call, hello = plan_tables(0, 2, nano_batches), make_call(5, kind=SLIM), message(sane)
    valid = [message(plan, b"".join(table.tobytes() for table in tables)), message(call, bytes(1000))]
    valid += [message(call, payload_bytes=2**50), message(replace(call, places=Places(((4096, 1000),), (), "")))]
    valid += [hello, message(Alive()), message(Reply(5, 0.0, 0), bytes(8)), message(End())]

    def raw(data):
        sock = create_connection(("127.0.0.1", port), 5)
        sock.sendall(data)
        return sock

    def authenticated(data, token=token):
        channel = Channel(raw(b""))
        channel.prove(token, SERVER, 5, connects=True)
        channel._sock.sendall(data)
        return channel

    while True:
        # A first message is sane, or none: a changed one might become that of a true peer.
        start, whole = random.choice([b"", hello]), random.choice(valid)
        end = 4 + int.from_bytes(whole[:4], "big")
        some = random.randbytes(random.choice([0, 1, 10, 28, 100, 3000]))
        match random.randrange(8 if sane.nixl else 7):
            case 0:
                yield partial(raw, some)
            case 1:
                handshake = framed(b"hf_distca %d " % VERSION + random.randbytes(32)) + framed(random.randbytes(32))
                yield partial(raw, handshake[: random.randint(0, len(handshake))])
            case 2:
                yield partial(authenticated, b"", make_token())
            case 3:
                yield partial(authenticated, start + some)
            case 4:  # a message that says that it is large
                yield partial(
                    authenticated, start + (2 ** random.randint(17, 32) - 1).to_bytes(4, "big") + bytes(1000)
                )
            case 5:  # a part of a message, or a message with some other bytes
                changed = bytearray(whole)
                for _ in range(random.randint(0, 4)):
                    changed[random.randrange(len(whole))] = random.randrange(256)
                yield partial(authenticated, hello + changed[: random.choice([None, random.randrange(len(whole))])])
            case 6:  # a message with another value of a field
                name, fields, payload = json.loads(whole[4:end])
                value = random.choice([None, True, 0, -1, 2**62, 10**400, 0.5, "x" * 3000, [], [[1]], {"x": 1}])
                fields[random.choice([*fields, "x"])] = value
                changed = json.dumps([name, fields, random.choice([payload, value])]).encode()
                yield partial(authenticated, hello + framed(changed) + whole[end:])
            case 7:  # an agent of which something is said that is not so
                field, number = random.choice(["name", "metadata", "probe", "device"]), random.choice([0, -1, 2**62])
                value = number if field in ("probe", "device") else some.hex()
                yield partial(authenticated, message(replace(sane, nixl=replace(sane.nixl, **{field: value}))))


@pytest.mark.parametrize(
    ("transport", "warm_up", "inputs_after"),
    [(Choice.TCP, 1000, 4000), pytest.param(Choice.NIXL, 400, 1200, marks=needs_nixl)],
)
def test_random_inputs(tmp_path, transport, warm_up, inputs_after):
    token, random, opened = make_token(), Random(0), deque()
    write_token(tmp_path / "token", token)
    directory = Directory("127.0.0.1", 0, token)
    server = ServeCommand(directory.port, tmp_path / "token", tmp_path / "output", "--transport", transport)
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
        inputs = strangers(random, port, token, nano_batches, memory_of(transport, "stranger"))
        count, before, served_before = 0, 0, 0
        while training.is_alive() and (count < warm_up + inputs_after or served[0] <= served_before + 20):
            if count == warm_up:
                before, served_before = server.memory(), served[0]
            count += 1
            with contextlib.suppress(LinkLost, OSError):  # the listener was quicker
                opened.append(next(inputs)())
            for _ in range(len(opened) - random.randint(0, 30)):  # some stay for a while
                opened.popleft().close()
        grown = server.memory() - before
        over.set()
        training.join()
        assert not failures
        run_calls(ranks, 0, nano_batches, served[0])
        server.process.send_signal(signal.SIGTERM)  # SIGINT is handled alike
        assert server.process.wait(60) == 0
        for connection in (*opened, *(rank.link for rank in ranks)):
            connection.close()
    finally:
        server.close()
        directory.close()
    said = server.output.read_text()
    assert "refusals so far" in said
    assert said.endswith("stopped\n")
    assert "Traceback" not in said
    assert len(said) < 100_000
    assert grown < 20e6

"""Connections: who is let in, what arrives, and what becomes of those that say nothing, too much or nonsense."""

import contextlib
import logging
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from hf_distca.pool import listener as listeners
from hf_distca.pool import wire
from hf_distca.pool.listener import HANDSHAKES, Listener, Outbox
from hf_distca.pool.messages import Alive, Refused, Reply, ServerWelcome
from hf_distca.pool.token import make_token
from hf_distca.pool.wire import (
    MESSAGE_BYTES,
    AuthenticationError,
    Channel,
    LinkLost,
    MismatchError,
    PeerLeft,
    ProtocolError,
    connect,
    is_within_host,
)
from tests.pool.servers import wait_until
from tests.pool.strangers import framed, message
from tests.pool.transport.ends import channels

REPLY = Reply(3, 0.5, 7)


@pytest.fixture
def ends():
    """Two channels, connected, whose peers are not asked for a token."""
    with channels() as both:
        yield both


@pytest.fixture
def token():
    return make_token()


@pytest.fixture
def listener(token):
    """A listener whose peers get their first message back, and who have a minute for it."""
    listener = Listener("127.0.0.1", 0, token, "echo", Channel.send, handshake_s=60)
    yield listener
    listener.close()


def greet(listener, token, service="echo"):
    channel = connect(listener.host, listener.port, token, service, 60)
    answer = channel.ask(ServerWelcome(5), ServerWelcome, 60)
    channel.close()
    return answer.server


@pytest.mark.parametrize(
    ("own", "peer", "within"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", True),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::1", "::1", True),
        ("fe80::1%eth0", "fe80::2%eth0", False),
    ],
)
def test_whether_the_other_side_is_on_this_host(own, peer, within):
    assert is_within_host(own, peer) is within


def test_payloads_of_any_size_arrive_whole(ends):
    near, far = ends
    sent = np.random.default_rng(0).integers(0, 255, 30_000_000, dtype=np.uint8)
    thread = threading.Thread(target=near.send, args=(REPLY, [sent[:7], np.zeros((0, 3)), sent[7:]]))
    thread.start()
    frame = far.receive()
    assert (frame.message, frame.payload) == (REPLY, sent.nbytes)
    came = np.zeros_like(sent)
    far.receive_payload([came[:11_000_000], np.zeros((0, 3)), came[11_000_000:].reshape(1, -1)])
    thread.join()
    assert np.array_equal(sent, came)


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (framed(b"[]"), ProtocolError, "message does not follow the protocol"),
        (framed(b""), ProtocolError, "message does not follow the protocol"),
        ((-2).to_bytes(4, "big", signed=True), ProtocolError, "message does not follow the protocol"),
        ((MESSAGE_BYTES + 1).to_bytes(4, "big"), LinkLost, "bad message length"),
        (b"\xff" * 4 + (2**63).to_bytes(8, "big"), LinkLost, "bad message length"),
    ],
)
def test_what_is_no_message_is_refused_before_memory_is_made_for_it(ends, data, error, said):
    ends[0]._sock.sendall(data)
    with pytest.raises(error, match=said):
        ends[1].receive(60)


@pytest.mark.parametrize("cut", [2, 10, -3])
def test_a_message_that_breaks_off_is_a_lost_link(ends, cut):
    near, far = ends
    near._sock.sendall(message(REPLY, b"12345")[:cut])
    near.close()

    def receive():
        far.receive()
        far.receive_payload([bytearray(5)])

    with pytest.raises(LinkLost, match=r"end of file|closed"):
        receive()


def test_nothing_is_waited_for_longer_than_it_may_take(ends):
    near, far = ends
    begin = time.monotonic()
    with pytest.raises(LinkLost, match="receiving made no progress"):
        far.receive(0.1)
    near._sock.sendall(message(REPLY, b"12345")[:-1])
    far.receive(60)
    with pytest.raises(LinkLost, match="receiving made no progress"):
        far.receive_payload([bytearray(5)], 0.1)
    with pytest.raises(LinkLost, match="sending made no progress"):
        near.send(REPLY, [bytes(50_000_000)], 0.1)
    assert time.monotonic() - begin < 30


def test_what_is_asked_is_answered_refused_or_of_another_kind(ends):
    near, far = ends
    far.send(ServerWelcome(5))
    assert near.ask(Alive(), ServerWelcome, 60) == ServerWelcome(5)
    far.refuse("no")
    with pytest.raises(MismatchError, match="refused: no"):
        near.ask(Alive(), ServerWelcome, 60)
    far.send(REPLY)
    with pytest.raises(ProtocolError, match="answers Reply, expected ServerWelcome"):
        near.ask(Alive(), ServerWelcome, 60)


def test_messages_behind_one_that_failed_are_let_go_unsent(ends):
    def fail():
        raise LinkLost("closed")

    done = []
    outbox = Outbox(ends[0])
    outbox.put(fail, lambda: done.append("first over"))
    outbox.put(lambda: done.append("sent"), lambda: done.append("second over"))
    outbox.finish(60)
    assert done == ["first over", "second over"]


def test_the_right_token_is_let_in(listener, token):
    assert greet(listener, token) == 5


def test_a_wrong_token_is_noticed_by_the_side_that_connects(listener, token):
    with pytest.raises(AuthenticationError, match="another token"):
        greet(listener, make_token())
    assert greet(listener, token) == 5


def test_another_service_is_noticed(listener, token):
    with pytest.raises(AuthenticationError, match="or is another service than directory"):
        greet(listener, token, "directory")


@pytest.fixture
def accepting(ends, token):
    """What the accepting side finds of a peer that the test plays: it takes the nonce and the proof to send."""
    near, far = ends
    found = []

    def prove():
        try:
            found.append(far.prove(token, "echo", connects=False))
        except LinkLost as error:
            found.append(error)

    thread = threading.Thread(target=prove)
    thread.start()

    def play(greeting, proof):
        near._framed.send_bytes(greeting)
        theirs = near._framed.recv_bytes()
        other = near._framed.recv_bytes() if greeting.startswith(b"hf_distca 3 ") else b""
        near._framed.send_bytes(proof(theirs, other))
        thread.join(60)
        return found[0]

    yield play
    near.shut_down()
    thread.join()


@pytest.mark.parametrize("proof", [lambda theirs, other: bytes(32), lambda theirs, other: other, lambda *_: b""])
def test_a_wrong_proof_is_noticed_by_the_side_that_accepts(accepting, proof):
    # The second one reflects the accepting side's own proof.
    found = accepting(b"hf_distca 3 " + bytes(32), proof)
    assert isinstance(found, AuthenticationError)


def test_proofs_serve_in_no_other_handshake(token):
    with channels() as (near, far):
        said, send = {}, wire.Connection.send_bytes

        def overheard(connection, data):
            said.setdefault(connection, []).append(data)
            send(connection, data)

        near._framed.__class__.send_bytes = overheard
        try:
            thread = threading.Thread(target=far.prove, args=(token, "echo"), kwargs={"connects": False})
            thread.start()
            near.prove(token, "echo", connects=True)
            thread.join()
        finally:
            near._framed.__class__.send_bytes = send
        overheard_of = {True: said[near._framed], False: said[far._framed]}
    for connects in (True, False):
        with channels() as (near, far):
            for data in overheard_of[connects]:
                near._framed.send_bytes(data)
            with pytest.raises(AuthenticationError, match="another token"):
                far.prove(token, "echo", connects=not connects)


@pytest.mark.parametrize(
    ("greeting", "said"),
    [(b"hf_distca 4 " + bytes(32), "version 4, expected 3"), (b"GET / HTTP/1.1", "does not speak this protocol")],
)
def test_another_version_is_named(accepting, greeting, said):
    found = accepting(greeting, lambda *_: b"")
    assert isinstance(found, ProtocolError)
    assert said in str(found)


def test_a_server_that_says_nothing_times_out(token):
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(LinkLost, match="timed out"):
        connect("127.0.0.1", silent.getsockname()[1], token, "echo", 0.3)


def test_a_server_that_says_one_byte_now_and_then_times_out(token):
    # The time is for all of the handshake, not for each byte.
    given_up = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as slow:

        def drip():
            sock, _ = slow.accept()
            with sock, contextlib.suppress(OSError):
                while not given_up.wait(0.3):
                    sock.send(b"\0")

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(LinkLost, match="timed out"):
            connect("127.0.0.1", slow.getsockname()[1], token, "echo", 0.6)
        given_up.set()
        thread.join()


def test_nobody_there_is_a_lost_link(token):
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
    with pytest.raises(LinkLost, match="cannot connect"):
        connect("127.0.0.1", port, token, "echo", 1)


def left_open(silent):
    """How many sockets the listener has not closed; each first gets its greeting."""
    still = 0
    for sock in silent:
        sock.settimeout(0.1)
        try:
            while sock.recv(1000):
                pass
        except TimeoutError:
            still += 1
        except ConnectionResetError:
            pass
    return still


def test_one_handshake_too_many_ends_the_oldest(listener, token):
    silent = [socket.create_connection((listener.host, listener.port)) for _ in range(2 * HANDSHAKES)]
    assert greet(listener, token) == 5
    # That was one more handshake: one less than the limit are left.
    wait_until(lambda: len(listener._peers) == HANDSHAKES - 1)
    assert left_open(silent[-3:]) == 3
    assert left_open(silent[: HANDSHAKES + 1]) == 0
    for sock in silent:
        sock.close()


def test_silent_peers_are_turned_away(token):
    listener = Listener("127.0.0.1", 0, token, "echo", Channel.send, handshake_s=0.3)
    with socket.create_connection((listener.host, listener.port)) as silent:
        silent.settimeout(60)
        while silent.recv(100):
            pass
    with connect(listener.host, listener.port, token, "echo", 60)._sock as silent:
        silent.settimeout(60)
        assert silent.recv(1) == b""  # nor may a peer that knows the token be silent
    listener.close()


def test_errors_are_told_to_the_peer_where_they_are_its_own(token, caplog):
    errors = [ProtocolError("not so"), MismatchError("not with you"), LinkLost("gone")]
    given = iter(errors)

    def serve(channel, hello):
        raise next(given)

    listener = Listener("127.0.0.1", 0, token, "echo", serve)
    answers = []
    for _ in errors:
        channel = connect(listener.host, listener.port, token, "echo", 60)
        channel.send(Alive())
        with contextlib.suppress(PeerLeft):
            answers.append(channel.receive().message)
        channel.close()
    listener.close()
    assert answers == [Refused("not so"), Refused("not with you")]
    assert [line.partition(": ")[2] for line in caplog.messages] == ["not so", "gone"]


def test_a_flood_of_strangers_does_not_fill_the_log(listener, token, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(200):
            with socket.create_connection((listener.host, listener.port)) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 4)
                sock.recv(100)  # one that leaves at once is no refusal
        assert greet(listener, token) == 5
        wait_until(lambda: not listener._peers)
    assert 10 <= len(caplog.records) <= 15
    assert caplog.messages[-1].startswith("128 refusals so far, the latest: refused 127.0.0.1:")


def test_closing_ends_all_connections(token):
    listener = Listener("127.0.0.1", 0, token, "echo", lambda channel, hello: channel.receive() and None)
    channel = connect(listener.host, listener.port, token, "echo", 60)
    channel.send(Alive())
    stranger = socket.create_connection((listener.host, listener.port))
    listener.close()
    with pytest.raises(PeerLeft):
        channel.receive()
    assert left_open([stranger]) == 0
    stranger.close()
    channel.close()


def test_a_connection_that_cannot_be_served_is_closed(listener, token, monkeypatch, caplog):
    def fail(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(
            listeners, "threading", SimpleNamespace(Thread=lambda **_: SimpleNamespace(start=lambda: fail(0)))
        )
        with pytest.raises(LinkLost):
            connect(listener.host, listener.port, token, "echo", 60)
    assert greet(listener, token) == 5
    assert "could not be accepted: can't start new thread" in caplog.text

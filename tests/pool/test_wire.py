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
from hf_distca.pool.listener import HANDSHAKES, Listener, Outbox
from hf_distca.pool.messages import Alive, Refused, Reply, ServerWelcome
from hf_distca.pool.token import make_token
from hf_distca.pool.wire import (
    MESSAGE_BYTES,
    VERSION,
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
from tests.ranks import free_port

REPLY = Reply(3, 0.5, 7)
GREETING = b"hf_distca %d " % VERSION


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
    assert far.receive() == (REPLY, sent.nbytes)
    came = np.zeros_like(sent)
    far.receive_payload([came[:11_000_000], np.zeros((0, 3)), came[11_000_000:].reshape(1, -1)])
    thread.join()
    assert np.array_equal(sent, came)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (framed(b"[]"), "message does not follow the protocol"),
        (framed(b""), "message does not follow the protocol"),
        ((MESSAGE_BYTES + 1).to_bytes(4, "big"), f"a message of {MESSAGE_BYTES + 1} bytes, at most {MESSAGE_BYTES}"),
        (b"\xff" * 4, "a message of 4294967295 bytes"),
    ],
)
def test_what_is_no_message_is_refused_before_memory_is_made_for_it(ends, data, error):
    ends[0]._sock.sendall(data)
    with pytest.raises(ProtocolError, match=error):
        ends[1].receive(60)


@pytest.mark.parametrize(("cut", "error"), [(0, PeerLeft), (2, LinkLost), (10, LinkLost), (-3, LinkLost)])
def test_a_message_that_breaks_off_is_a_lost_link(ends, cut, error):
    near, far = ends
    near._sock.sendall(message(REPLY, b"12345")[:cut])
    near.close()

    def receive():
        far.receive()
        far.receive_payload([bytearray(5)])

    with pytest.raises(LinkLost, match="the peer closed") as caught:
        receive()
    assert type(caught.value) is error


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


def test_a_message_that_cannot_be_sent_ends_the_connection_and_later_ones_are_dropped(ends):
    def fail():
        raise LinkLost("closed")

    outbox = Outbox(ends[0])
    outbox.put(fail)
    outbox.put(lambda: ends[0].send(REPLY))
    with pytest.raises(LinkLost, match="closed"):
        ends[0].receive(60)
    outbox.finish(60)
    with pytest.raises(PeerLeft):
        ends[1].receive(60)


def test_another_token_or_service_is_noticed_by_the_side_that_connects(listener, token):
    with pytest.raises(AuthenticationError, match="another token"):
        greet(listener, make_token())
    with pytest.raises(AuthenticationError, match="or is another service than directory"):
        greet(listener, token, "directory")
    assert greet(listener, token) == 5


@pytest.mark.parametrize(
    ("greeting", "proof", "error", "text"),
    [
        (GREETING + bytes(32), lambda other: bytes(32), AuthenticationError, "another token"),
        (GREETING + bytes(32), lambda other: other, AuthenticationError, "another token"),  # reflected
        (GREETING + bytes(32), lambda other: b"", AuthenticationError, "another token"),
        (b"hf_distca 99 " + bytes(32), None, ProtocolError, f"version 99, expected {VERSION}"),
        (b"GET / HTTP/1.1", None, ProtocolError, "does not speak this protocol"),
    ],
)
def test_a_wrong_greeting_or_proof_is_noticed_by_the_side_that_accepts(ends, token, greeting, proof, error, text):
    near, far = ends

    def play():
        near._send([greeting], 60)
        near._receive(100, 60)
        if proof is not None:
            near._send([proof(near._receive(100, 60))], 60)

    thread = threading.Thread(target=play)
    thread.start()
    with pytest.raises(error, match=text):
        far.prove(token, "echo", 60, connects=False)
    thread.join()


def test_proofs_serve_in_no_other_handshake(token, monkeypatch):
    heard, send = {}, Channel._send
    monkeypatch.setattr(
        Channel,
        "_send",
        lambda self, parts, *rest: heard.setdefault(self, []).append(parts) or send(self, parts, *rest),
    )
    with channels() as (near, far):
        thread = threading.Thread(target=far.prove, args=(token, "echo", 60), kwargs={"connects": False})
        thread.start()
        near.prove(token, "echo", 60, connects=True)
        thread.join()
    for connects, said in ((True, heard[near]), (False, heard[far])):
        with channels() as (near, far):
            for parts in said:
                send(near, parts, 60)
            with pytest.raises(AuthenticationError, match="another token"):
                far.prove(token, "echo", 60, connects=not connects)


@pytest.mark.parametrize("drip", [b"", b"\0"])
def test_a_server_that_is_silent_or_slow_times_out(token, drip):
    # The time is for all of the handshake, not for each byte.
    given_up = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as slow:

        def answer():
            sock, _ = slow.accept()
            with sock, contextlib.suppress(OSError):
                while not given_up.wait(0.1):
                    sock.send(drip)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(LinkLost, match=r"timed out after 0\.3 s"):
            connect("127.0.0.1", slow.getsockname()[1], token, "echo", 0.3)
        given_up.set()
        thread.join()


def test_nobody_there_is_a_lost_link(token):
    for port in (free_port(), 2**62):
        with pytest.raises(LinkLost, match="cannot connect"):
            connect("127.0.0.1", port, token, "echo", 1)


def is_open(sock):
    """Whether the listener has not closed a socket, which first gets its greeting."""
    sock.settimeout(0.1)
    try:
        while sock.recv(1000):
            pass
    except TimeoutError:
        return True
    except ConnectionResetError:
        pass
    return False


def test_one_handshake_too_many_ends_the_oldest(listener, token):
    silent = [socket.create_connection((listener.host, listener.port)) for _ in range(2 * HANDSHAKES)]
    assert greet(listener, token) == 5
    # That was one more handshake: one less than the limit are left.
    wait_until(lambda: len(listener._peers) == HANDSHAKES - 1)
    assert all(map(is_open, silent[-3:]))
    assert not any(map(is_open, silent[: HANDSHAKES + 1]))
    for sock in silent:
        sock.close()


def test_silent_peers_are_turned_away(token):
    listener = Listener("127.0.0.1", 0, token, "echo", Channel.send, handshake_s=0.3)
    stranger = socket.create_connection((listener.host, listener.port))
    friend = connect(listener.host, listener.port, token, "echo", 60)  # nor may a peer that knows the token be silent
    wait_until(lambda: not listener._peers)
    assert not is_open(stranger)
    with pytest.raises(PeerLeft):
        friend.receive(60)
    stranger.close()
    friend.close()
    listener.close()


def test_errors_are_sent_to_the_peer_where_they_are_its_own(token, caplog):
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
            answers.append(channel.receive()[0])
        channel.close()
    listener.close()
    assert answers == [Refused("not so"), Refused("not with you")]
    assert [line.partition(": ")[2] for line in caplog.messages] == ["not so", "gone"]


def test_a_flood_of_strangers_does_not_fill_the_log(listener, token, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(140):
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
    assert not is_open(stranger)
    stranger.close()
    channel.close()


def test_a_connection_that_cannot_be_served_is_closed(listener, token, monkeypatch, caplog):
    def fail():
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(listeners, "threading", SimpleNamespace(Thread=lambda **_: SimpleNamespace(start=fail)))
        with pytest.raises(LinkLost):
            connect(listener.host, listener.port, token, "echo", 60)
    assert greet(listener, token) == 5
    assert "could not be accepted: can't start new thread" in caplog.text

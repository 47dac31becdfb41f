import contextlib
import logging
import re
import select
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from hf_distca.pool.messages.kinds import Kind
from hf_distca.pool.wire import AuthenticationError, Channel, LinkLost, Listener, PeerLeft, ProtocolError, make_token
from hf_distca.pool.wire.handshake import (
    ACCEPTED,
    MAGIC,
    NONCE_BYTES,
    VERSION,
    accepting_side,
    connect,
    connecting_side,
)
from hf_distca.pool.wire.listener import HANDSHAKES, SparingLog
from tests.pool.servers import wait_until

HELLO_BYTES = len(MAGIC) + 2 + NONCE_BYTES


@pytest.fixture
def token():
    return make_token()


@pytest.fixture
def listener(token):
    """A listener whose peers get their hello back, and who have a minute for it."""
    listener = Listener("127.0.0.1", 0, token, "echo", Kind, echo, handshake_s=60)
    yield listener
    listener.close()


def echo(peer):
    peer.channel.send(Kind.WELCOME, peer.hello.header)


def greet(listener, token, service="echo"):
    channel = Channel(connect(listener.host, listener.port, token, service, 60), Kind)
    channel.send(Kind.HELLO, {"n": 1})
    header = channel.receive().header
    channel.close()
    return header


def test_the_right_token_is_let_in(listener, token):
    assert greet(listener, token) == {"n": 1}


def test_a_wrong_token_is_noticed_by_the_side_that_connects(listener, token):
    with pytest.raises(AuthenticationError, match="another token"):
        greet(listener, make_token())
    assert greet(listener, token) == {"n": 1}


def test_another_service_is_noticed(listener, token):
    with pytest.raises(AuthenticationError, match="or is no directory"):
        greet(listener, token, "directory")


def test_a_wrong_proof_is_noticed_by_the_side_that_accepts(token):
    accepting, connecting = accepting_side(token, "echo"), connecting_side(token, "echo")
    next(accepting)
    hello, _ = next(connecting)
    answer, size = accepting.send(hello)
    assert len(answer) == HELLO_BYTES + 32
    with pytest.raises(AuthenticationError, match="another token"):
        accepting.send(bytes(size))


def test_a_proof_cannot_be_reflected(token):
    # A stranger sends the accepting side's own proof back to it, which is of the same nonces.
    accepting = accepting_side(token, "echo")
    next(accepting)
    answer, size = accepting.send(next(connecting_side(make_token(), "echo"))[0])
    with pytest.raises(AuthenticationError, match="another token"):
        accepting.send(answer[-size:])


def test_a_proof_serves_in_no_other_handshake(token):
    # A stranger has overheard a whole handshake, and plays either side of it to who knows the token.
    connecting, accepting = connecting_side(token, "echo"), accepting_side(token, "echo")
    next(accepting)
    hello, _ = next(connecting)
    answer, _ = accepting.send(hello)
    proof, _ = connecting.send(answer)
    assert accepting.send(proof) == (ACCEPTED, 0)
    again = accepting_side(token, "echo")
    next(again)
    again.send(hello)
    with pytest.raises(AuthenticationError, match="another token"):
        again.send(proof)
    again = connecting_side(token, "echo")
    next(again)
    with pytest.raises(AuthenticationError, match="another token"):
        again.send(answer)


def test_another_version_is_named(token):
    accepting = accepting_side(token, "echo")
    next(accepting)
    with pytest.raises(ProtocolError, match=f"version {VERSION + 1}, expected {VERSION}"):
        accepting.send(MAGIC + (VERSION + 1).to_bytes(2, "big") + bytes(NONCE_BYTES))


def test_a_server_that_says_nothing_times_out(token):
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(LinkLost, match="timed out"):
        connect("127.0.0.1", silent.getsockname()[1], token, "echo", 0.3)


def test_a_server_that_says_one_byte_now_and_then_times_out(token):
    # The time is for all of the handshake, not for each byte.
    # With time for each, the last of these bytes would come after 20 s and be found to be no handshake.
    given_up = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as slow:

        def drip():
            sock, _ = slow.accept()
            with sock, contextlib.suppress(OSError):
                while not given_up.wait(0.3):
                    sock.send(b"H")

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


def test_one_handshake_too_many_ends_the_oldest(listener, token):
    silent = [socket.create_connection((listener.host, listener.port)) for _ in range(2 * HANDSHAKES)]
    assert greet(listener, token) == {"n": 1}
    # That was one more handshake: one less than the limit are left.
    assert select.select(silent, [], [], 0)[0] == silent[: HANDSHAKES + 1]
    for sock in silent[: HANDSHAKES + 1]:
        assert sock.recv(1) == b""
    for sock in silent:
        sock.close()


def test_silent_peers_are_turned_away(token):
    listener = Listener("127.0.0.1", 0, token, "echo", Kind, echo, handshake_s=0.3)
    with socket.create_connection((listener.host, listener.port)) as sock:
        sock.settimeout(60)
        assert sock.recv(1) == b""
    listener.close()


def test_a_peer_that_says_nothing_after_the_handshake_is_turned_away(listener, token, monkeypatch):
    given = []
    monkeypatch.setattr(
        Channel, "set_timeout", lambda self, seconds: given.append(seconds) or self._sock.settimeout(0.1)
    )
    with connect(listener.host, listener.port, token, "echo", 60) as sock:
        assert sock.recv(1) == b""
        assert given == [60]


@pytest.mark.parametrize(("kind", "payload"), [(Kind.HELLO, b"abc"), (Kind.CALL, b"")], ids=["payload", "kind"])
def test_the_first_message_is_a_hello_without_a_payload(token, kind, payload):
    peers = []
    listener = Listener("127.0.0.1", 0, token, "echo", Kind, peers.append)
    channel = Channel(connect(listener.host, listener.port, token, "echo", 60), Kind)
    channel.send(kind, {"n": 1}, [payload])
    frame = channel.receive()
    assert frame.kind is Kind.REFUSED
    assert f"must be HELLO without a payload, got {kind.name} with {len(payload)} bytes" in frame.header["reason"]
    channel.close()
    listener.close()
    assert peers == []


def test_a_flood_of_strangers_does_not_fill_the_log(listener, token, caplog):
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING):
        for _ in range(200):
            with socket.create_connection((listener.host, listener.port)) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 4)
        assert greet(listener, token) == {"n": 1}
        wait_until(lambda: not listener._handshakes)
        listener.close()
    intervals = 1 + (time.monotonic() - begin) // 10
    assert len(caplog.records) <= 11 * intervals
    counted = [re.match(r"(\d+) more refusals", record.getMessage()) for record in caplog.records]
    assert sum(int(rest[1]) if rest else 1 for rest in counted) == 200


def test_warnings_are_few_in_every_interval_and_the_rest_counted(caplog, monkeypatch):
    now = 0.0
    monkeypatch.setattr("hf_distca.pool.wire.listener.time", SimpleNamespace(monotonic=lambda: now))
    log = SparingLog(most=2, interval_s=10)
    for now in (1.0, 2.0, 3.0, 9.0, 10.0, 11.0, 12.0):
        log.warning(f"at {now:g}")
    log.close()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["at 1", "at 2", "2 more refusals like these", "at 10", "at 11", "1 more refusals like these"]


def test_closing_ends_all_connections(token):
    listener = Listener("127.0.0.1", 0, token, "echo", Kind, lambda peer: peer.channel.receive() and None)
    channel = Channel(connect(listener.host, listener.port, token, "echo", 60), Kind)
    channel.send(Kind.HELLO, {})
    stranger = socket.create_connection((listener.host, listener.port))
    listener.close()
    with pytest.raises(PeerLeft):
        channel.receive()
    stranger.settimeout(60)
    with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    stranger.close()
    channel.close()

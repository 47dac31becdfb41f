import contextlib
import logging
import socket
import threading
import time

import pytest

from hf_distca.wire import AuthenticationError, Channel, Kind, LinkLost, Listener, ProtocolError, make_token
from hf_distca.wire.handshake import MAGIC, NONCE_BYTES, VERSION, accepting_side, connect, connecting_side
from hf_distca.wire.listener import HANDSHAKES

HELLO_BYTES = len(MAGIC) + 2 + NONCE_BYTES


@pytest.fixture
def token():
    return make_token()


@pytest.fixture
def listener(token):
    """A listener whose peers get their hello back."""

    def serve(peer):
        peer.channel.send(Kind.WELCOME, peer.hello.header)

    listener = Listener("127.0.0.1", 0, token, "echo", serve, handshake_s=0.5)
    yield listener
    listener.close()


def greet(listener, token, service="echo"):
    channel = Channel(connect(listener.host, listener.port, token, service, 5))
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
    with pytest.raises(AuthenticationError):
        accepting.send(bytes(size))


def test_a_proof_cannot_be_reflected(token):
    # A stranger opens two connections and shows each side's nonce and proof to the other, or its own back to it.
    first, second = accepting_side(token, "echo"), accepting_side(token, "echo")
    next(first)
    next(second)
    answer, _ = first.send(next(connecting_side(token, "echo"))[0])
    other, _ = second.send(answer[:HELLO_BYTES])
    with pytest.raises(AuthenticationError):
        first.send(other[HELLO_BYTES:])
    connecting = connecting_side(token, "echo")
    hello, _ = next(connecting)
    with pytest.raises(AuthenticationError):
        connecting.send(hello + answer[HELLO_BYTES:])


def test_another_version_is_named(token):
    accepting = accepting_side(token, "echo")
    next(accepting)
    with pytest.raises(ProtocolError, match=f"version {VERSION + 1}, expected {VERSION}"):
        accepting.send(MAGIC + (VERSION + 1).to_bytes(2, "big") + bytes(NONCE_BYTES))


def test_a_server_that_says_nothing_times_out(token):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        with pytest.raises(LinkLost, match="timed out"):
            connect("127.0.0.1", silent.getsockname()[1], token, "echo", 0.3)
        assert time.monotonic() - begin < 2


def test_a_server_that_says_one_byte_now_and_then_times_out(token):
    # The time is for all of the handshake, not for each byte.
    with socket.create_server(("127.0.0.1", 0)) as slow:

        def drip():
            sock, _ = slow.accept()
            with sock, contextlib.suppress(OSError):
                while True:
                    sock.send(b"H")
                    time.sleep(0.1)

        thread = threading.Thread(target=drip)
        thread.start()
        begin = time.monotonic()
        with pytest.raises(LinkLost):
            connect("127.0.0.1", slow.getsockname()[1], token, "echo", 0.5)
        assert time.monotonic() - begin < 2
        thread.join(5)


def test_nobody_there_is_a_lost_link(token):
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
    with pytest.raises(LinkLost, match="cannot connect"):
        connect("127.0.0.1", port, token, "echo", 1)


def test_silent_peers_block_nobody_and_are_turned_away(listener, token):
    silent = [socket.create_connection((listener.host, listener.port)) for _ in range(2 * HANDSHAKES)]
    assert greet(listener, token) == {"n": 1}
    for sock in silent:
        sock.settimeout(5)
        assert sock.recv(1) == b""  # closed by the listener
        sock.close()


def test_a_peer_that_says_nothing_after_the_handshake_is_turned_away(listener, token):
    sock = connect(listener.host, listener.port, token, "echo", 5)
    sock.settimeout(5)
    assert sock.recv(1) == b""
    sock.close()


def test_a_flood_of_strangers_does_not_fill_the_log(listener, token, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(200):
            with socket.create_connection((listener.host, listener.port)) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 4)
        assert greet(listener, token) == {"n": 1}
        time.sleep(0.1)
    assert 1 <= len(caplog.records) <= 20


def test_closing_ends_all_connections(token):
    listener = Listener("127.0.0.1", 0, token, "echo", lambda peer: peer.channel.receive() and None)
    channel = Channel(connect(listener.host, listener.port, token, "echo", 5))
    channel.send(Kind.HELLO, {})
    stranger = socket.create_connection((listener.host, listener.port))
    listener.close()
    with pytest.raises(LinkLost):
        channel.receive()
    stranger.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    stranger.close()
    channel.close()

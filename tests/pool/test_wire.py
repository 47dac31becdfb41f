"""Messages and connections: who is let in, what arrives, and what becomes of silence, of too much
and of nonsense.
"""

import contextlib
import socket
import threading
import time
import typing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_distca.plan import AttentionKind, Branches
from hf_distca.planner.layout import layout_of_kind
from hf_distca.pool import wire
from hf_distca.pool.messages import (
    Alive,
    Message,
    Reply,
    ServerWelcome,
    decode,
    encode,
    plan_tables,
)
from hf_distca.pool.token import make_token, parse_token, read_token, write_token
from hf_distca.pool.wire import (
    HANDSHAKES,
    MESSAGE_BYTES,
    VERSION,
    Channel,
    LinkLost,
    Listener,
    MismatchError,
    Outbox,
    PeerLeft,
    ProtocolError,
    connect,
    is_loopback,
)
from tests.pool.ends import TOKEN, channels, make_call, make_nano_batch, message, wait_until

pytestmark = pytest.mark.timeout(100)  # whoever waits for ever has failed

SIZE = st.integers(1, 99)
st.register_type_strategy(
    AttentionKind,
    st.builds(
        AttentionKind,
        st.none() | SIZE,
        st.just(4),
        st.sampled_from([1, 2, 4]),
        SIZE,
        SIZE,
        st.none() | SIZE,
    ),
)
MESSAGES = st.sampled_from(typing.get_args(Message))


@settings(max_examples=300)
@given(MESSAGES.flatmap(st.from_type), st.integers(0))
def test_a_message_is_what_was_sent(message, payload):
    try:
        read, size = decode(encode(message, payload))
    except ValueError:
        assume(False)  # infinite numbers do not travel
    assert type(read) is type(message)
    assert size == payload
    assert vars(read) == vars(message)  # with the places, which calls are compared without


CALL_TEXT = encode(make_call(), 0)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"", "Expecting value"),
        (b"\xff", "can't decode"),
        (b"[" * 60_000, "recursion"),
        (b"{}", "does not follow"),
        (b'["Calls", {}, 0]', "Calls"),
        (b'["End", {}, 0.0]', "0.0 is not of type <class 'int'>"),
        (b'["End", {"x": 1}, 0]', "'x'"),
        (b'["ServerWelcome", {}, 0]', "missing"),
        (b'["ServerWelcome", {"server": true}, 0]', "True is not of type <class 'int'>"),
        (b'["Reply", {"call_id": 0, "seconds": 1%s, "pairs": 0}, 0]' % (b"0" * 400), "too large"),
        (CALL_TEXT.replace(b'"forward"', b'"sideways"'), "'sideways' is no"),
        (CALL_TEXT.replace(b'"float32"', b'["float32"]'), "is no"),
        (CALL_TEXT.replace(b'"q_heads": 4', b'"q_heads": 5'), "kv_heads must divide"),
        (encode(ServerWelcome(0), 0).replace(b"0}", b"[0]}"), "is not of type <class 'int'>"),
    ],
    ids=[
        "empty",
        "no UTF-8",
        "recursion",
        "no list",
        "unknown message",
        "bytes as a float",
        "unknown field",
        "missing field",
        "bool as an int",
        "number too large",
        "unknown direction",
        "list as a dtype",
        "heads that do not divide",
        "list as an int",
    ],
)
def test_what_is_no_message_is_refused(text, error):
    with pytest.raises(ValueError, match=error):
        decode(text)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 99))
def test_a_plan_is_what_was_sent(lengths, ranks, seed):
    sent = [make_nano_batch(lengths, ranks, seed), make_nano_batch(lengths[::-1], ranks, seed + 1)]
    message, tables = plan_tables(7, ranks, sent)
    assert message.plan_id == 7
    assert message.ranks == ranks
    assert message.workers == ranks + 1
    assert message.worker == ranks
    payload = b"".join(table.tobytes() for table in tables)
    read, size = decode(encode(message, len(payload)))
    assert read == message
    assert read.bytes == size
    expected = [
        (index, kind, plan) for index, nano in enumerate(sent) for kind, plan in nano.plans.items()
    ]
    for (*got_names, got), (*names, plan) in zip(
        read.read(bytearray(payload)), expected, strict=True
    ):
        assert got_names == names
        assert got.workers == plan.workers
        assert got.window == plan.window
        assert np.array_equal(got.tasks, plan.tasks)
        assert np.array_equal(got.layout.lengths, plan.layout.lengths)
        assert np.array_equal(got.layout.segments, plan.layout.segments)
        assert got.layout.branches is None


def test_a_plan_of_branches_is_what_was_sent():
    nano = make_nano_batch([64, 7], 2, 0)
    branches = Branches(np.array([-1, 0]), np.array([0, 3]))
    nano = replace(nano, layout=replace(nano.layout, branches=branches))
    message, tables = plan_tables(0, 2, [nano])
    payload = bytearray(b"".join(table.tobytes() for table in tables))
    for _, kind, plan in message.read(payload):
        expected = layout_of_kind(nano.layout, kind).branches
        assert plan.layout.branches.parents.tolist() == expected.parents.tolist()
        assert plan.layout.branches.starts.tolist() == expected.starts.tolist()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"workers": 2}, "worker 2 is no server"),
        ({"worker": 1}, "worker 1 is no server"),
        ({"ranks": 2**60, "worker": 2**60, "workers": 2**61}, "is no server"),
        ({"tables": ((1, 2),)}, "zip"),
        ({"tables": ((2**40,) * 7,)}, "tables of .* bytes are not from 0"),
        ({"tables": ((-1,) * 7,)}, "tables of .* bytes are not from 0"),
    ],
)
def test_a_plan_whose_numbers_do_not_fit_is_refused_before_memory_is_allocated(fields, error):
    message, _ = plan_tables(0, 2, [make_nano_batch([64, 7], 2, 0)])
    with pytest.raises(ValueError, match=error):
        _ = replace(message, **fields).bytes


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_survives_its_file_and_only_the_owner_can_read_it(tmp_path, mode):
    path = tmp_path / "folder" / "token"
    token = make_token()
    assert token != make_token()
    for _ in range(2):  # the second time over a file that others can read
        write_token(path, token)
        assert path.stat().st_mode & 0o777 == 0o600
        assert read_token(path) == token
        assert list(path.parent.iterdir()) == [path]
        path.chmod(mode)
        with pytest.raises(ValueError, match="chmod 600"):
            read_token(path)
    with pytest.raises(IsADirectoryError):
        write_token(path.parent, token)  # a folder cannot be replaced
    assert list(tmp_path.iterdir()) == [path.parent]  # no token is left anywhere else


@pytest.mark.parametrize(
    "text",
    ["", "abc", "0" * 63, "0" * 66, "g" * 64, "é" * 64, "0" * 10000],
    ids=["empty", "short", "odd", "long", "no hexadecimal digits", "no ASCII", "very long"],
)
def test_texts_that_are_no_token(text):
    with pytest.raises(ValueError, match="64 hexadecimal digits") as caught:
        parse_token(text)
    assert not text or text not in str(caught.value)


REPLY = Reply(3, 0.5, 7)
HELLO = ServerWelcome(5)


@pytest.fixture
def listen(request):
    """Makes listeners; without `serve` a peer gets its first message back within a minute."""

    def listen(serve=Channel.send, handshake_s=60):
        listener = Listener("127.0.0.1", 0, TOKEN, "echo", serve, handshake_s)
        request.addfinalizer(listener.close)
        return listener

    return listen


def met(listener, service="echo", hello=HELLO):
    """The connection of a peer that is served."""
    return connect(listener.host, listener.port, TOKEN, service, hello, ServerWelcome, 60)[0]


def stranger(listener):
    return socket.create_connection((listener.host, listener.port))


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


def test_payloads_of_any_size_arrive_whole_and_nothing_else_is_made_memory_for_or_waited_for():
    sent = np.random.default_rng(0).integers(0, 255, 30_000_000, dtype=np.uint8)
    received = np.zeros_like(sent)
    begin = time.monotonic()
    with channels() as (near, far), ThreadPoolExecutor(1) as beside:
        sending = beside.submit(near.send, REPLY, [sent[:7], np.zeros((0, 3)), sent[7:]], 60)
        assert far.receive(60) == (REPLY, sent.nbytes)
        far.receive_payload([received[:11_000_000], received[11_000_000:].reshape(1, -1)], 60)
        sending.result()
        assert np.array_equal(sent, received)
        with pytest.raises(LinkLost, match="receiving made no progress"):
            far.receive(0.1)
        near._sock.sendall(message(REPLY, b"12345")[:-1])
        far.receive(60)
        with pytest.raises(LinkLost, match="receiving made no progress"):
            far.receive_payload([bytearray(5)], 0.1)
        near._sock.sendall((MESSAGE_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(
            ProtocolError, match=f"a message of {MESSAGE_BYTES + 1} bytes, at most {MESSAGE_BYTES}"
        ):
            far.receive(60)
        assert near.within_host
        with pytest.raises(LinkLost, match="sending made no progress"):
            near.send(REPLY, [bytes(50_000_000)], 0.1)
        # A message that cannot be sent ends the connection, and later ones are dropped.
        outbox = Outbox(near)
        later = Mock()
        outbox.put(Mock(side_effect=LinkLost("closed")))
        outbox.put(later)
        with pytest.raises(LinkLost, match="closed"):
            near.receive(60)
        outbox.finish(60)
        later.assert_not_called()
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.2", True), ("::1", True), ("10.0.0.1", False), ("fe80::2%eth0", False)],
)
def test_loopback_addresses(host, expected):
    assert is_loopback(host) is expected


def test_a_time_out_is_of_its_own_call_alone():
    """What is sent or received after a call with a time-out may take longer."""
    with channels() as (near, far), ThreadPoolExecutor(1) as beside:
        near.send(REPLY, timeout_s=0.3)
        assert far.receive(0.3) == (REPLY, 0)
        receiving = beside.submit(far.receive)
        time.sleep(0.8)
        near.send(REPLY)
        assert receiving.result(60) == (REPLY, 0)
        sending = beside.submit(near.send, REPLY, [bytes(50_000_000)])  # more than the system keeps
        time.sleep(0.8)
        far.receive(60)
        far.receive_payload([bytearray(50_000_000)], 60)
        sending.result(60)


def test_a_wrong_greeting_or_proof_is_noticed_also_one_of_another_handshake(subtests):
    heard = {}
    send = Channel._send

    def hear(channel, parts, *rest):
        heard.setdefault(channel, []).append(parts[0])
        send(channel, parts, *rest)

    def play(channel, first, second):
        """Be the other end: greet, and make a proof of the proof that comes."""
        channel._send([first], 60)
        channel._receive(100, 60)
        if second is not None:
            channel._send([second(channel._receive(100, 60))], 60)

    with ThreadPoolExecutor(1) as beside:
        with channels() as (near, far), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Channel, "_send", hear)
            proving = beside.submit(far.prove, TOKEN, "echo", 60, connects=False)
            near.prove(TOKEN, "echo", 60, connects=True)
            proving.result()
        token = "another token"
        (greeting, proof) = heard[near]
        (other_greeting, other_proof) = heard[far]
        other_version = b"hf_distca 99 " + bytes(32)
        for name, connects, first, second, error in (
            ("zeros", False, greeting, lambda proof_of_peer: bytes(32), token),
            ("reflected", False, greeting, lambda proof_of_peer: proof_of_peer, token),
            ("empty", False, greeting, lambda proof_of_peer: b"", token),
            ("replayed", False, greeting, lambda proof_of_peer: proof, token),
            ("replayed to the other end", True, other_greeting, lambda _: other_proof, token),
            ("version", False, other_version, None, f"version 99, expected {VERSION}"),
            ("protocol", False, b"GET / HTTP/1.1", None, "does not speak this protocol"),
        ):
            with subtests.test(name), channels() as (near, far):
                playing = beside.submit(play, near, first, second)
                with pytest.raises(ProtocolError, match=error):
                    far.prove(TOKEN, "echo", 60, connects=connects)
                playing.result()


def test_only_a_peer_with_the_token_gets_an_answer_and_of_this_service_and_kind(listen):
    listener = listen()
    with pytest.raises(ProtocolError, match="another token, or is another service than directory"):
        met(listener, service="directory")
    met(listener).close()
    with pytest.raises(ProtocolError, match="answers Alive, expected ServerWelcome"):
        met(listener, hello=Alive())
    impatient = listen(handshake_s=1)  # enough for a proof on a busy machine
    silent = stranger(impatient)
    wait_until(lambda: not is_open(silent))
    silent.close()
    silent = Channel(stranger(impatient))
    silent.prove(TOKEN, "echo", 60, connects=True)  # knows the token and says nothing
    with pytest.raises(PeerLeft):
        silent.receive(60)
    silent.close()
    with pytest.raises(LinkLost, match="cannot connect"):
        connect("127.0.0.1", 2**62, TOKEN, "echo", HELLO, ServerWelcome, 1)  # no such port


def test_a_server_that_is_slow_times_out():
    # The time is for all of the handshake, not for each byte.
    given_up = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as slow, ThreadPoolExecutor(1) as beside:

        def answer():
            sock, _ = slow.accept()
            with sock, contextlib.suppress(OSError):
                sock.sendall(b"\0\0\0d")  # a hundred bytes follow
                while not given_up.wait(0.1):
                    sock.send(b"\0")

        beside.submit(answer)
        with pytest.raises(LinkLost, match=r"timed out after 0\.3 s"):
            connect("127.0.0.1", slow.getsockname()[1], TOKEN, "echo", HELLO, ServerWelcome, 0.3)
        given_up.set()


def test_one_handshake_too_many_ends_the_oldest_and_a_flood_of_strangers_does_not_fill_the_log(
    listen, caplog
):
    listener = listen()
    silent = [stranger(listener) for _ in range(2 * HANDSHAKES)]
    met(listener).close()
    # That was one more handshake: one less than the limit are left.
    wait_until(lambda: len(listener._peers) == HANDSHAKES - 1)
    assert all(map(is_open, silent[-3:]))
    assert not any(map(is_open, silent[: HANDSHAKES + 1]))
    for sock in silent:
        sock.close()  # who leaves at once is no refusal
    for _ in range(140 - HANDSHAKES):
        with stranger(listener) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 4)
            sock.recv(100)
    met(listener).close()
    wait_until(lambda: not listener._peers)
    assert 10 <= len(caplog.records) <= 15
    assert caplog.messages[-1].startswith("128 refusals so far, the latest: refused 127.0.0.1:")


def test_errors_are_sent_to_the_peer_where_they_are_its_own_and_closing_ends_all_connections(
    listen, caplog
):
    given = iter([ProtocolError("not so"), MismatchError("not with you"), LinkLost("gone"), None])

    def serve(channel, hello):
        if (error := next(given)) is not None:
            raise error
        channel.send(hello)
        channel.receive()

    listener = listen(serve)
    with pytest.raises(MismatchError, match="not so"):
        met(listener)
    with pytest.raises(MismatchError, match="not with you"):
        met(listener)
    with pytest.raises(PeerLeft, match="closed"):
        met(listener)
    channel = met(listener)
    silent = stranger(listener)
    listener.close()
    assert [line.partition(": ")[2] for line in caplog.messages] == ["not so", "gone"]
    with pytest.raises(PeerLeft):
        channel.receive(60)
    assert not is_open(silent)
    silent.close()
    channel.close()


def test_a_connection_that_cannot_be_served_is_closed(listen, monkeypatch, caplog):
    listener = listen()
    with monkeypatch.context() as patched:
        failing = Mock(Timer=threading.Timer)
        failing.Thread.return_value.start.side_effect = RuntimeError("can't start new thread")
        patched.setattr(wire, "threading", failing)
        with pytest.raises(LinkLost):
            met(listener)
    met(listener).close()
    assert "could not be accepted: can't start new thread" in caplog.text

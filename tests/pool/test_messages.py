"""Every message is what was sent when it has been written and read again, and so is a token; else it is refused."""

import typing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_distca.plan import AttentionKind
from hf_distca.pool.messages import Message, ServerWelcome, decode, encode, plan_tables
from hf_distca.pool.token import make_token, parse_token, read_token, write_token
from tests.pool.ends import make_call, make_nano_batch

SIZE = st.integers(1, 99)
st.register_type_strategy(
    AttentionKind,
    st.builds(AttentionKind, st.none() | SIZE, st.just(4), st.sampled_from([1, 2, 4]), SIZE, SIZE, st.none() | SIZE),
)
MESSAGES = st.sampled_from(typing.get_args(Message))


@settings(max_examples=300)
@given(MESSAGES.flatmap(st.from_type), st.integers(0))
def test_a_message_is_what_was_sent(message, payload):
    try:
        read, size = decode(encode(message, payload))
    except ValueError:
        assume(False)  # infinite numbers do not travel
    assert (type(read), size) == (type(message), payload)
    assert vars(read) == vars(message)  # with the places, which calls are compared without


def test_what_is_no_message_is_refused():
    call = encode(make_call(), 0)
    for text, error in (
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
        (call.replace(b'"forward"', b'"sideways"'), "'sideways' is no"),
        (call.replace(b'"float32"', b'["float32"]'), "is no"),
        (call.replace(b'"q_heads": 4', b'"q_heads": 5'), "kv_heads must divide"),
        (encode(ServerWelcome(0), 0).replace(b"0}", b"[0]}"), "is not of type <class 'int'>"),
    ):
        with pytest.raises(ValueError, match=error):
            decode(text)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 99))
def test_a_plan_is_what_was_sent(lengths, ranks, seed):
    sent = [make_nano_batch(lengths, ranks, seed), make_nano_batch(lengths[::-1], ranks, seed + 1)]
    message, tables = plan_tables(7, ranks, sent)
    assert (message.plan_id, message.ranks, message.workers, message.worker) == (7, ranks, ranks + 1, ranks)
    payload = b"".join(table.tobytes() for table in tables)
    read, size = decode(encode(message, len(payload)))
    assert (read, read.bytes) == (message, size)
    expected = [(index, kind, plan) for index, nano in enumerate(sent) for kind, plan in nano.plans.items()]
    for (*got_of, got), (*of, plan) in zip(read.read(bytearray(payload)), expected, strict=True):
        assert (got_of, got.workers, got.window) == (of, plan.workers, plan.window)
        assert np.array_equal(got.tasks, plan.tasks)
        assert np.array_equal(got.layout.lengths, plan.layout.lengths)
        assert np.array_equal(got.layout.segments, plan.layout.segments)


def test_a_plan_whose_numbers_do_not_fit_is_refused_before_memory_is_allocated():
    message, _ = plan_tables(0, 2, [make_nano_batch([64, 7], 2, 0)])
    for fields, error in (
        ({"workers": 2}, "worker 2 is no server"),
        ({"worker": 1}, "worker 1 is no server"),
        ({"ranks": 2**60, "worker": 2**60, "workers": 2**61}, "is no server"),
        ({"tables": ((1, 2),)}, "zip"),
        ({"tables": ((2**40,) * 5,)}, "tables of .* bytes are not from 0"),
        ({"tables": ((-1,) * 5,)}, "tables of .* bytes are not from 0"),
    ):
        with pytest.raises(ValueError, match=error):
            _ = replace(message, **fields).bytes


def test_a_token_survives_its_file_and_only_the_owner_can_read_it(tmp_path):
    path, token = tmp_path / "folder" / "token", make_token()
    assert token != make_token()
    for mode in (0o640, 0o604, 0o620):  # the later times over a file that others can read
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
    for text in ("", "abc", "0" * 63, "0" * 66, "g" * 64, "é" * 64, "0" * 10000):
        with pytest.raises(ValueError, match="64 hexadecimal digits") as caught:
            parse_token(text)
        assert not text or text not in str(caught.value)

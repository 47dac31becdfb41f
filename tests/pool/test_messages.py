"""Every message is what was sent when it has been written and read again; anything else is refused."""

import contextlib
import json
import typing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_distca.plan import AttentionKind
from hf_distca.pool.messages import Call, Message, ServerWelcome, decode, encode, plan_tables
from tests.pool.server.fake_ranks import FULL, make_call, make_nano_batch

SIZE = st.integers(1, 99)
st.register_type_strategy(
    AttentionKind,
    st.builds(AttentionKind, st.none() | SIZE, st.just(4), st.sampled_from([1, 2, 4]), SIZE, SIZE, st.none() | SIZE),
)
MESSAGES = typing.get_args(Message)


@settings(max_examples=300)
@given(st.sampled_from(MESSAGES).flatmap(st.from_type), st.integers(0))
def test_a_message_is_what_was_sent(message, payload):
    with contextlib.suppress(ValueError):
        text = encode(message, payload)
        read, size = decode(text)
        assert (type(read), size) == (type(message), payload)
        assert vars(read) == vars(message)  # with the places, which calls are compared without
        return
    assume(False)  # infinite numbers do not travel


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(data=st.data())
def test_anything_else_is_refused_or_a_message(data):
    kind = data.draw(st.sampled_from(MESSAGES))
    names = list(kind.__dataclass_fields__)
    fields = data.draw(st.dictionaries(st.sampled_from(names) | st.text() if names else st.text(), JSON))
    text = json.dumps(data.draw(st.just([kind.__name__, fields, 0]) | JSON)).encode()
    with contextlib.suppress(ValueError):
        message, payload = decode(text)
        assert decode(encode(message, payload)) == (message, payload)


def test_what_is_no_message_is_refused():
    call = encode(make_call(0, 0, 0, FULL, "forward"), 0)
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


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 2), st.integers(0, 99))
def test_a_plan_is_what_was_sent(lengths, ranks, servers, seed):
    sent = [make_nano_batch(lengths, ranks, servers, seed), make_nano_batch(lengths[::-1], ranks, servers, seed + 1)]
    message, tables = plan_tables(7, ranks, sent)
    assert (message.plan_id, message.ranks, message.workers, message.worker) == (7, ranks, ranks + servers, ranks)
    payload = b"".join(table.tobytes() for table in tables)
    read, size = decode(encode(message, len(payload)))
    assert (read, read.bytes) == (message, size)
    expected = [(index, kind, plan) for index, nano in enumerate(sent) for kind, plan in nano.plans.items()]
    for (*got_of, got), (*of, plan) in zip(read.read(bytearray(payload)), expected, strict=True):
        assert got_of == of
        assert (got.workers, got.window) == (plan.workers, plan.window)
        assert np.array_equal(got.tasks, plan.tasks)
        assert np.array_equal(got.layout.lengths, plan.layout.lengths)
        assert np.array_equal(got.layout.segments, plan.layout.segments)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"workers": 2}, "worker 2 is no server"),
        ({"worker": 1}, "worker 1 is no server"),
        ({"ranks": 2**60, "worker": 2**60, "workers": 2**61}, "is no server"),
        ({"tables": ((1, 2),)}, "zip"),
        ({"tables": ((2**40,) * 5,)}, "tables of .* bytes are not from 0"),
        ({"tables": ((-1,) * 5,)}, "tables of .* bytes are not from 0"),
    ],
)
def test_a_plan_whose_numbers_do_not_fit_is_refused_before_memory_is_allocated(fields, error):
    message, _ = plan_tables(0, 2, [make_nano_batch([64, 7], 2, 1, 0)])
    with pytest.raises(ValueError, match=error):
        _ = replace(message, **fields).bytes


def test_what_travels_with_a_call():
    kind = AttentionKind(64, q_heads=4, kv_heads=2, dim_qk=16, dim_v=24)
    shapes = {"q": (4, 16), "k": (2, 16), "v": (2, 24), "o": (4, 24), "lse": (4,), "do": (4, 24)}
    shapes |= {f"d{name}": shapes[name] for name in "qkv"}
    for direction, dtype, wide, sent, returned in (
        ("forward", "bfloat16", "float32", ["q", "k", "v"], ["o", "lse"]),
        ("backward", "float64", "float64", ["q", "do", "o", "lse", "k", "v"], ["dq", "dk", "dv"]),
    ):
        call = Call(1, 2, 0, kind, direction, 0.3, 30.0, dtype)
        assert [spec.name for spec in call.request()] == sent
        assert [spec.name for spec in call.reply()] == returned
        for spec in call.request() + call.reply():
            assert spec.shape == shapes[spec.name]
            assert spec.dtype == (wide if spec.name == "lse" else dtype)
            assert spec.rows == ("keys" if spec.name[-1] in "kv" else "queries")

"""Every message is what was sent when it has been written and read again; anything else is refused."""

import contextlib
import json
import typing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_distca.plan import SEGMENT, TASK, AttentionKind
from hf_distca.pool.messages import Call, Message, ServerWelcome, decode, encode, plan_tables
from tests.pool.server.fake_ranks import FULL, make_call, make_nano_batch

SIZE = st.integers(1, 99)
st.register_type_strategy(
    AttentionKind,
    st.builds(AttentionKind, st.none() | SIZE, st.just(4), st.sampled_from([1, 2, 4]), SIZE, SIZE, st.none() | SIZE),
)
MESSAGES = typing.get_args(Message)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_a_message_is_what_was_sent(kind, data):
    message, payload = data.draw(st.from_type(kind)), data.draw(st.integers(0))
    with contextlib.suppress(ValueError):
        text = encode(message, payload)
        read, size = decode(text)
        assert (type(read), size) == (kind, payload)
        assert vars(read) == vars(message)  # with the places, which calls are compared without
        return
    assume(False)  # infinite numbers do not travel


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_anything_else_is_refused_or_a_message(kind, data):
    names = list(kind.__dataclass_fields__)
    fields = data.draw(st.dictionaries(st.sampled_from(names) | st.text() if names else st.text(), JSON))
    text = json.dumps(data.draw(st.just([kind.__name__, fields, 0]) | JSON)).encode()
    with contextlib.suppress(ValueError):
        message, payload = decode(text)
        assert decode(encode(message, payload)) == (message, payload)


CALL = make_call(0, 0, 0, FULL, "forward")


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
        (encode(CALL, 0).replace(b'"forward"', b'"sideways"'), "'sideways' is no"),
        (encode(CALL, 0).replace(b'"float32"', b'["float32"]'), "is no"),
        (encode(CALL, 0).replace(b'"q_heads": 4', b'"q_heads": 5'), "kv_heads must divide"),
        (encode(ServerWelcome(0), 0).replace(b"0}", b"[0]}"), "is not of type <class 'int'>"),
    ],
)
def test_what_is_no_message_is_refused(text, error):
    with pytest.raises(ValueError, match=error):
        decode(text)


def read_back(message, tables):
    """The nano-batches of tables that have travelled."""
    payload = b"".join(table.tobytes() for table in tables)
    read, size = decode(encode(message, len(payload)))
    assert (read, read.bytes) == (message, size)
    return list(read.read(bytearray(payload)))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 2), st.integers(0, 99))
def test_a_plan_is_what_was_sent(lengths, ranks, servers, seed):
    sent = [make_nano_batch(lengths, ranks, servers, seed), make_nano_batch(lengths[::-1], ranks, servers, seed + 1)]
    message, tables = plan_tables(7, ranks, sent)
    assert (message.plan_id, message.ranks, message.workers, message.worker) == (7, ranks, ranks + servers, ranks)
    for got, nano_batch in zip(read_back(message, tables), sent, strict=True):
        assert got.plans.keys() == nano_batch.plans.keys()
        pairs = [(got.layout, nano_batch.layout)]
        for kind, plan in got.plans.items():
            pairs.append((plan.layout, nano_batch.plans[kind].layout))
            assert np.array_equal(plan.tasks, nano_batch.plans[kind].tasks)
            assert (plan.workers, plan.window) == (ranks + servers, kind.window)
        for layout, expected in pairs:
            assert np.array_equal(layout.lengths, expected.lengths)
            assert np.array_equal(layout.segments, expected.segments)


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


@pytest.mark.parametrize(
    ("table", "column", "value", "error"),
    [
        (0, None, 65, "segments of a plan do not cover"),
        (0, None, 2**62, "segments of a plan do not cover"),
        (0, None, -1, "segments of a plan have"),
        *((1, column, -1, "segments of a plan have") for column in ("document", "start", "stop", "rank")),
        *((1, column, 2**62, "segments of a plan have") for column in ("document", "start", "stop", "rank")),
        *((2, column, -1, "tasks of a plan have") for column in ("document", "start", "stop", "worker")),
        *((2, column, 2**62, "tasks of a plan have") for column in ("document", "start", "stop", "worker")),
        (2, "start", 1, "tasks of a plan do not cover"),
    ],
)
def test_tables_that_are_no_plan_are_refused(table, column, value, error):
    message, tables = plan_tables(0, 2, [make_nano_batch([64, 7], 2, 1, 0, kinds=(FULL,))])
    tables = [each.copy() for each in tables]
    changed = tables[table].view((np.int64, SEGMENT, TASK)[table])
    (changed if column is None else changed[column])[0] = value
    with pytest.raises(ValueError, match=error):
        read_back(message, tables)


def test_what_travels_with_a_call():
    kind = AttentionKind(64, q_heads=4, kv_heads=2, dim_qk=16, dim_v=24)
    call = Call(1, 2, 0, kind, "forward", 0.3, 30.0, "bfloat16")
    shapes = {"q": (4, 16), "k": (2, 16), "v": (2, 24), "o": (4, 24), "lse": (4,), "do": (4, 24)}
    shapes |= {f"d{name}": shapes[name] for name in "qkv"}
    for direction, sent, returned in (
        ("forward", ["q", "k", "v"], ["o", "lse"]),
        ("backward", ["q", "do", "o", "lse", "k", "v"], ["dq", "dk", "dv"]),
    ):
        call = replace(call, direction=direction)
        assert [spec.name for spec in call.request()] == sent
        assert [spec.name for spec in call.reply()] == returned
        for spec in call.request() + call.reply():
            assert spec.shape == shapes[spec.name]
            assert spec.dtype == ("float32" if spec.name == "lse" else "bfloat16")
            assert spec.rows == ("keys" if spec.name[-1] in "kv" else "queries")

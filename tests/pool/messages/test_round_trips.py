"""Every message is what was sent when it has been written as JSON and read again; what is not sane is refused."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.plan import AttentionKind
from hf_distca.pool.messages.call import HEAD_LIMIT, Call, Reply
from hf_distca.pool.messages.fields import LARGEST, Fields
from hf_distca.pool.messages.hello import RANKS, DirectoryWelcome, RankHello, Refusal, ServerHello
from hf_distca.pool.messages.plan import PlanHeader, decode_plan, encode_plan
from hf_distca.pool.messages.tensor_spec import ITEM_BYTES
from hf_distca.pool.wire.errors import ProtocolError
from tests.pool.server.fake_ranks import make_nano_batch

IDS = st.integers(0, LARGEST)
HEADS = st.integers(1, HEAD_LIMIT)
REALS = st.floats(-1e30, 1e30, allow_nan=False)
PAIRS = st.tuples(HEADS, st.integers(1, 32)).filter(lambda pair: pair[0] * pair[1] <= HEAD_LIMIT)
"""Key-value heads, and query heads to each."""


@st.composite
def calls(draw):
    kv_heads, group = draw(PAIRS)
    return Call(
        plan_id=draw(IDS),
        call_id=draw(IDS),
        nano_batch=draw(st.integers(0, 2**16)),
        window=draw(st.none() | st.integers(1, LARGEST)),
        direction=draw(st.sampled_from(["forward", "backward"])),
        scale=draw(REALS),
        softcap=draw(st.none() | st.floats(1e-6, 1e30)),
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        dim_qk=draw(HEADS),
        dim_v=draw(HEADS),
        dtype=draw(st.sampled_from(list(ITEM_BYTES))),
        chunk=draw(st.none() | st.integers(1, LARGEST)),
    )


@st.composite
def rank_hellos(draw):
    ranks = draw(st.integers(1, RANKS))
    return RankHello(draw(st.integers(0, ranks - 1)), ranks)


MESSAGES = {
    Call: calls(),
    Reply: st.builds(Reply, call_id=IDS, seconds=REALS, pairs=IDS),
    RankHello: rank_hellos(),
    ServerHello: st.builds(
        ServerHello,
        host=st.text(max_size=255),
        port=st.integers(1, 65535),
        device=st.text(max_size=63),
        pairs_per_second=st.floats(1e-6, 1e30),
    ),
    DirectoryWelcome: st.builds(DirectoryWelcome, server=IDS),
    Refusal: st.builds(Refusal, reason=st.text(max_size=1000)),
}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_a_message_is_what_was_sent(kind, data):
    message = data.draw(MESSAGES[kind])
    assert kind.read(json.loads(json.dumps(message.header()))) == message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", [*MESSAGES, PlanHeader], ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_anything_else_is_a_protocol_error_or_sane(kind, data):
    names = list(kind.__dataclass_fields__)
    header = data.draw(st.dictionaries(st.sampled_from(names) | st.text(), JSON))
    with contextlib.suppress(ProtocolError):
        message = kind.read(header)
        assert kind.read(message.header() if kind is not PlanHeader else header) == message


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 2), st.integers(0, 99))
def test_a_plan_is_what_was_sent(lengths, ranks, servers, seed):
    sent = [make_nano_batch(lengths, ranks, servers, seed), make_nano_batch(lengths[::-1], ranks, servers, seed + 1)]
    header, tables = encode_plan(7, ranks, sent)
    read = PlanHeader.read(json.loads(json.dumps(header)))
    assert (read.plan_id, read.ranks, read.workers, read.worker) == (7, ranks, ranks + servers, ranks)
    payload = b"".join(table.tobytes() for table in tables)
    assert read.payload == len(payload)
    for got, nano_batch in zip(decode_plan(read, payload), sent, strict=True):
        assert np.array_equal(got.layout.lengths, nano_batch.layout.lengths)
        assert np.array_equal(got.layout.segments, nano_batch.layout.segments)
        assert got.plans.keys() == nano_batch.plans.keys()
        for kind, plan in got.plans.items():
            assert np.array_equal(plan.layout.lengths, nano_batch.plans[kind].layout.lengths)
            assert np.array_equal(plan.layout.segments, nano_batch.plans[kind].layout.segments)
            assert np.array_equal(plan.tasks, nano_batch.plans[kind].tasks)
            assert (plan.workers, plan.window) == (ranks + servers, kind.window)


def test_what_travels_with_a_call():
    kind = AttentionKind(64, q_heads=4, kv_heads=2, dim_qk=16, dim_v=24)
    call = Call(1, 2, 0, 64, "forward", 0.3, 30.0, 4, 2, 16, 24, "bfloat16")
    assert call.kind == kind
    assert [(spec.name, spec.rows, spec.row_bytes) for spec in call.request()] == [
        ("q", "queries", 4 * 16 * 2),
        ("k", "keys", 2 * 16 * 2),
        ("v", "keys", 2 * 24 * 2),
    ]
    assert [(spec.name, spec.row_bytes) for spec in call.reply()] == [("o", 4 * 24 * 2), ("lse", 4 * 4)]
    back = replace(call, direction="backward")
    assert [spec.name for spec in back.request()] == ["q", "do", "o", "lse", "k", "v"]
    assert [(spec.name, spec.rows, spec.row_bytes) for spec in back.reply()] == [
        ("dq", "queries", 4 * 16 * 2),
        ("dk", "keys", 2 * 16 * 2),
        ("dv", "keys", 2 * 24 * 2),
    ]


@pytest.mark.parametrize(
    ("read", "value", "said"),
    [
        (lambda fields: fields.whole("x", 1, 9), True, "x of a test must be a whole number from 1 to 9, got True"),
        (lambda fields: fields.whole("x", 1, 9), 10, "got 10"),
        (lambda fields: fields.whole("x"), None, "got None"),
        (lambda fields: fields.whole_or_none("x", 1), 0, "got 0"),
        (lambda fields: fields.real("x"), float("nan"), "a number of at most 1e"),
        (lambda fields: fields.real("x"), 10**400, "a number of at most 1e"),
        (lambda fields: fields.real("x"), False, "got False"),
        (lambda fields: fields.real("x", positive=True), 0.0, "a positive number of at most 1e"),
        (lambda fields: fields.real_or_none("x", positive=True), -1, "got -1"),
        (lambda fields: fields.text("x", 3), "four", "a text of at most 3 characters, got 'four'"),
        (lambda fields: fields.text("x", 3), 3, "got 3"),
        (lambda fields: fields.one_of("x", ("a", "b")), "c", "one of a, b, got 'c'"),
        (lambda fields: fields.one_of("x", ("a", "b")), ["a"], "one of a, b"),
        (lambda fields: fields.rows("x", 1, 2), [], "a list of 1 to 2 lists"),
        (lambda fields: fields.rows("x", 1, 2), [[], 3], "a list of 1 to 2 lists"),
        (lambda fields: fields.require(False, "x", "even"), 3, "x of a test must be even, got 3"),
    ],
)
def test_a_field_that_is_not_as_it_must_be_is_named(read, value, said):
    with pytest.raises(ProtocolError) as error:
        read(Fields("a test", {"x": value}))
    assert said in str(error.value)

"""Every message is what was sent when it has been written and read again; anything else is refused."""

import contextlib
import json
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.plan import AttentionKind
from hf_distca.pool.messages import (
    ITEM_BYTES,
    WORKERS,
    Alive,
    Call,
    End,
    NixlPeer,
    Places,
    PlanTables,
    Process,
    RankHello,
    RankWelcome,
    Refused,
    Reply,
    ServerHello,
    ServerWelcome,
    decode,
    encode,
    plan_tables,
)
from tests.pool.server.fake_ranks import FULL, make_call, make_nano_batch

NUMBERS = st.integers(0, 2**62)
REALS = st.floats(-1e30, 1e30, allow_nan=False)
PIECES = st.lists(st.tuples(st.integers(1, 2**62), st.integers(1, 2**40)), max_size=6).map(tuple)
PLACES = st.builds(Places, PIECES, PIECES, st.text())
PROCESSES = st.builds(Process, st.text(), NUMBERS, NUMBERS)
PEERS = st.builds(
    NixlPeer,
    st.text(),
    st.text(),
    st.integers(1, 2**62),
    st.sampled_from(["DRAM", "VRAM"]),
    st.integers(0, 7),
    PROCESSES,
)
RANKS = st.integers(1, WORKERS).flatmap(lambda ranks: st.tuples(st.integers(0, ranks - 1), st.just(ranks)))

MESSAGES = {
    Call: st.builds(
        Call,
        plan_id=NUMBERS,
        call_id=NUMBERS,
        nano_batch=NUMBERS,
        window=st.none() | NUMBERS,
        direction=st.sampled_from(["forward", "backward"]),
        scale=REALS,
        softcap=st.none() | REALS,
        q_heads=NUMBERS,
        kv_heads=NUMBERS,
        dim_qk=NUMBERS,
        dim_v=NUMBERS,
        dtype=st.sampled_from(list(ITEM_BYTES)),
        chunk=st.none() | NUMBERS,
        places=st.none() | PLACES,
    ),
    Reply: st.builds(Reply, call_id=NUMBERS, seconds=REALS, pairs=NUMBERS),
    RankHello: st.builds(lambda ranks, nixl: RankHello(*ranks, nixl), RANKS, st.none() | PEERS),
    RankWelcome: st.builds(RankWelcome, st.sampled_from(["tcp", "nixl"]), st.text(), st.none() | PROCESSES),
    ServerHello: st.builds(ServerHello, st.text(), st.integers(1, 65535), st.text(), st.floats(1e-6, 1e29)),
    ServerWelcome: st.builds(ServerWelcome, NUMBERS),
    Refused: st.builds(Refused, st.text()),
    Alive: st.just(Alive()),
    End: st.just(End()),
}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_a_message_is_what_was_sent(kind, data):
    message, payload = data.draw(MESSAGES[kind]), data.draw(NUMBERS)
    read, size = decode(encode(message, payload))
    assert (type(read), size) == (kind, payload)
    assert vars(read) == vars(message)  # with the places, which calls are compared without


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", [*MESSAGES, PlanTables], ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_anything_else_is_refused_or_a_message(kind, data):
    names = list(kind.__dataclass_fields__)
    fields = data.draw(st.dictionaries(st.sampled_from(names) | st.text() if names else st.text(), JSON))
    text = json.dumps(data.draw(st.just([kind.__name__, fields, 0]) | JSON)).encode()
    with contextlib.suppress(ValueError):
        message, payload = decode(text)
        assert decode(encode(message, payload)) == (message, payload)


CALL, HELLO = make_call(0, 0, 0, FULL, "forward"), ServerHello("", 4000, "cpu", 1e9)


@pytest.mark.parametrize(
    ("text", "said"),
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
        (b'["Reply", {"call_id": 0, "seconds": NaN, "pairs": 0}, 0]', "NaN is not a number"),
        (b'["Reply", {"call_id": 0, "seconds": 1%s, "pairs": 0}, 0]' % (b"0" * 400), "too large"),
    ],
)
def test_what_is_no_message_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        decode(text)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (HELLO, {"port": 0}),
        (HELLO, {"port": 65536}),
        (HELLO, {"pairs_per_second": -1.0}),
        (HELLO, {"pairs_per_second": 1e40}),
        (RankHello(0, 2), {"rank": 2}),
        (RankHello(0, 2), {"rank": -1}),
        (RankHello(0, 2), {"ranks": 2**20}),
    ],
)
def test_numbers_without_sense_are_refused(message, fields):
    with pytest.raises(ValueError, match=r"is none|are no speed"):
        replace(message, **fields)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 2), st.integers(0, 99))
def test_a_plan_is_what_was_sent(lengths, ranks, servers, seed):
    sent = [make_nano_batch(lengths, ranks, servers, seed), make_nano_batch(lengths[::-1], ranks, servers, seed + 1)]
    message, tables = plan_tables(7, ranks, sent)
    payload = b"".join(table.tobytes() for table in tables)
    read, size = decode(encode(message, len(payload)))
    assert (read, read.bytes) == (message, size)
    assert (read.plan_id, read.ranks, read.workers, read.worker) == (7, ranks, ranks + servers, ranks)
    for got, nano_batch in zip(read.read(bytearray(payload)), sent, strict=True):
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
    call = Call(1, 2, 0, 64, "forward", 0.3, 30.0, *astuple(kind)[1:5], "bfloat16")
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

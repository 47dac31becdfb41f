"""Ends of connections and transports in one process, and ranks without a model that know what must come back."""

import itertools
import socket
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_distca.kernels import TaskShapes
from hf_distca.kernels.reference import ReferenceKernel
from hf_distca.plan import TASK, AttentionKind, NanoBatch, Plan
from hf_distca.planner.layout import fixed_layout, layout_of_kind
from hf_distca.pool.messages import Call, encode, plan_tables
from hf_distca.pool.nixl import is_installed
from hf_distca.pool.rank.link import ServerLink
from hf_distca.pool.server import params_of
from hf_distca.pool.transport import Choice, choose, make_memory, rank_end, rank_hello
from hf_distca.pool.wire import Channel

CPU = torch.device("cpu")
TOKEN = bytes(range(32))
FULL = AttentionKind(None, q_heads=4, kv_heads=2, dim_qk=16, dim_v=24)
KINDS = (FULL, replace(FULL, window=40), replace(FULL, chunk=32))
SLIM = AttentionKind(None, q_heads=2, kv_heads=1, dim_qk=8, dim_v=8)
needs_nixl = pytest.mark.skipif(not is_installed(), reason="needs nixl-cu12 or nixl-cu13")


def framed(text):
    """A message's bytes as they travel."""
    return len(text).to_bytes(4, "big") + text


def message(message, payload=b"", payload_bytes=None):
    """The bytes of a message, which may name another size of its payload."""
    return framed(encode(message, len(payload) if payload_bytes is None else payload_bytes)) + payload


@cache
def memory_of(choice, _end="rank"):
    """One for each end of all tests: an agent takes a second to start."""
    return make_memory(choice, CPU, "127.0.0.1")


@contextmanager
def channels():
    """Two channels, connected, whose peers are not asked for a token."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    both = Channel(left), Channel(right)
    yield both
    for channel in both:
        channel.close()


@contextmanager
def ends(choice, left=None):
    """A rank's and a server's end of a transport: memory, channel and transport."""
    left, right = left or memory_of(choice, "rank"), memory_of(choice, "server")
    with channels() as (near, far):
        server, welcome = choose(far, right, rank_hello(0, left))
        assert welcome.transport == choice.upper()
        rank = rank_end(near, left, welcome)
        yield tuple(
            SimpleNamespace(memory=memory, channel=channel, transport=transport)
            for memory, channel, transport in ((left, near, rank), (right, far, server))
        )
        near.shut_down()
        far.shut_down()
        rank.close()
        server.close()


def make_nano_batch(lengths, ranks, seed, kinds=KINDS):
    """Documents packed onto ranks, and tasks of the server behind the ranks: all rows, cut at random."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths)
    layout = fixed_layout([lengths.tolist()], ranks)
    plans = {}
    for kind in kinds:
        seen = layout_of_kind(layout, kind)
        tasks = []
        for document, length in enumerate(seen.lengths):
            cuts = np.unique(np.concatenate([[0], rng.integers(0, length, 5), [length]]))
            tasks += [(document, start, stop, ranks) for start, stop in itertools.pairwise(cuts)]
        plans[kind] = Plan(seen, np.array(tasks, TASK), ranks + 1, kind.window)
    return NanoBatch(np.arange(len(lengths)), layout, plans)


def make_call(call_id=0, plan_id=0, nano_batch=0, kind=FULL, direction="forward", dtype="float32", softcap=None):
    return Call(plan_id, call_id, nano_batch, kind, direction, 0.3, softcap, dtype)


def data_of(plan, call, seed=0):
    """Random rows of each rank for one call, and their results in float64, by name."""
    generator, kind, layout = torch.Generator().manual_seed(seed), call.kind, plan.layout
    heads = ((kind.q_heads, kind.dim_qk), (kind.kv_heads, kind.dim_qk), (kind.kv_heads, kind.dim_v))
    q, k, v, do = (
        torch.randn((layout.lengths.sum(), *shape), generator=generator).to(getattr(torch, call.dtype)).double()
        for shape in (*heads, (kind.q_heads, kind.dim_v))
    )
    shapes, kernel = TaskShapes.build(layout.lengths.tolist(), layout.lengths.tolist(), "cpu"), ReferenceKernel()
    o, lse = kernel.forward(q, k, v, shapes, params_of(call))
    dq, dk, dv = kernel.backward(do, q, k, v, o, lse, shapes, params_of(call))
    columns = {"q": q, "k": k, "v": v, "do": do, "o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    segments = [layout.of_rank(rank) for rank in range(layout.ranks)]
    counts = [int((each["stop"] - each["start"]).sum()) for each in segments]
    of_ranks = zip(*(x.split(counts) for x in columns.values()), strict=True)
    return [dict(zip(columns, each, strict=True)) for each in of_ranks]


class FakeRank:
    """One rank and its link to a server; `replies` so far."""

    def __init__(self, port, rank, worker, token=TOKEN, choice=Choice.TCP):
        self.rank, self.worker, self.replies = rank, worker, []
        self._memory = memory_of(choice)
        self.link = ServerLink("127.0.0.1", port, token, rank_hello(rank, self._memory), 10, 60, self._memory)

    def send_plan(self, plan_id, nano_batches):
        self.link.send(*plan_tables(plan_id, self.worker, nano_batches))

    def start(self, call, data):
        """Send this rank's rows."""
        rows = data[self.rank]
        came = {spec.name: self._memory.empty(spec, len(rows[spec.name])).fill_(np.nan) for spec in call.reply()}
        sent, ready = self._memory.stage([rows[spec.name].to(getattr(torch, spec.dtype)) for spec in call.request()])
        return self.link.call(call, sent, came, ready), rows

    def finish(self, started, tolerance=2e-4):
        """Wait for the reply and compare it."""
        answer, expected = started
        self.replies.append(self.link.wait(answer, 30))
        for name, got in answer.results.items():
            torch.testing.assert_close(got.double(), expected[name], rtol=tolerance, atol=tolerance)


def run_calls(ranks, plan_id, nano_batches, call_id=0, tolerance=2e-4, **options):
    """Every nano-batch and kind of attention, both directions, on all ranks; the id after the last call."""
    for index, nano_batch in enumerate(nano_batches):
        for kind, plan in nano_batch.plans.items():
            for direction in ("forward", "backward"):
                call = make_call(call_id, plan_id, index, kind, direction, **options)
                data = data_of(plan, call, call_id)
                started = [rank.start(call, data) for rank in ranks]
                for rank, each in zip(ranks, started, strict=True):
                    rank.finish(each, tolerance)
                    assert rank.replies[-1].call_id == call_id
                call_id += 1
    return call_id

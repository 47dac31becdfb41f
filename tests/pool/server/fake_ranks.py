"""Ranks without a model: they send rows by their routes, and know what must come back.

Shape suffixes: T rows of one rank, L rows of a document, H query heads, G key/value heads, D head dim.
"""

import itertools
from dataclasses import replace

import numpy as np
import torch

from hf_distca.dispatch.remote import ServerRows
from hf_distca.dispatch.rows import IndexBuffer
from hf_distca.kernels import TaskShapes
from hf_distca.kernels.reference import ReferenceKernel
from hf_distca.plan import TASK, AttentionKind, NanoBatch, Plan
from hf_distca.planner.intervals import merged
from hf_distca.planner.layout import fixed_layout, layout_of_kind
from hf_distca.planner.routes import make_routes
from hf_distca.pool.messages import Call, plan_tables
from hf_distca.pool.rank.link import ServerLink
from hf_distca.pool.server import params_of
from hf_distca.pool.transport import Memory, rank_hello

FULL = AttentionKind(None, q_heads=4, kv_heads=2, dim_qk=16, dim_v=24)
KINDS = (FULL, replace(FULL, window=40), replace(FULL, chunk=32))
SLIM = AttentionKind(None, q_heads=2, kv_heads=1, dim_qk=8, dim_v=8)


def make_nano_batch(lengths, ranks, servers, seed, kinds=KINDS):
    """Documents packed onto ranks, their rows cut at random and given to random workers."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths)
    layout = fixed_layout([lengths.tolist()], ranks)
    plans = {}
    for kind in kinds:
        seen = layout_of_kind(layout, kind)
        tasks = []
        for document, length in enumerate(seen.lengths):
            cuts = np.unique(np.concatenate([[0], rng.integers(0, length, 5), [length]]))
            for start, stop in itertools.pairwise(cuts):
                tasks.append((document, start, stop, rng.integers(ranks + servers)))
        plans[kind] = Plan(seen, merged(np.array(tasks, TASK)), ranks + servers, kind.window)
    return NanoBatch(np.arange(len(lengths)), layout, plans)


def make_call(plan_id, call_id, nano_batch, kind, direction, *, dtype="float32", softcap=None):
    return Call(plan_id, call_id, nano_batch, kind, direction, 0.3, softcap, dtype)


class Data:
    """Random rows of all ranks for one call, and results of one worker's tasks: `local` [T, …] by rank and name."""

    def __init__(self, plan, call, worker, seed=0):
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, call.dtype)
        both = [replace(call, direction=direction) for direction in ("forward", "backward")]
        widths = {spec.name: spec.shape for each in both for spec in each.request() + each.reply()}
        documents = [
            {
                name: torch.randn((length, *width), generator=generator).to(dtype)
                if name in ("q", "k", "v", "do")
                else torch.zeros((length, *width), dtype=torch.float64)
                for name, width in widths.items()
            }
            for length in plan.layout.lengths.tolist()
        ]
        kernel, params = ReferenceKernel(), params_of(call)
        for document, start, stop, who in plan.tasks.tolist():
            if who != worker:
                continue
            first = 0 if plan.window is None else max(0, start - plan.window + 1)
            rows = documents[document]
            shapes = TaskShapes.build([stop - start], [stop - first], "cpu")
            q, do = (rows[name][start:stop].double() for name in ("q", "do"))
            k, v = (rows[name][first:stop].double() for name in ("k", "v"))
            o, lse = kernel.forward(q, k, v, shapes, params)
            dq, dk, dv = kernel.backward(do, q, k, v, o, lse, shapes, params)
            for name, value in (("o", o), ("lse", lse), ("dq", dq)):
                rows[name][start:stop] = value
            for name, value in (("dk", dk), ("dv", dv)):
                rows[name][first:stop] += value
        self.local = []
        for rank in range(plan.layout.ranks):
            segments = plan.layout.of_rank(rank)[["document", "start", "stop"]].tolist()
            self.local.append(
                {
                    name: torch.cat([documents[document][name][start:stop] for document, start, stop in segments])
                    for name in widths
                }
            )


class FakeRank:
    """One rank and its link to a server; `replies` so far."""

    def __init__(self, port, token, rank, ranks, worker, memory=None):
        self.rank, self.worker = rank, worker
        self._memory = memory or Memory(torch.device("cpu"))
        hello = rank_hello(rank, ranks, self._memory)
        self.link = ServerLink("127.0.0.1", port, token, hello, 10, 60, self._memory)
        self.replies = []

    def send_plan(self, plan_id, nano_batches):
        self.link.send(*plan_tables(plan_id, self.worker, nano_batches))

    def start(self, call, plan, data):
        """Send the rows that the server needs of this rank; None if there are none."""
        ranks, columns = plan.layout.ranks, data.local[self.rank]
        asked = ServerRows(self.worker - ranks, make_routes(plan, self.rank), ranks, IndexBuffer(torch.device("cpu")))
        if not asked.q_count + asked.k_count:
            return None
        rows = {"queries": asked.q_rows, "keys": asked.k_rows}
        sent, expected = (
            [columns[spec.name][rows[spec.rows]] for spec in specs] for specs in (call.request(), call.reply())
        )
        sent = [x_N.to(getattr(torch, spec.dtype)) for x_N, spec in zip(sent, call.request(), strict=True)]
        came = {
            spec.name: self._memory.empty(spec, len(x_N)).fill_(float("nan"))
            for x_N, spec in zip(expected, call.reply(), strict=True)
        }
        sent, ready = self._memory.stage(sent)
        return self.link.call(call, sent, came, ready), expected

    def finish(self, started, tolerance=2e-4, timeout_s=30):
        """Wait for the reply and compare it."""
        answer, expected = started
        reply = self.link.wait(answer, timeout_s)
        self.replies.append(reply)
        for got, wanted in zip(answer.results.values(), expected, strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
        return reply


def run_calls(ranks, plan_id, nano_batches, first_call=0, tolerance=2e-4, **options):
    """Every nano-batch and kind of attention, both directions, on all ranks; the id after the last call."""
    call_id = first_call
    for index, nano_batch in enumerate(nano_batches):
        for kind, plan in nano_batch.plans.items():
            for direction in ("forward", "backward"):
                call = make_call(plan_id, call_id, index, kind, direction, **options)
                data = Data(plan, call, ranks[0].worker, seed=call_id)
                started = [rank.start(call, plan, data) for rank in ranks]
                for rank, each in zip(ranks, started, strict=True):
                    if each is not None:
                        assert rank.finish(each, tolerance).call_id == call_id
                call_id += 1
    return call_id
